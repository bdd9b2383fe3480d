# SPDX-License-Identifier: Apache-2.0
"""Fetching: pins, a broken cache, no network, interruptions."""

import argparse
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import CORE, snapshot, stops

from build_tools import fetch

REPO = Path(fetch.__file__).resolve().parents[1]
FETCH = "python -m build_tools fetch"


def arguments(**options):
    return argparse.Namespace(**{"cuda": None, "offline": False, "no_core": False, **options})


def cached(tmp_path):
    folder = tmp_path / "cache/archives"
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def asked(index):
    log = index / "asked"
    return log.read_text().split() if log.exists() else []


@pytest.mark.parametrize("role", ["python", "sources"])
def test_it_fetches_and_checks_once(lock, fake_pip, tmp_path, role, upstream):
    index = fake_pip("serve")
    pin = lock["archives"][role]
    path = fetch.archive(role)
    assert path.read_bytes() == (upstream.folder / pin["file"]).read_bytes()
    assert cached(tmp_path) == [pin["file"]]
    assert fetch.archive(role) == path
    assert len(asked(index)) == 1


def test_the_sources_see_a_stand_in_for_torch(lock, fake_pip, site):
    # As pip does, ask in a process of its own.
    code = "import torch.utils.cpp_extension as c, torch; assert 'stub' in torch.__file__ and c"
    with open(site / "pip/__main__.py", "a") as main:
        main.write(f"import subprocess\nsubprocess.check_call([sys.executable, '-c', {code!r}])\n")
    fake_pip("serve")
    fetch.archive("sources")


@pytest.mark.parametrize(
    "damage, seen",
    [
        (lambda data: data[:-1] + b"?", "wrong sha256"),
        (lambda data: data[:-1], "wrong size"),
        (lambda data: b"", "got 0 bytes"),
    ],
    ids=["sha256", "size", "empty"],
)
def test_another_file_from_the_index_is_not_kept(lock, fake_pip, tmp_path, damage, seen):
    index = fake_pip("serve")
    pin = lock["archives"]["python"]
    path = index / pin["file"]
    path.write_bytes(damage(path.read_bytes()))
    values = (
        [pin["sha256"], fetch.sha256(path)]
        if seen == "wrong sha256"
        else [f"pinned {pin['size']} bytes", f"got {path.stat().st_size} bytes"]
    )
    with stops(pin["file"], seen, *values, next_step=FETCH):
        fetch.archive("python")
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    "mode, seen, next_step",
    [
        ("offline", "the package index cannot be reached", "run it on another machine and copy"),
        ("mismatch", "Expected sha256 aaa\n  Got        bbb", "pip config list"),
        ("full", "No space left", "TE_WGRAD_CACHE"),
    ],
)
def test_what_pip_says_is_explained(lock, fake_pip, tmp_path, mode, seen, next_step):
    fake_pip(mode)
    file = lock["archives"]["python"]["file"]
    with stops(seen, *([file] if mode != "full" else []), next_step=next_step):
        fetch.archive("python")
    assert cached(tmp_path) == []


def test_no_network_names_the_folder_to_copy_to(lock, fake_pip, tmp_path):
    fake_pip("offline")
    file = lock["archives"]["sources"]["file"]
    with stops(file, next_step=f"copy {file} into {tmp_path / 'cache/archives'}"):
        fetch.archive("sources")


@pytest.mark.parametrize(
    "log, seen, next_step",
    [
        ("/x/python: No module named pip", "has no pip", "-m ensurepip"),
        ("ModuleNotFoundError: No module named 'setuptools'", "setuptools", "pip install setupt"),
        ("a\nb\nERROR: odd", "ERROR: odd", FETCH),
    ],
)
def test_other_failures_of_pip(lock, log, seen, next_step):
    with stops(seen, next_step=next_step):
        raise fetch.explain_pip(lock["archives"]["python"], log)


@pytest.mark.parametrize("how", ["option", "variable"])
def test_offline_with_a_missing_archive(lock, tmp_path, how, monkeypatch):
    if how == "variable":
        monkeypatch.setenv("TE_WGRAD_OFFLINE", "1")
    file = lock["archives"]["python"]["file"]
    with stops(file, str(tmp_path / "cache/archives"), next_step=FETCH):
        fetch.archive("python", offline=how == "option", get=None)
    assert cached(tmp_path) == []


def test_offline_with_everything(lock, archives):
    assert fetch.archive("python", offline=True, get=None).parent == archives


def test_a_damaged_cached_archive_is_fetched_again(lock, archives, fake_pip, capsys):
    index = fake_pip("serve")
    path = archives / lock["archives"]["python"]["file"]
    good = path.read_bytes()
    for bad in (good[:-1], good[:-1] + b"?"):
        path.write_bytes(bad)
        assert fetch.archive("python") == path
        assert path.read_bytes() == good
        assert "damaged and is fetched again" in capsys.readouterr().err
    assert len(asked(index)) == 2


def test_a_damaged_cached_archive_offline(lock, archives):
    path = archives / lock["archives"]["python"]["file"]
    path.write_bytes(b"x")
    with stops("wrong size", str(path), next_step=FETCH):
        fetch.archive("python", offline=True, get=None)


