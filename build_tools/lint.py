# SPDX-License-Identifier: Apache-2.0
"""Check patches/ and the overlay: series, headers, trailers, size, tests that they name."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from .apply import overlay_files
from .common import REPO, ToolError, say
from .gittree import read_series

MAX_CHANGED = 60
TRAILERS = ("Upstream-Status", "Upstream-Base", "Bug", "Adds", "Test", "Drop-When", "Signed-off-by")
STATUS = ("Pending", "Submitted", "Backport", "Denied", "Inappropriate")
FOLDERS = ("core", "perf", "fork", "upstream_only")


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


def lint_patch(name: str, text: str, root: Path) -> list[str]:
    """What is wrong with one patch, a sentence each."""
    head, diff = split_patch(text)
    problems = []
    for header in ("From: ", "Date: ", "Subject: "):
        if not re.search(f"^{header}", head, re.M):
            problems.append(f"no {header.strip()} header")
    if re.search(r"^Subject: \[PATCH", head, re.M):
        problems.append("the subject is numbered; use `python -m build_tools export`")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*\.patch", Path(name).name):
        problems.append("the file name is not a lower-case slug without a number")
    changed = len(re.findall(r"^(?:\+(?!\+\+ )|-(?!-- ))", diff, re.M))
    if changed > MAX_CHANGED:
        problems.append(
            f"{changed} changed lines, at most {MAX_CHANGED}: move code to an overlay file"
        )
    if changed == 0:
        problems.append("it changes nothing")
    if re.search(r"^\+.*[ \t]$", diff, re.M):
        problems.append("an added line ends in white space")
    found = trailers_of(head)
    problems += [f"no {t}: trailer" for t in TRAILERS if t not in found and t != "Adds"]
    for value in found.get("Upstream-Status", []):
        if value.split()[0] not in STATUS:
            problems.append(f"Upstream-Status: {value} is not one of {', '.join(STATUS)}")
    for path in found.get("Adds", []):
        if not (root / path).is_file():
            problems.append(f"Adds: {path} does not exist")
    for value in found.get("Test", []):
        file, _, test = value.partition("::")
        if not (root / file).is_file():
            problems.append(f"Test: {file} does not exist")
        elif test and not re.search(
            rf"\bdef {re.escape(test.split('[')[0])}\b", (root / file).read_text()
        ):
            problems.append(f"Test: {file} has no {test}")
    return [f"patches/{name}: {problem}" for problem in problems]


def lint(root: Path = REPO) -> list[str]:
    """Everything wrong with the patch set below ``root``."""
    patches = root / "patches"
    series = read_series(patches)
    problems = [
        f"patches/series: {n} is listed twice"
        for n in sorted({n for n in series if series.count(n) > 1})
    ]
    there = {p.relative_to(patches).as_posix() for p in patches.rglob("*.patch")}
    problems += [f"patches/series: {n} does not exist" for n in series if n not in there]
    problems += [f"patches/{n}: not in patches/series" for n in sorted(there - set(series))]
    # Overlay files that stand alone are named in the series instead of in a trailer.
    added = set(re.findall(r"^# alone: (\S+)$", (patches / "series").read_text(), re.M))
    for name in series:
        if name.split("/")[0] not in FOLDERS:
            problems.append(f"patches/{name}: not in one of {', '.join(FOLDERS)}")
        if name in there:
            text = (patches / name).read_text()
            problems += lint_patch(name, text, root)
            added |= set(trailers_of(split_patch(text)[0]).get("Adds", []))
    overlay = root / "transformer_engine"
    for path in overlay_files(overlay):
        name = path.relative_to(root).as_posix()
        if name not in added:
            problems.append(f"{name}: no patch names it in an Adds: trailer, nor patches/series")
        if path.name == "__init__.py":
            problems.append(
                f"{name}: upstream owns its package folders; no __init__.py in the overlay"
            )
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]:
            problems.append(f"{name}: no SPDX-License-Identifier line at the top")
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
