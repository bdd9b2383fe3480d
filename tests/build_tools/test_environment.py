# SPDX-License-Identifier: Apache-2.0
"""Which Pythons, torches, toolkits, compilers and installed packages are refused, and how."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import stops, write_program

from build_tools import common, environment

REPO = Path(environment.__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "version, cuda, major",
    [("2.14.1+cu130", "13.0", 13), ("2.6.0+cu126", "12.6", 12), ("2.9.0a0+git1.nv25", "12.9", 12)],
)
def test_torch_that_fits(fake_torch, version, cuda, major):
    fake_torch(version, cuda, before="print('a greeting')")
    facts = environment.torch_facts()
    assert (facts.version, facts.cuda_major) == (version, major)
    assert facts.folder.endswith("site/torch")


@pytest.mark.parametrize(
    "version, cuda, seen, next_step",
    [
        ("2.14.1+cpu", None, "torch 2.14.1+cpu", "install a CUDA build of torch"),
        ("2.6.0+cu118", "11.8", "built for CUDA 11.8", "CUDA 12 or 13"),
        ("2.20.0+cu140", "14.0", "built for CUDA 14.0", "CUDA 12 or 13"),
        ("2.5.1+cu124", "12.4", "torch 2.5.1+cu124", "2.6 or newer"),
    ],
    ids=["cpu", "cuda-11", "cuda-14", "old"],
)
def test_torch_that_does_not_fit(fake_torch, version, cuda, seen, next_step):
    fake_torch(version, cuda)
    with stops(seen, next_step=next_step):
        environment.torch_facts()


def test_no_torch(fake_torch):
    fake_torch("1", None, before="raise ModuleNotFoundError(\"No module named 'torch'\")")
    with stops("cannot import torch", "No module named 'torch'", next_step="--no-build-isolation"):
        environment.torch_facts()


def test_a_torch_that_was_refused_is_asked_again(fake_torch):
    fake_torch("2.14.1", None)
    with pytest.raises(common.ToolError):
        environment.torch_facts()
    fake_torch("2.14.1", "13.0")
    assert environment.torch_facts().cuda_major == 13


@pytest.mark.parametrize("version", [(3, 8), (3, 9)])
def test_an_old_python_is_refused(version):
    with stops(f"Python {version[0]}.{version[1]}", "3.10", next_step="python3.12 -m venv"):
        common.require_python(version)


def test_python_310_is_accepted():
    common.require_python((3, 10))


@pytest.mark.parametrize("name", ["setup.py", "build_tools/__main__.py", "build_tools/common.py"])
def test_an_old_python_can_read_what_refuses_it(name):
    ast.parse((REPO / name).read_text(), feature_version=(3, 8))


def nvcc(path, release):
    return write_program(path, f"echo 'Cuda compilation tools, release {release}, V{release}.1'\n")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A /usr/local without CUDA, and a PATH without nvcc."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    folder = tmp_path / "local"
    folder.mkdir()
    return folder


def test_no_toolkit(system, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with stops("No CUDA 13 toolkit (nvcc) found.", next_step="set CUDA_HOME"):
        environment.cuda_toolkit(13, system)


def test_a_toolkit_of_another_major_version(system):
    found = nvcc(system / "cuda-12.8/bin/nvcc", "12.8")
    with stops(f"{found} (release 12.8)", next_step="install the CUDA 13 toolkit"):
        environment.cuda_toolkit(13, system)


def test_where_a_toolkit_is_looked_for(system, tmp_path, monkeypatch):
    last = nvcc(system / "cuda-13.0/bin/nvcc", "13.0")
    nvcc(system / "cuda-12.8/bin/nvcc", "12.8")
    assert environment.cuda_toolkit(13, system) == last
    on_path = nvcc(tmp_path / "bin/nvcc", "13.1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert environment.cuda_toolkit(13, system) == on_path
    home = nvcc(tmp_path / "home/bin/nvcc", "13.2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert environment.cuda_toolkit(13, system) == home
    home.chmod(0o644)  # it cannot be run
    assert environment.cuda_toolkit(13, system) == on_path
    nvcc(home, "12.0")  # of another version
    assert environment.cuda_toolkit(13, system) == on_path


def test_an_empty_cuda_home_is_not_the_working_folder(system, tmp_path, monkeypatch):
    nvcc(tmp_path / "bin/nvcc", "13.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setenv("PATH", str(system))
    with stops("No CUDA 13 toolkit", next_step="CUDA_HOME"):
        environment.cuda_toolkit(13, system)


def test_the_compiler(tmp_path, monkeypatch):
    write_program(tmp_path / "bin/g++", 'echo "g++ 12.2 $*"\necho more\n')
    write_program(tmp_path / "bin/ccache", 'shift; echo "behind $*"\n')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CXX", "g++")
    assert environment.compiler_version() == "g++ 12.2 --version"
    monkeypatch.setenv("CXX", "ccache g++")
    assert environment.compiler_version() == "behind --version"
    for missing in ("clang++", "ccache clang++"):
        monkeypatch.setenv("CXX", missing)
        with stops(f"No C++ compiler ({missing})", next_step="install g++"):
            environment.compiler_version()


@pytest.mark.parametrize("name", [f"transformer_engine_{n}" for n in ("torch", "cu12", "cu13")])
def test_stock_packages_beside_the_fork(tmp_path, name, monkeypatch):
    info = tmp_path / f"{name}-2.20.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.20.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with stops(f"{name} 2.20.2", sys.executable, next_step=f"-m pip uninstall -y {name}"):
        environment.refuse_stock()
    monkeypatch.setenv("TE_WGRAD_ALLOW_STOCK", "1")
    environment.refuse_stock()


def test_nothing_stock_is_no_problem():
    assert environment.installed(("a-package-that-nobody-has",)) == {}
    environment.refuse_stock()


def setup_py(code, cwd=REPO):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, text=True, capture_output=True)


def test_pip_is_told_what_is_wrong_without_a_traceback(fake_torch, tmp_path):
    fake_torch("2.14.1+cpu", None)
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=REPO, text=True, capture_output=True
    )
    assert done.returncode == 1
    assert "CPU-only" in done.stderr and "next: install a CUDA build" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_wheel_declares_what_upstream_needs(fake_torch, tmp_path):
    pytest.importorskip("setuptools")
    fake_torch("2.14.1+cu130", "13.0")
    code = (
        "import setuptools.build_meta as b, pathlib, sys\n"
        f"out = pathlib.Path({str(tmp_path)!r})\n"
        "name = b.prepare_metadata_for_build_wheel(str(out))\n"
        "sys.stderr.write((out / name / 'METADATA').read_text())"
    )
    done = setup_py(code)
    assert done.returncode == 0, done.stderr
    rows = [row for row in done.stderr.split("\n\n")[0].splitlines()]
    needs = {row.split(": ")[1] for row in rows if row.startswith("Requires-Dist")}
    # transformer_engine_torch 2.20.2 and transformer_engine_cu13 2.20.2 together; torch as tested.
    assert needs == {
        "torch>=2.6", "einops", "onnxscript", "onnx", "packaging", "pydantic", "nvdlfw-inspect",
        "nvidia-cudnn-frontend>=1.29.0", "importlib-metadata>=1.0",
    }  # fmt: skip
    assert "Name: transformer_engine" in rows
    assert "Requires-Python: >=3.10" in rows
