# SPDX-License-Identifier: Apache-2.0
"""What this Python, torch, CUDA toolkit and compiler are, and whether they fit together."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from .common import ToolError, require_python

OLDEST_TORCH = (2, 6)
STOCK = ("transformer_engine_torch", "transformer_engine_cu12", "transformer_engine_cu13")


@dataclasses.dataclass(frozen=True)
class TorchFacts:
    """What was asked of torch: version, CUDA version ("" without) and its folder."""

    version: str
    cuda: str
    folder: str

    @property
    def cuda_major(self) -> int:
        """12 or 13."""
        return int(self.cuda.split(".")[0])


def check_torch(facts: TorchFacts) -> TorchFacts:
    """Return the facts, or stop on a torch that Transformer Engine cannot use."""
    number = re.match(r"(\d+)\.(\d+)", facts.version)
    if number and (int(number[1]), int(number[2])) < OLDEST_TORCH:
        raise ToolError(
            f"torch {facts.version} in {sys.executable} is too old.",
            f"install a CUDA build of torch {'.'.join(map(str, OLDEST_TORCH))} or newer.",
        )
    if not facts.cuda:
        raise ToolError(
            f"torch {facts.version} in {sys.executable} is a CPU-only build.",
            "install a CUDA build of torch (https://pytorch.org/get-started/locally), "
            "e.g. pip install torch --index-url https://download.pytorch.org/whl/cu130",
        )
    if facts.cuda_major not in (12, 13):
        raise ToolError(
            f"torch {facts.version} was built for CUDA {facts.cuda}; "
            "Transformer Engine 2.20.2 has core libraries for CUDA 12 and 13 only.",
            "install a torch built for CUDA 12 or 13.",
        )
    return facts


@functools.lru_cache(maxsize=None)
def torch_facts() -> TorchFacts:
    """Ask this Python's torch once, and check it."""
    require_python()
    return check_torch(ask_torch())


def ask_torch() -> TorchFacts:
    """Ask torch in a process of its own (its import takes seconds and memory)."""
    code = (
        "import json, os, torch; print(json.dumps([torch.__version__, torch.version.cuda or '',"
        " os.path.dirname(torch.__file__)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ToolError(
            f"{sys.executable} cannot import torch: {last}",
            "install a CUDA build of torch into it; with pip, also pass --no-build-isolation "
            "so that the build sees it.",
        )
    return TorchFacts(*json.loads(done.stdout.splitlines()[-1]))


def cuda_toolkit(cuda_major: int, system: Path = Path("/usr/local")) -> Path:
    """The nvcc of a CUDA toolkit of the wanted major version.

    Looks at ``CUDA_HOME`` and ``CUDA_PATH``, PATH, then ``system``/cuda*.
    """
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(home) / "bin/nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    places += [Path(on_path)] if on_path else []
    places += sorted(system.glob("cuda*/bin/nvcc"), reverse=True)
    seen = []
    for nvcc in places:
        if not nvcc.is_file() or not os.access(nvcc, os.X_OK):
            continue
        text = subprocess.run([nvcc, "--version"], text=True, capture_output=True).stdout
        version = re.search(r"release (\d+)\.(\d+)", text)
        if version and int(version[1]) == cuda_major:
            return nvcc
        seen.append(f"{nvcc} ({version[0] if version else 'no version'})")
    raise ToolError(
        f"No CUDA {cuda_major} toolkit (nvcc) found"
        + (f"; found {', '.join(seen)}." if seen else "."),
        f"install the CUDA {cuda_major} toolkit (nvcc, cudart, headers) and set CUDA_HOME to it.",
    )


def compiler_version() -> str:
    """First line of the C++ compiler's ``--version``; CXX may be a launcher and a compiler."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if not all(shutil.which(part) for part in compiler if not part.startswith("-")):
        raise ToolError(
            f"No C++ compiler ({' '.join(compiler)}) found.",
            "install g++ (e.g. apt install g++) or set CXX.",
        )
    done = subprocess.run([*compiler, "--version"], text=True, capture_output=True)
    return done.stdout.split("\n")[0]


def extension_suffix() -> str:
    """File name ending of this Python's extension modules, e.g. .cpython-312-x86_64-linux-gnu.so."""
    return sysconfig.get_config_var("EXT_SUFFIX")


def installed(names: tuple = STOCK) -> dict[str, str]:
    """Which of the named distributions this Python has, with their versions."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def refuse_stock() -> None:
    """Stop when stock packages are installed that would break the fork's import."""
    found = installed()
    if found and os.environ.get("TE_WGRAD_ALLOW_STOCK") != "1":
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        raise ToolError(
            f"Stock packages are installed in {sys.executable}: {listed}. "
            "Transformer Engine refuses to import beside them.",
            f"{sys.executable} -m pip uninstall -y {' '.join(found)}   (then run this again; "
            "TE_WGRAD_ALLOW_STOCK=1 builds a wheel for another environment)",
        )
