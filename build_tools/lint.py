# SPDX-License-Identifier: Apache-2.0
"""Check patches/ and the overlay: series, headers, trailers, size, tests that they name."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from .apply import overlay_files
from .common import REPO, ToolError, say
from .gittree import PRISTINE, git, ok, read_patch, read_series

MAX_CHANGED = 60
TRAILERS = ("Upstream-Status", "Upstream-Base", "Bug", "Adds", "Test", "Drop-When", "Signed-off-by")
STATUS = ("Pending", "Submitted", "Backport", "Denied", "Inappropriate")
WHERE_NEEDED = ("Submitted", "Backport", "Denied")  # a status that says where, too
FOLDERS = ("core", "perf", "fork", "upstream_only")
PARTS = ("Symptom", "Cause", "Fix")  # of the message, for patches meant for upstream


def split_patch(text: str) -> tuple[str, str]:
    """The mail part (headers, message) and the diff part."""
    head, mark, diff = text.partition("\ndiff --git ")
    return head, mark + diff


def trailers_of(head: str) -> dict[str, list[str]]:
    """Values by trailer name, from the message's last paragraph (before ---)."""
    message = head.rsplit("\n---", 1)[0]
    found: dict[str, list[str]] = {}
    for line in message.rstrip().split("\n\n")[-1].splitlines():
        pair = re.match(r"([A-Z][A-Za-z-]+): (.+)$", line)
        if pair:
            found.setdefault(pair[1], []).append(pair[2].strip())
    return found


def wide_context(diff: str) -> str | None:
    """The first @@ header whose hunk has more than one line of context on a side."""
    header, body = "", ""
    for row in [*diff.split("\n"), "@@ end"]:
        if row.startswith(("@@ ", "diff --git ")):
            # Between two changes both have their line of context.
            if re.search(r"^  |   |  $", body):
                return header
            header, body = row, ""
        elif header.startswith("@@ "):
            body += row[:1].replace("\\", "")
    return None


def lint_message(name: str, head: str, root: Path) -> list[str]:
    """What is wrong with a patch's headers and message."""
    problems = []
    for header in ("From: ", "Date: ", "Subject: "):
        if not re.search(f"^{header}", head, re.M):
            problems.append(f"no {header.strip()} header")
    if re.search(r"^Subject: \[PATCH", head, re.M):
        problems.append("the subject is numbered; use `python -m build_tools export`")
    if name.startswith(("core/", "perf/")):
        problems += [
            f"the message has no '{part}: ...' paragraph"
            for part in PARTS
            if not re.search(rf"^{part}: ", head, re.M)
        ]
    found = trailers_of(head)
    problems += [f"no {t}: trailer" for t in TRAILERS if t not in found and t != "Adds"]
    for value in found.get("Upstream-Status", []):
        word, _, where = value.partition(" ")
        if word not in STATUS:
            problems.append(f"Upstream-Status: {value} is not one of {', '.join(STATUS)}")
        elif word in WHERE_NEEDED and not where:
            problems.append(f"Upstream-Status: {value} does not say where")
    for value in found.get("Signed-off-by", []):
        if not re.fullmatch(r"[^<>]+ <[^<> ]+@[^<> ]+>", value):
            problems.append(f"Signed-off-by: {value} is not 'Name <mail>'")
    lock = root / "build_tools/upstream.lock"
    if lock.is_file():
        base = f"v{json.loads(lock.read_text('utf-8'))['version']}"
        for value in found.get("Upstream-Base", []):
            if value != base:
                problems.append(f"Upstream-Base: {value} is not the pinned {base}")
    for path in found.get("Adds", []):
        if not (root / path).is_file():
            problems.append(f"Adds: {path} does not exist")
    for value in found.get("Test", []):
        file, _, test = value.partition("::")
        function = test.split("[")[0].split("::")[-1]
        if not (root / file).is_file():
            problems.append(f"Test: {file} does not exist")
        elif test and not re.search(
            rf"\bdef {re.escape(function)}\(", (root / file).read_text("utf-8")
        ):
            problems.append(f"Test: {file} has no {test}")
    return problems


