# SPDX-License-Identifier: Apache-2.0
"""What every verb shares: paths, errors with a next step, progress, atomic writes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
BUILD = REPO / "build"  # git-ignored; everything in it can be made again
TREE = BUILD / "tree"
EXT_BUILD = BUILD / "ext"
DIST = REPO / "dist"
PATCHES = REPO / "patches"
OVERLAY = REPO / "transformer_engine"
FORK_RELEASE = 1  # the N of 2.20.2+wgrad.N
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DAY = 24 * 3600


class ToolError(Exception):
    """An error a user can act on.

    Parameters
    ----------
    message : str
        What is wrong, with the values that were seen.
    next_step : str
        What to run or change.
    """

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(message)
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.args[0]}\n  next: {self.next_step}"


def say(text: str) -> None:
    """Print one line of progress to stderr, at once."""
    print(f"[build_tools] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Announce a long step and say how many seconds it took."""
    say(f"{what} ...")
    start = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - start:.0f} s")


def cache_dir() -> Path:
    """Folder of downloaded and built files: ``TE_WGRAD_CACHE`` or the user's cache folder."""
    base = os.environ.get("TE_WGRAD_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "te-wgrad"


def fork_version(base: str) -> str:
    """Version of the fork's wheel for the upstream version ``base``."""
    return f"{base}+wgrad.{FORK_RELEASE}"


def sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hash_files(files: Sequence[Path], root: Path, *facts: str) -> str:
    """Hex sha256 over the names (relative to ``root``) and contents of files, and ``facts``."""
    digest = hashlib.sha256("\0".join(facts).encode())
    for path in sorted(files):
        digest.update(f"\0{path.relative_to(root)}\0{sha256(path)}".encode())
    return digest.hexdigest()


def no_space(error: OSError, where: Path) -> ToolError:
    """The error for a full disk, with what is free and how to get more."""
    free = shutil.disk_usage(existing_parent(where)).free >> 20
    return ToolError(
        f"No space left on the disk of {where} ({free} MiB free): {error}",
        "free about 8 GB there, or point TE_WGRAD_CACHE and TMPDIR at another disk; "
        "nothing half-written was kept.",
    )


def existing_parent(path: Path) -> Path:
    """The nearest folder of ``path`` that exists."""
    while not path.exists():
        path = path.parent
    return path


@contextlib.contextmanager
def disk_full_explained(where: Path) -> Iterator[None]:
    """Turn the system's error for a full disk into one with a next step."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise no_space(error, where) from error
        raise


@contextlib.contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target`` for half-done work; it is deleted at the end.

    Those that a killed run left a day ago are deleted too.
    """
    prefix = f".te-wgrad.{target.name}."
    with disk_full_explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.iterdir():
            if old.name.startswith(prefix) and time.time() - old.lstat().st_mtime > DAY:
                shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=prefix))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``target`` when the block succeeds."""
    with scratch_folder(target) as folder:
        temporary = folder / target.name
        temporary.touch()
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, target)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a new empty folder that replaces ``target`` when the block succeeds."""
    with scratch_folder(target) as temporary:
        yield temporary
        temporary.chmod(0o755)
        swap_folder(temporary, target)


def cached_file(folder: Path, name: str, what: str, make: Callable[[], Path]) -> Path:
    """``folder / name``, made when it is not there whole.

    Parameters
    ----------
    folder : Path
        Named by everything that the file depends on.
    what : str
        For the line that says where the file came from.
    make : callable
        Makes the file outside ``folder`` and returns its path.
    """
    path, digest = folder / name, folder / "sha256"
    if path.is_file() and digest.is_file():
        if digest.read_text() == sha256(path):
            say(f"{what}: unchanged, taken from the cache")
            return path
        say(f"{what}: {path} is damaged and is made again")
    made = make()
    with atomic_folder(folder) as temporary:
        shutil.copyfile(made, temporary / name)
        (temporary / "sha256").write_text(sha256(temporary / name))
    return path


def swap_folder(new: Path, target: Path) -> None:
    """Move a folder to ``target``; what was there comes back when that fails."""
    try:
        os.replace(new, target)  # works when nothing, or an empty folder, is there
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".te-wgrad-old.{target.name}."))
    try:
        os.replace(target, aside / "x")
        os.replace(new, target)
    except BaseException:
        if (aside / "x").exists() and not target.exists():
            os.replace(aside / "x", target)
        if not (aside / "x").exists():
            aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def run(command: Sequence[str], *, cwd: Path | None = None, env: dict | None = None) -> str:
    """Run a command quietly and return its stdout, which keeps every byte (see `to_text`).

    Raises
    ------
    subprocess.CalledProcessError
        When it fails; ``output`` and ``stderr`` hold what it printed.
    """
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True)
    if done.returncode:
        raise subprocess.CalledProcessError(
            done.returncode,
            list(command),
            output=to_text(done.stdout),
            stderr=to_text(done.stderr),
        )
    return to_text(done.stdout)


def to_text(data: bytes) -> str:
    """UTF-8 to text; other bytes and all line ends survive the way back with `to_bytes`."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """The bytes that `to_text` was given."""
    return text.encode("utf-8", "surrogateescape")


def require_python(version: tuple = tuple(sys.version_info[:2])) -> None:
    """Stop when Python is older than Transformer Engine allows (3.10)."""
    if tuple(version) < (3, 10):
        raise ToolError(
            f"Python {version[0]}.{version[1]} is too old: Transformer Engine needs 3.10 or newer.",
            "create the environment with a newer Python, e.g. python3.12 -m venv .venv",
        )
