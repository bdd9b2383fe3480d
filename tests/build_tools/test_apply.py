# SPDX-License-Identifier: Apache-2.0
"""Applying the series: exact places, no half-done tree, nothing lost."""

import shutil
import subprocess

import pytest
from fakes import BASE, commit, edit, scratch, snapshot, stops

from build_tools import apply as module
from build_tools import gittree
from build_tools.export import export

FIRST, SECOND = "core/first.patch", "core/second.patch"
BEFORE_SECOND = f"python -m build_tools apply --before {SECOND}"
OVERLAY = "transformer_engine/pytorch/module/_new.py"


def commits(tree):
    return gittree.git(tree, "log", "--format=%s").splitlines()


def unchanged(work, before):
    """The tree is as it was, clean, on its branch, with no `git am` in progress."""
    assert snapshot(work.tree) == before
    assert gittree.dirty(work.tree) == []
    assert gittree.git(work.tree, "branch", "--show-current").strip() == "main"
    assert not (work.tree / ".git/rebase-apply").exists()
    return True


def test_each_patch_is_a_commit_and_the_overlay_lies_on_top(work):
    assert work.apply() is True
    assert commits(work.tree) == [
        gittree.OVERLAY_SUBJECT, "Mend the second line", "Mend the first line", "upstream"
    ]  # fmt: skip
    assert "line_10 = 'first'\nextra = 1\nline_11" in work.base.read_text()
    assert (work.tree / OVERLAY).read_bytes() == (work.repo / OVERLAY).read_bytes()
    assert gittree.git(work.tree, "log", "-1", "--format=%an", "HEAD").strip() == "te-wgrad"


def test_twice_does_nothing(applied):
    before = snapshot(applied.tree)
    assert applied.apply() is False
    assert unchanged(applied, before)


