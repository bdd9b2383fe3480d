# SPDX-License-Identifier: Apache-2.0
"""Install this bundle of the Transformer Engine fork. Standard library only."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SCHEMA = 1
PACKAGE = "transformer_engine"
STOCK = ("transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
MARK = "te-wgrad-bundle.json"
KERNELS = "libte_grouped_wgrad.so"


class Problem(NamedTuple):
    """Something that keeps the bundle from working here, and what to do about it."""

    message: str
    next_step: str


def check_node(manifest: dict, node: dict) -> list[Problem]:
    """Compare a bundle with a node.

    Parameters
    ----------
    manifest : dict
        The bundle's ``manifest.json``.
    node : dict
        ``python`` ("3.12"), ``machine``, ``torch`` and ``torch_cuda`` (versions or None),
        ``gpus`` (architectures such as "90"; empty without a GPU) and ``distributions``
        (installed name to version, names with dashes).
    """
    problems = []
    remake = "make the bundle again: python -m build_tools bundle"
    if manifest.get("schema") != SCHEMA:
        problems.append(
            Problem(
                f"The manifest has schema {manifest.get('schema')}, this installer reads {SCHEMA}.",
                "use the install.py that came with the manifest.",
            )
        )
        return problems
    if node["machine"] != "x86_64":
        problems.append(
            Problem(f"The libraries are for x86_64, not {node['machine']}.", "use an x86_64 node.")
        )
    if node["python"] != manifest["python"] and (manifest["wheels"] or not manifest["sources"]):
        problems.append(
            Problem(
                f"The bundle is for Python {manifest['python']}, this is {node['python']}.",
                f"run it with PYTHON=python{manifest['python']}, or {remake} "
                f"--python-version {node['python']}",
            )
        )
    if node["torch"] is None:
        problems.append(
            Problem(
                "This Python has no torch.",
                f"install torch for CUDA {manifest['cuda_major']}, or set PYTHON to a Python with it.",
            )
        )
    elif (node["torch_cuda"] or "").split(".")[0] != str(manifest["cuda_major"]):
        have = f"CUDA {node['torch_cuda']}" if node["torch_cuda"] else "CPU only"
        problems.append(
            Problem(
                f"torch {node['torch']} is {have}, the bundle is for CUDA {manifest['cuda_major']}.",
                f"install a torch for CUDA {manifest['cuda_major']}, or {remake} --cuda 12 or 13",
            )
        )
    elif not ext_fits(manifest, node) and not manifest["sources"]:
        problems.append(
            Problem(
                f"The extension is for torch {manifest['ext']['torch']}, here is {node['torch']}.",
                f"{remake} --ext-sources",
            )
        )
    stock = {name: node["distributions"][name] for name in STOCK if name in node["distributions"]}
    version = node["distributions"].get("transformer-engine")
    if version is not None and "+wgrad" not in version:
        stock["transformer-engine"] = version
    if stock:
        names = ", ".join(f"{name} {stock[name]}" for name in stock)
        problems.append(
            Problem(
                f"Another Transformer Engine is installed: {names}.",
                f"{sys.executable} -m pip uninstall -y {' '.join(stock)}",
            )
        )
    bad = [gpu for gpu in node["gpus"] if not any(runs(gpu, arch) for arch in manifest["archs"])]
    if bad:
        problems.append(
            Problem(
                f"The GPU here is sm_{bad[0]}, the bundle is for sm_{', sm_'.join(manifest['archs'])}.",
                f"{remake} --archs {bad[0]}",
            )
        )
    return problems


def runs(gpu: str, arch: str) -> bool:
    """Whether a GPU runs all code kept for ``arch``; code for 10x is tied to its exact chip."""
    gpu_number, number = int(gpu), int(arch)
    same = gpu_number // 10 == number // 10 and gpu_number >= number
    return gpu_number == number or (same and number // 10 != 10)


def ext_fits(manifest: dict, node: dict) -> bool:
    """Whether the finished extension is for the node's Python and torch."""
    ext = manifest["ext"]
    return bool(ext) and ext["torch"] == node["torch"] and ext["python"] == node["python"]


def missing_wheels(manifest: dict, versions: dict, roles: set[str]) -> list[str]:
    """Files of the wheels to install: absent, or older than the other wheels accept."""
    chosen = []
    for wheel in manifest["wheels"]:
        have = versions.get(wheel["name"])
        old = have and wheel["at_least"] and numbers(have) < numbers(wheel["at_least"])
        if wheel["role"] in roles and (not have or old):
            chosen.append(wheel["name"])
    # pydantic accepts one version of its core only, so they come as a pair.
    if {"pydantic", "pydantic-core"} & set(chosen):
        chosen += ["pydantic", "pydantic-core"]
    return [wheel["file"] for wheel in manifest["wheels"] if wheel["name"] in chosen]


def numbers(version: str) -> list[int]:
    """The leading numbers of a version, for comparing."""
    return [int(part) for part in re.match(r"[\d.]*", version).group().split(".") if part]


