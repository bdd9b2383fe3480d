# SPDX-License-Identifier: Apache-2.0
"""The bundle's packing and its installer's checks: no GPU, no torch, no network."""

import shutil
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from build_tools import bundle, bundle_install
from build_tools.common import ToolError

EXT = {"file": "x.so", "torch": "2.14.1+cu130", "python": "3.12"}
MANIFEST = {
    "schema": 1,
    "python": "3.12",
    "cuda_major": 13,
    "archs": ["90"],
    "ext": EXT,
    "sources": False,
    "wheels": [{"name": "einops"}],
}
NODE = {
    "python": "3.12",
    "machine": "x86_64",
    "torch": "2.14.1+cu130",
    "torch_cuda": "13.0",
    "gpus": ["90"],
    "distributions": {},
}


def test_a_fitting_node_has_no_problems():
    assert bundle_install.check_node(MANIFEST, NODE) == []
    assert bundle_install.check_node(MANIFEST, {**NODE, "gpus": []}) == []
    ours = {"transformer-engine": "2.20.2+wgrad.1"}
    assert bundle_install.check_node(MANIFEST, {**NODE, "distributions": ours}) == []


@pytest.mark.parametrize(
    "change, message, next_step",
    [
        ({"python": "3.11"}, "for Python 3.12, this is 3.11", "--python-version 3.11"),
        ({"machine": "aarch64"}, "aarch64", "x86_64"),
        ({"torch": None, "torch_cuda": None}, "no torch", "CUDA 13"),
        ({"torch_cuda": None}, "CPU only", "CUDA 13"),
        ({"torch_cuda": "12.8"}, "CUDA 12.8", "CUDA 13"),
        ({"torch": "2.13.0+cu130"}, "torch 2.14.1", "--ext-sources"),
        ({"gpus": ["80"]}, "sm_80", "--archs 80"),
        (
            {"distributions": {"transformer-engine-cu13": "2.20.2"}},
            "transformer-engine-cu13 2.20.2",
            "pip uninstall -y transformer-engine-cu13",
        ),
        (
            {"distributions": {"transformer-engine": "2.20.2"}},
            "transformer-engine 2.20.2",
            "pip uninstall -y transformer-engine",
        ),
    ],
)
def test_each_mismatch_is_named(change, message, next_step):
    problems = bundle_install.check_node(MANIFEST, {**NODE, **change})
    assert any(message in p.message and next_step in p.next_step for p in problems)


def test_sources_serve_another_torch():
    manifest = {**MANIFEST, "sources": True}
    node = {**NODE, "torch": "2.13.0+cu130"}
    assert bundle_install.check_node(manifest, node) == []
    assert not bundle_install.ext_fits(manifest, node)


def test_missing_and_old_wheels_are_chosen():
    def wheel(name, at_least=None, role="run"):
        return {"name": name, "file": name, "role": role, "at_least": at_least}

    manifest = {
        "wheels": [
            wheel("pydantic"),
            wheel("pydantic-core"),
            wheel("typing-extensions", "4.16.0"),
            wheel("einops"),
            wheel("pytest", role="test"),
        ]
    }
    have = {"pydantic-core": "1.0", "typing-extensions": "4.9.0", "einops": "0.8"}
    chosen = bundle_install.missing_wheels(manifest, have, {"run"})
    assert chosen == ["pydantic", "pydantic-core", "typing-extensions"]


def test_requirements_of_a_wheel(tmp_path):
    path = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "a-1.dist-info/METADATA",
            "Requires-Dist: typing-extensions>=4.16.0\nRequires-Dist: b_c==2.50.5\n"
            "Requires-Dist: d\nRequires-Dist: e>=2; extra == 'x'\n",
        )
    assert bundle.lowest_versions(path) == {"typing-extensions": "4.16.0", "b-c": "2.50.5"}


def test_packing_repeats_and_damage_is_found(tmp_path):
    root = tmp_path / "b"
    (root / "d").mkdir(parents=True)
    (root / "d/f").write_text("text")
    files = bundle.hashes(root)
    assert bundle_install.damaged_files(root, files) == []
    bundle.pack(root, tmp_path / "1.tar.xz")
    (root / "d/f").touch()
    bundle.pack(root, tmp_path / "2.tar.xz")
    assert (tmp_path / "1.tar.xz").read_bytes() == (tmp_path / "2.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "1.tar.xz") as archive:
        assert archive.getnames() == ["b", "b/d", "b/d/f"]
    (root / "d/f").write_text("test")
    assert bundle_install.damaged_files(root, files) == ["d/f"]


def test_an_extension_for_another_python_is_refused(tmp_path):
    path = tmp_path / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so"
    path.write_text("")
    with pytest.raises(ToolError, match="3.11, the bundle for 3.12"):
        bundle.describe_ext(path, "3.12", "2.14.1")
    assert bundle.describe_ext(path, "3.11", "2.14.1")["python"] == "3.11"


def test_the_installed_package_declares_its_requirements(tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    manifest = {"version": "2.20.2+wgrad.1", "python": "3.12", "requires": ["einops", "onnx>=1"]}
    info = bundle_install.write_dist_info(tmp_path, manifest, {})
    assert Distribution.at(info).requires == ["einops", "onnx>=1"]
    del manifest["requires"]  # an older bundle
    shutil.rmtree(info)
    assert Distribution.at(bundle_install.write_dist_info(tmp_path, manifest, {})).requires is None


def test_a_failed_swap_puts_the_old_installation_back(tmp_path, monkeypatch):
    target, stage = tmp_path / "t", tmp_path / "t/.s"
    for base, text in ((target, "old"), (stage, "new")):
        (base / "transformer_engine").mkdir(parents=True)
        (base / "transformer_engine/f").write_text(text)
    (stage / "transformer_engine-1.dist-info").mkdir()
    replace = bundle_install.os.replace

    def failing(source, place):
        if Path(source) == stage / "transformer_engine-1.dist-info":
            raise OSError("disk")
        replace(source, place)

    monkeypatch.setattr(bundle_install.os, "replace", failing)
    with pytest.raises(OSError, match="disk"):
        bundle_install.swap_in(stage, target)
    assert (target / "transformer_engine/f").read_text() == "old"
