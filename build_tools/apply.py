# SPDX-License-Identifier: Apache-2.0
"""Apply the patch series to the source tree, then add the overlay files.

Each patch becomes one commit, with no fuzz. When one fails the tree goes back
to what it was. Applying twice does nothing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

from .common import OVERLAY, PATCHES, TREE, ToolError, hash_files, say
from .gittree import APPLIED, OVERLAY_SUBJECT, PRISTINE, buildable, dirty, git, ok, read_series
from .tree import make_tree


def overlay_files(overlay: Path = OVERLAY) -> list[Path]:
    """The fork's own files, without caches."""
    skip = {"__pycache__"}
    return sorted(
        p
        for p in overlay.rglob("*")
        if p.is_file() and not skip & set(p.parts) and p.suffix != ".pyc"
    )


def check_overlay(tree: Path, overlay: Path = OVERLAY) -> None:
    """Stop when an overlay file has the path of an upstream file."""
    upstream = set(git(tree, "ls-tree", "-r", "--name-only", PRISTINE).splitlines())
    for path in overlay_files(overlay):
        name = path.relative_to(overlay.parent).as_posix()
        if name in upstream:
            raise ToolError(
                f"The overlay file {name} would overwrite an upstream file.",
                "give it another name and hook it in with a patch; overlay files are new files only.",
            )


def stamp_of(patches: Path, overlay: Path) -> str:
    """Hash over everything that ``apply`` puts into the tree."""
    names = buildable(read_series(patches))
    missing = [name for name in names if not (patches / name).is_file()]
    if missing:
        raise ToolError(
            f"patches/series names files that do not exist: {', '.join(missing)}",
            "fix patches/series, or restore the file with git checkout.",
        )
    return hash_files(
        [patches / name for name in names], patches, *names,
        hash_files(overlay_files(overlay), overlay),
    )  # fmt: skip


def explain_failure(tree: Path, name: str, patch: Path, log: str) -> ToolError:
    """Name the patch, file and hunk that git could not place."""
    where = re.search(r"patch failed: (.+?):(\d+)", log)
    missing = re.search(r"error: (.+?): (does not exist in index|No such file)", log)
    exists = re.search(r"error: (.+?): already exists in (?:index|working directory)", log)
    detail = log.strip().splitlines()[0] if log.strip() else "git gave no reason"
    if where:
        file, line = where[1], int(where[2])
        hunk = find_hunk(patch.read_text(), file, line)
        detail = f"{file}, hunk {hunk or f'near line {line}'}: its lines are not there as it says"
    elif missing:
        detail = f"{missing[1]}: no such file in Transformer Engine's sources"
    elif exists:
        detail = f"{exists[1]}: the file is there already"
    return ToolError(
        f"Patch {name} does not apply.\n  {detail}",
        f"python -m build_tools apply --before {name}, make the change by hand in {tree}, commit "
        "it with the patch's message, then `python -m build_tools export`.",
    )


def find_hunk(text: str, file: str, line: int) -> str | None:
    """The @@ header in ``text`` of the hunk that starts at old ``line`` of ``file``."""
    inside = False
    for row in text.splitlines():
        if row.startswith("--- "):
            inside = row[4:].strip() == f"a/{file}"
        found = re.match(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@", row)
        if inside and found and int(found[1]) == line:
            return found[0]
    return None


def apply(
    tree: Path = TREE,
    *,
    patches: Path = PATCHES,
    overlay: Path = OVERLAY,
    before: str | None = None,
) -> bool:
    """Apply the series and the overlay; False when that was done already.

    Parameters
    ----------
    before : str, optional
        Stop before this patch of the series and leave the overlay out, to
        redo the patch by hand.

    Raises
    ------
    ToolError
        When the tree has edits of its own, or a patch does not apply. The
        tree is then as it was.
    """
    names = buildable(read_series(patches))
    if before is not None:
        if before not in names:
            raise ToolError(
                f"{before} is not in patches/series.", "name one of: " + ", ".join(names)
            )
        names = names[: names.index(before)]
    stamp = stamp_of(patches, overlay)
    record = tree / ".git" / "te-wgrad-applied"
    head = git(tree, "rev-parse", "HEAD").strip()
    recorded = record.read_text().split() if record.exists() else []
    edits = dirty(tree)
    if edits:
        raise ToolError(
            f"{tree} was edited and not committed: {', '.join(edits[:5])}.",
            f"commit it there (git -C {tree} commit -a) and run `python -m build_tools export`, "
            "or drop it with `python -m build_tools tree --force`.",
        )
    if recorded == [head, stamp] and before is None:
        return False
    known = {git(tree, "rev-parse", PRISTINE).strip(), *recorded[:1]}
    if head not in known:
        raise ToolError(
            f"{tree} has commits that patches/ does not have.",
            "run `python -m build_tools export` to keep them, or `python -m build_tools tree "
            "--force` to drop them.",
        )
    check_overlay(tree, overlay)
    git(tree, "checkout", "-q", "-B", "applying", PRISTINE)
    try:
        for name in names:
            apply_one(tree, name, patches / name)
        git(tree, "tag", "-f", APPLIED)
        if before is None:
            add_overlay(tree, overlay)
    except BaseException:
        git(tree, "reset", "-q", "--hard", head)
        git(tree, "checkout", "-q", "-B", "main", head)
        raise
    git(tree, "checkout", "-q", "-B", "main")
    head = git(tree, "rev-parse", "HEAD").strip()
    record.write_text(f"{head} {stamp if before is None else 'partial'}")
    return True


def apply_one(tree: Path, name: str, patch: Path) -> None:
    """Commit one patch onto the tree."""
    try:
        git(
            tree,
            "am",
            "-q",
            "--keep-non-patch",
            "--committer-date-is-author-date",
            str(patch.resolve()),
        )
    except subprocess.CalledProcessError as error:
        if ok(tree, "am", "--show-current-patch=diff"):
            git(tree, "am", "--abort")
        raise explain_failure(tree, name, patch, error.stderr + error.output) from error


def add_overlay(tree: Path, overlay: Path) -> None:
    """Copy the overlay files and commit them on top."""
    for path in overlay_files(overlay):
        target = tree / path.relative_to(overlay.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    git(tree, "add", "-A", "-f")
    git(tree, "commit", "-q", "--allow-empty", "-m", OVERLAY_SUBJECT, author=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--before", metavar="PATCH", help="stop before this patch of the series")
    parser.add_argument("--offline", action="store_true", help="use the cache only")


def main(args: argparse.Namespace) -> None:
    """Make the tree when needed and apply."""
    tree = make_tree(offline=args.offline)
    if apply(tree, before=args.before):
        say(
            f"applied {len(buildable(read_series()))} patches and {len(overlay_files())} overlay files"
        )
    else:
        say("already applied; nothing to do")
