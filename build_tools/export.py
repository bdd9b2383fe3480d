# SPDX-License-Identifier: Apache-2.0
"""Write the tree's commits back to patches/, byte for byte (--check only compares).

The n-th commit after the pristine one is the n-th entry of patches/series; a
commit beyond the series becomes patches/core/<subject>.patch and is appended.
After `apply --before` only the patches up to the redone one are written.
"""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path

from .apply import edited_copies, stamp_of
from .common import OVERLAY, PATCHES, TREE, ToolError, atomic_file, say, to_bytes
from .gittree import (
    PARTIAL,
    buildable,
    dirty,
    format_patch,
    git,
    ok,
    patch_commits,
    read_patch,
    read_record,
    read_series,
    require_tree,
    subject_of,
)


def slug(subject: str) -> str:
    """File name of a new patch: lower case words of the subject."""
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:60]


def exported(tree: Path, patches: Path, *, check: bool) -> list[tuple[str, str, str]]:
    """Series name, commit and patch text of each of the tree's patch commits."""
    names = buildable(read_series(patches))
    commits = patch_commits(tree)
    base, stamp = read_record(tree)
    if stamp == PARTIAL and not check:
        redone = int(git(tree, "rev-list", "--count", f"{base}..HEAD"))
        if redone > 1:
            raise ToolError(
                f"{tree} has {redone} commits after `apply --before`; a patch is one commit.",
                f"join them (git -C {tree} reset --soft {base[:12]}; git -C {tree} commit).",
            )
    elif len(commits) < len(names):
        raise ToolError(
            f"{tree} has {len(commits)} patch commits, patches/series names {len(names)}.",
            "run `python -m build_tools apply`, or take the dropped patch out of patches/series.",
        )
    texts = [format_patch(tree, commit) for commit in commits]
    check_order(names, [subject_of(text) for text in texts], patches)
    for commit in commits[len(names) :]:
        name = f"core/{slug(git(tree, 'log', '-1', '--format=%s', commit))}.patch"
        if name in names or (patches / name).exists():
            raise ToolError(
                f"A new commit would become patches/{name}, which is there already.",
                f"give it another subject (git -C {tree} commit --amend).",
            )
        names.append(name)
    return list(zip(names, commits, texts))


def check_order(names: list[str], subjects: list[str], patches: Path) -> None:
    """Stop when commits stand in another order than the series, as after a rebase."""
    for i, name in enumerate(names[: len(subjects)]):
        if not (patches / name).is_file():
            continue
        subject = subject_of(read_patch(patches / name))
        if subject != subjects[i] and subject in subjects:
            raise ToolError(
                f"{name} is number {i + 1} of patches/series, its commit ('{subject}') is number "
                f"{subjects.index(subject) + 1} of the tree.",
                "put the commits in the series' order, a new one last (git rebase -i pristine), "
                "then `python -m build_tools export`; or order patches/series and `apply`.",
            )


def check_unedited(tree: Path, patches: Path, overlay: Path, name: str, commit: str) -> None:
    """Stop before a patch file that was edited after ``apply`` is overwritten with its old text."""
    made, stamp = read_record(tree)
    if stamp in (PARTIAL, stamp_of(patches, overlay)):
        return
    if ok(tree, "merge-base", "--is-ancestor", commit, made):
        raise ToolError(
            f"patches/{name} was edited after it was applied; its commit in the tree was not.",
            "run `python -m build_tools apply` to take the file. When the tree has new commits, "
            f"set the edit aside first (git stash push patches/{name}), export, and bring it back.",
        )


def check_clean(tree: Path, overlay: Path) -> None:
    """Stop on uncommitted edits and on overlay copies edited in the tree."""
    edits = dirty(tree)
    if edits:
        raise ToolError(
            f"{tree} has uncommitted edits: {', '.join(edits[:5])}.",
            f"commit them there (git -C {tree} commit), then export again.",
        )
    for name in edited_copies(tree, overlay):
        raise ToolError(
            f"The tree has commits that edit {name}, a copy of an overlay file.",
            f"bring the edit into {overlay.parent / name}, take it out of the tree's commits "
            f"(git -C {tree} rebase -i pristine), then `python -m build_tools apply`.",
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
    entries = exported(tree, patches, check=check)
    changed = {}
    for name, commit, text in entries:
        path = patches / name
        old = read_patch(path) if path.exists() else ""
        if old == text:
            continue
        if check:
            diff = list(difflib.unified_diff(old.split("\n"), text.split("\n"), lineterm="", n=0))
            shown = [ascii(line)[1:-1] for line in diff[2:8]]
            raise ToolError(
                f"patches/{name} is not what the tree exports:\n  " + "\n  ".join(shown),
                "if you edited the file, run `python -m build_tools apply`; if you edited the tree, "
                "`python -m build_tools export`. Commit the result.",
            )
        if old:
            check_unedited(tree, patches, overlay, name, commit)
        changed[name] = text
    for name, text in changed.items():
        with atomic_file(patches / name) as temporary:
            temporary.write_bytes(to_bytes(text))
    series = read_series(patches)
    new = [name for name, _, _ in entries if name not in series]
    if new:
        with atomic_file(patches / "series") as temporary:
            lines = (patches / "series").read_text("utf-8").splitlines() + new
            temporary.write_text("\n".join(lines) + "\n", "utf-8")
    return list(changed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--check", action="store_true", help="change nothing; fail on a difference")


def main(args: argparse.Namespace) -> None:
    """Export and list what changed."""
    changed = export(check=args.check)
    for name in changed:
        print(f"patches/{name}")
    say("patches/ and the tree agree" if not changed else f"{len(changed)} patches written")
