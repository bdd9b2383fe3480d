# SPDX-License-Identifier: Apache-2.0
"""Pack the patched tree, a pruned core library and missing wheels for a node without network.

The bundle is one ``.tar.xz`` with one folder::

    install, install.py     the installer; needs only the node's Python and torch
    manifest.json           what is in it, for which Python, CUDA and GPUs, file hashes
    payload/                what is copied to site-packages: Python files, core library
    ext/                    a finished extension (--ext), tied to one torch and one Python
    sources/                the extension's sources and CMakeLists.txt (--ext-sources)
    kernels/                the grouped wgrad kernels, finished where nvcc is here, and sources
    wheels/                 packages that Transformer Engine imports and a node may lack
    tests/, ci/             the fork's tests, when the repository holds them

With neither --ext nor --ext-sources the bundle holds the sources: they fit any torch of
the right CUDA major version. With both, the node builds only where the finished one does
not fit.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from . import environment, prune
from .build import REQUIRES
from .common import (
    DIST,
    REPO,
    TREE,
    ToolError,
    atomic_file,
    atomic_folder,
    cache_dir,
    fork_version,
    run,
    say,
    sha256,
    step,
)
from .kernels import LIBRARY, OPTIONS, SOURCE, kernels, sources, targets, wanted

SCHEMA = 1
HERE = Path(__file__).resolve().parent
NATIVE = {".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp"}


class Wheel(NamedTuple):
    """A package in the bundle: its name, what is imported, and when the node needs it.

    ``role`` is "run" (`import transformer_engine.pytorch` needs it), "build" (building
    the extension needs it) or "test" (running the tests needs it).
    """

    name: str
    imports: str
    role: str


# onnx and onnxscript (export only, imported on use) and nvidia-cudnn-frontend (header
# files of the core build, optional fused MLP) are left out: none is needed to import,
# and together they would double the size.
WHEELS = (
    Wheel("pydantic", "pydantic", "run"),
    Wheel("pydantic-core", "pydantic_core", "run"),
    Wheel("typing-inspection", "typing_inspection", "run"),
    Wheel("annotated-types", "annotated_types", "run"),
    Wheel("typing-extensions", "typing_extensions", "run"),
    Wheel("nvdlfw-inspect", "nvdlfw_inspect", "run"),
    Wheel("einops", "einops", "run"),
    Wheel("packaging", "packaging", "run"),
    Wheel("importlib-metadata", "importlib_metadata", "run"),
    Wheel("zipp", "zipp", "run"),
    Wheel("pybind11", "pybind11", "build"),
    Wheel("ninja", "ninja", "build"),
    Wheel("pytest", "pytest", "test"),
    Wheel("pluggy", "pluggy", "test"),
    Wheel("iniconfig", "iniconfig", "test"),
    Wheel("pygments", "pygments", "test"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--archs",
        default=os.environ.get("NVTE_CUDA_ARCHS", "90"),
        help="GPU architectures of the node (default: NVTE_CUDA_ARCHS, else 90)",
    )
    parser.add_argument("--ext", type=Path, metavar="SO", help="a finished extension to include")
    parser.add_argument(
        "--ext-torch", metavar="VERSION", help="torch it was built with (default: this Python's)"
    )
    parser.add_argument(
        "--ext-sources", action="store_true", help="include the extension's sources"
    )
    parser.add_argument(
        "--python-version",
        default=f"{sys.version_info[0]}.{sys.version_info[1]}",
        help="the node's Python, for wheels and --ext (default: this one, %(default)s)",
    )
    parser.add_argument("--cuda", type=int, choices=(12, 13), default=13, help="CUDA major version")
    parser.add_argument("--no-wheels", action="store_true", help="the node has all packages")
    parser.add_argument("--core", type=Path, help="unpruned core library (default: fetched)")
    parser.add_argument(
        "--tree", type=Path, default=TREE, help="patched tree (default: build/tree)"
    )
    parser.add_argument("-o", "--output", type=Path, help="default: dist/te-wgrad-bundle-...tar.xz")


def main(args: argparse.Namespace) -> None:
    """Run the verb."""
    if not re.fullmatch(r"3\.\d+", args.python_version):
        raise ToolError(
            f"'{args.python_version}' is no Python version.", "write it as --python-version 3.12."
        )
    tree = args.tree
    if not (tree / "transformer_engine/pytorch").is_dir():
        raise ToolError(f"No patched tree in {tree}.", "run: python -m build_tools apply")
    archs = prune.parse_archs(args.archs)
    ext_sources = args.ext_sources or args.ext is None
    ext = None if args.ext is None else describe_ext(args.ext, args.python_version, args.ext_torch)
    core = args.core
    if core is None:
        from .fetch import core_library  # only here: --core works without a network

        core = core_library(args.cuda)

    version = fork_version(upstream_version())
    tags = "-".join(
        [
            f"cu{args.cuda}",
            "sm" + "_".join(sorted(archs, key=int)) if archs else "all",
            "cp" + args.python_version.replace(".", ""),
        ]
    )
    name = f"te-wgrad-bundle-{version}-{tags}"
    output = args.output or DIST / f"{name}.tar.xz"
    with tempfile.TemporaryDirectory(prefix="te-wgrad-bundle.") as temporary:
        root = Path(temporary) / name
        root.mkdir()
        copy_payload(tree, root / "payload/transformer_engine")
        prune.prune(core, root / "payload/transformer_engine/libtransformer_engine.so", archs)
        copy_nccl_ep(core.parent, root / "payload/transformer_engine")
        if ext:
            (root / "ext").mkdir()
            shutil.copyfile(args.ext, root / "ext" / ext["file"])
        if ext_sources:
            copy_sources(tree, root / "sources")
        library = add_kernels(tree, archs, args.cuda, root / "kernels")
        wheels = []
        if not args.no_wheels:
            wheels = add_wheels(root / "wheels", args.python_version)
        copy_extras(root)
        manifest = {
            "schema": SCHEMA,
            "name": "transformer_engine",
            "version": version,
            "upstream_version": upstream_version(),
            "commit": commit(),
            "archs": sorted(archs, key=int) if archs else sorted(prune.list_archs(core), key=int),
            "cuda_major": args.cuda,
            "python": args.python_version,
            "ext": ext,
            "sources": ext_sources,
            "kernels": library,
            "wheels": wheels,
            "requires": list(REQUIRES),
            "files": hashes(root),
        }
        (root / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        with step("compressing"), atomic_file(output) as part:
            pack(root, part)
    say(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    say(f"on the node: tar xf {output.name} && {name}/install")


def upstream_version() -> str:
    """Version of Transformer Engine that the fork patches."""
    return json.loads((HERE / "upstream.lock").read_text())["version"]


def commit() -> str | None:
    """Commit of the fork, with ``+dirty`` when files differ from it; None outside git."""
    try:
        head = run(["git", "rev-parse", "HEAD"], cwd=REPO).strip()
        return head + ("+dirty" if run(["git", "status", "--porcelain"], cwd=REPO) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def describe_ext(path: Path, python_version: str, torch_version: str | None) -> dict:
    """What a finished extension is tied to.

    Parameters
    ----------
    path : Path
        ``transformer_engine_torch.cpython-<tag>-<platform>.so``.
    python_version : str
        The node's Python, such as "3.12".
    torch_version : str or None
        torch it was built with; None asks the running Python.

    Raises
    ------
    ToolError
        When the file is missing, is for another Python, or torch's version is unknown.
    """
    match = re.fullmatch(r"transformer_engine_torch\.cpython-3(\d+)-[\w-]+\.so", path.name)
    if not match or not path.is_file():
        raise ToolError(
            f"{path} is no finished extension (transformer_engine_torch.cpython-....so).",
            "build one (python -m build_tools build) or bundle the sources: --ext-sources.",
        )
    built_for = f"3.{match.group(1)}"
    if built_for != python_version:
        raise ToolError(
            f"{path.name} is for Python {built_for}, the bundle for {python_version}.",
            f"pass --python-version {built_for}, or --ext-sources instead of --ext.",
        )
    if torch_version is None:
        done = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.__version__)"],
            text=True,
            capture_output=True,
        )
        torch_version = done.stdout.strip()
        if done.returncode or not torch_version:
            raise ToolError(
                "Which torch the extension was built with is unknown: this Python has none.",
                "name it, as torch.__version__ prints it: --ext-torch 2.14.1+cu130",
            )
    return {"file": path.name, "torch": torch_version, "python": built_for}


def copy_payload(tree: Path, target: Path) -> None:
    """Copy what is installed: Python and data files, without C++ sources and without JAX."""

    def skip(folder: str, names: list[str]) -> set[str]:
        here = Path(folder)
        top = here == tree / "transformer_engine"
        return {
            name
            for name in names
            if name in ("__pycache__", "csrc", "wheel_lib")
            or (top and name == "jax")
            or Path(name).suffix in NATIVE
            or ".so" in Path(name).suffixes
        }

    shutil.copytree(tree / "transformer_engine", target, ignore=skip)
    # Folders of headers only are empty now.
    for folder in sorted(target.rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def copy_nccl_ep(folder: Path, target: Path) -> None:
    """Copy the NCCL expert-parallel library and the headers it compiles kernels from.

    The core library opens it on first use only and looks beside itself; nothing links to
    it. A core library without it beside it serves everything but ``transformer_engine.ep``.
    """
    if not (folder / "libnccl_ep.so").is_file():
        return
    shutil.copyfile(folder / "libnccl_ep.so", target / "libnccl_ep.so")
    if (folder / "nccl_ep").is_dir():
        shutil.copytree(folder / "nccl_ep", target / "nccl_ep")


def copy_sources(tree: Path, target: Path) -> None:
    """Copy what CMakeLists.txt reads to build the extension."""
    cmake = REPO / "CMakeLists.txt"
    if not cmake.is_file():
        raise ToolError(f"{cmake} is missing.", "restore it from git: git checkout CMakeLists.txt")
    target.mkdir(parents=True)
    shutil.copyfile(cmake, target / "CMakeLists.txt")
    for part in ("transformer_engine/pytorch/csrc", "transformer_engine/common"):
        for path in sorted((tree / part).rglob("*")):
            if path.is_file() and path.suffix in NATIVE and "wgrad_kernels" not in path.parts:
                copy = target / "tree" / path.relative_to(tree)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def add_kernels(tree: Path, archs: set | None, cuda: int, target: Path) -> dict | None:
    """Add the grouped wgrad kernels: sources, and the library where this machine has nvcc.

    Returns
    -------
    dict or None
        For the manifest: the library's and the source's file names (the former None where
        the node must compile it) and nvcc's options; None without kernels for these GPUs.
    """
    if not wanted(tree, archs):
        return None
    target.mkdir()
    for path in sources(tree):
        shutil.copyfile(path, target / path.name)
    file = None
    try:
        nvcc = environment.cuda_toolkit(cuda)
    except ToolError as error:
        say(f"the node compiles the grouped wgrad kernels: {error.args[0]}")
    else:
        shutil.copyfile(kernels(tree, archs, nvcc), target / LIBRARY)
        file = LIBRARY
    return {"file": file, "source": SOURCE, "nvcc": [*OPTIONS, *targets(archs)]}


def copy_extras(root: Path) -> None:
    """Copy the installer, the license, and the tests and their script where they exist."""
    shutil.copyfile(HERE / "bundle_install.py", root / "install.py")
    (root / "install").write_text(
        '#!/bin/sh\nexec "${PYTHON:-python3}" "$(dirname "$0")/install.py" "$@"\n'
    )
    (root / "install").chmod(0o755)
    for name in ("LICENSE", "ci/pytorch.sh"):
        if (REPO / name).is_file():
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(REPO / name, root / name)
    if (REPO / "tests/pytorch").is_dir():
        ignore = shutil.ignore_patterns("__pycache__", ".pytest_cache")
        shutil.copytree(REPO / "tests/pytorch", root / "tests/pytorch", ignore=ignore)


def add_wheels(target: Path, python_version: str) -> list[dict]:
    """Copy the wheels of the table for one Python, downloading them once.

    Returns
    -------
    list of dict
        For the manifest: name, file, import, role, version and, as ``at_least``, the
        lowest version that the other wheels accept (None when any will do).

    Raises
    ------
    ToolError
        When pip cannot get them.
    """
    tag = python_version.replace(".", "")
    store = cache_dir() / "wheels" / f"cp{tag}"
    if not all(find_wheel(store, wheel.name) for wheel in WHEELS):
        with step(f"downloading {len(WHEELS)} wheels for Python {python_version}"):
            with atomic_folder(store) as part:
                download_wheels(part, python_version)
    target.mkdir()
    found = {}
    needs: dict[str, str] = {}
    for wheel in WHEELS:
        path = find_wheel(store, wheel.name)
        shutil.copyfile(path, target / path.name)
        found[wheel.name] = path
        needs.update(lowest_versions(path))
    return [
        {
            "name": wheel.name,
            "file": found[wheel.name].name,
            "import": wheel.imports,
            "role": wheel.role,
            "version": found[wheel.name].name.split("-")[1],
            "at_least": needs.get(wheel.name),
        }
        for wheel in WHEELS
    ]


def find_wheel(folder: Path, name: str) -> Path | None:
    """The wheel of a package in a folder, or None."""
    if not folder.is_dir():
        return None
    return next(iter(sorted(folder.glob(f"{name.replace('-', '_')}-*.whl"))), None)


def lowest_versions(wheel: Path) -> dict[str, str]:
    """The lowest versions that a wheel's own requirements accept, from >= and ==."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(names[0]).decode()
    lowest = {}
    for line in text.splitlines():
        match = re.match(r"Requires-Dist: ([\w.-]+)\s*\(?[><!=~,.\w\s]*?[>=]=\s*([\d.]+)", line)
        if match and ";" not in line:
            lowest[re.sub(r"[-_.]+", "-", match.group(1)).lower()] = match.group(2)
    return lowest


