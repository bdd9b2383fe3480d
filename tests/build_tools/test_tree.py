# SPDX-License-Identifier: Apache-2.0
"""Making the source tree: what is kept, what is refused, what --force does."""

import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from fakes import BASE, SOURCES, UPSTREAM, commit, scratch, snapshot, stops

from build_tools import gittree, tree
from build_tools.common import ToolError

FORCE = "python -m build_tools tree --force"


@pytest.fixture
def made(lock, archives, tmp_path):
    return tree.make_tree(tmp_path / "build/tree", lock=lock)


def again(made, lock, **options):
    return tree.make_tree(made, lock=lock, **options)


def test_the_tree_has_upstreams_paths_and_the_pinned_hash(made, lock):
    files = snapshot(made)
    assert set(files) - {"HEAD"} == {
        *UPSTREAM,
        "LICENSE",
        "transformer_engine/pytorch/csrc/extensions/pybind.cpp",
        "transformer_engine/common/common.h",
    }
    assert (
        files["transformer_engine/common/common.h"].decode()
        == SOURCES["common_headers/common/common.h"]
    )
    assert gittree.git(made, "rev-parse", "pristine^{tree}").strip() == lock["pristine_tree"]
    assert gittree.dirty(made) == []


def test_a_right_tree_is_kept(made, lock, archives):
    before = snapshot(made)
    shutil.rmtree(archives)  # nothing is read from it
    assert again(made, lock) == made
    assert snapshot(made) == before


def test_the_commit_is_the_same_everywhere(made, lock, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_AUTHOR_NAME", "someone else")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    other = tree.make_tree(tmp_path / "other", lock=lock)
    assert snapshot(other)["HEAD"] == snapshot(made)["HEAD"]


def test_edits_are_kept_without_force(made, lock):
    (made / BASE).write_text("edited\n")
    before = snapshot(made)
    assert again(made, lock) == made
    assert snapshot(made) == before


def test_force_drops_edits_and_commits(made, lock):
    fresh = snapshot(made)
    (made / BASE).write_text("edited\n")
    commit(made, "Edit")
    (made / "untracked").write_text("x")
    again(made, lock, force=True)
    assert snapshot(made) == fresh
    assert [p.name for p in made.parent.iterdir()] == ["tree"]


def test_another_commit_under_the_name_pristine(made, lock):
    (made / BASE).write_text("edited\n")
    commit(made, "Edit")
    gittree.git(made, "tag", "-f", gittree.PRISTINE)
    (made / BASE).write_text("edited twice\n")
    before = snapshot(made)
    with stops("is not the pinned pristine tree; edited: " + BASE, next_step=FORCE):
        again(made, lock)
    assert snapshot(made) == before


def break_head(made):
    (made / ".git/HEAD").write_text("nonsense\n")


def break_objects(made):
    shutil.rmtree(made / ".git/objects")
    (made / ".git/objects").mkdir()


def empty_git(made):
    shutil.rmtree(made / ".git")
    (made / ".git").mkdir()


def no_git(made):
    shutil.rmtree(made / ".git")


@pytest.mark.parametrize(
    "damage, seen",
    [
        (break_head, "broken .git"),
        (break_objects, "broken .git"),
        (empty_git, "broken .git"),
        (no_git, "files but no .git"),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in-a-checkout"])
def test_a_broken_git_folder(made, lock, damage, seen, inside):
    if inside:  # git would go up to this one, which even has the tag
        around = made.parent
        subprocess.run(["git", "init", "-q", around], check=True)
        gittree.git(around, "commit", "-q", "--allow-empty", "-m", "x", author=True)
        gittree.git(around, "tag", gittree.PRISTINE)
    fresh = snapshot(made)
    damage(made)
    files = {p for p in made.rglob("*")}
    with stops(str(made), seen, next_step=FORCE):
        again(made, lock)
    with pytest.raises(ToolError):
        gittree.require_tree(made)
    assert {p for p in made.rglob("*")} == files
    again(made, lock, force=True)
    assert snapshot(made) == fresh


def test_a_folder_of_someone_else_is_not_replaced(lock, archives, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("precious")
    with stops("has files but no .git", next_step="copy what you need out of it"):
        tree.make_tree(tmp_path / "mine", lock=lock)
    assert snapshot(tmp_path / "mine") == {"notes": b"precious"}
    (tmp_path / "empty").mkdir()
    tree.make_tree(tmp_path / "empty", lock=lock)


def test_no_tree(tmp_path):
    with stops(f"No source tree in {tmp_path / 'x'}", next_step="python -m build_tools tree"):
        gittree.require_tree(tmp_path / "x")


def test_archives_that_give_another_tree(lock, archives, tmp_path):
    other = {**lock, "pristine_tree": "0" * 40}
    with stops(lock["pristine_tree"], "0" * 40, next_step="build_tools/upstream.lock"):
        tree.make_tree(tmp_path / "build/tree", lock=other)
    assert not (tmp_path / "build/tree").exists() and not scratch(tmp_path / "build")


def test_offline_without_archives(lock, tmp_path):
    with stops("offline mode is on", next_step="python -m build_tools fetch"):
        tree.make_tree(tmp_path / "build/tree", lock=lock, offline=True)
    assert not (tmp_path / "build").exists()


def test_a_failed_force_keeps_the_old_tree(made, lock, monkeypatch):
    (made / "mine").write_text("x")
    before = snapshot(made)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tree, "unpack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        again(made, lock, force=True)
    assert snapshot(made) == before
    assert not scratch(made.parent)


def zipped(tmp_path, name, text="x"):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr(name, text)
    return tmp_path / "a.whl"


def tarred(tmp_path, name=None, text=b"x"):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        if name:
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return tmp_path / "a.tar.gz"


def test_a_path_that_leaves_the_tree(tmp_path):
    wheel = zipped(tmp_path, "transformer_engine/../../evil")
    with stops("unsafe path", "../../evil", next_step="do not use"):
        tree.unpack(wheel, tarred(tmp_path), tmp_path / "a/b")
    assert not list(tmp_path.rglob("evil"))
    sources = tarred(tmp_path, "te-1/csrc/../../../../evil")
    with stops("unsafe path", next_step="do not use"):
        tree.unpack(zipped(tmp_path, "other"), sources, tmp_path / "a/b")
    assert not list(tmp_path.rglob("evil"))


def test_archives_that_disagree(tmp_path):
    wheel = zipped(tmp_path, "transformer_engine/common/a.h", "one")
    with stops("disagree about transformer_engine/common/a.h", next_step="one version"):
        tree.unpack(wheel, tarred(tmp_path, "te-1/common_headers/common/a.h"), tmp_path / "out")


def test_a_copy_of_the_pristine_files(made, lock, tmp_path):
    fresh = snapshot(made)
    (made / BASE).write_text("edited\n")
    commit(made, "Edit")
    tree.pristine_copy(made, tmp_path / "copy")
    fresh.pop("HEAD")
    assert snapshot(tmp_path / "copy") == fresh


def test_the_verb_prints_the_folder(lock, archives, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tree, "load_lock", lambda: lock)
    from build_tools.__main__ import make_parser

    args = make_parser().parse_args(["tree", "--dest", str(tmp_path / "t")])
    args.main(args)
    assert capsys.readouterr().out.strip() == str(tmp_path / "t")
    assert Path(tmp_path / "t/.git").is_dir()
