# SPDX-License-Identifier: Apache-2.0
"""Build the fork's wheel: patched Python files, extension, kernels and core library in one.

The compiled extension is cached by the content of its sources, the compiler,
torch, CUDA and Python, so that an unchanged one is not compiled again; the
grouped wgrad kernels likewise (kernels.py). NVTE_CUDA_ARCHS (e.g. "90",
"80;90", "native") keeps only those GPU architectures in the core library and
in the kernels. MAX_JOBS limits the parallel compilers.
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
    cached_file,
    disk_full_explained,
    fork_version,
    hash_files,
    no_space,
    say,
    scratch_folder,
    sha256,
    step,
)
from .fetch import core_folder, load_lock
from .kernels import LIBRARY, kernels, kernels_key, wanted
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
WHEEL_FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
CXX_SUFFIXES = {".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh"}
# Each names its library's version; torch's and nvcc's own versions cover the other headers.
HEADERS = (
    "cublas_api.h",
    "cublasLt.h",
    "cuda.h",
    "cuda_runtime_api.h",
    "cudnn_version.h",
    "nccl.h",
)
# What the compiler, the linker and CMakeLists.txt read beside CMake's own CMAKE_*.
COMPILE_VARIABLES = {
    "CXX", "CXXFLAGS", "LDFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH",
    "CUDAToolkit_ROOT", "NCCL_HOME", "Torch_DIR", "Torch_ROOT", "pybind11_ROOT",
    "NVTE_WITH_NCCL_EP", "NVTE_BUILD_DEBUG",
}  # fmt: skip


def header_folders(torch_folder: Path, system: Path = Path("/")) -> list[Path]:
    """Where the compiler may find headers of CUDA's libraries, in CMakeLists.txt's order."""
    named = [f"{os.environ['NCCL_HOME']}/include"] if os.environ.get("NCCL_HOME") else []
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        named += filter(None, os.environ.get(name, "").split(os.pathsep))
    wheels = sorted(torch_folder.parent.glob("nvidia/*/include"))
    usual = ("usr/local/include", "usr/include", "usr/include/x86_64-linux-gnu")
    return [*map(Path, named), *wheels, *(system / path for path in usual)]


def compile_facts() -> dict[str, str]:
    """Everything but the sources that the compiled extension depends on, by name."""
    facts = environment.torch_facts()
    found = {
        "python": environment.extension_suffix(),
        "torch": f"{facts.version} {facts.cuda}",
        "compiler": environment.compiler_version(),
        "nvcc": subprocess.run([nvcc(), "--version"], text=True, capture_output=True).stdout,
        "pybind11": version_of("pybind11"),
        "CMakeLists.txt": sha256(REPO / "CMakeLists.txt"),
    }
    folders = header_folders(Path(facts.folder))
    for name in HEADERS:
        found[name] = " ".join(sha256(f / name)[:16] for f in folders if (f / name).is_file())
    for name, value in os.environ.items():
        if name in COMPILE_VARIABLES or name.startswith("CMAKE_"):
            found[name] = value
    found.pop("CMAKE_BUILD_PARALLEL_LEVEL", None)
    return found


def version_of(name: str) -> str:
    """Version of an installed distribution; empty when there is none."""
    return environment.installed((name,)).get(name, "")


def extension_key(tree: Path, facts: dict[str, str]) -> str:
    """Hash over everything the compiled extension depends on: the C++ sources and `compile_facts`."""
    # The grouped wgrad kernels are a library of their own: the unpatched extension is the same.
    sources = [
        p
        for p in (tree / "transformer_engine").rglob("*")
        if p.suffix in CXX_SUFFIXES and "wgrad_kernels" not in p.parts
    ]
    return hash_files(sources, tree, json.dumps(facts, sort_keys=True))


def cmake_options(tree: Path) -> list[str]:
    """Options of the configure step, from the same NVTE_ variables as upstream's build."""
    nccl_ep = {"0": "OFF", "1": "ON"}.get(os.environ.get("NVTE_WITH_NCCL_EP", ""), "AUTO")
    return [
        "-G", "Ninja", f"-DTE_TREE={tree}", f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_CUDA_COMPILER={nvcc()}", f"-DTE_WITH_NCCL_EP={nccl_ep}",
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
    facts = compile_facts()
    name = f"transformer_engine_torch{environment.extension_suffix()}"

    def make() -> Path:
        compile_extension(tree, build, facts)
        return build / name

    key = extension_key(tree, facts)
    return cached_file(cache_dir() / "ext" / key[:32], name, "extension", make)


def compile_extension(tree: Path, build: Path, facts: dict[str, str]) -> None:
    """Configure and compile in ``build``; its objects are kept for the same facts only.

    CMake reads the compiler, its flags and torch's place once, and Ninja does
    not see a compiler that was upgraded in place.
    """
    record = build / "facts.json"
    known = json.loads(record.read_text()) if record.is_file() else {}
    if build.exists() and known != facts:
        names = sorted(k for k in known.keys() | facts.keys() if known.get(k) != facts.get(k))
        why = f"changed: {', '.join(names[:4])}" if known else "has no record of what made it"
        say(f"{build} is made again: {why}")
        shutil.rmtree(build)
    with disk_full_explained(build):
        build.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(facts, indent=1))
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
            f"mend what it names and run it again; the whole log: {build / 'configure.log'}",
        )
    with step("compiling the extension"):
        run_ninja(build)


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


