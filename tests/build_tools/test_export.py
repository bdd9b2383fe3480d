# SPDX-License-Identifier: Apache-2.0
"""Exporting: byte-identical, new commits, and nothing overwritten that is worth keeping."""

import pytest
from fakes import BASE, MESSAGE, commit, edit, snapshot, stops

from build_tools import gittree
from build_tools.export import export, slug

FIRST, SECOND = "core/first.patch", "core/second.patch"
OVERLAY = "transformer_engine/pytorch/module/_new.py"
APPLY, EXPORT = "python -m build_tools apply", "python -m build_tools export"


def write(work, check=False):
    return export(work.tree, **work.places, check=check)


def change(work, line, subject, value="'mine'"):
    edit(work.tree, BASE, (f"line_{line} = {line}\n", f"line_{line} = {value}\n"))
    commit(work.tree, subject)


def test_the_round_trip_is_byte_identical(applied):
    before = snapshot(applied.patches)
    assert write(applied, check=True) == []
    assert write(applied) == []
    for name in (FIRST, SECOND):
        (applied.patches / name).write_text("old text\n")
    # Without a record of what was applied, the tree is what counts.
    (applied.tree / ".git/te-wgrad-applied").unlink()
    assert write(applied) == [FIRST, SECOND]
    assert snapshot(applied.patches) == before


def test_odd_bytes_survive(applied):
    subject = "Add a line with odd bytes"
    path = applied.tree / BASE
    path.write_bytes(path.read_bytes().replace(b"line_20 = 20\n", b"caf\xe9 \xc3\xa9 = 20\r\n"))
    commit(applied.tree, subject, MESSAGE.replace("wrong", "wr\xf6ng"))
    content = path.read_bytes()
    assert write(applied) == [f"core/{slug(subject)}.patch"]
    assert (
        b"+caf\xe9 \xc3\xa9 = 20\r\n"
        in (applied.patches / f"core/{slug(subject)}.patch").read_bytes()
    )
    applied.apply()
    assert path.read_bytes() == content
    assert write(applied, check=True) == []


@pytest.mark.parametrize(
    "old, new",
    [
        (b"Symptom: wrong.", b"Symptom: bad."),
        (b"+extra = 1\n", b"+extra = 2\n"),
        (b"+extra = 1\n", b"+extra = 1\r\n"),
    ],
    ids=["message", "diff", "line-end"],
)
def test_check_finds_a_hand_edited_patch(applied, old, new):
    path = applied.patches / FIRST
    path.write_bytes(path.read_bytes().replace(old, new))
    before = snapshot(applied.repo)
    with stops(f"patches/{FIRST} is not what the tree exports", next_step=APPLY):
        write(applied, check=True)
    assert snapshot(applied.repo) == before


def test_a_hand_edited_patch_is_not_overwritten(applied):
    edit(applied.patches, FIRST, ("Symptom: wrong.", "Symptom: bad."))
    before = snapshot(applied.repo)
    with stops(f"patches/{FIRST} was edited after it was applied", next_step=APPLY):
        write(applied)
    change(applied, 20, "Mend the third line")
    with stops(f"patches/{FIRST} was edited", next_step=f"git stash push patches/{FIRST}"):
        write(applied)
    assert snapshot(applied.repo) == before


def test_a_hand_edited_patch_is_taken_by_apply(applied):
    edit(applied.patches, FIRST, ("Symptom: wrong.", "Symptom: bad."))
    before = snapshot(applied.repo)
    applied.apply()
    assert write(applied, check=True) == []
    assert snapshot(applied.repo) == before


def test_check_finds_an_extra_commit(applied):
    change(applied, 20, "Mend the third line")
    before = snapshot(applied.repo)
    with stops("patches/core/mend-the-third-line.patch", next_step=EXPORT):
        write(applied, check=True)
    assert snapshot(applied.repo) == before


def test_check_finds_an_amended_commit(work):
    (work.patches / "series").write_text(f"{FIRST}\n")
    work.apply()
    gittree.git(work.tree, "reset", "-q", "--hard", "HEAD~1")
    edit(work.tree, BASE, ("extra = 1", "extra = 2"))
    gittree.git(work.tree, "commit", "-q", "-a", "--amend", "--no-edit", author=True)
    with stops(f"patches/{FIRST}", "+extra = 2", next_step=EXPORT):
        write(work, check=True)
    assert write(work) == [FIRST]
    assert work.apply() is True
    assert "extra = 2" in work.base.read_text()