def download_wheels(target: Path, python_version: str) -> None:
    """Let pip download the wheels of the table for another Python on x86-64 Linux."""
    tag = python_version.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(target)]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python_version]
    for abi in (f"cp{tag}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", platform]
    try:
        # One call with dependencies for pydantic, which accepts one pydantic-core only;
        # one without for the rest, whose dependencies torch has brought.
        run(command + ["pydantic"])
        have = [wheel.name for wheel in WHEELS if find_wheel(target, wheel.name)]
        run(command + ["--no-deps"] + [w.name for w in WHEELS if w.name not in have])
    except subprocess.CalledProcessError as error:
        why = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise ToolError(
            f"pip could not download the wheels: {(why or [error.stderr.strip()])[-1]}",
            "check the network and the package index (pip config list), or pass --no-wheels "
            "when the node has them.",
        ) from error


def hashes(root: Path) -> dict[str, str]:
    """Hex sha256 of every file below a folder, by its relative name."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): sha256(path) for path in files}


def pack(root: Path, target: Path) -> None:
    """Write a folder as .tar.xz; the same files give the same bytes of tar."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = "root"
        info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
        return info

    def write(stream) -> None:
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for path in [root, *sorted(root.rglob("*"))]:
                name = path.relative_to(root.parent).as_posix()
                archive.add(path, arcname=name, recursive=False, filter=plain)

    xz = shutil.which("xz")
    if xz is None:
        with lzma.open(target, "wb", preset=6) as stream:
            write(stream)
        return
    # The program uses every core, the module only one. The block size bounds its memory.
    with open(target, "wb") as file:
        with subprocess.Popen(
            [xz, "-6", "-T0", "-c"], stdin=subprocess.PIPE, stdout=file
        ) as process:
            write(process.stdin)
            process.stdin.close()
            if process.wait():
                raise ToolError(
                    f"xz failed with exit code {process.returncode}.",
                    f"check the free space at {target.parent}.",
                )
