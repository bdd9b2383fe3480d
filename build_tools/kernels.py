# SPDX-License-Identifier: Apache-2.0
"""Compile the grouped weight gradient kernels: a library that needs nvcc, not torch or Python.

It is cached by the content of its sources, nvcc, the host compiler and the GPU architectures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Collection
from pathlib import Path

from . import environment
from .common import (
    BUILD,
    ToolError,
    cache_dir,
    cached_file,
    disk_full_explained,
    hash_files,
    no_space,
    step,
)

LIBRARY = "libte_grouped_wgrad.so"
FOLDER = "transformer_engine/pytorch/csrc/wgrad_kernels"
SOURCE = "grouped_wgrad.cu"
OPTIONS = ("-O3", "-std=c++17", "-shared", "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden")
# What nvcc and its host compiler read.
VARIABLES = {"CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"}


def targets(archs: Collection[str] | None) -> list[str]:
    """nvcc's architecture options.

    Parameters
    ----------
    archs : collection of str, optional
        Numbers such as "90"; all when None. Hopper has code of its own; code for 80, or its PTX,
        runs on every other GPU from there on. None needs the library where all are older.
    """
    found = []
    if archs is None or "90" in archs:
        found += ["-gencode", "arch=compute_90a,code=sm_90a"]
    if archs is None or any(int(arch) >= 80 and arch != "90" for arch in archs):
        found += ["-gencode", "arch=compute_80,code=[sm_80,compute_80]"]
    return found


def sources(tree: Path) -> list[Path]:
    """The kernels' files in a tree; none in an unpatched one."""
    return sorted(path for path in (tree / FOLDER).glob("*.cu*") if path.is_file())


def wanted(tree: Path, archs: Collection[str] | None) -> bool:
    """Whether the tree has kernels for any of the architectures."""
    return bool(sources(tree) and targets(archs))


def kernels_key(tree: Path, archs: Collection[str] | None, nvcc: Path) -> str:
    """Hash over everything that the library depends on; "" where there is none to make."""
    if not wanted(tree, archs):
        return ""
    facts = {
        "options": [*OPTIONS, *targets(archs)],
        "nvcc": subprocess.run([nvcc, "--version"], text=True, capture_output=True).stdout,
        "compiler": environment.compiler_version(),
    }
    for name, value in os.environ.items():
        if name in VARIABLES or name.startswith("NVCC_"):
            facts[name] = value
    return hash_files(sources(tree), tree, json.dumps(facts, sort_keys=True))


def kernels(
    tree: Path, archs: Collection[str] | None, nvcc: Path, build: Path = BUILD / "kernels"
) -> Path | None:
    """The library of a tree, from the cache when nothing it depends on changed.

    Returns None for a tree without the kernels, or with GPUs only that are too old for them.
    """
    key = kernels_key(tree, archs, nvcc)
    if not key:
        return None

    def make() -> Path:
        with disk_full_explained(build):
            build.mkdir(parents=True, exist_ok=True)
        with step("compiling the grouped wgrad kernels"):
            compile_kernels(tree, archs, nvcc, build / LIBRARY)
        return build / LIBRARY

    return cached_file(cache_dir() / "kernels" / key[:32], LIBRARY, "grouped wgrad kernels", make)


def compile_kernels(tree: Path, archs: Collection[str] | None, nvcc: Path, target: Path) -> None:
    """Run nvcc.

    Raises
    ------
    ToolError
        With its first errors, when it fails.
    """
    command = [nvcc, *OPTIONS, *targets(archs), "-o", target, tree / FOLDER / SOURCE]
    done = subprocess.run(
        [str(part) for part in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        if "No space left on device" in done.stdout:
            raise no_space(OSError("nvcc could not write"), target)
        errors = re.findall(r"^.*(?:error|fatal|Killed).*$", done.stdout, re.M)[:6]
        raise ToolError(
            "The grouped wgrad kernels did not compile:\n  "
            + "\n  ".join(errors or done.stdout.splitlines()[-6:]),
            f"mend what nvcc names in {FOLDER}, or use a CUDA toolkit that ci/build.sh was tried with.",
        )
