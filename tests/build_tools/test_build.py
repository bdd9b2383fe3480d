# SPDX-License-Identifier: Apache-2.0
"""The wheel and the extension: made again when anything they depend on changed, else not."""

import errno
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import BASE, CORE, edit, scratch, snapshot, stops, write_program

from build_tools import build, environment
from build_tools.common import REPO, ToolError

OVERLAY = "transformer_engine/pytorch/module/_new.py"
KERNELS = "transformer_engine/pytorch/csrc/wgrad_kernels/grouped_wgrad.cu"
CPP = "transformer_engine/pytorch/csrc/extensions/pybind.cpp"
SUFFIX = environment.extension_suffix()
EXT = f"transformer_engine_torch{SUFFIX}"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A made-up torch, toolkit and compiler, whose parts a test can change."""
    folder = tmp_path / "machine"
    torch = folder / "site/torch"
    torch.mkdir(parents=True)
    nvcc = write_program(folder / "cuda/bin/nvcc", "echo 'release 13.0, V13.0.88'\n")
    found = SimpleNamespace(
        torch=environment.TorchFacts("2.14.1+cu130", "13.0", str(torch)),
        suffix=SUFFIX, compiler="c++ 12", nvcc=nvcc, folder=folder,
    )  # fmt: skip
    monkeypatch.setattr(environment, "torch_facts", lambda: found.torch)
    monkeypatch.setattr(environment, "cuda_toolkit", lambda major: found.nvcc)
    monkeypatch.setattr(environment, "compiler_version", lambda: found.compiler)
    monkeypatch.setattr(environment, "extension_suffix", lambda: found.suffix)
    return found


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A copy of what the tools read of this repository."""
    folder = tmp_path / "checkout"
    (folder / "build_tools").mkdir(parents=True)
    for name in (*build.WHEEL_FILES, "CMakeLists.txt", "build_tools/prune.py"):
        shutil.copy(REPO / name, folder / name)
    monkeypatch.setattr(build, "REPO", folder)
    return folder


@pytest.fixture
def wheels(plain, machine, repo, tmp_path, monkeypatch):
    """Ask for the wheel; ``made`` counts how often it was built."""
    state = SimpleNamespace(made=0, out=tmp_path / "dist", work=plain)
    write(plain.tree / KERNELS)

    def pip_wheel(folder):
        state.made += 1
        path = folder / "te-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name in ("libtransformer_engine.so", "libte_grouped_wgrad.so"):
                wheel.writestr(f"transformer_engine/{name}", str(state.made))
        return path

    def ask():
        return build.build_wheel(state.out, tree=plain.tree)

    monkeypatch.setattr(build, "pip_wheel", pip_wheel)
    state.ask = ask
    return state


def append(path, text="\n# more\n"):
    path.write_text(path.read_text() + text)


