# SPDX-License-Identifier: Apache-2.0
"""Say what is pinned, fetched, applied, built and installed."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from pathlib import Path

from .apply import overlay_files, stamp_of
from .common import DIST, OVERLAY, PATCHES, TREE, ToolError, cache_dir, fork_version
from .environment import cuda_toolkit, installed, torch_facts
from .fetch import load_lock
from .gittree import PARTIAL, PRISTINE, buildable, dirty, git, read_record, read_series
from .tree import ok_tree


def tree_state(tree: Path, lock: dict, patches: Path = PATCHES, overlay: Path = OVERLAY) -> str:
    """One line on the tree."""
    if not tree.exists():
        return "not there (python -m build_tools tree)"
    if not ok_tree(tree, lock):
        return "not the pinned one, or its .git is broken (python -m build_tools tree --force)"
    edits = dirty(tree)
    if edits:
        return f"edited: {', '.join(edits[:4])} (commit there, then export)"
    head = git(tree, "rev-parse", "HEAD").strip()
    made, stamp = read_record(tree)
    if head not in (made, git(tree, "rev-parse", PRISTINE).strip()):
        return "has new commits (python -m build_tools export, then apply)"
    if head != made:
        return "pristine (python -m build_tools apply)"
    if stamp == PARTIAL:
        return "stopped by apply --before (redo the patch, commit it, export, apply)"
    try:
        now = stamp_of(patches, overlay)
    except ToolError as error:
        return str(error).replace("\n", " ")
    if stamp != now:
        return "patches or overlay changed since (python -m build_tools apply)"
    return "series and overlay applied"


def wheel_state(dist: Path = DIST) -> str:
    """One line on the built wheel."""
    try:
        file = json.loads((dist / "wheel.json").read_text())["file"]
    except (OSError, ValueError, KeyError):
        return "not built (python -m build_tools build)"
    return file if (dist / file).is_file() else f"{file} is gone (python -m build_tools build)"


def facts() -> dict[str, str]:
    """Everything the verb prints, by name."""
    lock = load_lock()
    rows = {"pinned": f"Transformer Engine {lock['version']}; fork {fork_version(lock['version'])}"}
    there = [
        p["file"]
        for p in lock["archives"].values()
        if (cache_dir() / "archives" / p["file"]).exists()
    ]
    rows["fetched"] = f"{', '.join(there) or 'nothing'} (in {cache_dir() / 'archives'})"
    rows["patches"] = (
        f"{len(buildable(read_series()))} patches, {len(overlay_files())} overlay files"
    )
    rows["tree"] = tree_state(TREE, lock)
    for name, ask in (
        ("torch", torch_facts),
        ("nvcc", lambda: cuda_toolkit(torch_facts().cuda_major)),
    ):
        try:
            found = ask()
            rows[name] = f"{found.version} (CUDA {found.cuda})" if name == "torch" else str(found)
        except ToolError as error:
            rows[name] = str(error).replace("\n", " ")
    rows["wheel"] = wheel_state()
    rows["GPU archs"] = os.environ.get("NVTE_CUDA_ARCHS") or "all (NVTE_CUDA_ARCHS is not set)"
    try:
        rows["installed"] = f"transformer_engine {importlib.metadata.version('transformer_engine')}"
    except importlib.metadata.PackageNotFoundError:
        rows["installed"] = "no transformer_engine"
    stock = installed()
    if stock:
        rows["beside it"] = (
            f"{', '.join(stock)}: uninstall these, the fork cannot be imported beside them"
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> None:
    """Print the facts."""
    rows = facts()
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        for name, text in rows.items():
            print(f"{name:10} {text}")