def look_at_node(target: Path) -> dict:
    """Collect the facts that `check_node` compares."""
    code = (
        "import json, torch; n = torch.cuda.device_count() if torch.version.cuda else 0; "
        "print(json.dumps([torch.__version__, torch.version.cuda, sorted({'%d%d' % "
        "torch.cuda.get_device_capability(i) for i in range(n)})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    torch, cuda, gpus = (None, None, [])
    if done.returncode == 0:
        torch, cuda, gpus = json.loads(done.stdout.splitlines()[-1])
    versions = {}
    for place in ([*sys.path[1:]], [str(target)]):
        for found in importlib.metadata.distributions(path=place):
            name = re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower()
            versions[name] = found.version
    return {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "machine": platform.machine(),
        "torch": torch,
        "torch_cuda": cuda,
        "gpus": gpus,
        "distributions": versions,
    }


def fail(message: str, next_step: str) -> None:
    """Stop with an error and its next step."""
    sys.exit(f"install: {message}\n  next: {next_step}")


def sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def damaged_files(root: Path, files: dict) -> list[str]:
    """Names of files that are missing or differ from their hash."""
    return [
        name
        for name, digest in files.items()
        if not (root / name).is_file() or sha256(root / name) != digest
    ]


def build_extension(root: Path, build: Path, jobs: int, manifest: dict) -> Path:
    """Build the extension against the node's torch and return its path."""
    if not shutil.which("cmake"):
        fail("The extension must be built here and cmake is not on PATH.", "install cmake 3.22+.")
    build.mkdir(parents=True, exist_ok=True)
    tools = build / "tools"
    files = [w["file"] for w in manifest["wheels"] if w["role"] == "build"]
    for file in files:  # not installed: only this build uses them
        shutil.unpack_archive(str(root / "wheels" / file), str(tools), "zip")
    env = dict(os.environ, PYTHONPATH=f"{tools}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    ninja = shutil.which("ninja") or next((str(p) for p in tools.rglob("bin/ninja")), None)
    if ninja is None:
        fail("The extension must be built here and ninja is not on PATH.", "install ninja.")
    if str(tools) in ninja:
        os.chmod(ninja, 0o755)  # unpacking a zip drops the mode
    log = build / "build.log"
    configure = ["cmake", "-S", root / "sources", "-B", build / "ext", "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DTE_TREE={root / 'sources/tree'}"]
    for command in (configure, ["cmake", "--build", build / "ext", "-j", str(jobs)]):
        with open(log, "a", encoding="utf-8") as file:
            done = subprocess.run([str(c) for c in command], env=env, stdout=file, stderr=file)
        if done.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            fail(f"Building the extension failed:\n{tail}", f"read {log}; run again to resume.")
    return next((build / "ext").glob("transformer_engine_torch*.so"))


def find_nvcc(cuda_major: int, system: Path = Path("/usr/local")) -> Path | None:
    """nvcc of a CUDA toolkit of the major version, or None."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(home) / "bin/nvcc" for home in homes if home]
    places += [Path(path) for path in [shutil.which("nvcc")] if path]
    places += sorted(system.glob("cuda*/bin/nvcc"), reverse=True)
    for nvcc in places:
        if nvcc.is_file() and os.access(nvcc, os.X_OK):
            text = subprocess.run([nvcc, "--version"], text=True, capture_output=True).stdout
            if f"release {cuda_major}." in text:
                return nvcc
    return None


def loads(library: Path) -> bool:
    """Whether a library loads here, asked in a process of its own."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    return not subprocess.run([sys.executable, "-c", code, library], capture_output=True).returncode


def grouped_wgrad_library(root: Path, build: Path, manifest: dict) -> Path | None:
    """The grouped wgrad kernels: the bundle's library where it loads, else compiled here.

    None, with a line that says why, where they cannot be had: cuBLAS then does their work.
    """
    wanted = manifest.get("kernels")
    if not wanted:
        return None
    folder = root / "kernels"
    if wanted["file"] and loads(folder / wanted["file"]):
        return folder / wanted["file"]
    nvcc = find_nvcc(manifest["cuda_major"])
    why = f"no nvcc of CUDA {manifest['cuda_major']} to compile them with (set CUDA_HOME)"
    if nvcc:
        print("compiling the grouped wgrad kernels ...", flush=True)
        build.mkdir(parents=True, exist_ok=True)
        command = [nvcc, *wanted["nvcc"], "-o", build / KERNELS, folder / wanted["source"]]
        done = subprocess.run([str(c) for c in command], text=True, capture_output=True)
        if done.returncode == 0 and loads(build / KERNELS):
            return build / KERNELS
        lines = (done.stdout + done.stderr).strip().splitlines()
        why = f"{nvcc}: {lines[-1] if lines else 'the library does not load'}"
    print(f"without the grouped wgrad kernels, cuBLAS serves: {why}", flush=True)
    return None


def write_dist_info(stage: Path, manifest: dict, mark: dict) -> Path:
    """Write what pip reads, so that ``pip show`` and ``pip uninstall`` work."""
    info = stage / f"{PACKAGE}-{manifest['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {manifest['version']}\n"
        "Summary: Transformer Engine with delayed weight gradients repaired\n"
        + "".join(f"Requires-Dist: {name}\n" for name in manifest.get("requires", []))
    )
    tag = "cp" + manifest["python"].replace(".", "")
    # TE takes a package that is not pure for a source build, which may hold both libraries.
    (info / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: te-wgrad-bundle\nRoot-Is-Purelib: false\n"
        f"Tag: {tag}-{tag}-linux_x86_64\n"
    )
    (info / "INSTALLER").write_text("te-wgrad-bundle\n")
    (info / MARK).write_text(json.dumps(mark) + "\n")
    lines = []
    for path in sorted(p for p in stage.rglob("*") if p.is_file()):
        digest = base64.urlsafe_b64encode(bytes.fromhex(sha256(path))).rstrip(b"=").decode()
        lines.append(f"{path.relative_to(stage)},sha256={digest},{path.stat().st_size}")
    lines.append(f"{info.name}/RECORD,,")
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    return info


def swap_in(stage: Path, target: Path) -> None:
    """Move the staged folders into place; on an error put back what was there."""
    old = Path(tempfile.mkdtemp(dir=target, prefix=".te-wgrad-old."))
    moved, placed = [], []
    try:
        for path in [target / PACKAGE, *target.glob(f"{PACKAGE}-*.dist-info")]:
            if path.exists():
                os.replace(path, old / path.name)
                moved.append(path)
        for path in sorted(stage.iterdir()):
            os.replace(path, target / path.name)
            placed.append(target / path.name)
    except BaseException:
        for path in placed:
            shutil.rmtree(path)
        for path in moved:
            os.replace(old / path.name, path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    """Check, build if needed, install, import once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path(sysconfig.get_paths()["platlib"]))
    parser.add_argument("--build-dir", type=Path, help="default: build/ in the bundle's folder")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tests", action="store_true", help="install pytest too where missing")
    args = parser.parse_args()
    start = time.monotonic()
    root = Path(__file__).resolve().parent
    manifest_text = (root / "manifest.json").read_bytes()
    manifest = json.loads(manifest_text)
    target = args.target.resolve()
    target.mkdir(parents=True, exist_ok=True)
    node = look_at_node(target)
    problems = check_node(manifest, node)
    if problems:
        sys.exit("\n".join(f"install: {p.message}\n  next: {p.next_step}" for p in problems))
    mark = {
        "manifest": hashlib.sha256(manifest_text).hexdigest(),
        "torch": node["torch"],
        "python": node["python"],
    }
    info = target / f"{PACKAGE}-{manifest['version']}.dist-info"
    wheels = missing_wheels(
        manifest, node["distributions"], {"run"} | ({"test"} if args.tests else set())
    )
    done = (info / MARK).is_file() and json.loads((info / MARK).read_text()) == mark
    if done and (target / PACKAGE / "libtransformer_engine.so").is_file() and not wheels:
        print(f"{manifest['version']} is installed in {target}; nothing to do")
        return
    damaged = damaged_files(root, manifest["files"])
    if damaged:
        fail(f"{len(damaged)} files are damaged, e.g. {damaged[0]}.", "unpack the bundle again.")
    if ext_fits(manifest, node):
        ext = root / "ext" / manifest["ext"]["file"]
    else:
        print(f"building the extension for torch {node['torch']} ...", flush=True)
        ext = build_extension(root, args.build_dir or root / "build", args.jobs, manifest)
    kernels = grouped_wgrad_library(root, args.build_dir or root / "build", manifest)
    if wheels:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        if target != Path(sysconfig.get_paths()["platlib"]).resolve():
            command += ["--target", str(target), "--upgrade"]
        # Containers pin versions with PIP_CONSTRAINT, which would refuse these files.
        env = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
        if subprocess.run(command + [str(root / "wheels" / w) for w in wheels], env=env).returncode:
            fail(f"pip could not install {', '.join(wheels)}.", "see pip's message above.")
    stage = Path(tempfile.mkdtemp(dir=target, prefix=".te-wgrad-stage."))
    try:
        shutil.copytree(root / "payload" / PACKAGE, stage / PACKAGE)
        shutil.copyfile(
            ext,
            stage / PACKAGE / f"transformer_engine_torch{sysconfig.get_config_var('EXT_SUFFIX')}",
        )
        if kernels:
            shutil.copyfile(kernels, stage / PACKAGE / KERNELS)
        write_dist_info(stage, manifest, mark)
        swap_in(stage, target)
    except OSError as error:
        fail(f"Cannot write to {target}: {error}", "free 400 MB there or pass --target DIR.")
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    # torch first: it brings the CUDA, cuDNN and NCCL libraries into the process.
    code = (
        "import torch, transformer_engine.pytorch, transformer_engine as te; "
        "print(te.__version__, te.__file__)"
    )
    env = dict(os.environ, PYTHONPATH=f"{target}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    check = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=target, text=True, capture_output=True
    )
    if check.returncode:
        (info / MARK).unlink()  # so that the next run installs again instead of stopping early
        fail(
            f"Installed, but it does not import:\n{check.stderr.strip()[-2000:]}", "see the error."
        )
    print(f"{check.stdout.splitlines()[-1]} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