def write(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def hide_strip(monkeypatch):
    real = shutil.which
    monkeypatch.setattr(
        build.shutil, "which", lambda n, **o: None if n == "strip" else real(n, **o)
    )


# Name: a change of (work, machine, repo, monkeypatch) after which an old wheel would be wrong.
WHEEL_CHANGES = {
    "python-file": lambda w, m, r, p: append(w.base),
    "overlay": lambda w, m, r, p: append(w.tree / OVERLAY),
    "overlay-gone": lambda w, m, r, p: (w.tree / OVERLAY).unlink(),
    "kernels": lambda w, m, r, p: append(w.tree / KERNELS),
    "archs": lambda w, m, r, p: p.setenv("NVTE_CUDA_ARCHS", "90"),
    "torch": lambda w, m, r, p: setattr(m, "torch", m.torch.__class__("2.15", "13.0", "x")),
    "compiler": lambda w, m, r, p: setattr(m, "compiler", "c++ 13"),
    "readme": lambda w, m, r, p: append(r / "README.md"),
    "license": lambda w, m, r, p: append(r / "LICENSE"),
    "notice": lambda w, m, r, p: append(r / "NOTICE"),
    "setup": lambda w, m, r, p: append(r / "setup.py"),
    "pyproject": lambda w, m, r, p: append(r / "pyproject.toml"),
    "tools": lambda w, m, r, p: append(r / "build_tools/prune.py"),
    "cmake": lambda w, m, r, p: append(r / "CMakeLists.txt"),
    "pins": lambda w, m, r, p: p.setattr(build, "load_lock", lambda: {"version": "3"}),
    "commit": lambda w, m, r, p: p.setattr(build, "git_commit", lambda: "1234"),
    "strip": lambda w, m, r, p: hide_strip(p),
    "setuptools": lambda w, m, r, p: p.setattr(build, "version_of", lambda name: "0"),
}


def test_an_unchanged_wheel_is_kept(wheels, capsys):
    path = wheels.ask()
    assert path == wheels.out / "te-1-py3-none-any.whl"
    before = snapshot(wheels.out)
    assert set(before) == {path.name, "wheel.json"}
    assert wheels.ask() == path
    assert wheels.made == 1
    assert snapshot(wheels.out) == before
    assert "wheel: unchanged" in capsys.readouterr().err


@pytest.mark.parametrize("change", WHEEL_CHANGES)
def test_a_change_makes_a_new_wheel(wheels, machine, repo, monkeypatch, change):
    wheels.ask()
    WHEEL_CHANGES[change](wheels.work, machine, repo, monkeypatch)
    wheels.ask()
    assert wheels.made == 2
    wheels.ask()
    assert wheels.made == 2


def test_a_changed_patch_or_overlay_file_makes_a_new_wheel(wheels, applied, monkeypatch):
    monkeypatch.setattr(build, "make_tree", lambda: applied.tree)
    monkeypatch.setattr(build, "apply", lambda tree: applied.apply())
    build.build_wheel(wheels.out)
    edit(applied.patches, "core/first.patch", ("+extra = 1", "+extra = 2"))
    build.build_wheel(wheels.out)
    assert wheels.made == 2
    append(applied.repo / OVERLAY)
    build.build_wheel(wheels.out)
    build.build_wheel(wheels.out)
    assert wheels.made == 3


def test_other_words_for_the_same_archs(wheels, monkeypatch):
    monkeypatch.setenv("NVTE_CUDA_ARCHS", "80;90")
    wheels.ask()
    monkeypatch.setenv("NVTE_CUDA_ARCHS", "sm_90, 8.0")
    wheels.ask()
    assert wheels.made == 1


def test_native_means_the_gpus_of_this_machine(wheels, monkeypatch):
    monkeypatch.setenv("NVTE_CUDA_ARCHS", "native")
    monkeypatch.setattr("build_tools.prune.native_archs", lambda: {"90"})
    wheels.ask()
    monkeypatch.setattr("build_tools.prune.native_archs", lambda: {"80"})
    wheels.ask()
    assert wheels.made == 2


def test_wrong_archs_stop_before_anything_is_made(wheels, monkeypatch):
    monkeypatch.setenv("NVTE_CUDA_ARCHS", "h100")
    with stops("'h100'", "names no GPU architecture", next_step="--archs 90"):
        wheels.ask()
    assert wheels.made == 0 and not wheels.out.exists()


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def edited(path):
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize("damage", [cut, edited, Path.unlink], ids=["cut", "edited", "gone"])
@pytest.mark.parametrize("what", ["wheel", "record"])
def test_a_damaged_wheel_or_record_is_made_again(wheels, damage, what):
    path = wheels.ask()
    damage(path if what == "wheel" else wheels.out / "wheel.json")
    wheels.ask()
    assert wheels.made == 2
    assert zipfile.is_zipfile(path)


def test_stock_packages_stop_it(wheels, monkeypatch):
    monkeypatch.setattr(environment, "installed", lambda: {"transformer_engine_torch": "2.20.2"})
    with stops("transformer_engine_torch 2.20.2", next_step="-m pip uninstall -y transformer_eng"):
        wheels.ask()
    assert wheels.made == 0


@pytest.mark.parametrize(
    "error", [ToolError("x", "y"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")],
    ids=["error", "ctrl-c", "disk-full"],
)  # fmt: skip
def test_a_failed_build_keeps_the_old_wheel(wheels, monkeypatch, error):
    wheels.ask()
    before = snapshot(wheels.out)
    append(wheels.work.base)

    def fails(folder):
        (folder / "half.whl").write_bytes(b"half")
        raise error

    monkeypatch.setattr(build, "pip_wheel", fails)
    with pytest.raises((ToolError, KeyboardInterrupt)):
        wheels.ask()
    assert snapshot(wheels.out) == before and not scratch(wheels.out)


@pytest.mark.parametrize("missing", ["core library", "grouped wgrad kernels"])
def test_a_wheel_without_a_library_is_not_kept(wheels, monkeypatch, missing):
    names = {
        "core library": "libtransformer_engine.so",
        "grouped wgrad kernels": "libte_grouped_wgrad.so",
    }

    def lacking(folder):
        with zipfile.ZipFile(folder / "te-1.whl", "w") as wheel:
            for what, name in names.items():
                if what != missing:
                    wheel.writestr(f"transformer_engine/{name}", "x")
        return folder / "te-1.whl"

    monkeypatch.setattr(build, "pip_wheel", lacking)
    with stops(f"holds no {missing}", next_step="report"):
        wheels.ask()
    assert snapshot(wheels.out) == {}


def test_a_wheel_for_old_gpus_needs_no_kernels(wheels, monkeypatch):
    monkeypatch.setenv("NVTE_CUDA_ARCHS", "75")
    monkeypatch.setattr(build, "LIBRARY", "something-else.so")
    wheels.ask()
    assert wheels.made == 1


@pytest.mark.parametrize(
    "mode, seen, next_step",
    [
        ("fail", "SyntaxError: a broken patch\nerror: of ours", "python -m build_tools build"),
        ("full", "No space left", "TE_WGRAD_CACHE"),
    ],
)
def test_what_pip_says_while_it_builds(fake_pip, tmp_path, mode, seen, next_step, capsys):
    fake_pip(mode)
    with stops(seen, next_step=next_step):
        build.pip_wheel(tmp_path)
    assert "[build_tools]   staging" in capsys.readouterr().err


def test_pip_makes_the_wheel(fake_pip, tmp_path):
    fake_pip("wheel")
    assert build.pip_wheel(tmp_path).read_bytes() == b"wheel"


@pytest.mark.parametrize("module", ["setuptools", "wheel"])
def test_a_missing_build_package(fake_pip, site, tmp_path, module):
    fake_pip("wheel")
    (site / f"{module}.py").write_text("raise ImportError\n")
    with stops(f"{module} is not installed", next_step=f"-m pip install {module}"):
        build.pip_wheel(tmp_path)


# --- the extension ----------------------------------------------------------


@pytest.fixture
def extensions(plain, machine, repo, tmp_path, monkeypatch):
    """Ask for the extension; ``made`` counts how often it was compiled."""
    state = SimpleNamespace(made=0, cache=tmp_path / "cache/ext", work=plain)

    def compile_extension(tree, folder, facts):
        state.made += 1
        write(folder / EXT, f"compiled {state.made} " + "x" * 100)

    def ask():
        return build.extension(plain.tree, tmp_path / "build/ext")

    monkeypatch.setattr(build, "compile_extension", compile_extension)
    state.ask = ask
    return state


NVIDIA = "site/nvidia"
VARIABLES = (
    "CXX", "CXXFLAGS", "LDFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH",
    "CMAKE_PREFIX_PATH", "CMAKE_BUILD_TYPE", "CUDAToolkit_ROOT", "NCCL_HOME", "Torch_DIR",
    "Torch_ROOT", "pybind11_ROOT", "NVTE_WITH_NCCL_EP", "NVTE_BUILD_DEBUG",
)  # fmt: skip
EXT_CHANGES = {
    "source": lambda w, m, r, p: append(w.tree / CPP),
    "header": lambda w, m, r, p: append(w.tree / "transformer_engine/common/common.h"),
    "new-source": lambda w, m, r, p: write(w.tree / "transformer_engine/pytorch/csrc/a.cpp"),
    "cmake": lambda w, m, r, p: append(r / "CMakeLists.txt"),
    "torch": lambda w, m, r, p: setattr(
        m, "torch", m.torch.__class__("2.15", "13.0", m.torch.folder)
    ),
    "torch-cuda": lambda w, m, r, p: setattr(
        m, "torch", m.torch.__class__(m.torch.version, "13.1", m.torch.folder)
    ),
    "compiler": lambda w, m, r, p: setattr(m, "compiler", "c++ 13"),
    "nvcc": lambda w, m, r, p: write_program(m.nvcc, "echo 'release 13.0, V13.0.99'\n"),
    "pybind11": lambda w, m, r, p: p.setattr(build, "version_of", lambda name: "0"),
    "nccl": lambda w, m, r, p: write(m.folder / NVIDIA / "nccl/include/nccl.h"),
    "cudnn": lambda w, m, r, p: write(m.folder / NVIDIA / "cudnn/include/cudnn_version.h"),
    "cublas": lambda w, m, r, p: write(m.folder / NVIDIA / "cu13/include/cublas_api.h"),
    **{name: lambda w, m, r, p, name=name: p.setenv(name, "/x") for name in VARIABLES},
}


@pytest.mark.parametrize("change", EXT_CHANGES)
def test_a_change_compiles_again(extensions, machine, repo, monkeypatch, change):
    extensions.ask()
    EXT_CHANGES[change](extensions.work, machine, repo, monkeypatch)
    extensions.ask()
    assert extensions.made == 2
    extensions.ask()
    assert extensions.made == 2


def test_another_python_compiles_again(extensions, machine):
    facts = build.compile_facts()
    machine.suffix = ".cpython-313-x86_64-linux-gnu.so"
    assert build.compile_facts() != facts


@pytest.mark.parametrize("variable", ["CPATH", "CPLUS_INCLUDE_PATH", "NCCL_HOME"])
def test_headers_where_the_compiler_is_told_to_look(machine, repo, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path / "more"))
    folder = tmp_path / "more" / ("include" if variable == "NCCL_HOME" else "")
    facts = build.compile_facts()
    write(folder / "nccl.h", "2.30")
    changed = build.compile_facts()
    assert facts != changed
    write(folder / "nccl.h", "2.31")
    assert build.compile_facts() not in (facts, changed)


def test_headers_of_the_system(tmp_path):
    found = build.header_folders(tmp_path / "site/torch", tmp_path)
    assert tmp_path / "usr/include" in found


@pytest.mark.parametrize(
    "change",
    [
        lambda work, patch: append(work.tree / BASE),
        lambda work, patch: write(work.tree / KERNELS),
        lambda work, patch: patch.setenv("NVTE_CUDA_ARCHS", "90"),
        lambda work, patch: patch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "2"),
        lambda work, patch: patch.setenv("MAX_JOBS", "2"),
    ],
    ids=["python-file", "kernels", "archs", "parallel-level", "max-jobs"],
)
def test_what_it_does_not_depend_on(extensions, monkeypatch, change):
    extensions.ask()
    change(extensions.work, monkeypatch)
    extensions.ask()
    assert extensions.made == 1


@pytest.mark.parametrize("damage", [cut, edited, Path.unlink], ids=["cut", "edited", "gone"])
@pytest.mark.parametrize("what", [EXT, "sha256"])
def test_a_damaged_cached_extension_is_made_again(extensions, damage, what):
    path = extensions.ask()
    good = path.read_text()
    damage(path.with_name(what))
    assert extensions.ask() == path
    assert extensions.made == 2
    assert path.read_text() == good.replace("1", "2", 1)


def test_a_full_disk_keeps_the_cache_clean(extensions, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(build.shutil, "copyfile", full)
    with stops("No space left", next_step="TE_WGRAD_CACHE"):
        extensions.ask()
    assert list(extensions.cache.iterdir()) == []


# --- compiling --------------------------------------------------------------


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Stand-ins for cmake and ninja; ninja makes the extension from ``build/object``."""
    folder = tmp_path / "tools"
    write_program(folder / "cmake", 'echo "$@" >> "$(dirname "$0")/configured"\n')
    write_program(
        folder / "ninja",
        'cd "$2"; echo "[1/1] $@"; [ -e object ] || echo compiled > object\n' f"cp object {EXT}\n",
    )
    monkeypatch.setattr(build, "need_tool", lambda name: str(folder / name))
    return folder


@pytest.fixture
def compiles(plain, machine, repo, tools, tmp_path):
    folder = tmp_path / "build/ext"

    def ask():
        build.compile_extension(plain.tree, folder, build.compile_facts())

    return SimpleNamespace(ask=ask, folder=folder, object=folder / "object")


def test_objects_are_kept_while_the_environment_is_the_same(compiles, tools):
    compiles.ask()
    write(compiles.object, "kept")
    compiles.ask()
    assert (compiles.folder / EXT).read_text() == "kept"
    assert "-DTE_TREE=" in (tools / "configured").read_text()


@pytest.mark.parametrize("change", ["compiler", "flags", "torch", "unknown"])
def test_objects_of_another_environment_are_thrown_away(
    compiles, machine, monkeypatch, change, capsys
):
    compiles.ask()
    write(compiles.object, "stale")
    if change == "compiler":  # upgraded in place: the same command line
        machine.compiler = "c++ 13"
    elif change == "flags":
        monkeypatch.setenv("CXXFLAGS", "-march=native")
    elif change == "torch":
        machine.torch = machine.torch.__class__("2.15", "13.0", machine.torch.folder)
    else:
        (compiles.folder / "facts.json").unlink()
    compiles.ask()
    assert (compiles.folder / EXT).read_text() == "compiled\n"
    word = {"flags": "CXXFLAGS", "unknown": "no record"}.get(change, change)
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    "ninja, seen, next_step",
    [
        ("echo 'a.cpp:3: error: no'; exit 1", "a.cpp:3: error: no", "mend the C++"),
        ("echo 'c++: fatal error: Killed'; exit 1", "Killed", "MAX_JOBS=1"),
        ("echo 'error: No space left on device'; exit 1", "No space left", "TE_WGRAD_CACHE"),
    ],
    ids=["error", "killed", "disk-full"],
)
def test_an_extension_that_does_not_compile(
    plain, machine, repo, tools, tmp_path, ninja, seen, next_step
):
    write_program(tools / "ninja", ninja + "\n")
    with stops(seen, next_step=next_step):
        build.extension(plain.tree, tmp_path / "build/ext")
    assert not (tmp_path / "cache").exists()


def test_cmake_that_fails(plain, machine, repo, tools, tmp_path):
    write_program(tools / "cmake", "echo noise; echo 'CMake Error: no torch'; exit 1\n")
    with stops("CMake Error: no torch", next_step="configure.log"):
        build.extension(plain.tree, tmp_path / "build/ext")
    assert not (tmp_path / "cache").exists()


def test_a_missing_tool():
    with stops("no-such-tool is not installed", next_step="-m pip install no-such-tool"):
        build.need_tool("no-such-tool")


@pytest.mark.parametrize("value, option", [("0", "OFF"), ("1", "ON"), (None, "AUTO")])
def test_options_for_cmake(machine, monkeypatch, value, option):
    if value:
        monkeypatch.setenv("NVTE_WITH_NCCL_EP", value)
        monkeypatch.setenv("NVTE_BUILD_DEBUG", value)
    options = build.cmake_options(Path("/tree"))
    assert f"-DTE_WITH_NCCL_EP={option}" in options
    assert f"-DTE_DEBUG_SYMBOLS={'ON' if value == '1' else 'OFF'}" in options
    assert f"-DCMAKE_CUDA_COMPILER={machine.nvcc}" in options


# --- what goes into the wheel -----------------------------------------------


@pytest.fixture
def staged(plain, machine, repo, lock, archives, tmp_path):
    def ask(archs=None, flavour="fork", **more):
        write(tmp_path / EXT, "extension")
        build.stage(
            tmp_path / "lib", tree=plain.tree, archs=archs, ext=tmp_path / EXT, flavour=flavour,
            **more,
        )  # fmt: skip
        return tmp_path / "lib/transformer_engine"

    return ask


def test_the_staged_package(staged, plain):
    package = staged()
    files = snapshot(package)
    assert files["pytorch/module/base.py"] == plain.base.read_bytes()
    assert "pytorch/module/_new.py" in files
    assert files[EXT] == b"extension"
    assert files["libtransformer_engine.so"] == CORE["libtransformer_engine.so"] + b"13"
    assert not [name for name in files if Path(name).suffix in build.CXX_SUFFIXES]
    info = json.loads(files["wgrad_build.json"])
    assert (info["archs"], info["torch"], info["cuda"]) == ("all", "2.14.1+cu130", "13.0")
    assert info["version"].startswith("2.20.2+wgrad.")


def test_the_kernels_are_staged_beside_the_extension(staged, tmp_path):
    write(tmp_path / "libte_grouped_wgrad.so", "kernels")
    files = snapshot(staged(library=tmp_path / "libte_grouped_wgrad.so"))
    assert files["libte_grouped_wgrad.so"] == b"kernels"


def test_files_of_an_earlier_build_do_not_stay(staged):
    package = staged()
    fresh = snapshot(package)
    write(package / "pytorch/dropped.py")
    write(package / "libold.so")
    staged()
    assert snapshot(package) == fresh


def test_a_pruned_core_library(staged, monkeypatch):
    calls = []

    def prune(source, target, archs):
        shutil.copy(source, target)
        calls.append((target.name, archs))

    monkeypatch.setattr(build, "prune", prune)
    monkeypatch.setattr(build, "verify_loads", lambda path: calls.append(path.name))
    package = staged(archs={"90"}, flavour="stock")
    assert calls == [("libtransformer_engine.so", {"90"}), "libtransformer_engine.so"]
    info = json.loads((package / "wgrad_build.json").read_text())
    assert (info["archs"], info["version"]) == (["90"], "2.20.2")


def test_the_commit_is_recorded(repo):
    assert build.git_commit() is None
    for arguments in (["init", "-q"], ["add", "README.md"]):
        subprocess.run(["git", *arguments], cwd=repo, check=True)
    author = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *author, "commit", "-q", "-m", "x"], cwd=repo, check=True)
    clean = build.git_commit()
    assert len(clean) == 12
    append(repo / "README.md")
    assert build.git_commit() == f"{clean}+edits"