def stage(
    target: Path,
    *,
    tree: Path,
    archs: set | None,
    ext: Path,
    flavour: str,
    library: Path | None = None,
) -> None:
    """Write an importable ``transformer_engine`` folder below ``target``, in place of one there.

    Parameters
    ----------
    archs : set of str, optional
        GPU architectures to keep, e.g. {"90"}; all when None.
    library : Path, optional
        The grouped wgrad kernels.
    flavour : str
        "fork" or "stock"; written into ``wgrad_build.json``.
    """
    facts = environment.torch_facts()
    package = target / "transformer_engine"
    if package.exists():
        shutil.rmtree(package)  # pip's build folder keeps files that the tree has no more
    for path in python_files(tree):
        copy = target / path.relative_to(tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for compiled in filter(None, (ext, library)):
        shutil.copyfile(compiled, package / compiled.name)
    for core in sorted(core_folder(facts.cuda_major).glob("*.so")):
        if archs and core.name == "libtransformer_engine.so":
            with step(f"pruning the core library to {', '.join(sorted(archs))}"):
                prune(core, package / core.name, archs)
                verify_loads(package / core.name)
        else:
            shutil.copyfile(core, package / core.name)
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
    library = kernels(tree, archs, nvcc())
    stage(target, tree=tree, archs=archs, ext=extension(tree), flavour="fork", library=library)


def nvcc() -> Path:
    """The nvcc that goes with this Python's torch."""
    return environment.cuda_toolkit(environment.torch_facts().cuda_major)


def stage_stock(target: Path) -> None:
    """The unpatched package below ``target``, to compare with."""
    tree = make_tree()
    pristine = BUILD / "pristine"
    pristine_copy(tree, pristine)
    ext = extension(pristine, BUILD / "ext-stock")
    stage(target, tree=pristine, archs=None, ext=ext, flavour="stock")


def wheel_key(tree: Path) -> str:
    """Hash over everything the wheel's content depends on."""
    own = [*(REPO / "build_tools").glob("*.py"), *(REPO / name for name in WHEEL_FILES)]
    archs = parse_archs(os.environ.get("NVTE_CUDA_ARCHS", ""))
    facts = {
        "archs": sorted(archs) if archs else "all",  # `native` differs between machines
        "commit": git_commit(),
        "lock": load_lock(),
        "strip": bool(shutil.which("strip")),
        **{name: version_of(name) for name in ("setuptools", "wheel")},
    }
    return hash_files(
        python_files(tree), tree, hash_files(own, REPO), extension_key(tree, compile_facts()),
        kernels_key(tree, archs, nvcc()), json.dumps(facts, sort_keys=True),
    )  # fmt: skip


def known_wheel(out: Path, key: str) -> Path | None:
    """The whole, unedited wheel in ``out`` that was made for a key."""
    record = out / "wheel.json"
    try:
        known = json.loads(record.read_text())
        path = out / known["file"]
        return path if (known["key"], known["sha256"]) == (key, sha256(path)) else None
    except (OSError, ValueError, KeyError):
        return None


def build_wheel(out: Path = DIST, *, tree: Path | None = None) -> Path:
    """The wheel in ``out``; made again only when something it depends on changed.

    Parameters
    ----------
    tree : Path, optional
        The patched tree (default: build/tree, made and patched when needed).
    """
    environment.refuse_stock()
    tree = tree or patched_tree()
    key = wheel_key(tree)
    known = known_wheel(out, key)
    if known:
        say("wheel: unchanged")
        return known
    with scratch_folder(out / "wheel") as folder:
        made = pip_wheel(folder)
        with zipfile.ZipFile(made) as archive:
            parts = {"core library": "libtransformer_engine.so"}
            if wanted(tree, parse_archs(os.environ.get("NVTE_CUDA_ARCHS", ""))):
                parts["grouped wgrad kernels"] = LIBRARY
            for what, name in parts.items():
                if not any(n.endswith(name) for n in archive.namelist()):
                    raise ToolError(f"The wheel holds no {what}.", "please report this as a bug.")
        digest = sha256(made)
        os.replace(made, out / made.name)
    with atomic_file(out / "wheel.json") as temporary:
        temporary.write_text(json.dumps({"key": key, "file": made.name, "sha256": digest}))
    return out / made.name


def pip_wheel(folder: Path) -> Path:
    """Let pip build the wheel into ``folder``."""
    for module in ("setuptools", "wheel"):
        check = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
        if check.returncode:
            raise ToolError(
                f"{module} is not installed.", f"{sys.executable} -m pip install {module}"
            )
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
    command += ["--disable-pip-version-check", "-w", str(folder), str(REPO)]
    # Containers pin versions with PIP_CONSTRAINT, which would refuse this one.
    env = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    with step("building the wheel"):
        lines = []
        with subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as pip:
            for line in pip.stdout:
                lines.append(line.rstrip())
                if "[build_tools]" in line:
                    say("  " + line.split("[build_tools]")[1].strip())
    if pip.returncode:
        if any("No space left on device" in line for line in lines):
            raise no_space(OSError("pip could not write the wheel"), folder)
        # What our own code or Python said stands before pip's summary.
        ends = [i for i, line in enumerate(lines) if "subprocess-exited-with-error" in line]
        end = ends[0] if ends else len(lines)
        raise ToolError(
            "pip could not build the wheel:\n" + "\n".join(lines[max(0, end - 12) : end]),
            "mend what it names and run `python -m build_tools build` again.",
        )
    return next(folder.glob("*.whl"))


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
