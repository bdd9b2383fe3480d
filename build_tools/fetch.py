# SPDX-License-Identifier: Apache-2.0
"""Fetch the pinned upstream archives into the content-checked cache.

Every archive of ``upstream.lock`` is taken from the package index by pip, which
checks the sha256 before anything in it runs. Finished archives are kept one by
one, so an interrupted fetch goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from .common import ToolError, atomic_file, atomic_folder, cache_dir, no_space, say, sha256, step
from .environment import torch_facts

LOCK = Path(__file__).with_name("upstream.lock")
NEXT_AFTER_DAMAGE = (
    "run `python -m build_tools fetch` with a network: it keeps no file that differs from its pin. "
    "If the index really serves another file (pip config list), do not use it."
)

# pip asks an sdist for its metadata by running its setup.py, and that one stops
# without a CUDA build of torch. This stand-in answers the three questions it
# asks; nothing is compiled and the real torch is not touched.
STUB = {
    "torch/__init__.py": '__version__ = "2.11.0"\nclass version:\n    cuda = "13.0"\n',
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": textwrap.dedent("""\
        from setuptools import Extension
        from setuptools.command.build_ext import build_ext as BuildExtension

        def CppExtension(name, sources, **_):
            return Extension(name, sources)
        """),
}


def load_lock(path: Path = LOCK) -> dict:
    """The pins: ``version``, ``pristine_tree`` and ``archives`` by role."""
    return json.loads(path.read_text(encoding="utf-8"))


def check_archive(path: Path, pin: dict) -> None:
    """Compare a file's size (bytes) and sha256 with its pin.

    Raises
    ------
    ToolError
        With both values, when either differs.
    """
    size = path.stat().st_size
    if size != pin["size"]:
        raise ToolError(
            f"{path.name}: wrong size: pinned {pin['size']} bytes, got {size} bytes ({path}).",
            NEXT_AFTER_DAMAGE,
        )
    got = sha256(path)
    if got != pin["sha256"]:
        raise ToolError(
            f"{path.name}: wrong sha256:\n  pinned {pin['sha256']}\n  got    {got}\n  in     {path}",
            NEXT_AFTER_DAMAGE,
        )


def pip_command(pin: dict, folder: Path) -> list[str]:
    """pip's command line that downloads one pinned archive into ``folder``."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pin['requirement']} --hash=sha256:{pin['sha256']}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "-d", str(folder), "-r", str(requirements)]
    if pin["file"].endswith(".whl"):
        # A core wheel may be fetched on a machine of another kind than its own.
        tag = pin["file"][: -len(".whl")].split("-")[-1]
        command += ["--only-binary=:all:", "--platform", tag]
    else:
        command += ["--no-binary=:all:", "--no-build-isolation"]
    return command


def explain_pip(pin: dict, log: str) -> ToolError:
    """Turn pip's output after a failed download into an error with a next step."""
    hashes = re.findall(r"(?:Expected sha256|Got)\s+\S+", log)
    if hashes:
        return ToolError(
            f"{pin['file']}: the package index serves another file:\n  " + "\n  ".join(hashes),
            "check which index pip uses (pip config list); do not go on with that file.",
        )
    if "No space left" in log:
        return no_space(OSError("pip could not write the download"), cache_dir())
    if "No module named pip" in log:
        return ToolError(f"{sys.executable} has no pip.", f"{sys.executable} -m ensurepip")
    if re.search(r"No module named '?(setuptools|wheel|packaging)", log):
        return ToolError(
            "pip needs setuptools, wheel and packaging in this Python to read the sources' metadata.",
            f"{sys.executable} -m pip install setuptools wheel packaging",
        )
    network = r"NewConnectionError|NameResolutionError|name resolution|timed out|Connection \w+"
    why = ": the package index cannot be reached" if re.search(network, log) else ""
    tail = "\n  ".join(log.strip().splitlines()[-4:])
    return ToolError(
        f"pip could not download {pin['file']} ({pin['requirement']}){why}:\n  {tail}",
        "check the network, proxy and index (pip config list) and run "
        "`python -m build_tools fetch` again. Without a network: run it on another machine and "
        f"copy {pin['file']} into {cache_dir() / 'archives'}.",
    )