def test_an_interrupted_fetch_goes_on_where_it_stopped(lock, fake_pip, tmp_path, monkeypatch):
    index = fake_pip("serve")
    real = subprocess.run

    def interrupted(command, **options):
        wanted = Path(command[command.index("-r") + 1])
        if "transformer_engine_torch" in wanted.read_text():
            wanted.with_name("partial").write_text("half")
            raise KeyboardInterrupt
        return real(command, **options)

    monkeypatch.setattr(fetch.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.main(arguments(no_core=True))
    assert cached(tmp_path) == [lock["archives"]["python"]["file"]]
    monkeypatch.setattr(fetch.subprocess, "run", real)
    fetch.main(arguments(no_core=True))
    assert asked(index) == ["transformer_engine", "transformer_engine_torch"]
    assert len(cached(tmp_path)) == 2


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_a_fetch_that_is_killed_leaves_no_archive(fake_pip, tmp_path, number, code):
    started = fake_pip("hang") / "started"
    run = subprocess.Popen(
        [sys.executable, "-m", "build_tools", "fetch", "--no-core"],
        cwd=REPO, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        # What a shell runs in the background ignores SIGINT, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        end = time.monotonic() + 20
        while not (started.exists() and started.read_text()) and time.monotonic() < end:
            time.sleep(0.02)
        run.send_signal(number)
        if number == signal.SIGKILL:  # pip lives on and holds the pipes
            os.kill(int(started.read_text()), signal.SIGKILL)
        out, errors = run.communicate(timeout=20)
    finally:
        run.kill()
    assert run.returncode == code
    assert "Traceback" not in errors and not out
    left = [name for name in cached(tmp_path) if not name.startswith(".te-wgrad.")]
    assert left == []
    if number != signal.SIGKILL:
        assert "interrupted" in errors
        assert cached(tmp_path) == []


@pytest.mark.parametrize("where", ["mkdtemp", "replace"])
def test_a_full_disk(lock, fake_pip, tmp_path, where, monkeypatch):
    fake_pip("serve")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(
        f"build_tools.common.{'tempfile' if where == 'mkdtemp' else 'os'}.{where}", full
    )
    with stops("No space left", "MiB free", next_step="TE_WGRAD_CACHE"):
        fetch.archive("python")
    assert cached(tmp_path) == []


@pytest.mark.parametrize("cuda, major", [("12.8", 12), ("13.0", 13)])
def test_the_core_library_is_that_of_torchs_cuda(
    lock, fake_pip, fake_torch, tmp_path, cuda, major, capsys
):
    index = fake_pip("serve")
    fake_torch("2.14.1", cuda)
    fetch.main(arguments())
    assert asked(index)[-1] == f"transformer_engine_cu{major}"
    assert len(cached(tmp_path)) == 3
    library = fetch.core_library()
    assert library.read_bytes() == CORE[library.name] + str(major).encode()
    assert str(tmp_path / "cache/archives") in capsys.readouterr().out


def test_the_core_library_without_torch(lock, fake_pip, fake_torch):
    index = fake_pip("serve")
    fake_torch("2.14.1", None)
    with stops("CPU-only", next_step="CUDA build"):
        fetch.main(arguments())
    assert asked(index) == []
    fetch.main(arguments(cuda="12"))
    assert asked(index)[-1] == "transformer_engine_cu12"


def test_an_unpacked_library_that_was_cut_or_edited_is_unpacked_again(lock, archives):
    folder = fetch.core_folder(13)
    good = snapshot(folder)
    assert sorted(good) == sorted(CORE)
    assert fetch.core_folder(13) == folder
    library = folder / "libtransformer_engine.so"
    data = library.read_bytes()
    for bad in (data[:-1], data[:-1] + b"?"):
        library.write_bytes(bad)
        fetch.core_folder(13)
        assert snapshot(folder) == good
    library.unlink()
    fetch.core_folder(13)
    assert snapshot(folder) == good


def test_a_full_disk_while_unpacking(lock, archives, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(fetch.shutil, "copyfileobj", full)
    with stops("No space left", next_step="TE_WGRAD_CACHE"):
        fetch.core_folder(13)
    assert not list((tmp_path / "cache/core").iterdir())


def test_the_pins_are_complete():
    pins = fetch.load_lock()
    assert set(pins["archives"]) == {"python", "sources", "core_cu12", "core_cu13"}
    for pin in pins["archives"].values():
        assert pin["requirement"].endswith(f"=={pins['version']}")
        assert len(pin["sha256"]) == 64 and pin["size"] > 0
    assert shutil.which("git") and len(pins["pristine_tree"]) == 40


def test_pip_is_asked_with_the_hash(lock, tmp_path):
    pin = lock["archives"]["core_cu13"]
    command = fetch.pip_command(pin, tmp_path)
    assert "--require-hashes" in command and "--no-deps" in command
    assert command[-2:] == ["--platform", "manylinux_2_28_x86_64"]
    assert f"--hash=sha256:{pin['sha256']}" in (tmp_path / "requirements.txt").read_text()
