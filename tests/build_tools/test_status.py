# SPDX-License-Identifier: Apache-2.0
"""What status says about each state, and that it reports what is broken instead of stopping."""

import json

import pytest
from fakes import commit, edit

from build_tools import gittree, status
from build_tools.__main__ import main


@pytest.fixture
def state(upstream):
    def ask(work):
        return status.tree_state(work.tree, upstream.lock, work.patches, work.overlay)

    return ask


def test_no_tree_and_a_broken_one(work, state, tmp_path, upstream):
    assert "not there (python -m build_tools tree)" in status.tree_state(
        tmp_path / "none", upstream.lock
    )
    (work.tree / ".git/HEAD").unlink()
    assert "tree --force" in state(work)


def test_pristine(work, state):
    assert state(work) == "pristine (python -m build_tools apply)"


def test_applied(applied, state):
    assert state(applied) == "series and overlay applied"


def test_edited(applied, state):
    applied.base.write_text("mine\n")
    assert state(applied).startswith("edited: transformer_engine/pytorch/module/base.py")


def test_new_commits(applied, state):
    applied.base.write_text("mine\n")
    commit(applied.tree, "Mine")
    assert "has new commits (python -m build_tools export" in state(applied)


def test_back_to_pristine(applied, state):
    gittree.git(applied.tree, "reset", "-q", "--hard", gittree.PRISTINE)
    assert state(applied).startswith("pristine")


def test_changed_patches(applied, state):
    edit(applied.patches, "core/first.patch", ("Symptom: wrong.", "Symptom: bad."))
    assert "changed since (python -m build_tools apply)" in state(applied)


def test_a_missing_patch(applied, state):
    (applied.patches / "core/first.patch").unlink()
    assert "core/first.patch" in state(applied) and "\n" not in state(applied)


def test_stopped_before_a_patch(applied, state):
    applied.apply(before="core/second.patch")
    assert "stopped by apply --before" in state(applied)


def test_the_wheel(tmp_path):
    assert status.wheel_state(tmp_path).startswith("not built")
    (tmp_path / "wheel.json").write_text("{")
    assert status.wheel_state(tmp_path).startswith("not built")
    (tmp_path / "wheel.json").write_text('{"file": "a.whl"}')
    assert status.wheel_state(tmp_path) == "a.whl is gone (python -m build_tools build)"
    (tmp_path / "a.whl").write_text("")
    assert status.wheel_state(tmp_path) == "a.whl"


def test_the_verb_without_torch_and_without_a_tree(fake_torch, tmp_path, monkeypatch, capsys):
    fake_torch("2.14.1+cpu", None)
    monkeypatch.setattr(status, "TREE", tmp_path / "none")
    monkeypatch.setattr(status, "DIST", tmp_path / "none")
    assert main(["status", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["pinned"].startswith("Transformer Engine 2.20.2; fork 2.20.2+wgrad.")
    assert rows["fetched"].startswith("nothing")
    assert rows["tree"].startswith("not there")
    assert "CPU-only" in rows["torch"] and "next: install" in rows["torch"]
    assert main(["status"]) == 0
    assert "tree       not there" in capsys.readouterr().out
