# SPDX-License-Identifier: Apache-2.0
"""Apply the patch series to the source tree, then add the overlay files.

Each patch becomes one commit. Its old lines must stand exactly where it says:
no fuzz, and no moved lines without --moved. When one fails the tree goes back to
what it was. Applying twice does nothing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .common import OVERLAY, PATCHES, TREE, ToolError, atomic_file, hash_files, say, to_text
from .gittree import (
    OVERLAY_SUBJECT,
    PARTIAL,
    PRISTINE,
    buildable,
    dirty,
    format_patch,
    git,
    ok,
    patch_commits,
    read_patch,
    read_record,
    read_series,
    record_of,
    require_tree,
)
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


def explain_failure(tree: Path, name: str, log: str) -> ToolError:
    """Name the patch, file and hunk that git could not place."""
    where = re.search(r"patch failed: (.+?):(\d+)", log)
    missing = re.search(r"error: (.+?): (does not exist in index|No such file)", log)
    exists = re.search(r"error: (.+?): already exists in (?:index|working directory)", log)
    detail = log.strip().splitlines()[0] if log.strip() else "git gave no reason"
    if where:
        detail = f"{where[1]}, hunk near line {where[2]}: its lines are not there as it says"
    elif missing:
        detail = f"{missing[1]}: no such file in Transformer Engine's sources"
    elif exists:
        detail = f"{exists[1]}: the file is there already"
    return does_not_apply(tree, name, detail)


def does_not_apply(tree: Path, name: str, detail: str, hint: str = "") -> ToolError:
    """The error for a patch that has to be redone by hand."""
    return ToolError(
        f"Patch {name} does not apply.\n  {detail}",
        f"{hint}`python -m build_tools apply --before {name}`, make the change by hand in {tree}, "
        "commit it with the patch's message, then `python -m build_tools export`.",
    )


def hunks(text: str) -> Iterator[tuple[str, str, int, list[str]]]:
    """The hunks of a patch: file, @@ header, first old line (from 1) and the old lines."""
    file = header = ""
    start = old = new = 0
    lines: list[str] = []
    for row in text.split("\n"):
        if old or new:
            old -= row[:1] != "+" and row[:1] != "\\"
            new -= row[:1] != "-" and row[:1] != "\\"
            if row[:1] not in ("+", "\\"):
                lines.append(row[1:])
            if not old and not new:
                yield file, header, start, lines
            continue
        if row.startswith("--- "):
            file = row[4:].partition("/")[2]
        found = re.match(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", row)
        if file and found:
            header, start, lines = found[0], int(found[1]), []
            old, new = (int(n) if n is not None else 1 for n in found.groups()[1:])


def check_places(tree: Path, name: str, text: str) -> None:
    """Stop when a hunk's old lines do not stand exactly where the patch says.

    ``git am`` takes them from another line too, and one line of context is too
    little to trust that.
    """
    files: dict[str, list[str]] = {}
    for file, header, start, old in hunks(text):
        if file not in files:
            # The tree is clean, so its files are HEAD's. git says it when one is missing.
            path = tree / file
            files[file] = to_text(path.read_bytes()).split("\n") if path.is_file() else []
        rows = files[file]
        if not rows or not old or rows[start - 1 : start - 1 + len(old)] == old:
            continue
        moved = [i + 1 for i in range(len(rows)) if rows[i : i + len(old)] == old]
        if moved:
            where = f"its lines stand at line {', '.join(map(str, moved[:3]))} now"
            hint = (
                "if that is the right place, `python -m build_tools apply --moved` and then "
                "`python -m build_tools export`; else "
            )
            raise does_not_apply(tree, name, f"{file}, hunk {header}: {where}", hint)
        where = "its lines are not there as it says"
        raise does_not_apply(tree, name, f"{file}, hunk {header}: {where}")


def unexported(tree: Path, patches: Path, overlay: Path) -> list[str]:
    """What the tree's commits have that neither ``patches`` nor the overlay has."""
    there = [patches / name for name in buildable(read_series(patches))]
    texts = {read_patch(path) for path in there if path.is_file()}
    lost = [
        git(tree, "log", "-1", "--format=%s", commit).strip()
        for commit in patch_commits(tree)
        if format_patch(tree, commit) not in texts
    ]
    return lost + edited_copies(tree, overlay)


