# SPDX-License-Identifier: Apache-2.0
"""A tiny made-up upstream, pip and torch for the tests of the build tools."""

import contextlib
import tarfile
import textwrap
import zipfile

import pytest

from build_tools import gittree, tree
from build_tools.common import ToolError, sha256

BASE = "transformer_engine/pytorch/module/base.py"
# Each line once, so that a hunk has one place.
UPSTREAM = {
    "transformer_engine/__init__.py": "VERSION = 1\n",
    "transformer_engine/pytorch/__init__.py": "",
    "transformer_engine/pytorch/module/__init__.py": "",
    "transformer_engine/pytorch/notes/readme.txt": "a folder without __init__.py\n",
    BASE: "".join(f"line_{i} = {i}\n" for i in range(1, 41)),
}
SOURCES = {
    "csrc/extensions/pybind.cpp": "// the extension\n",
    "common_headers/common/common.h": "// a header\n",
    "LICENSE": "a license\n",
    "setup.py": "raise SystemExit('not part of the tree')\n",
}
CORE = {"libtransformer_engine.so": b"core" * 500, "libnccl_ep.so": b"nccl" * 50}
TRAILERS = textwrap.dedent("""\
    Upstream-Status: Pending
    Upstream-Base: v2.20.2
    Bug: https://example.com/issues/1
    Adds: transformer_engine/pytorch/module/_new.py
    Test: tests/pytorch/test_new.py::test_it
    Drop-When: upstream does it
    Signed-off-by: A Person <person@example.com>
    """)
MESSAGE = f"Symptom: wrong.\n\nCause: a typo.\n\nFix: mend it.\n\n{TRAILERS}"


@contextlib.contextmanager
def stops(*seen, next_step):
    """The block raises a ToolError that names all of ``seen`` and whose next step is given."""
    with pytest.raises(ToolError) as caught:
        yield
    message, what_next = caught.value.args[0], caught.value.next_step
    for text in seen:
        assert text in message, message
    assert next_step in what_next, what_next


def snapshot(folder):
    """Every file and its bytes below a folder (but git's own), and git's HEAD."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }
    if (folder / ".git/HEAD").is_file():
        files["HEAD"] = gittree.git(folder, "rev-parse", "HEAD")
    return files


def scratch(folder):
    """What is half-done below a folder: scratch folders and what is in them."""
    return sorted(p.name for p in folder.rglob("*") if p.name.startswith(".te-wgrad"))


def make_upstream(folder):
    """Write the pinned archives into ``folder`` and return their lock."""
    files = {
        "python": "transformer_engine-1-py3-none-any.whl",
        "sources": "transformer_engine_torch-1.tar.gz",
        "core_cu12": "transformer_engine_cu12-1-py3-none-manylinux_2_28_x86_64.whl",
        "core_cu13": "transformer_engine_cu13-1-py3-none-manylinux_2_28_x86_64.whl",
    }
    with zipfile.ZipFile(folder / files["python"], "w") as wheel:
        for name, text in UPSTREAM.items():
            wheel.writestr(name, text)
        wheel.writestr("transformer_engine-1.dist-info/METADATA", "Name: transformer_engine\n")
    for name, text in SOURCES.items():
        path = folder / "transformer_engine_torch-1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with tarfile.open(folder / files["sources"], "w:gz") as tar:
        tar.add(folder / "transformer_engine_torch-1", "transformer_engine_torch-1")
    for major in ("12", "13"):
        with zipfile.ZipFile(folder / files[f"core_cu{major}"], "w") as wheel:
            for name, data in CORE.items():
                wheel.writestr(f"transformer_engine/wheel_lib/{name}", data + major.encode())
            wheel.writestr("transformer_engine/wheel_lib/notes.txt", "not a library")
    lock = {"version": "2.20.2", "pristine_tree": "", "archives": {}}
    for role, file in files.items():
        lock["archives"][role] = {
            "requirement": f"{file.split('-')[0]}==1",
            "file": file,
            "size": (folder / file).stat().st_size,
            "sha256": sha256(folder / file),
        }
    # The hash that a right tree has, found with git itself.
    again = folder / "again"
    tree.unpack(folder / files["python"], folder / files["sources"], again)
    gittree.git(again, "init", "-q", "--template=")
    gittree.git(again, "add", "-A", "-f")
    lock["pristine_tree"] = gittree.git(again, "write-tree").strip()
    return lock


def edit(root, name, *changes):
    """Replace texts that occur once in a file."""
    text = (root / name).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (root / name).write_text(text)


def commit(root, subject, message=MESSAGE):
    """Commit everything in the tree."""
    gittree.git(root, "add", "-A")
    gittree.git(root, "commit", "-q", "-m", f"{subject}\n\n{message}", author=True)


def write_program(path, text):
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


FAKE_PIP = '''
"""pip, as far as `download` and `wheel` go: FAKE_PIP says how it ends."""
import os, pathlib, shutil, sys, time

mode = os.environ["FAKE_PIP"]
assert "PIP_CONSTRAINT" not in os.environ
options = sys.argv[1:]
if options[0] == "wheel":
    print("  [build_tools] staging ...")
    if mode == "wheel":
        folder = pathlib.Path(options[options.index("-w") + 1])
        (folder / "te-1-py3-none-any.whl").write_bytes(b"wheel")
        sys.exit(0)
    print("SyntaxError: a broken patch")
    print("OSError: [Errno 28] No space left on device" if mode == "full" else "error: of ours")
    print("error: subprocess-exited-with-error")
    print("pip's own summary")
    sys.exit(1)
folder = pathlib.Path(options[options.index("-d") + 1])
wanted = pathlib.Path(options[options.index("-r") + 1]).read_text()
index = pathlib.Path(os.environ["FAKE_INDEX"])
with open(index / "asked", "a") as log:
    log.write(wanted.split("==")[0] + "\\n")
if mode == "serve":
    shutil.copy(next(index.glob(wanted.split("==")[0] + "-*.*")), folder)
elif mode == "offline":
    print("WARNING: Retrying after connection broken by 'NewConnectionError(Failed to resolve)'")
    print("ERROR: No matching distribution found for " + wanted.split()[0])
    sys.exit(1)
elif mode == "mismatch":
    print("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\\n  Expected sha256 aaa\\n  Got        bbb")
    sys.exit(1)
elif mode == "full":
    print("ERROR: Could not install: [Errno 28] No space left on device")
    sys.exit(1)
elif mode == "hang":
    (folder / "partial.whl").write_bytes(b"half")
    (index / "started").write_text(str(os.getpid()))
    time.sleep(60)
'''
