# SPDX-License-Identifier: Apache-2.0
"""Stage an unpatched Transformer Engine in build/stock, to compare with.

Put that folder on PYTHONPATH to import it; nothing is installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .build import compile_facts, extension_key, stage_stock
from .common import BUILD, REPO, atomic_folder, hash_files, say
from .fetch import load_lock
from .gittree import PRISTINE, git
from .tree import make_tree, pristine_copy

STOCK = BUILD / "stock"
# TE asks its own distribution how it was installed; this is the answer of a
# source install (one package that is not pure Python).
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: build_tools\nRoot-Is-Purelib: false\n",
    "INSTALLER": "build_tools\n",
    # Never empty: importlib.metadata then knows no files, and TE's import fails.
    "RECORD": "{info}/METADATA,,\n{info}/WHEEL,,\n{info}/INSTALLER,,\n{info}/RECORD,,\n",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--dest", type=Path, default=STOCK, help="folder (default: build/stock)")


def write_metadata(folder: Path, version: str) -> Path:
    """Write the package's ``.dist-info`` below ``folder`` and return it."""
    info = folder / f"transformer_engine-{version}.dist-info"
    info.mkdir()
    for name, text in METADATA.items():
        (info / name).write_text(text.format(version=version, info=info.name))
    return info


def main(args: argparse.Namespace) -> None:
    """Stage it when it is not there for the same sources and environment."""
    tree = make_tree()
    pristine = BUILD / "pristine"
    if not pristine.exists():
        pristine_copy(tree, pristine)
    own = hash_files(list((REPO / "build_tools").glob("*.py")), REPO)
    key = extension_key(pristine, compile_facts())
    key += git(tree, "rev-parse", PRISTINE).strip() + own
    record = args.dest / "key"
    if record.exists() and record.read_text() == key:
        say("stock: unchanged")
    else:
        with atomic_folder(args.dest) as folder:
            stage_stock(folder)
            write_metadata(folder, load_lock()["version"])
            (folder / "key").write_text(key)
    print(args.dest)