def download(pin: dict, target: Path) -> None:
    """Let pip download one archive, check it, and move it to ``target`` at once."""
    with atomic_file(target) as temporary:
        folder = temporary.parent / "pip"
        folder.mkdir()
        # Containers pin versions with PIP_CONSTRAINT, which would refuse this one.
        environment = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
        if not pin["file"].endswith(".whl"):
            for path, text in STUB.items():
                (folder / "stub" / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "stub" / path).write_text(text)
            paths = [str(folder / "stub"), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with step(f"fetching {pin['file']} ({pin['size'] / 1e6:.1f} MB)"):
            done = subprocess.run(
                pip_command(pin, folder),
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            raise explain_pip(pin, done.stdout)
        check_archive(folder / pin["file"], pin)
        os.replace(folder / pin["file"], temporary)


def archive(
    role: str,
    *,
    lock: dict | None = None,
    offline: bool = False,
    get: Callable[[dict, Path], None] = download,
) -> Path:
    """The checked archive of one role, fetched when the cache lacks it or holds a damaged one.

    Parameters
    ----------
    role : str
        A key of the lock's ``archives``: python, sources, core_cu12 or core_cu13.
    offline : bool
        Never ask the package index; also on with ``TE_WGRAD_OFFLINE=1``.

    Raises
    ------
    ToolError
        A wrong hash or size, no network, a full disk, or missing or damaged when offline.
    """
    pin = (lock or load_lock())["archives"][role]
    path = cache_dir() / "archives" / pin["file"]
    offline = offline or os.environ.get("TE_WGRAD_OFFLINE") == "1"
    if path.exists():
        try:
            check_archive(path, pin)
            return path
        except ToolError as error:
            if offline:
                raise
            say(f"the cached archive is damaged and is fetched again: {error.args[0]}")
            path.unlink()
    if offline:
        raise ToolError(
            f"{pin['file']} is not in the cache ({path.parent}) and offline mode is on.",
            "run `python -m build_tools fetch` on a machine with a network and copy "
            f"{path.parent} here (or set TE_WGRAD_CACHE to the copy).",
        )
    get(pin, path)
    return path


def core_library(cuda_major: int | None = None) -> Path:
    """The unpruned ``libtransformer_engine.so`` for a CUDA major version (default: torch's)."""
    return core_folder(cuda_major) / "libtransformer_engine.so"


def core_folder(cuda_major: int | None = None, *, lock: dict | None = None) -> Path:
    """Folder with the core wheel's libraries, unpacked again when one was cut off or edited."""
    role = f"core_cu{cuda_major or torch_facts().cuda_major}"
    path = archive(role, lock=lock)
    folder = cache_dir() / "core" / (lock or load_lock())["archives"][role]["sha256"][:16]
    with zipfile.ZipFile(path) as wheel:
        members = [
            m for m in wheel.infolist() if "/wheel_lib/" in m.filename and m.filename[-3:] == ".so"
        ]
        if not all(intact(folder / Path(m.filename).name, m) for m in members):
            with step("unpacking the core library"), atomic_folder(folder) as temporary:
                for member in members:
                    copy = temporary / Path(member.filename).name
                    with wheel.open(member) as source, open(copy, "wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
    return folder


def intact(path: Path, member: zipfile.ZipInfo) -> bool:
    """Whether a file has the size (bytes) and CRC that a zip archive records for it."""
    if not path.is_file() or path.stat().st_size != member.file_size:
        return False
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc == member.CRC


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--cuda", choices=("12", "13"), help="CUDA major (default: torch's)")
    parser.add_argument("--offline", action="store_true", help="check the cache, download nothing")
    parser.add_argument("--no-core", action="store_true", help="leave the large core library out")


def main(args: argparse.Namespace) -> None:
    """Fetch and list what is there."""
    roles = ["python", "sources"]
    if not args.no_core:
        roles.append(f"core_cu{args.cuda or torch_facts().cuda_major}")
    for role in roles:
        print(archive(role, offline=args.offline))
    say("all archives match upstream.lock")