def lint_diff(name: str, diff: str, root: Path) -> list[str]:
    """What is wrong with a patch's diff."""
    problems = []
    changed = len(re.findall(r"^(?:\+(?!\+\+ )|-(?!-- ))", diff, re.M))
    if changed > MAX_CHANGED:
        problems.append(
            f"{changed} changed lines, at most {MAX_CHANGED}: move code to an overlay file"
        )
    if changed == 0:
        problems.append("it changes nothing")
    if re.search(r"^\+.*[ \t\r]$", diff, re.M):
        problems.append("an added line ends in white space")
    wide = wide_context(diff)
    if wide:
        problems.append(
            f"more than one line of context at {wide}; use `python -m build_tools export`"
        )
    if not name.startswith("upstream_only/"):
        for path in re.findall(r"^diff --git a/(\S+)", diff, re.M):
            if not path.startswith("transformer_engine/"):
                problems.append(f"{path} is in no package; such patches go to upstream_only/")
            if (root / path).is_file():
                problems.append(f"it changes {path}, an overlay file: edit that file instead")
        if re.search(r"^new file mode ", diff, re.M):
            problems.append("it adds a file: make that an overlay file and name it in Adds:")
    return problems


def lint_patch(name: str, text: str, root: Path) -> list[str]:
    """What is wrong with one patch, a sentence each."""
    head, diff = split_patch(text)
    problems = lint_message(name, head, root) + lint_diff(name, diff, root)
    if not re.fullmatch(r"(?!\d+-)[a-z0-9][a-z0-9-]*\.patch", Path(name).name):
        problems.append("the file name is not a lower-case slug without a number")
    if name.split("/")[0] not in FOLDERS:
        problems.append(f"not in one of {', '.join(FOLDERS)}")
    return [f"patches/{name}: {problem}" for problem in problems]


def lint_series(patches: Path) -> list[str]:
    """What is wrong between patches/series and the files."""
    series = read_series(patches)
    files = {p.relative_to(patches).as_posix() for p in patches.rglob("*") if p.is_file()}
    there = {name for name in files if name.endswith(".patch")}
    return [
        *(
            f"patches/series: {n} is listed twice"
            for n in sorted({n for n in series if series.count(n) > 1})
        ),
        *(f"patches/series: {n} does not exist" for n in series if n not in there),
        *(f"patches/{n}: not in patches/series" for n in sorted(there - set(series))),
        *(f"patches/{n}: not a patch" for n in sorted(files - there - {"series"})),
    ]


def upstream_folders(tree: Path) -> set[str]:
    """Folders that upstream has; empty without the source tree."""
    if not (tree / ".git").is_dir() or not ok(tree, "rev-parse", "-q", "--verify", PRISTINE):
        return set()
    return set(git(tree, "ls-tree", "-r", "-d", "--name-only", PRISTINE).splitlines())


def lint_overlay(root: Path, tree: Path, added: set[str]) -> list[str]:
    """What is wrong with the overlay's files; ``added`` are those that patches or series name."""
    problems = []
    upstream = upstream_folders(tree)
    for path in overlay_files(root / "transformer_engine"):
        name = path.relative_to(root).as_posix()
        if name not in added:
            problems.append(f"{name}: no patch names it in an Adds: trailer, nor patches/series")
        if path.name == "__init__.py" and path.parent.relative_to(root).as_posix() in upstream:
            problems.append(f"{name}: upstream owns that folder; no __init__.py of ours in it")
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text("utf-8")[:200]:
            problems.append(f"{name}: no SPDX-License-Identifier line at the top")
    return problems


def lint(root: Path = REPO, tree: Path | None = None) -> list[str]:
    """Everything wrong with the patch set below ``root``.

    Parameters
    ----------
    tree : Path, optional
        The source tree, to know upstream's folders (default: ``root``/build/tree).
    """
    patches = root / "patches"
    problems = lint_series(patches)
    # Overlay files that stand alone are named in the series instead of in a trailer.
    alone = re.findall(r"^# alone: (\S+)$", (patches / "series").read_text("utf-8"), re.M)
    problems += [
        f"patches/series: '# alone: {n}' does not exist" for n in alone if not (root / n).is_file()
    ]
    added = set(alone)
    for name in dict.fromkeys(read_series(patches)):
        if (patches / name).is_file():
            text = read_patch(patches / name)
            problems += lint_patch(name, text, root)
            added |= set(trailers_of(split_patch(text)[0]).get("Adds", []))
    problems += lint_overlay(root, tree or root / "build/tree", added)
    tests: dict[str, Path] = {}
    for path in sorted((root / "tests/pytorch").rglob("test_*.py")):
        first = tests.setdefault(path.name, path)
        if first != path:
            problems.append(
                f"{path.relative_to(root)}: {first.relative_to(root)} has the same name"
            )
    return problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb: none."""
    del parser


def main(args: argparse.Namespace) -> None:
    """List the problems and fail when there are any."""
    del args
    problems = lint()
    if problems:
        raise ToolError(
            "\n  ".join([f"{len(problems)} problems:", *problems]),
            "fix them; CONTRIBUTING.md says how.",
        )
    say(f"{len(read_series())} patches: series, headers, trailers and sizes are right")
