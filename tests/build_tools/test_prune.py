# SPDX-License-Identifier: Apache-2.0
"""Pruning on a small made-up library: no GPU, no torch, no network."""

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from build_tools import prune
from build_tools.common import ToolError

EXACT = prune.FLAG_EXACT


def payload(kind, arch, exact):
    return bytes([kind, arch, 7 if exact else 5]) * 40


def make_library(path, fatbins, magic=prune.FATBIN_MAGIC):
    """Write an ELF file whose GPU code is ``fatbins``, lists of (kind, arch, exact)."""
    code = b""
    for entries in fatbins:
        body = b""
        for kind, arch, exact in entries:
            data = payload(kind, arch, exact)
            header = struct.pack("<HHIQ", kind, 257, 64, len(data)) + bytes(12)
            header += struct.pack("<I", arch) + bytes(8) + struct.pack("<Q", EXACT if exact else 1)
            body += header.ljust(64, b"\0") + data
        code += struct.pack("<IHHQ", magic, 1, 16, len(body)) + body
    names = b"\0.nv_fatbin\0.shstrtab\0"
    table = 64 + len(code) + len(names)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQI", 3, 62, 1, 0, 0, table, 0
    )
    head += struct.pack("<HHHHHH", 64, 0, 0, 64, 3, 2)
    sections = bytes(64)
    for name, kind, start, size in ((1, 1, 64, len(code)), (12, 3, 64 + len(code), len(names))):
        sections += struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, start, size, 0, 0, 1, 0)
    path.write_bytes(head + code + names + sections)
    return path


@pytest.fixture(autouse=True)
def no_strip(monkeypatch):
    # The made-up file is no complete ELF library, so strip would refuse or reorder it.
    monkeypatch.setattr(prune.shutil, "which", lambda name: None)


def kept(path):
    with prune._mapped(path) as data:
        return [
            [(e.kind, e.arch, e.exact) for e in entries if not prune._is_zero(data, e)]
            for entries in prune._fatbins(data, path)
        ]


def test_wanted_stays_byte_identical_and_the_rest_is_zero(tmp_path):
    source = make_library(tmp_path / "a.so", [[(2, 80, 0), (2, 90, 0)], [(2, 90, 1)]])
    before = source.read_bytes()
    prune.prune(source, tmp_path / "b.so", {"90"})
    gone = payload(2, 80, 0)
    assert before.count(gone) == 1
    assert (tmp_path / "b.so").read_bytes() == before.replace(gone, bytes(len(gone)))
    assert source.read_bytes() == before
    assert prune.list_archs(tmp_path / "b.so") == {"90": 240}


@pytest.mark.parametrize(
    "arch, fatbin, expected",
    [
        ("86", [(2, 75, 0), (2, 80, 0), (2, 89, 0)], [(2, 80, 0)]),
        ("103", [(2, 100, 0), (2, 100, 1), (2, 103, 1)], [(2, 103, 1)]),
        ("103", [(2, 100, 0), (2, 100, 1), (2, 120, 0)], [(2, 100, 0)]),
        ("90", [(1, 80, 0), (2, 80, 0)], [(1, 80, 0)]),
        ("90", [(1, 80, 0), (2, 90, 0)], [(2, 90, 0)]),
    ],
)
def test_what_an_architecture_uses(tmp_path, arch, fatbin, expected):
    source = make_library(tmp_path / "a.so", [fatbin])
    prune.prune(source, tmp_path / "b.so", {arch})
    assert kept(tmp_path / "b.so") == [[tuple(map(int, e)) for e in expected]]


def test_the_choice_is_made_per_fatbin(tmp_path):
    source = make_library(tmp_path / "a.so", [[(2, 100, 0), (2, 103, 1)], [(2, 100, 0)]])
    prune.prune(source, tmp_path / "b.so", {"103"})
    assert kept(tmp_path / "b.so") == [[(2, 103, True)], [(2, 100, False)]]


def test_absent_architecture_names_those_held_and_writes_nothing(tmp_path):
    source = make_library(tmp_path / "a.so", [[(2, 80, 0), (2, 90, 1)]])
    target = tmp_path / "b.so"
    target.write_text("old")
    with pytest.raises(ToolError, match="sm_70.*sm_80, sm_90"):
        prune.prune(source, target, {"90", "70"})
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.so", "b.so"]


def test_corrupt_magic_and_cut_file(tmp_path):
    bad = make_library(tmp_path / "a.so", [[(2, 90, 0)]], magic=0x12345678)
    with pytest.raises(ToolError, match="0x12345678"):
        prune.prune(bad, tmp_path / "b.so", {"90"})
    whole = make_library(tmp_path / "c.so", [[(2, 90, 0)]]).read_bytes()
    for size in (0, 10, 40, 100, len(whole) - 70):
        (tmp_path / "cut.so").write_bytes(whole[:size])
        with pytest.raises(ToolError):
            prune.prune(tmp_path / "cut.so", tmp_path / "b.so", {"90"})
    assert not (tmp_path / "b.so").exists()


@pytest.mark.parametrize(
    "text, archs",
    [
        (None, None),
        ("", None),
        ("all", None),
        ("90", {"90"}),
        ("80;90", {"80", "90"}),
        ("80,90", {"80", "90"}),
        ("90a", {"90"}),
        ("100f", {"100"}),
        ("sm_90", {"90"}),
        ("9.0", {"90"}),
        ("90-real", {"90"}),
    ],
)
def test_parse_archs(text, archs):
    assert prune.parse_archs(text) == archs


@pytest.mark.parametrize("text", ["h100", "9", "90-virtual", "90;x"])
def test_parse_archs_refuses(text):
    with pytest.raises(ToolError, match="names no GPU architecture"):
        prune.parse_archs(text)
