# SPDX-License-Identifier: Apache-2.0
"""The command line: help, exit codes, no traceback."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import __main__ as cli
from build_tools.common import ToolError

REPO = Path(cli.__file__).resolve().parents[1]


def run(*arguments):
    command = [sys.executable, "-m", "build_tools", *arguments]
    return subprocess.run(command, cwd=REPO, text=True, capture_output=True)


def test_help_lists_every_verb():
    done = run("--help")
    assert done.returncode == 0
    assert all(f"\n    {verb} " in done.stdout for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_a_verb(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    assert f"python -m build_tools {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["bake"], [], ["fetch", "--bake"], ["fetch", "--cuda", "11"]]
)
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, said",
    [
        (ToolError("It broke.", "mend it."), 1, ["error: It broke.", "next: mend it."]),
        (KeyboardInterrupt(), 130, ["interrupted", "Run it again"]),
        (OSError(errno.ENOSPC, "full", "/x/y"), 1, ["/x/y", "MiB free", "next: free about 8 GB"]),
        (PermissionError(errno.EACCES, "denied", "/x"), 1, ["denied: '/x'", "next: check that"]),
        (
            subprocess.CalledProcessError(3, ["git", "am"], None, "fatal: broken"),
            1,
            ["error: git am\nfatal: broken\n", "next: mend"],
        ),
    ],
    ids=["tool-error", "ctrl-c", "disk-full", "no-permission", "command"],
)
def test_how_a_verb_ends(error, code, said, monkeypatch, capsys):
    def fails(args):
        raise error

    monkeypatch.setattr("build_tools.lint.main", fails)
    assert cli.main(["lint"]) == code
    shown = capsys.readouterr().err
    assert all(text in shown for text in said), shown


def test_a_verb_that_works_exits_with_0(monkeypatch):
    monkeypatch.setattr("build_tools.lint.main", lambda args: None)
    assert cli.main(["lint"]) == 0


def test_an_error_of_a_real_run_has_no_traceback(tmp_path):
    done = run("fetch", "--offline", "--no-core")
    assert done.returncode == 1
    assert "error: transformer_engine-" in done.stderr and "\n  next: " in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    assert not list((tmp_path / "cache").glob("**/*"))


def test_an_unknown_verb_of_a_real_run():
    done = run("bake")
    assert done.returncode == 2
    assert "bake" in done.stderr and "Traceback" not in done.stderr
