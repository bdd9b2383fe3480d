# SPDX-License-Identifier: Apache-2.0
"""The stand-in metadata of the staged stock package is what importlib.metadata reads."""

from importlib.metadata import Distribution

from build_tools.stock import write_metadata


def test_metadata_names_its_files(tmp_path):
    folder = write_metadata(tmp_path, "2.20.2")
    found = Distribution.at(folder)
    assert found.version == "2.20.2"
    # TE reads WHEEL through this list; None or a missing entry stops its import.
    names = {path.name: found.locate_file(path) for path in found.files}
    assert set(names) == {"METADATA", "WHEEL", "INSTALLER", "RECORD"}
    assert "Root-Is-Purelib: false" in names["WHEEL"].read_text(encoding="utf-8")
