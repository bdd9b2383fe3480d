# SPDX-License-Identifier: Apache-2.0
"""Write the tree's commits back to patches/, byte for byte (--check only compares).

The n-th commit after the pristine one is the n-th entry of patches/series; a
commit beyond the series becomes patches/core/<subject>.patch and is appended.
"""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path

from .apply import overlay_files
from .common import OVERLAY, PATCHES, TREE, ToolError, atomic_file, say
from .gittree import buildable, dirty, format_patch, git, patch_commits, read_series, require_tree


def slug(subject: str) -> str:
    """File name of a new patch: lower case words of the subject."""
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:60]


def exported(tree: Path, patches: Path) -> dict[str, str]:
    """Patch texts by series name, as the tree's commits give them."""
    names = buildable(read_series(patches))
    commits = patch_commits(tree)
    if len(commits) < len(names):
        raise ToolError(
            f"{tree} has {len(commits)} patch commits, patches/series names {len(names)}.",
            "run `python -m build_tools apply`, or take the dropped patch out of patches/series.",
        )
    for commit in commits[len(names) :]:
        names.append(f"core/{slug(git(tree, 'log', '-1', '--format=%s', commit))}.patch")
    return {name: format_patch(tree, commit) for name, commit in zip(names, commits)}


def check_clean(tree: Path, overlay: Path) -> None:
    """Stop on uncommitted edits and on overlay files edited in the tree."""
    edits = dirty(tree)
    if edits:
        raise ToolError(
            f"{tree} has uncommitted edits: {', '.join(edits[:5])}.",
            f"commit them there (git -C {tree} commit), then export again.",
        )
    for path in overlay_files(overlay):
        copy = tree / path.relative_to(overlay.parent)
        if copy.exists() and copy.read_bytes() != path.read_bytes():
            raise ToolError(
                f"{copy} differs from {path}.",
                f"edit {path} (the tree's copy is made from it), then `python -m build_tools apply`.",
            )


def export(
    tree: Path = TREE, patches: Path = PATCHES, overlay: Path = OVERLAY, *, check: bool
) -> list:
    """Write the patches, or with ``check`` only compare; returns the names that changed.

    Raises
    ------
    ToolError
        With the first differing line, when ``check`` finds a difference.
    """
    require_tree(tree)
    check_clean(tree, overlay)
    changed = []
    texts = exported(tree, patches)
    for name, text in texts.items():
        path = patches / name
        old = path.read_text() if path.exists() else ""
        if old == text:
            continue
        if check:
            diff = list(difflib.unified_diff(old.splitlines(), text.splitlines(), lineterm="", n=0))
            raise ToolError(
                f"patches/{name} is not what the tree exports:\n  " + "\n  ".join(diff[2:8]),
                "run `python -m build_tools export` and commit the result.",
            )
        with atomic_file(path) as temporary:
            temporary.write_text(text)
        changed.append(name)
    series = read_series(patches)
    new = [name for name in texts if name not in series]
    if new:
        with atomic_file(patches / "series") as temporary:
            temporary.write_text((patches / "series").read_text() + "".join(f"{n}\n" for n in new))
    return changed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--check", action="store_true", help="change nothing; fail on a difference")


def main(args: argparse.Namespace) -> None:
    """Export and list what changed."""
    changed = export(check=args.check)
    for name in changed:
        print(f"patches/{name}")
    say("patches/ and the tree agree" if not changed else f"{len(changed)} patches written")
