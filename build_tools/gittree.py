# SPDX-License-Identifier: Apache-2.0
"""Git plumbing of the patched tree: how patches become commits and commits patches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from .common import PATCHES, ToolError, run, to_text

PRISTINE = "pristine"  # tag of the unpatched commit
OVERLAY_SUBJECT = "[overlay] Add the fork's own files"
# The same pinned sources must give the same commit everywhere.
IDENTITY = {
    "GIT_AUTHOR_NAME": "te-wgrad",
    "GIT_AUTHOR_EMAIL": "te-wgrad@localhost",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "te-wgrad",
    "GIT_COMMITTER_EMAIL": "te-wgrad@localhost",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}
# A user's own git configuration must not change a byte of what comes out.
NEUTRAL = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "LC_ALL": "C"}
# safe.directory: the tree may belong to another user, as in a container that mounts it.
SETTINGS = ("core.autocrlf=false", "commit.gpgsign=false", "gc.auto=0", "safe.directory=*")
PARTIAL = "partial"  # stands for the stamp after `apply --before`


def git(tree: Path, *arguments: str, author: bool = False) -> str:
    """Run git in the tree with neutral settings and return its stdout."""
    if not shutil.which("git"):
        raise ToolError("git is not on PATH.", "install git (e.g. apt install git).")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= NEUTRAL | {k: v for k, v in IDENTITY.items() if author or "COMMITTER" in k}
    # With a broken .git, git would otherwise go up and work on the checkout around the tree.
    environment["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    settings = []
    for setting in SETTINGS:
        settings += ["-c", setting]
    return run(["git", *settings, *arguments], cwd=tree, env=environment)


def ok(tree: Path, *arguments: str) -> bool:
    """Whether a git command succeeds."""
    try:
        git(tree, *arguments)
    except subprocess.CalledProcessError:
        return False
    return True


def dirty(tree: Path) -> list[str]:
    """Files that differ from the tree's last commit, untracked ones too."""
    return [line[3:] for line in git(tree, "status", "--porcelain", "-uall").splitlines()]


def require_tree(tree: Path) -> None:
    """Stop when there is no tree that git can read."""
    if not (tree / ".git").is_dir():
        raise ToolError(f"No source tree in {tree}.", "run `python -m build_tools tree`.")
    if not tree_hashes(tree):
        raise ToolError(
            f"{tree / '.git'} is broken: it has no pristine commit, or no HEAD.",
            f"copy edits that you want to keep out of {tree}, then run "
            "`python -m build_tools tree --force`.",
        )


def tree_hashes(tree: Path) -> list[str]:
    """Hashes of the pristine tree and of HEAD's; none when git cannot read one of them."""
    try:
        return git(tree, "rev-parse", f"{PRISTINE}^{{tree}}", "HEAD^{tree}").split()
    except subprocess.CalledProcessError:
        return []


def record_of(tree: Path) -> Path:
    """Where ``apply`` writes the commit that it made and the stamp of what it applied."""
    return tree / ".git" / "te-wgrad-applied"


def read_record(tree: Path) -> tuple[str, str]:
    """Commit and stamp of the last ``apply``; empty before the first."""
    path = record_of(tree)
    head, _, stamp = path.read_text().partition(" ") if path.exists() else ("", "", "")
    return head, stamp


def read_patch(path: Path) -> str:
    """Text of a patch file, with every byte of it."""
    return to_text(path.read_bytes())


def subject_of(text: str) -> str:
    """Subject of a mail patch, unfolded."""
    found = re.search(r"^Subject: (.*(?:\n[ \t].*)*)", text, re.M)
    return re.sub(r"\n[ \t]", " ", found[1]) if found else ""


def read_series(patches: Path = PATCHES) -> list[str]:
    """The patches in order, as paths relative to ``patches``."""
    path = patches / "series"
    if not path.is_file():
        raise ToolError(f"{path} is missing.", "restore it: git checkout patches/series")
    lines = (line.split("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    return [line for line in lines if line]


def buildable(series: list[str]) -> list[str]:
    """The entries that apply to the packages' files: ``upstream_only`` ones touch others."""
    return [name for name in series if not name.startswith("upstream_only/")]


def format_patch(tree: Path, commit: str) -> str:
    """One commit as a mail patch: one line of context, no versions, no statistics."""
    return git(
        tree, "format-patch", "-1", "--stdout", "-U1", "-k", "-N", "--zero-commit", "--full-index",
        "--no-stat", "--no-signature", "--no-renames", "--diff-algorithm=myers", commit,
    )  # fmt: skip


def patch_commits(tree: Path) -> list[str]:
    """Commits after the pristine one, oldest first, without the overlay's."""
    lines = git(tree, "log", "--reverse", "--format=%H %s", f"{PRISTINE}..HEAD").splitlines()
    return [line.split(" ", 1)[0] for line in lines if line.split(" ", 1)[1] != OVERLAY_SUBJECT]