def edited_copies(tree: Path, overlay: Path) -> list[str]:
    """Overlay files whose copy in the tree is not the one that ``apply`` put there."""
    made = read_record(tree)[0]
    copies = [path.relative_to(overlay.parent).as_posix() for path in overlay_files(overlay)]
    if not copies or not made or not ok(tree, "cat-file", "-e", made):
        return []
    return git(
        tree, "diff", "--name-only", "--diff-filter=M", made, "HEAD", "--", *copies
    ).splitlines()


def apply(
    tree: Path = TREE,
    *,
    patches: Path = PATCHES,
    overlay: Path = OVERLAY,
    before: str | None = None,
    moved: bool = False,
) -> bool:
    """Apply the series and the overlay; False when that was done already.

    Parameters
    ----------
    before : str, optional
        Stop before this patch of the series and leave the overlay out, to
        redo the patch by hand.
    moved : bool
        Take hunks whose lines stand at another place of the file.

    Raises
    ------
    ToolError
        When the tree has edits of its own, or a patch does not apply. The
        tree is then as it was.
    """
    require_tree(tree)
    names = buildable(read_series(patches))
    if before is not None:
        if before not in names:
            raise ToolError(
                f"{before} is not in patches/series.", "name one of: " + ", ".join(names)
            )
        names = names[: names.index(before)]
    stamp = stamp_of(patches, overlay)
    head = git(tree, "rev-parse", "HEAD").strip()
    recorded = read_record(tree)
    edits = dirty(tree)
    if edits:
        raise ToolError(
            f"{tree} was edited and not committed: {', '.join(edits[:5])}.",
            f"commit it there (git -C {tree} add -A; git -C {tree} commit) and run `python -m build_tools export`, "
            "or drop it with `python -m build_tools tree --force`.",
        )
    if recorded == (head, stamp) and before is None:
        return False
    if head not in (git(tree, "rev-parse", PRISTINE).strip(), recorded[0]):
        lost = unexported(tree, patches, overlay)
        if lost:
            raise ToolError(
                f"{tree} has commits that patches/ does not have: {'; '.join(lost[:5])}.",
                "run `python -m build_tools export` to keep them, or `python -m build_tools tree "
                "--force` to drop them.",
            )
    check_overlay(tree, overlay)
    git(tree, "checkout", "-q", "-B", "applying", PRISTINE)
    try:
        for name in names:
            if not moved:
                check_places(tree, name, read_patch(patches / name))
            apply_one(tree, name, patches / name)
        if before is None:
            add_overlay(tree, overlay)
    except BaseException:
        # Ctrl-C may have left a half-done `git am`, and the overlay's files untracked.
        ok(tree, "am", "--quit")
        git(tree, "reset", "-q", "--hard", head)
        git(tree, "clean", "-q", "-f", "-d")
        git(tree, "checkout", "-q", "-B", "main", head)
        raise
    git(tree, "checkout", "-q", "-B", "main")
    head = git(tree, "rev-parse", "HEAD").strip()
    with atomic_file(record_of(tree)) as temporary:
        temporary.write_text(f"{head} {stamp if before is None else PARTIAL}")
    return True


def apply_one(tree: Path, name: str, patch: Path) -> None:
    """Commit one patch onto the tree."""
    options = ["-q", "--keep-non-patch", "--keep-cr", "--committer-date-is-author-date"]
    try:
        git(tree, "am", *options, str(patch.resolve()))
    except subprocess.CalledProcessError as error:
        raise explain_failure(tree, name, error.stderr + error.output) from error


def add_overlay(tree: Path, overlay: Path) -> None:
    """Copy the overlay files and commit them on top."""
    for path in overlay_files(overlay):
        target = tree / path.relative_to(overlay.parent)
        if target.exists():
            raise ToolError(
                f"{path.relative_to(overlay.parent)} is an overlay file, and a patch makes it too.",
                "take it out of the patch, or delete the overlay file.",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    git(tree, "add", "-A", "-f")
    git(tree, "commit", "-q", "--allow-empty", "-m", OVERLAY_SUBJECT, author=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--before", metavar="PATCH", help="stop before this patch of the series")
    parser.add_argument(
        "--moved", action="store_true", help="take hunks whose lines moved; export them then"
    )
    parser.add_argument("--offline", action="store_true", help="use the cache only")


def main(args: argparse.Namespace) -> None:
    """Make the tree when needed and apply."""
    tree = make_tree(offline=args.offline)
    if apply(tree, before=args.before, moved=args.moved):
        done = f"applied {len(patch_commits(tree))} patches"
        if args.before:
            say(f"{done}; next: redo {args.before} in {tree}, commit it, export")
        else:
            say(f"{done} and {len(overlay_files())} overlay files")
    else:
        say("already applied; nothing to do")