@pytest.mark.parametrize("check", [True, False])
def test_an_edited_copy_of_an_overlay_file(applied, check):
    (applied.tree / OVERLAY).write_text("NEW = 'mine'\n")
    with stops("uncommitted edits", OVERLAY, next_step="commit them"):
        write(applied, check=check)
    commit(applied.tree, "Edit the copy")
    before = snapshot(applied.repo)
    with stops(OVERLAY, next_step=f"bring the edit into {applied.repo / OVERLAY}"):
        write(applied, check=check)
    assert snapshot(applied.repo) == before


def test_an_overlay_file_edited_in_the_repository_is_no_edit_of_the_tree(applied):
    (applied.repo / OVERLAY).write_text("NEW = 2\n")
    change(applied, 20, "Mend the third line")
    assert write(applied) == ["core/mend-the-third-line.patch"]
    applied.apply()
    assert (applied.tree / OVERLAY).read_text() == "NEW = 2\n"


@pytest.mark.parametrize("end", ["\n", ""], ids=["newline", "no-newline"])
def test_a_new_commit_becomes_a_file_and_a_line(applied, end):
    series = applied.patches / "series"
    series.write_text(series.read_text().rstrip("\n") + end)
    change(applied, 20, "Mend the third line: it's wrong")
    assert write(applied) == ["core/mend-the-third-line-it-s-wrong.patch"]
    assert series.read_text() == (
        "# Patches in order.\ncore/first.patch\ncore/second.patch\n"
        "core/mend-the-third-line-it-s-wrong.patch\n"
    )
    assert write(applied) == [] and write(applied, check=True) == []


def test_two_new_commits_of_one_name(applied):
    change(applied, 20, "Mend it")
    change(applied, 21, "Mend it!")
    before = snapshot(applied.repo)
    with stops("patches/core/mend-it.patch", next_step="another subject"):
        write(applied)
    assert snapshot(applied.repo) == before


def test_uncommitted_edits(applied):
    applied.base.write_text("mine\n")
    with stops("uncommitted edits", BASE, next_step="commit them there"):
        write(applied)


def test_a_missing_commit(applied):
    gittree.git(applied.tree, "reset", "-q", "--hard", "HEAD~2")
    before = snapshot(applied.repo)
    with stops("has 1 patch commits, patches/series names 2", next_step=APPLY):
        write(applied)
    assert snapshot(applied.repo) == before


def test_commits_in_another_order_than_the_series(applied):
    gittree.git(applied.tree, "reset", "-q", "--hard", gittree.PRISTINE)
    change(applied, 30, "Mend the second line")
    change(applied, 10, "Mend the first line")
    before = snapshot(applied.repo)
    with stops(f"{FIRST} is number 1", "number 2 of the tree", next_step="git rebase -i pristine"):
        write(applied)
    assert snapshot(applied.repo) == before


def test_a_new_commit_in_the_middle(applied):
    gittree.git(applied.tree, "reset", "-q", "--hard", "HEAD~2")
    change(applied, 20, "Mend the third line")
    change(applied, 30, "Mend the second line")
    before = snapshot(applied.repo)
    with stops(f"{SECOND} is number 2", next_step="a new one last"):
        write(applied)
    assert snapshot(applied.repo) == before


def test_a_redone_patch_in_the_middle(work):
    third = "core/mend-the-third-line.patch"
    work.apply()
    change(work, 35, "Mend the third line")
    write(work)
    kept = (work.patches / third).read_bytes()
    work.apply(before=SECOND)
    with stops("has 1 patch commits", next_step=APPLY):
        write(work, check=True)
    change(work, 30, "Mend the second line better", "'redone'")
    assert write(work) == [SECOND]
    assert (work.patches / third).read_bytes() == kept
    assert work.apply() is True
    assert "line_30 = 'redone'" in work.base.read_text()
    assert "line_35 = 'mine'" in work.base.read_text()
    # The third patch names the hash of the file that it changes; export brings it up to date.
    assert write(work) == [third]
    work.apply()
    assert write(work, check=True) == []


def test_a_redone_patch_is_one_commit(work):
    work.apply(before=FIRST)
    change(work, 10, "Mend the first line")
    change(work, 11, "And more")
    before = snapshot(work.repo)
    with stops("has 2 commits after", next_step="reset --soft"):
        write(work)
    assert snapshot(work.repo) == before


def test_no_tree(work, tmp_path):
    with stops("No source tree", next_step="python -m build_tools tree"):
        export(tmp_path / "none", **work.places, check=True)


@pytest.mark.parametrize(
    "subject, name",
    [("Fix A_b (C)!", "fix-a-b-c"), ("x" * 80, "x" * 60), ("--a--", "a")],
)
def test_names_of_new_patches(subject, name):
    assert slug(subject) == name
