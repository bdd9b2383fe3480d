# SPDX-License-Identifier: Apache-2.0
"""Build the fork's wheel: patched Python files, extension and core library in one.

The compiled extension is cached by the content of its sources, the compiler,
torch, CUDA and Python, so that an unchanged one is not compiled again.
NVTE_CUDA_ARCHS (e.g. "90", "80;90", "native") keeps only those GPU
architectures in the core library. MAX_JOBS limits the parallel compilers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from . import environment
from .apply import apply
from .common import (
    BUILD,
    DIST,
    EXT_BUILD,
    REPO,
    TREE,
    ToolError,
    atomic_file,
    cache_dir,
    fork_version,
    hash_files,
    no_space,
    say,
    sha256,
    step,
)
from .fetch import core_folder, load_lock
from .prune import parse_archs, prune, verify_loads
from .tree import make_tree, pristine_copy

REQUIRES = (
    "torch>=2.6",
    "einops",
    "importlib-metadata>=1.0",
    "nvdlfw-inspect",
    "nvidia-cudnn-frontend>=1.29.0",
    "onnx",
    "onnxscript",
    "packaging",
    "pydantic",
)
CXX_SUFFIXES = {".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh"}


def extension_key(tree: Path) -> str:
    """Hash over everything the compiled extension depends on."""
    root = tree / "transformer_engine"
    sources = [p for p in root.rglob("*") if p.suffix in CXX_SUFFIXES]
    facts = environment.torch_facts()
    nvcc = environment.cuda_toolkit(facts.cuda_major)
    options = [
        f"{k}={os.environ.get(k, '')}"
        for k in ("CXX", "CXXFLAGS", "NVTE_WITH_NCCL_EP", "NVTE_BUILD_DEBUG")
    ]
    return hash_files(
        sources, tree, sha256(REPO / "CMakeLists.txt"), facts.version, facts.cuda,
        environment.extension_suffix(), environment.compiler_version(),
        subprocess.run([nvcc, "--version"], text=True, capture_output=True).stdout, *options,
    )  # fmt: skip


def cmake_options(tree: Path) -> list[str]:
    """Options of the configure step, from the same NVTE_ variables as upstream's build."""
    facts = environment.torch_facts()
    nvcc = environment.cuda_toolkit(facts.cuda_major)
    nccl_ep = {"0": "OFF", "1": "ON"}.get(os.environ.get("NVTE_WITH_NCCL_EP", ""), "AUTO")
    return [
        "-G", "Ninja", f"-DTE_TREE={tree}", f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DTE_WITH_NCCL_EP={nccl_ep}",
        f"-DTE_DEBUG_SYMBOLS={'ON' if os.environ.get('NVTE_BUILD_DEBUG', '0') != '0' else 'OFF'}",
    ]  # fmt: skip


def need_tool(name: str) -> str:
    """Path of cmake or ninja: this Python's own scripts first, then PATH."""
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if not path:
        raise ToolError(f"{name} is not installed.", f"{sys.executable} -m pip install {name}")
    return path


def run_ninja(build: Path) -> None:
    """Compile, showing one line of progress now and then; the log stays in ``build``."""
    jobs = os.environ.get("NVTE_BUILD_MAX_JOBS") or os.environ.get("MAX_JOBS")
    command = [need_tool("ninja"), "-C", str(build), *(["-j", jobs] if jobs else [])]
    log_path = build / "ninja.log"
    shown = -1
    with open(log_path, "w", encoding="utf-8") as log:
        with subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as ninja:
            for line in ninja.stdout:
                log.write(line)
                count = re.match(r"\[(\d+)/(\d+)\]", line)
                if count and int(count[2]) > 4 and int(count[1]) * 8 // int(count[2]) > shown:
                    shown = int(count[1]) * 8 // int(count[2])
                    say(f"compiling {count[1]}/{count[2]}")
    if ninja.returncode:
        text = log_path.read_text()
        if "No space left on device" in text:
            raise no_space(OSError("the compiler could not write"), build)
        errors = re.findall(r"^.*(?:error|FAILED|Killed).*$", text, re.M)[:6]
        raise ToolError(
            "The extension did not compile:\n  "
            + "\n  ".join(errors)
            + f"\n  whole log: {log_path}",
            "mend the C++ the log names; with `Killed`, run again with MAX_JOBS=1 (1.5 GB a job).",
        )


def extension(tree: Path = TREE, build: Path = EXT_BUILD) -> Path:
    """The compiled extension of a tree, from the cache when nothing it depends on changed."""
    name = f"transformer_engine_torch{environment.extension_suffix()}"
    cached = cache_dir() / "ext" / extension_key(tree)[:32] / name
    if cached.exists():
        say("extension: unchanged, taken from the cache")
        return cached
    build.mkdir(parents=True, exist_ok=True)
    # ccache then finds objects again that were compiled in another checkout.
    os.environ.setdefault("CCACHE_BASEDIR", str(REPO))
    with step("configuring"):
        done = subprocess.run(
            [need_tool("cmake"), "-S", str(REPO), "-B", str(build), *cmake_options(tree)],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        (build / "configure.log").write_text(done.stdout)
    if done.returncode:
        error = done.stdout[done.stdout.find("CMake Error") :].strip()[:1500]
        raise ToolError(
            f"cmake could not configure the extension:\n{error}",
            f"read {build / 'configure.log'}; delete {build} when it was made by another Python.",
        )
    with step("compiling the extension"):
        run_ninja(build)
    with atomic_file(cached) as temporary:
        shutil.copyfile(build / name, temporary)
    return cached


def git_commit() -> str | None:
    """The checkout's commit, with +edits when files differ; None outside git."""
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=+edits", "--exclude=*"],
        cwd=REPO, text=True, capture_output=True,
    )  # fmt: skip
    return done.stdout.strip() or None if done.returncode == 0 else None


