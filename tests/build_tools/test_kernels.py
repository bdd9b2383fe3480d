# SPDX-License-Identifier: Apache-2.0
"""The grouped wgrad kernels: compiled again when anything they depend on changed, else not."""

import errno
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import scratch, snapshot, stops, write_program

from build_tools import build, bundle, bundle_install, environment, kernels
from build_tools.common import REPO, ToolError

# A stand-in for nvcc: it writes what it was called with, and how often.
NVCC = """
if [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; exit 0; fi
here=$(dirname "$0"); echo "$@" >> "$here/calls"
while [ "$1" != -o ]; do shift; done
{ echo compiled; wc -l < "$here/calls"; cat "$3"; } > "$2"
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A tree with kernels and a made-up nvcc. ``ask`` gives the library, ``calls`` the compilations."""
    tree, folder = tmp_path / "tree", tmp_path / "cuda/bin"
    (tree / kernels.FOLDER).mkdir(parents=True)
    for name in ("grouped_wgrad.cu", "common.cuh"):
        (tree / kernels.FOLDER / name).write_text(f"// {name}\n")
    nvcc = write_program(folder / "nvcc", NVCC)
    monkeypatch.setattr(environment, "compiler_version", lambda: "c++ 12")
    calls = folder / "calls"

    def ask(archs=None, tree=tree):
        return kernels.kernels(tree, archs, nvcc, tmp_path / "build")

    return SimpleNamespace(
        tree=tree, nvcc=nvcc, ask=ask, folder=tree / kernels.FOLDER, cache=tmp_path / "cache/kernels",
        calls=lambda: calls.read_text().splitlines() if calls.exists() else [],
    )  # fmt: skip


HOPPER = ["-gencode", "arch=compute_90a,code=sm_90a"]
OTHERS = ["-gencode", "arch=compute_80,code=[sm_80,compute_80]"]


@pytest.mark.parametrize(
    "archs, options",
    [
        (None, HOPPER + OTHERS),
        ({"90"}, HOPPER),
        ({"80"}, OTHERS),
        ({"80", "90"}, HOPPER + OTHERS),
        ({"89", "120"}, OTHERS),
        ({"75", "90"}, HOPPER),
        ({"75"}, []),
    ],
    ids=["all", "90", "80", "80-90", "89-120", "75-90", "75"],
)
def test_targets(archs, options):
    assert kernels.targets(archs) == options


def test_an_unchanged_library_is_kept(work, capsys):
    path = work.ask()
    assert path.name == "libte_grouped_wgrad.so"
    assert path.read_text().splitlines()[::2] == ["compiled", "// grouped_wgrad.cu"]
    assert work.ask() == path
    assert len(work.calls()) == 1
    told = capsys.readouterr().err
    assert "compiling the grouped wgrad kernels: 0 s" in told
    assert "grouped wgrad kernels: unchanged, taken from the cache" in told


