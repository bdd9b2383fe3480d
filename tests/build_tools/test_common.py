# SPDX-License-Identifier: Apache-2.0
"""Atomic writes, a full disk, hashes, running commands."""

import errno
import os
import sys
import time
from pathlib import Path

import pytest
from fakes import scratch, snapshot, stops

from build_tools import common

KINDS = pytest.mark.parametrize("kind", ["file", "folder"])


def write(target, text, *, before=None, after=None):
    """Replace a file, or a folder of one file, with what may go wrong around the write."""
    if target.suffix:
        with common.atomic_file(target) as temporary:
            temporary.write_text(text[:1])
            if after:
                after()
            temporary.write_text(text)
    else:
        with common.atomic_folder(target) as temporary:
            (temporary / "f").write_text(text[:1])
            if after:
                after()
            (temporary / "f").write_text(text)


def make(tmp_path, kind):
    folder = tmp_path / "place"
    folder.mkdir()
    target = folder / ("target.txt" if kind == "file" else "target")
    write(target, "old")
    return folder, target


def fail(error):
    def after():
        raise error

    return after


@KINDS
def test_it_replaces_what_is_there(tmp_path, kind):
    folder, target = make(tmp_path, kind)
    write(target, "new")
    assert list(snapshot(folder).values()) == [b"new"]
    assert len(list(folder.iterdir())) == 1
    assert target.stat().st_mode & 0o777 == (0o644 if kind == "file" else 0o755)


@KINDS
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["full", "quota"])
def test_a_full_disk_keeps_the_old_one(tmp_path, kind, number):
    folder, target = make(tmp_path, kind)
    before = snapshot(folder)
    with stops(f"No space left on the disk of {target}", "MiB free", next_step="TE_WGRAD_CACHE"):
        write(target, "new", after=fail(OSError(number, "full")))
    assert snapshot(folder) == before
    assert len(list(folder.iterdir())) == 1


def test_a_really_full_disk(tmp_path):
    with stops("No space left", next_step="free about 8 GB"):
        with common.atomic_file(tmp_path / "x"):
            Path("/dev/full").write_text("x")
    assert not list(tmp_path.iterdir())


@KINDS
def test_a_full_disk_before_anything_is_written(tmp_path, kind, monkeypatch):
    folder, target = make(tmp_path, kind)

    def mkdtemp(**_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(common.tempfile, "mkdtemp", mkdtemp)
    with stops("No space left", next_step="TMPDIR"):
        write(target, "new")
    assert list(snapshot(folder).values()) == [b"old"]


@KINDS
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), OSError(errno.EIO, "x")])
def test_anything_else_keeps_the_old_one_and_goes_on(tmp_path, kind, error):
    folder, target = make(tmp_path, kind)
    with pytest.raises(type(error)):
        write(target, "new", after=fail(error))
    assert list(snapshot(folder).values()) == [b"old"]
    assert not scratch(folder)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "x"), KeyboardInterrupt()])
def test_a_folder_comes_back_when_the_swap_fails(tmp_path, error, monkeypatch):
    folder, target = make(tmp_path, "folder")
    replace, calls = os.replace, []

    def failing(source, place):
        calls.append(source)
        if len(calls) == 3:  # onto the full folder; the old one aside; the new one in
            raise error
        replace(source, place)

    monkeypatch.setattr(common.os, "replace", failing)
    with pytest.raises((common.ToolError, KeyboardInterrupt)):
        write(target, "new")
    assert list(snapshot(folder).values()) == [b"old"]
    assert [p.name for p in folder.iterdir()] == ["target"]


def test_two_runs_that_make_the_same_folder(tmp_path):
    with common.atomic_folder(tmp_path / "a") as first:
        (first / "f").write_text("1")
        with common.atomic_folder(tmp_path / "a") as second:
            (second / "f").write_text("2")
    assert snapshot(tmp_path) == {"a/f": b"1"}


def test_what_a_killed_run_left_is_deleted_a_day_later(tmp_path):
    old, young, others = (
        tmp_path / name
        for name in (".te-wgrad.a.txt.old", ".te-wgrad.a.txt.young", ".a.txt.backup")
    )
    for folder in (old, young, others):
        folder.mkdir()
        (folder / "f").write_text("x")
    for folder in (old, others):
        os.utime(folder, (0, time.time() - common.DAY - 9))
    write(tmp_path / "a.txt", "new")
    assert (old.exists(), young.exists(), others.exists()) == (False, True, True)


def test_a_hash_of_files_covers_names_contents_and_facts(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    files = [tmp_path / "a", tmp_path / "b"]
    first = common.hash_files(files, tmp_path, "x", "y")
    assert first == common.hash_files(files[::-1], tmp_path, "x", "y")
    assert first != common.hash_files(files, tmp_path, "xy", "")
    assert first != common.hash_files(files[:1], tmp_path, "x", "y")
    (tmp_path / "b").write_text("3")
    assert first != common.hash_files(files, tmp_path, "x", "y")
    (tmp_path / "b").write_text("2")
    assert first == common.hash_files(files, tmp_path, "x", "y")
    (tmp_path / "b").rename(tmp_path / "c")
    assert first != common.hash_files([tmp_path / "a", tmp_path / "c"], tmp_path, "x", "y")


def test_run_keeps_line_ends_and_odd_bytes():
    code = "import sys; sys.stdout.buffer.write(bytes([255, 13, 10, 195, 164]))"
    assert common.to_bytes(common.run([sys.executable, "-c", code])) == b"\xff\r\n\xc3\xa4"


def test_run_tells_what_a_failed_command_said():
    code = "import sys; print('out'); sys.exit('err')"
    with pytest.raises(common.subprocess.CalledProcessError) as caught:
        common.run([sys.executable, "-c", code])
    assert (caught.value.output, caught.value.stderr) == ("out\n", "err\n")


def test_the_cache_is_where_the_user_says(monkeypatch):
    monkeypatch.setenv("TE_WGRAD_CACHE", "/a")
    assert common.cache_dir() == Path("/a")
    monkeypatch.delenv("TE_WGRAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert common.cache_dir() == Path("/b/te-wgrad")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert common.cache_dir() == Path.home() / ".cache/te-wgrad"


def test_an_error_says_what_to_do_next():
    assert str(common.ToolError("It broke.", "mend it.")) == "It broke.\n  next: mend it."