def test_two_checkouts_give_the_same_commit(work, template, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(template / "tree", other)
    module.apply(other, **work.places)
    work.apply()
    assert snapshot(other) == snapshot(work.tree)


@pytest.mark.parametrize("what", ["patch", "overlay", "overlay-gone", "series"])
def test_a_change_is_applied(applied, what):
    if what == "patch":
        edit(applied.patches, FIRST, ("+extra = 1", "+extra = 2"))
    elif what == "overlay":
        (applied.repo / OVERLAY).write_text("NEW = 2\n")
    elif what == "overlay-gone":
        (applied.repo / OVERLAY).unlink()
    else:
        (applied.patches / "series").write_text(f"{FIRST}\n")
    assert applied.apply() is True
    assert ("extra = 2" in applied.base.read_text()) == (what == "patch")
    assert ("line_30 = 30" in applied.base.read_text()) == (what == "series")
    copy = applied.tree / OVERLAY
    assert copy.exists() == (what != "overlay-gone")
    assert not copy.exists() or ("NEW = 2" in copy.read_text()) == (what == "overlay")
    assert applied.apply() is False


@pytest.mark.parametrize(
    "change, seen",
    [
        (("-line_30 = 30", "-line_30 = 31"), "its lines are not there as it says"),
        ((" line_29 = 29", " line_29 = 92"), "its lines are not there as it says"),
        ((" line_31 = 31\n", " line_13 = 13\n"), "its lines are not there as it says"),
        (("@@ -30,3 +30,3 @@", "@@ -29,3 +29,3 @@"), "its lines stand at line 30 now"),
    ],
    ids=["old-line", "context-before", "context-after", "moved"],
)
def test_a_patch_that_does_not_fit(applied, change, seen):
    before = snapshot(applied.tree)
    # The first patch adds a line, so the second starts at 30.
    edit(applied.patches, SECOND, change)
    with stops(SECOND, BASE, "hunk @@ -", seen, next_step=BEFORE_SECOND):
        applied.apply()
    assert unchanged(applied, before)


def test_a_patch_that_does_not_fit_on_a_pristine_tree(work):
    before = snapshot(work.tree)
    edit(work.patches, SECOND, (" line_29 = 29", " line_29 = 92"))
    with stops(SECOND, next_step=BEFORE_SECOND):
        work.apply()
    assert unchanged(work, before)
    edit(work.patches, SECOND, (" line_29 = 92", " line_29 = 29"))
    assert work.apply() is True


def test_lines_with_another_end(work):
    path = work.patches / FIRST
    path.write_bytes(path.read_bytes().replace(b"-line_10 = 10\n", b"-line_10 = 10\r\n"))
    with stops(FIRST, "its lines are not there", next_step="apply --before"):
        work.apply()


def test_moved_lines_on_request(work):
    (work.patches / "series").write_text(f"{SECOND}\n")
    (work.patches / FIRST).unlink()
    before = snapshot(work.tree)
    with stops(SECOND, "stand at line 29 now", next_step="apply --moved` and then"):
        work.apply()
    assert unchanged(work, before)
    assert work.apply(moved=True) is True
    assert export(work.tree, **work.places, check=False) == [SECOND]
    assert "@@ -29,3 +29,3 @@" in (work.patches / SECOND).read_text()
    work.apply()
    assert export(work.tree, **work.places, check=True) == []


def test_a_patch_for_a_file_that_is_not_there(work):
    path = work.patches / SECOND
    path.write_text(path.read_text().replace("module/base.py", "module/gone.py"))
    before = snapshot(work.tree)
    with stops(SECOND, "module/gone.py: no such file", next_step=BEFORE_SECOND):
        work.apply()
    assert unchanged(work, before)


def test_a_patch_that_makes_a_file_that_is_there(work):
    path = work.patches / SECOND
    head = path.read_text().split("\ndiff --git")[0]
    name = "transformer_engine/__init__.py"
    path.write_text(
        f"{head}\ndiff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n"
        f"+++ b/{name}\n@@ -0,0 +1 @@\n+x = 1\n"
    )
    before = snapshot(work.tree)
    with stops(SECOND, f"{name}: the file is there already", next_step=BEFORE_SECOND):
        work.apply()
    assert unchanged(work, before)


def test_a_patch_that_is_no_patch(work):
    (work.patches / SECOND).write_text("nothing\n")
    before = snapshot(work.tree)
    with stops(SECOND, next_step=BEFORE_SECOND):
        work.apply()
    assert unchanged(work, before)


def test_the_series_names_a_missing_file(work):
    (work.patches / "series").write_text(f"{FIRST}\ncore/gone.patch\n")
    before = snapshot(work.tree)
    with stops("core/gone.patch", next_step="fix patches/series"):
        work.apply()
    assert unchanged(work, before)


def test_no_series(work):
    (work.patches / "series").unlink()
    with stops("series is missing", next_step="git checkout patches/series"):
        work.apply()


def test_upstream_only_patches_are_left_out(work):
    (work.patches / "series").write_text(f"upstream_only/qa.patch\n{FIRST}\n{SECOND} # why\n\n")
    work.apply()
    assert len(commits(work.tree)) == 4


def test_an_overlay_file_over_an_upstream_file(work):
    (work.repo / BASE).write_text("ours\n")
    before = snapshot(work.tree)
    with stops(BASE, "overwrite an upstream file", next_step="give it another name"):
        work.apply()
    assert unchanged(work, before)


def test_an_overlay_file_that_a_patch_makes_too(work):
    work.apply(before=SECOND)
    (work.tree / OVERLAY).write_text("theirs\n")
    commit(work.tree, "Mend the second line")
    export(work.tree, **work.places, check=False)
    before = snapshot(work.tree)
    with stops(OVERLAY, "a patch makes it too", next_step="take it out of the patch"):
        work.apply()
    assert unchanged(work, before)


def test_caches_are_no_overlay_files(work):
    (work.overlay / "__pycache__").mkdir()
    (work.overlay / "__pycache__/x.pyc").write_bytes(b"x")
    (work.overlay / "y.pyc").write_bytes(b"x")
    assert [p.name for p in module.overlay_files(work.overlay)] == ["_new.py"]


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("name", [BASE, "a_new_file"])
def test_uncommitted_edits_are_not_lost(work, applied, name):
    if applied:
        work.apply()
    (work.tree / name).write_text("mine\n")
    before = snapshot(work.tree)
    with stops("edited and not committed", name, next_step="python -m build_tools export"):
        work.apply()
    assert snapshot(work.tree) == before


@pytest.mark.parametrize("applied", [False, True])
def test_commits_that_were_not_exported_are_not_lost(work, applied):
    if applied:
        work.apply()
    edit(work.tree, BASE, ("line_20 = 20", "line_20 = 'mine'"))
    commit(work.tree, "My own change")
    before = snapshot(work.tree)
    with stops("has commits", "My own change", next_step="`python -m build_tools export`"):
        work.apply()
    assert snapshot(work.tree) == before


def test_an_edited_copy_of_an_overlay_file_is_not_lost(applied):
    (applied.tree / OVERLAY).write_text("NEW = 'mine'\n")
    gittree.git(applied.tree, "commit", "-q", "-a", "--amend", "--no-edit", author=True)
    before = snapshot(applied.tree)
    with stops(OVERLAY, next_step="python -m build_tools export"):
        applied.apply()
    assert snapshot(applied.tree) == before


def test_exported_commits_do_not_stand_in_the_way(applied):
    edit(applied.tree, BASE, ("line_20 = 20", "line_20 = 'third'"))
    commit(applied.tree, "Mend the third line")
    assert export(applied.tree, **applied.places, check=False) == ["core/mend-the-third-line.patch"]
    assert applied.apply() is True
    assert commits(applied.tree)[:2] == [gittree.OVERLAY_SUBJECT, "Mend the third line"]
    assert applied.apply() is False


def test_stop_before_a_patch(applied):
    assert applied.apply(before=SECOND) is True
    assert commits(applied.tree) == ["Mend the first line", "upstream"]
    assert not (applied.tree / OVERLAY).exists()
    assert applied.apply() is True
    assert len(commits(applied.tree)) == 4


def test_stop_before_an_unknown_patch(work):
    with stops("core/x.patch is not in patches/series", next_step=f"{FIRST}, {SECOND}"):
        work.apply(before="core/x.patch")


@pytest.mark.parametrize("at", ["am", "overlay", "commit"])
def test_an_interruption_leaves_the_tree_as_it_was(applied, at, monkeypatch):
    edit(applied.patches, FIRST, ("+extra = 1", "+extra = 2"))
    (applied.repo / OVERLAY).write_text("NEW = 2\n")
    (applied.repo / OVERLAY).with_name("_newer.py").write_text("NEWER = 1\n")
    before = snapshot(applied.tree)
    real = module.git

    def git(tree, *arguments, **options):
        if at == "am" and arguments[0] == "am":
            # What Ctrl-C leaves: a `git am` that stopped half-way.
            (applied.patches / "broken").write_text((applied.patches / FIRST).read_text()[:-40])
            with pytest.raises(subprocess.CalledProcessError):
                real(tree, "am", "-q", str(applied.patches / "broken"))
            assert (tree / ".git/rebase-apply").exists()
            raise KeyboardInterrupt
        if at == "commit" and arguments[0] == "commit":
            raise KeyboardInterrupt
        if at == "overlay" and arguments[:2] == ("add", "-A"):
            raise KeyboardInterrupt
        return real(tree, *arguments, **options)

    monkeypatch.setattr(module, "git", git)
    with pytest.raises(KeyboardInterrupt):
        applied.apply()
    assert unchanged(applied, before)
    monkeypatch.setattr(module, "git", real)
    assert applied.apply() is True
    assert not scratch(applied.tree / ".git")


def test_a_run_killed_half_way_is_gone_on_with(applied):
    gittree.git(applied.tree, "checkout", "-q", "-B", "applying", gittree.PRISTINE)
    module.apply_one(applied.tree, FIRST, applied.patches / FIRST)
    assert applied.apply() is True
    assert len(commits(applied.tree)) == 4


def test_the_users_git_settings_do_not_matter(work, tmp_path, monkeypatch):
    (tmp_path / ".gitconfig").write_text(
        "[commit]\ngpgsign = true\n[core]\nautocrlf = true\n[diff]\nnoprefix = true\n"
        "[format]\nsignature = me\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.context")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "9")
    work.apply()
    assert export(work.tree, **work.places, check=True) == []


def test_hunks_are_read_as_git_reads_them():
    text = (
        "--- in the message\n@@ -1 +1 @@\n\ndiff --git a/x/y b/x/y\n--- a/x/y\n+++ b/x/y\n"
        "@@ -3,2 +3,3 @@ def f():\n a\n--- b\n+++ c\n+d\n@@ -9 +11 @@\n-e\n+f\n"
        "\\ No newline at end of file\n"
    )
    assert list(module.hunks(text)) == [
        ("x/y", "@@ -3,2 +3,3 @@", 3, ["a", "-- b"]),
        ("x/y", "@@ -9 +11 @@", 9, ["e"]),
    ]
