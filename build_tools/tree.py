# SPDX-License-Identifier: Apache-2.0
"""Make the upstream-shaped source tree from the pinned archives, with a pristine commit.

Python files come from the upstream wheel, the extension's C++ and the common
headers from the upstream sdist, each at the path they have in upstream's
repository. The commit's tree hash is pinned in upstream.lock too.
"""

from __future__ import annotations

import argparse
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from .common import TREE, ToolError, atomic_folder, say, step
from .fetch import archive, load_lock
from .gittree import PRISTINE, dirty, git, ok, tree_hashes

# sdist folder -> folder in upstream's repository
SDIST_MAP = {
    "csrc": "transformer_engine/pytorch/csrc",
    "common_headers/common": "transformer_engine/common",
    "LICENSE": "LICENSE",
}


def sdist_target(name: str) -> str | None:
    """Where a member of the sdist goes in the tree; None when it does not."""
    inner = str(PurePosixPath(*PurePosixPath(name).parts[1:]))
    for source, target in SDIST_MAP.items():
        if inner == source or inner.startswith(source + "/"):
            return target + inner[len(source) :]
    return None


def unpack(python: Path, sources: Path, target: Path) -> None:
    """Fill ``target`` from the two archives; a file in both must be the same."""
    with zipfile.ZipFile(python) as wheel:
        for member in wheel.infolist():
            if member.filename.startswith("transformer_engine/") and not member.is_dir():
                write(target, member.filename, wheel.read(member))
    with tarfile.open(sources) as tar:
        for member in tar:
            name = sdist_target(member.name)
            if name and member.isfile() and "__pycache__" not in name:
                write(target, name, tar.extractfile(member).read())


def write(root: Path, name: str, data: bytes) -> None:
    """Write one file below ``root``; refuses a path that leaves it."""
    path = root / name
    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
        raise ToolError(f"The archive holds an unsafe path: {name}", "do not use this archive.")
    if path.exists() and path.read_bytes() != data:
        raise ToolError(
            f"The two archives disagree about {name}.", "check that both pins are of one version."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def make_tree(
    dest: Path = TREE, *, force: bool = False, offline: bool = False, lock: dict | None = None
) -> Path:
    """Make the pristine tree, or keep the one that is there.

    Raises
    ------
    ToolError
        When a folder there is something else (unless ``force``), or the pinned
        archives give another tree than the pinned one.
    """
    lock = lock or load_lock()
    if ok_tree(dest, lock) and not force:
        return dest
    if dest.exists() and not force:
        refuse_other(dest)
    python, sources = (archive(r, offline=offline, lock=lock) for r in ("python", "sources"))
    with step(f"making the source tree in {dest}"), atomic_folder(dest) as folder:
        unpack(python, sources, folder)
        git(folder, "init", "-q", "-b", "main")
        git(folder, "add", "-A", "-f")
        git(folder, "commit", "-q", "-m", f"Transformer Engine {lock['version']}", author=True)
        git(folder, "tag", PRISTINE)
        found = git(folder, "rev-parse", f"{PRISTINE}^{{tree}}").strip()
        if found != lock["pristine_tree"]:
            raise ToolError(
                f"The archives gave tree {found}, pinned is {lock['pristine_tree']}.",
                "update pristine_tree in build_tools/upstream.lock if you changed the pins "
                "on purpose; otherwise delete the cache and fetch again.",
            )
    return dest


def refuse_other(dest: Path) -> None:
    """Stop when ``dest`` holds anything; it is not the pinned tree, and would be lost."""
    if not any(dest.iterdir()):
        return
    if not (dest / ".git").is_dir():
        why = "has files but no .git"
    elif not ok(dest, "rev-parse", "-q", "--verify", "HEAD^{tree}"):
        why = "has a broken .git"
    else:
        edits = dirty(dest)
        why = "is not the pinned pristine tree"
        why += f"; edited: {', '.join(edits[:5])}" if edits else ""
    raise ToolError(
        f"{dest} {why}.",
        "copy what you need out of it, then run `python -m build_tools tree --force`, which "
        "makes it again.",
    )


def ok_tree(dest: Path, lock: dict) -> bool:
    """Whether ``dest`` holds the pinned pristine commit (patches may lie on it)."""
    return (dest / ".git").is_dir() and lock["pristine_tree"] in tree_hashes(dest)[:1]


def pristine_copy(tree: Path, dest: Path) -> None:
    """Write the unpatched files of ``tree`` to the new folder ``dest``."""
    with tempfile.TemporaryDirectory(dir=dest.parent) as name:
        tar = Path(name) / "pristine.tar"
        git(tree, "archive", "-o", str(tar), PRISTINE)
        with atomic_folder(dest) as folder:
            shutil.unpack_archive(tar, folder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--force", action="store_true", help="make it again; edits there are lost")
    parser.add_argument("--offline", action="store_true", help="use the cache only")
    parser.add_argument("--dest", type=Path, default=TREE, help="folder (default: build/tree)")


def main(args: argparse.Namespace) -> None:
    """Make the tree and print where it is."""
    print(make_tree(args.dest, force=args.force, offline=args.offline))
    say("next: python -m build_tools apply")