CHANGES = {
    "source": lambda w, p: (w.folder / "grouped_wgrad.cu").write_text("// other\n"),
    "header": lambda w, p: (w.folder / "common.cuh").write_text("// other\n"),
    "new-header": lambda w, p: (w.folder / "new.cuh").write_text("// new\n"),
    "header-gone": lambda w, p: (w.folder / "common.cuh").unlink(),
    "nvcc": lambda w, p: write_program(w.nvcc, NVCC.replace("V13.0.88", "V13.0.99")),
    "compiler": lambda w, p: p.setattr(environment, "compiler_version", lambda: "c++ 13"),
    "options": lambda w, p: p.setattr(kernels, "OPTIONS", ("-O2", *kernels.OPTIONS)),
    "NVCC_APPEND_FLAGS": lambda w, p: p.setenv("NVCC_APPEND_FLAGS", "-G"),
    "CPATH": lambda w, p: p.setenv("CPATH", "/x"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_compiles_again(work, monkeypatch, change):
    work.ask()
    CHANGES[change](work, monkeypatch)
    work.ask()
    assert len(work.calls()) == 2
    work.ask()
    assert len(work.calls()) == 2


def test_each_set_of_architectures_has_its_library(work):
    assert work.ask({"90"}) != work.ask({"80", "90"}) == work.ask({"90", "89"})
    assert len(work.calls()) == 2
    assert "sm_80" not in work.calls()[0] and "sm_90a" in work.calls()[0]


def test_no_library_where_none_can_run(work, tmp_path):
    assert work.ask({"75"}) is None
    assert work.ask(tree=tmp_path / "pristine") is None
    assert work.calls() == []


@pytest.mark.parametrize("what", [kernels.LIBRARY, "sha256"])
@pytest.mark.parametrize(
    "damage", [lambda p: p.write_text("?"), Path.unlink], ids=["edited", "gone"]
)
def test_a_damaged_library_is_made_again(work, what, damage):
    path = work.ask()
    damage(path.with_name(what))
    assert work.ask() == path
    assert len(work.calls()) == 2 and path.read_text().startswith("compiled\n2")


@pytest.mark.parametrize(
    "nvcc, seen, next_step",
    [
        ("echo 'a.cu(3): error: no'; exit 1", "a.cu(3): error: no", "mend what nvcc names"),
        ("echo 'strange'; exit 1", "strange", "mend what nvcc names"),
        ("echo 'error: No space left on device'; exit 1", "No space left", "TE_WGRAD_CACHE"),
    ],
    ids=["error", "no-error-line", "disk-full"],
)
def test_kernels_that_do_not_compile(work, nvcc, seen, next_step):
    write_program(work.nvcc, f"{nvcc}\n")
    with stops(seen, next_step=next_step):
        work.ask()
    assert not work.cache.exists()


def test_a_full_disk_keeps_the_cache_clean(work, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(shutil, "copyfile", full)
    with stops("No space left", next_step="TE_WGRAD_CACHE"):
        work.ask()
    assert snapshot(work.cache) == {} and not scratch(work.cache)


def test_the_fork_has_kernels_and_stock_has_none(work, monkeypatch, tmp_path):
    staged = {}
    monkeypatch.setenv("NVTE_CUDA_ARCHS", "90")
    monkeypatch.setattr(build, "patched_tree", lambda: work.tree)
    monkeypatch.setattr(build, "nvcc", lambda: work.nvcc)
    monkeypatch.setattr(build, "stage", lambda target, **how: staged.update(how))
    monkeypatch.setattr(build, "make_tree", lambda: tmp_path)
    monkeypatch.setattr(build, "pristine_copy", lambda tree, pristine: None)
    monkeypatch.setattr(build, "extension", lambda *_: tmp_path / "ext")
    monkeypatch.setattr(build, "kernels", lambda tree, archs, nvcc: work.ask(archs, tree))
    build.stage_fork(tmp_path)
    assert staged.pop("library") == work.ask({"90"})
    build.stage_stock(tmp_path)
    assert staged["flavour"] == "stock" and "library" not in staged


# --- the bundle -------------------------------------------------------------


def test_a_bundle_carries_the_library_and_its_sources(work, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "cuda_toolkit", lambda major: work.nvcc)
    found = bundle.add_kernels(work.tree, {"90"}, 13, tmp_path / "kernels")
    assert found["file"] == kernels.LIBRARY and found["nvcc"][-2:] == HOPPER
    assert set(snapshot(tmp_path / "kernels")) == {
        kernels.LIBRARY, "grouped_wgrad.cu", "common.cuh",
    }  # fmt: skip
    assert bundle.add_kernels(work.tree, {"75"}, 13, tmp_path / "none") is None


def test_a_bundle_made_without_nvcc_carries_sources(work, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(environment.cuda_toolkit, "__defaults__", (tmp_path / "no-system",))
    found = bundle.add_kernels(work.tree, None, 13, tmp_path / "kernels")
    assert found["file"] is None
    assert set(snapshot(tmp_path / "kernels")) == {"grouped_wgrad.cu", "common.cuh"}
    assert "the node compiles the grouped wgrad kernels: No CUDA 13" in capsys.readouterr().err


@pytest.fixture
def node(work, tmp_path, monkeypatch):
    """An unpacked bundle on a node: ``ask`` for the library to install."""
    root = tmp_path / "bundle"
    (root / "kernels").mkdir(parents=True)
    (root / "kernels/grouped_wgrad.cu").write_text("// grouped_wgrad.cu\n")
    (root / "kernels" / kernels.LIBRARY).write_text("finished")
    manifest = {
        "cuda_major": 13,
        "kernels": {"file": kernels.LIBRARY, "source": kernels.SOURCE, "nvcc": ["-O3", *HOPPER]},
    }
    bad = set()
    monkeypatch.setattr(bundle_install, "loads", lambda path: path.read_text() not in bad)
    monkeypatch.setattr(bundle_install, "find_nvcc", lambda major: work.nvcc)

    def ask():
        return bundle_install.grouped_wgrad_library(root, tmp_path / "built", manifest)

    return SimpleNamespace(ask=ask, root=root, manifest=manifest, bad=bad)


def test_the_finished_library_is_installed(node, work):
    assert node.ask() == node.root / "kernels" / kernels.LIBRARY
    assert work.calls() == []


@pytest.mark.parametrize("why", ["not-in-the-bundle", "does-not-load"])
def test_the_node_compiles_it(node, work, tmp_path, why):
    if why == "does-not-load":
        node.bad.add("finished")
    else:
        node.manifest["kernels"]["file"] = None
    assert node.ask() == tmp_path / "built" / kernels.LIBRARY
    (call,) = work.calls()
    assert " ".join(HOPPER) in call and call.endswith("kernels/grouped_wgrad.cu")


@pytest.mark.parametrize("why", ["no-nvcc", "error"])
def test_a_node_goes_without_it(node, work, monkeypatch, capsys, why):
    node.manifest["kernels"]["file"] = None
    if why == "no-nvcc":
        monkeypatch.setattr(bundle_install, "find_nvcc", lambda major: None)
    else:
        write_program(work.nvcc, "echo 'a.cu(3): error: no' >&2; exit 1\n")
    assert node.ask() is None
    told = capsys.readouterr().out
    assert "cuBLAS serves" in told and {"no-nvcc": "CUDA_HOME", "error": "error: no"}[why] in told


def test_a_bundle_for_old_gpus_or_of_old_tools_has_none(node):
    node.manifest["kernels"] = None
    assert node.ask() is None
    del node.manifest["kernels"]
    assert node.ask() is None


def test_the_nvcc_of_the_right_version(tmp_path, monkeypatch):
    for name, version in (("cuda-12", "release 12.8"), ("cuda-13", "release 13.0")):
        write_program(tmp_path / name / "bin/nvcc", f"echo '{version}, V'\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-12"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert bundle_install.find_nvcc(13, tmp_path) == tmp_path / "cuda-13/bin/nvcc"
    assert bundle_install.find_nvcc(12, tmp_path) == tmp_path / "cuda-12/bin/nvcc"
    assert bundle_install.find_nvcc(11, tmp_path) is None


def test_the_installer_knows_the_librarys_name():
    assert bundle_install.KERNELS == kernels.LIBRARY


def test_a_library_that_does_not_load(tmp_path):
    (tmp_path / "x.so").write_text("no library")
    assert not bundle_install.loads(tmp_path / "x.so")


# --- the real one -----------------------------------------------------------


def test_the_command_in_the_source_is_this_one():
    """The comment that says how to compile by hand."""
    text = (REPO / kernels.FOLDER / kernels.SOURCE).read_text()
    written = "".join(
        line.removeprefix("//") for line in text.split("//   nvcc")[1].split("\n")[:3]
    )
    options = [*kernels.OPTIONS, *kernels.targets(None)]
    assert sorted(written.split(" -o ")[0].split()) == sorted(options)


def test_it_compiles(tmp_path):
    """With the toolkit that is here, for Hopper."""
    try:
        nvcc = environment.cuda_toolkit(13)
    except ToolError:
        pytest.skip("no CUDA 13 toolkit")
    path = kernels.kernels(REPO, {"90"}, nvcc, tmp_path / "build")
    assert bundle_install.loads(path)
    text = subprocess.run(["strings", path], text=True, capture_output=True).stdout
    assert "te_grouped_wgrad_version" in text
