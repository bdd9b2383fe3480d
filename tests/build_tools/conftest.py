# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the build tools' tests: no network, no torch, no compiler."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fakes

from build_tools import build, environment, fetch, gittree
from build_tools.apply import apply

SETTINGS = ("NVTE_", "TE_WGRAD_", "PIP_", "CMAKE_", "CUDA", "FAKE_")


@pytest.fixture(autouse=True)
def sandbox(tmp_path, monkeypatch):
    """A cache of its own, no settings of the caller, nothing remembered about torch."""
    for name in list(os.environ):
        if name.startswith(SETTINGS) or name in build.COMPILE_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("TE_WGRAD_CACHE", str(tmp_path / "cache"))
    clear = environment.torch_facts.cache_clear
    clear()
    yield
    clear()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of modules that Pythons started by a test import first."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def fake_torch(site):
    """Write a torch of a version and CUDA version (None: CPU only)."""

    def write(version, cuda, before=""):
        (site / "torch").mkdir(exist_ok=True)
        text = f"{before}\n__version__ = {version!r}\nclass version:\n    cuda = {cuda!r}\n"
        (site / "torch/__init__.py").write_text(text)
        environment.torch_facts.cache_clear()

    return write


@pytest.fixture
def fake_pip(site, tmp_path, upstream, monkeypatch):
    """Put a made-up pip first; it serves a copy of the archives. Call it to say how it ends."""
    (site / "pip").mkdir()
    (site / "pip/__init__.py").write_text("")
    (site / "pip/__main__.py").write_text(fakes.FAKE_PIP)
    index = tmp_path / "index"
    index.mkdir()
    for pin in upstream.lock["archives"].values():
        shutil.copy(upstream.folder / pin["file"], index)
    monkeypatch.setenv("FAKE_INDEX", str(index))
    monkeypatch.setenv("PIP_CONSTRAINT", "/etc/pip/constraint.txt")  # as containers do

    def end(mode):
        monkeypatch.setenv("FAKE_PIP", mode)
        return index

    return end


@pytest.fixture(scope="session")
def upstream(tmp_path_factory):
    """The made-up archives and their lock."""
    folder = tmp_path_factory.mktemp("upstream")
    return SimpleNamespace(folder=folder, lock=fakes.make_upstream(folder))


@pytest.fixture
def lock(upstream, monkeypatch):
    """The made-up lock, also where the tools load theirs."""
    monkeypatch.setattr(fetch, "load_lock", lambda: upstream.lock)
    return upstream.lock


@pytest.fixture
def archives(upstream, tmp_path):
    """The cache's folder of archives, filled."""
    folder = tmp_path / "cache/archives"
    folder.mkdir(parents=True)
    for pin in upstream.lock["archives"].values():
        shutil.copy(upstream.folder / pin["file"], folder)
    return folder


def pack(tree):
    """Leave few files in .git: a template is copied often."""
    gittree.git(tree, "repack", "-a", "-d", "-q")
    shutil.rmtree(tree / ".git/logs")


@pytest.fixture(scope="session")
def template(upstream, tmp_path_factory):
    """A pristine tree, and a repository with two patches, a series and an overlay file."""
    root = tmp_path_factory.mktemp("template")
    shutil.copytree(upstream.folder / "again", root / "tree")
    tree = root / "tree"
    gittree.git(tree, "checkout", "-q", "-b", "main")
    gittree.git(tree, "commit", "-q", "-m", "upstream", author=True)
    gittree.git(tree, "tag", gittree.PRISTINE)
    patches = root / "repo/patches"
    (patches / "core").mkdir(parents=True)
    for name, old, new in (
        ("first", "line_10 = 10\n", "line_10 = 'first'\nextra = 1\n"),
        ("second", "line_30 = 30\n", "line_30 = 'second'\n"),
    ):
        fakes.edit(tree, fakes.BASE, (old, new))
        fakes.commit(tree, f"Mend the {name} line")
        text = gittree.format_patch(tree, "HEAD")
        (patches / f"core/{name}.patch").write_text(text)
    (patches / "series").write_text("# Patches in order.\ncore/first.patch\ncore/second.patch\n")
    gittree.git(tree, "reset", "-q", "--hard", gittree.PRISTINE)
    pack(tree)
    overlay = root / "repo/transformer_engine/pytorch/module/_new.py"
    overlay.parent.mkdir(parents=True)
    overlay.write_text("# SPDX-License-Identifier: Apache-2.0\nNEW = 1\n")
    test = root / "repo/tests/pytorch/test_new.py"
    test.parent.mkdir(parents=True)
    test.write_text(
        "def test_it():\n    pass\n\n\nclass TestMore:\n    def test_in(self):\n        pass\n"
    )
    (root / "repo/build_tools").mkdir()
    (root / "repo/build_tools/upstream.lock").write_text('{"version": "2.20.2"}')
    return root


def copy_of(template, tmp_path):
    """A copy of a template to work on: ``tree``, ``repo``, ``patches``, ``overlay``, ``apply``."""
    root = tmp_path / "work"
    shutil.copytree(template, root, copy_function=shutil.copyfile)
    places = {"patches": root / "repo/patches", "overlay": root / "repo/transformer_engine"}
    return SimpleNamespace(
        tree=root / "tree",
        repo=root / "repo",
        **places,
        places=places,
        base=root / "tree" / fakes.BASE,
        apply=lambda **options: apply(root / "tree", **places, **options),
    )


@pytest.fixture
def plain(applied_template, tmp_path):
    """The files of a patched tree, without git: ``tree``, ``base``."""
    tree = tmp_path / "tree"
    shutil.copytree(
        applied_template / "tree/transformer_engine",
        tree / "transformer_engine",
        copy_function=shutil.copyfile,
    )
    return SimpleNamespace(tree=tree, base=tree / fakes.BASE)


@pytest.fixture
def work(template, tmp_path):
    """A pristine tree beside a repository."""
    return copy_of(template, tmp_path)


@pytest.fixture(scope="session")
def applied_template(template, tmp_path_factory):
    """The template with its patches applied."""
    work = copy_of(template, tmp_path_factory.mktemp("applied"))
    work.apply()
    pack(work.tree)
    return work.tree.parent


@pytest.fixture
def applied(applied_template, tmp_path):
    """A patched tree beside a repository."""
    return copy_of(applied_template, tmp_path)
