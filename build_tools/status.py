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
from .gittree import buildable, dirty, git, read_series
from .tree import ok_tree


def tree_state(tree: Path, lock: dict) -> str:
    """One line on the tree."""
    if not ok_tree(tree, lock):
        return "not there, or not the pinned one (python -m build_tools tree)"
    edits = dirty(tree)
    if edits:
        return f"edited: {', '.join(edits[:4])} (commit there, then export)"
    record = tree / ".git" / "te-wgrad-applied"
    if not record.exists():
        return "pristine (python -m build_tools apply)"
    head, stamp = record.read_text().split()
    if git(tree, "rev-parse", "HEAD").strip() != head:
        return "has commits that patches/ lacks (python -m build_tools export)"
    if stamp != stamp_of(PATCHES, OVERLAY):
        return "patches or overlay changed since (python -m build_tools apply)"
    return "series and overlay applied"


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
    record = DIST / "wheel.json"
    rows["wheel"] = json.loads(record.read_text())["file"] if record.exists() else "not built"
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