def python_files(tree: Path) -> list[Path]:
    """Files of the package that a wheel carries: all but the C++ sources and headers."""
    root = tree / "transformer_engine"
    files = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return sorted(p for p in files if p.suffix not in CXX_SUFFIXES)


def stage(target: Path, *, tree: Path, archs: set | None, ext: Path, flavour: str) -> None:
    """Write an importable ``transformer_engine`` folder below ``target``.

    Parameters
    ----------
    archs : set of str, optional
        GPU architectures to keep, e.g. {"90"}; all when None.
    flavour : str
        "fork" or "stock"; written into ``wgrad_build.json``.
    """
    facts = environment.torch_facts()
    for path in python_files(tree):
        copy = target / path.relative_to(tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    package = target / "transformer_engine"
    shutil.copyfile(ext, package / ext.name)
    for library in sorted(core_folder(facts.cuda_major).glob("*.so")):
        if archs and library.name == "libtransformer_engine.so":
            with step(f"pruning the core library to {', '.join(sorted(archs))}"):
                prune(library, package / library.name, archs)
                verify_loads(package / library.name)
        else:
            shutil.copyfile(library, package / library.name)
    info = {
        "schema": 1, "flavour": flavour, "upstream": load_lock()["version"],
        "version": fork_version(load_lock()["version"]) if flavour == "fork" else load_lock()["version"],
        "commit": git_commit(), "torch": facts.version, "cuda": facts.cuda,
        "archs": sorted(archs) if archs else "all",
    }  # fmt: skip
    (package / "wgrad_build.json").write_text(json.dumps(info, indent=1) + "\n")


def patched_tree() -> Path:
    """The tree with the series and the overlay applied."""
    tree = make_tree()
    apply(tree)
    return tree


def stage_fork(target: Path) -> None:
    """What setup.py calls: everything of the wheel below ``target``."""
    archs = parse_archs(os.environ.get("NVTE_CUDA_ARCHS", ""))
    tree = patched_tree()
    stage(target, tree=tree, archs=archs, ext=extension(tree), flavour="fork")


def stage_stock(target: Path) -> None:
    """The unpatched package below ``target``, to compare with."""
    tree = make_tree()
    pristine = BUILD / "pristine"
    pristine_copy(tree, pristine)
    ext = extension(pristine, BUILD / "ext-stock")
    stage(target, tree=pristine, archs=None, ext=ext, flavour="stock")


def wheel_key() -> str:
    """Hash over everything the wheel's content depends on."""
    tree = patched_tree()
    own = [*(REPO / "build_tools").glob("*.py"), REPO / "setup.py", REPO / "pyproject.toml"]
    return hash_files(
        python_files(tree), tree, hash_files(own, REPO), extension_key(tree),
        os.environ.get("NVTE_CUDA_ARCHS", ""), json.dumps(load_lock()), str(git_commit()),
    )  # fmt: skip


def build_wheel(out: Path = DIST) -> Path:
    """The wheel in ``out``; made again only when something it depends on changed."""
    environment.refuse_stock()
    key = wheel_key()
    record = out / "wheel.json"
    if record.exists():
        known = json.loads(record.read_text())
        path = out / known["file"]
        if known["key"] == key and path.exists() and path.stat().st_size == known["size"]:
            say("wheel: unchanged")
            return path
    for module in ("setuptools", "wheel"):
        check = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
        if check.returncode:
            raise ToolError(
                f"{module} is not installed.", f"{sys.executable} -m pip install {module}"
            )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".wheel.") as name:
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
        command += ["--disable-pip-version-check", "-w", name, str(REPO)]
        with step("building the wheel"):
            lines = []
            with subprocess.Popen(
                command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as pip:
                for line in pip.stdout:
                    lines.append(line.rstrip())
                    if "[build_tools]" in line:
                        say("  " + line.split("[build_tools]")[1].strip())
        if pip.returncode:
            # What our own code or Python said stands before pip's summary.
            ends = [i for i, line in enumerate(lines) if "subprocess-exited-with-error" in line]
            end = ends[0] if ends else len(lines)
            raise ToolError(
                "pip could not build the wheel:\n" + "\n".join(lines[max(0, end - 12) : end]),
                "mend what it names and run `python -m build_tools build` again.",
            )
        made = next(Path(name).glob("*.whl"))
        with zipfile.ZipFile(made) as archive:
            if not any(n.endswith("libtransformer_engine.so") for n in archive.namelist()):
                raise ToolError("The wheel holds no core library.", "please report this as a bug.")
        target = out / made.name
        os.replace(made, target)
    with atomic_file(record) as temporary:
        temporary.write_text(
            json.dumps({"key": key, "file": target.name, "size": target.stat().st_size})
        )
    return target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--archs", help="GPU architectures to keep (sets NVTE_CUDA_ARCHS)")
    parser.add_argument("-o", "--out", type=Path, default=DIST, help="folder (default: dist)")


def main(args: argparse.Namespace) -> None:
    """Build and print the wheel's path."""
    if args.archs is not None:
        os.environ["NVTE_CUDA_ARCHS"] = args.archs
    path = build_wheel(args.out)
    say(f"{path.stat().st_size / 1e6:.1f} MB")
    print(path)
