# SPDX-License-Identifier: Apache-2.0
"""The stand-in metadata of the staged stock package is what importlib.metadata reads."""

import argparse
from importlib.metadata import Distribution

from build_tools import stock
from build_tools.stock import write_metadata


def test_metadata_names_its_files(tmp_path):
    folder = write_metadata(tmp_path, "2.20.2")
    found = Distribution.at(folder)
    assert found.version == "2.20.2"
    # TE reads WHEEL through this list; None or a missing entry stops its import.
    names = {path.name: found.locate_file(path) for path in found.files}
    assert set(names) == {"METADATA", "WHEEL", "INSTALLER", "RECORD"}
    assert "Root-Is-Purelib: false" in names["WHEEL"].read_text(encoding="utf-8")


def test_it_is_staged_again_when_the_environment_or_the_tools_changed(work, tmp_path, monkeypatch):
    made = []
    facts = {"compiler": "1"}
    (tmp_path / "build").mkdir()
    monkeypatch.setattr(stock, "BUILD", tmp_path / "build")
    monkeypatch.setattr(stock, "make_tree", lambda: work.tree)
    monkeypatch.setattr(stock, "compile_facts", lambda: facts)
    monkeypatch.setattr(stock, "stage_stock", made.append)
    monkeypatch.setattr(stock, "REPO", work.repo)
    args = argparse.Namespace(dest=tmp_path / "stock")
    for count in (1, 1):
        stock.main(args)
        assert len(made) == count
    facts["compiler"] = "2"
    stock.main(args)
    (work.repo / "build_tools/stock.py").write_text("changed\n")
    stock.main(args)
    stock.main(args)
    assert len(made) == 3
    assert (args.dest / "key").is_file()
