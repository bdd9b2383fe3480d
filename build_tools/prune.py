# SPDX-License-Identifier: Apache-2.0
"""Copy libtransformer_engine.so, keeping the machine code of chosen GPU architectures only.

The prebuilt library holds kernels for eight architectures. Section ``.nv_fatbin`` is a
run of fatbins, each a header and a list of entries, one per architecture. Pruning
zeroes the payload of the entries that the wanted architectures cannot use and leaves
every header where it is, so no offset in the file changes; the zeros cost nothing in a
compressed wheel or bundle. Symbols that only a debugger reads are then stripped.

What is kept is decided fatbin by fatbin, because a source file compiled for "100;120"
holds no entry for 103 or 89 although the library as a whole does:

* the entries of the wanted architecture itself, if the fatbin has any;
* else those of the nearest lower architecture of the same major version, which the
  wanted one runs (86 runs code for 80, 103 runs plain code for 100). Code that is tied
  to one exact architecture (``100a``) does not count here;
* else the nearest lower PTX, which the driver compiles. PTX is dropped where machine
  code runs, as it would never be read.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .common import ToolError, atomic_file, run, say, step

FATBIN_MAGIC = 0xBA55ED50
KIND_PTX, KIND_CODE = 1, 2
# Entry flag: the code runs on this exact architecture only (an "a" target such as 90a).
# Seen on upstream's library: set on every entry of 103 and 107, which are built as
# "103a" and "107a", and clear on the "120f" entries.
FLAG_EXACT = 1 << 20
CODE_SECTION = ".nv_fatbin"


class Entry(NamedTuple):
    """One entry of a fatbin; ``start`` and ``size`` (bytes) are those of its payload."""

    kind: int
    arch: int
    exact: bool
    start: int
    size: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("lib", type=Path, metavar="LIB", help="the library to read")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help="the library to write")
    parser.add_argument(
        "--archs",
        default=os.environ.get("NVTE_CUDA_ARCHS", ""),
        help="GPU architectures, e.g. 90, '80;90', native or all (default: NVTE_CUDA_ARCHS, "
        "else all)",
    )
    parser.add_argument("--list", action="store_true", help="print what LIB holds, write nothing")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not check that OUT loads beside torch"
    )


def main(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.list:
        for arch, size in list_archs(args.lib).items():
            print(f"sm_{arch:<4} {size / 1e6:7.1f} MB")
        return
    if args.out is None:
        raise ToolError("No output file was named.", "add OUT after LIB, or pass --list.")
    prune(args.lib, args.out, parse_archs(args.archs))
    if not args.no_verify:
        with step("loading the pruned library"):
            verify_loads(args.out)


def parse_archs(text: str | None) -> set[str] | None:
    """Read a list of architectures in the syntax of ``NVTE_CUDA_ARCHS``.

    Parameters
    ----------
    text : str or None
        Architectures separated by ``;``, ``,`` or blanks: ``90``, ``9.0``, ``90a``,
        ``100f``, ``sm_90``, ``90-real`` or ``native``. Suffixes are dropped: pruning works
        on whole architectures. Empty, None or ``all`` means all of them.

    Returns
    -------
    set of str or None
        Numbers such as ``"90"``; None for all architectures.

    Raises
    ------
    ToolError
        On a word that names no architecture, or ``native`` on a machine without a GPU.
    """
    words = re.split(r"[;,\s]+", (text or "").strip().lower())
    words = [word for word in words if word]
    if not words or "all" in words:
        return None
    found: set[str] = set()
    for word in words:
        if word == "native":
            found |= native_archs()
            continue
        match = re.fullmatch(
            r"(?:sm_?|compute_)?(?:(\d{1,2})\.(\d)|(\d{2,3}))[af]?(?:-real)?", word
        )
        if not match:
            raise ToolError(
                f"'{word}' (in '{text}') names no GPU architecture.",
                "write compute capabilities without the dot, e.g. --archs 90 or "
                "NVTE_CUDA_ARCHS='80;90'.",
            )
        major, minor, joined = match.groups()
        found.add(joined or major + minor)
    return found


def native_archs(python: str = sys.executable) -> set[str]:
    """Architectures of the GPUs that torch sees.

    Raises
    ------
    ToolError
        Where ``python`` has no torch, or torch sees no GPU.
    """
    code = (
        "import torch\n"
        "for i in range(torch.cuda.device_count()):\n"
        "    print('%d%d' % torch.cuda.get_device_capability(i))"
    )
    # A process of its own: torch must not be loaded into the build tool, and asking
    # for a capability may create a CUDA context.
    done = subprocess.run([python, "-c", code], text=True, capture_output=True)
    archs = set(done.stdout.split()) if done.returncode == 0 else set()
    if not archs:
        seen = done.stderr.strip().splitlines()[-1:] or ["torch.cuda.device_count() is 0"]
        raise ToolError(
            f"'native' needs a visible GPU and a CUDA build of torch in {python}: {seen[0]}",
            "name the architecture of the machine that will run it, e.g. --archs 90 for an H100.",
        )
    return archs


def list_archs(path: Path) -> dict[str, int]:
    """Sizes in bytes of the machine code and PTX in a library, per architecture.

    Entries that an earlier pruning zeroed are not counted.

    Raises
    ------
    ToolError
        When the file is no 64-bit ELF library with well-formed GPU code.
    """
    sizes: dict[int, int] = {}
    with _mapped(path) as data:
        for entry in _all_entries(data, path):
            if not _is_zero(data, entry):
                sizes[entry.arch] = sizes.get(entry.arch, 0) + entry.size
    return {str(arch): sizes[arch] for arch in sorted(sizes)}


def prune(source: Path, target: Path, archs: set[str] | None) -> None:
    """Write a copy of a library that keeps the wanted GPU architectures only.

    Parameters
    ----------
    source : Path
        The library as upstream ships it. It is not changed.
    target : Path
        Replaced in one step at the end; untouched on an error. May be ``source``.
    archs : set of str or None
        As `parse_archs` returns them; None keeps all of them (debug symbols go all the same).

    Raises
    ------
    ToolError
        When the library has no code that a wanted architecture runs, is malformed, or the
        disk is full.
    """
    source, target = Path(source), Path(target)
    with step(f"pruning {source.name} to {'all architectures' if archs is None else _sm(archs)}"):
        with _mapped(source) as data:
            drop = _unwanted(data, source, archs)
        with atomic_file(target) as temporary:
            shutil.copyfile(source, temporary)
            if drop:
                with open(temporary, "r+b") as file:
                    with mmap.mmap(file.fileno(), 0) as data:
                        for entry in drop:
                            data[entry.start : entry.start + entry.size] = bytes(entry.size)
            _strip(temporary)
    dropped = sum(entry.size for entry in drop)
    say(
        f"{target.name}: {dropped / 1e6:.0f} MB of code zeroed, {target.stat().st_size / 1e6:.0f} MB"
    )


def verify_loads(path: Path, python: str = sys.executable) -> None:
    """Check that a core library loads into a process that has torch.

    Raises
    ------
    ToolError
        When ``python`` has no torch or the dynamic loader refuses the library.
    """
    # cuDNN and NCCL come as wheels that no loader path names. Each missing name that the
    # loader reports is looked up in those wheels and loaded first, then it tries again.
    code = """
import ctypes, glob, os, re, sys, torch
site = os.path.dirname(os.path.dirname(torch.__file__))
tried = set()
def load(path):
    while True:
        try:
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
        except OSError as error:
            name = re.match(r"(\\S+?): cannot open shared object file", str(error))
            found = name and glob.glob(f"{site}/nvidia/*/lib/{name.group(1)}")
            if not found or found[0] in tried:
                sys.exit(str(error))
            tried.add(found[0])
            load(found[0])
load(sys.argv[1])
"""
    done = subprocess.run(
        [python, "-c", code, str(Path(path).resolve())], text=True, capture_output=True
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ToolError(
            f"{path} does not load in {python}: {why}",
            "check that this Python has torch for the library's CUDA major version "
            "(python -c 'import torch; print(torch.version.cuda)'), or pass --no-verify when "
            "only the target machine has it.",
        )


def _sm(archs: set[str] | set[int]) -> str:
    return ", ".join(f"sm_{arch}" for arch in sorted(int(arch) for arch in archs))


class _mapped:
    """Context manager: the bytes of a file, read-only, without reading it all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> mmap.mmap:
        try:
            with open(self._path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ToolError(
                f"Cannot read {self._path}: {error}",
                "name an existing libtransformer_engine.so.",
            ) from error
        return self._map

    def __exit__(self, *_: object) -> None:
        self._map.close()


def _malformed(path: Path, what: str) -> ToolError:
    return ToolError(
        f"{path} is not a library this tool can prune: {what}.",
        "fetch the core library again, or leave it whole (--archs all).",
    )


def _code_section(data: mmap.mmap, path: Path) -> tuple[int, int]:
    """Start and end offset of the GPU code in the file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise _malformed(path, "no 64-bit little-endian ELF file")
    try:
        (table,) = struct.unpack_from("<Q", data, 40)
        size, count, names_index = struct.unpack_from("<HHH", data, 58)
        sections = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
        names = sections[names_index][4]
        for name, _, _, _, start, length in sections:
            label = data[names + name : data.find(b"\0", names + name)]
            if label.decode("ascii", "replace") == CODE_SECTION:
                if start + length > len(data):
                    raise _malformed(path, f"its section {CODE_SECTION} is cut off")
                return start, start + length
    except (struct.error, IndexError) as error:
        raise _malformed(path, f"its section table is cut off ({error})") from error
    raise _malformed(path, f"it has no section {CODE_SECTION}")


def _fatbins(data: mmap.mmap, path: Path) -> Iterator[list[Entry]]:
    """The entries of each fatbin, in file order."""
    place, end = _code_section(data, path)
    while place < end:
        if not any(data[place : place + 8]) and place + 8 <= end:
            place += 8  # padding of the linker
            continue
        if place + 16 > end:
            raise _malformed(path, f"a fatbin header at {place:#x} is cut off")
        magic, _, header, size = struct.unpack_from("<IHHQ", data, place)
        if magic != FATBIN_MAGIC:
            raise _malformed(path, f"no fatbin at {place:#x} but {magic:#010x}")
        at, stop = place + header, place + header + size
        if header < 16 or stop > end:
            raise _malformed(path, f"the fatbin at {place:#x} is longer than its section")
        entries = []
        while at < stop:
            if at + 48 > stop:
                raise _malformed(path, f"an entry at {at:#x} is cut off")
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
            (arch,) = struct.unpack_from("<I", data, at + 28)
            (flags,) = struct.unpack_from("<Q", data, at + 40)
            if header < 48 or at + header + payload > stop:
                raise _malformed(path, f"the entry at {at:#x} is longer than its fatbin")
            entries.append(Entry(kind, arch, bool(flags & FLAG_EXACT), at + header, payload))
            at += header + payload
        yield entries
        place = stop


def _all_entries(data: mmap.mmap, path: Path) -> Iterator[Entry]:
    for entries in _fatbins(data, path):
        yield from entries


def _is_zero(data: mmap.mmap, entry: Entry) -> bool:
    return not any(data[entry.start : entry.start + min(entry.size, 64)])


def _used(entries: list[Entry], arch: int) -> list[Entry]:
    """The entries of one fatbin that a GPU of an architecture can use."""
    code = [entry for entry in entries if entry.kind != KIND_PTX]
    same = [entry for entry in code if entry.arch == arch]
    if same:
        return same
    lower = [
        entry
        for entry in code
        if entry.arch // 10 == arch // 10 and entry.arch < arch and not entry.exact
    ]
    if not lower:
        lower = [
            entry
            for entry in entries
            if entry.kind == KIND_PTX
            and (entry.arch == arch or (entry.arch < arch and not entry.exact))
        ]
    best = max((entry.arch for entry in lower), default=None)
    return [entry for entry in lower if entry.arch == best]


def _unwanted(data: mmap.mmap, path: Path, archs: set[str] | None) -> list[Entry]:
    """The entries to zero, after checking that each wanted architecture has code."""
    fatbins = []
    for entries in _fatbins(data, path):
        fatbins.append([entry for entry in entries if not _is_zero(data, entry)])
    held = {entry.arch for entries in fatbins for entry in entries}
    if archs is None:
        return []
    wanted = sorted(int(arch) for arch in archs)
    served = {
        arch: {entry.arch for entries in fatbins for entry in _used(entries, arch)}
        for arch in wanted
    }
    missing = {arch for arch in wanted if not served[arch]}
    if missing:
        raise ToolError(
            f"{path} has no code that {_sm(missing)} can run; it holds {_sm(held) or 'none'}.",
            f"choose among those, e.g. --archs {max(held, default=90)}, or build for another "
            "CUDA major version.",
        )
    for arch in wanted:
        if arch not in served[arch]:
            say(f"no code for sm_{arch} itself: keeping {_sm(served[arch])}, which it runs")
    drop = []
    for entries in fatbins:
        keep = {entry for arch in wanted for entry in _used(entries, arch)}
        drop += [entry for entry in entries if entry not in keep]
    return drop


def _strip(path: Path) -> None:
    """Drop symbols and debug information that the dynamic loader does not read."""
    tool = shutil.which("strip")
    if tool is None:
        say("no `strip` on PATH (package binutils): the symbol table stays, about 30 MB more")
        return
    stripped = path.with_name(path.name + ".stripped")
    try:
        run([tool, "--strip-unneeded", "-o", str(stripped), str(path)])
        os.replace(stripped, path)
    except subprocess.CalledProcessError as error:
        say(f"`strip` failed, the symbol table stays: {error.stderr.strip()}")
    finally:
        stripped.unlink(missing_ok=True)
