# SPDX-License-Identifier: Apache-2.0
"""How far grouped weight gradients are from the roofline, and from what else does them.

``dW[g] += dY[g]^T X[g]``, bf16 in, accumulated into a packed fp32 ``main_grad``. The roofline is
the larger of the matrix units' and the memory's time at the ceilings of one H200 (CEILINGS).

Peers do the same work: Transformer Engine's split path, ``torch._grouped_mm`` followed by an
addition, and mslk-cuda's ``grouped_wgrad`` where it can be imported. Context, not peers: ``torch._grouped_mm`` alone (bf16 out, nothing read back) and one
dense GEMM with as many operations (a bound that no grouped kernel with ragged groups reaches).

Every number follows a check in the same process: against float64, from NaN when overwriting, with
NaN after the last group, empty groups untouched when accumulating, three runs equal bit for bit.
Contestants take turns on the same buffers; the L2 cache is flushed before each timed run. Between
runs the GPU rests ``--rest`` times the run's length: under lasting load it lowers its clock by
a quarter, and the ceilings were measured in short bursts as well. ``--rest 0`` measures
lasting load; the clock is reported either way.

    python benchmarks/grouped_wgrad.py --json report.json
    python benchmarks/grouped_wgrad_plot.py report.json --out report.svg
    python benchmarks/grouped_wgrad.py --module transformer_engine/pytorch/grouped_wgrad.py
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch


@dataclasses.dataclass(frozen=True)
class Case:
    """Groups, widths, rows, and how rows are spread over groups."""

    name: str
    groups: int
    in_features: int
    out_features: int
    rows: int
    skewed: bool

    def splits(self) -> list[int]:
        """Even, or Zipf over seven of eight groups in a seeded order."""
        if not self.skewed:
            return [self.rows // self.groups] * self.groups
        active = [group for group in range(self.groups) if group % 8 != 7]
        weights = [1 / (rank + 1) for rank in range(len(active))]
        counts = [int(weight / sum(weights) * self.rows) for weight in weights]
        counts[0] += self.rows - sum(counts)
        order = torch.randperm(len(active), generator=torch.Generator().manual_seed(0)).tolist()
        splits = [0] * self.groups
        for position, group in enumerate(active):
            splits[group] = counts[order[position]]
        return splits

    def roofline_ms(self) -> float:
        """The larger of two times."""
        rate, bandwidth = CEILINGS
        matrix = 2 * self.rows * self.in_features * self.out_features / rate
        operands = 2 * self.rows * (self.in_features + self.out_features)
        weights = 8 * self.groups * self.in_features * self.out_features
        return 1e3 * max(matrix, (operands + weights) / bandwidth)


SHAPES = [
    ("Qwen3-30B fc1", 128, 2048, 1536, 65536),
    ("Qwen3-30B fc2", 128, 768, 2048, 65536),
    ("Mixtral fc1", 8, 4096, 28672, 16384),
    ("DeepSeek-V3 fc1", 32, 7168, 4096, 32768),
    ("DeepSeek-V3 fc2", 32, 2048, 7168, 32768),
    ("Qwen3 small batch", 128, 2048, 1536, 8192),
]
CASES = [
    Case(f"{name} {'Zipf' if skewed else 'even'}", *sizes, skewed)
    for name, *sizes in SHAPES
    for skewed in (False, True)
]
CEILINGS = (790e12, 4.3e12)  # FLOP/s, byte/s
SLACK = 64  # rows after the last group
FLUSH_BYTES = 256 << 20
LIMIT = 1e-5  # relative Frobenius error against float64
PEER_LIMIT = 5e-3  # of peers against ours: some round to bf16 on the way


def load_module(path: str):
    """The module under test, from the installed package or from a file."""
    if not path:
        from transformer_engine.pytorch import grouped_wgrad

        return grouped_wgrad
    spec = importlib.util.spec_from_file_location("grouped_wgrad", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Buffers:
    """The operands of one case and what runs on them."""

    def __init__(self, case: Case, wgrad, flags: int) -> None:
        self.case, self.wgrad, self.flags = case, wgrad, flags
        self.counts = case.splits()
        rows, types = case.rows + SLACK, {"device": "cuda", "dtype": torch.bfloat16}
        self.dy = torch.randn(rows, case.out_features, **types)
        self.x = torch.randn(rows, case.in_features, **types)
        self.dy[case.rows :] = float("nan")
        self.x[case.rows :] = float("nan")
        self.splits = torch.tensor(self.counts, device="cuda")
        self.offsets = self.splits.cumsum(0).to(torch.int32)
        self.out = torch.empty(case.groups, case.out_features, case.in_features, device="cuda")
        self.dy_rows, self.x_rows = self.dy[: case.rows], self.x[: case.rows]
        self.lists = [list(t.split(self.counts)) for t in (self.x_rows, self.dy_rows)]
        self.outs = list(self.out.unbind())

    def ours(self, accumulate: bool = True) -> None:
        """One launch of the kernel under test."""
        self.wgrad.grouped_wgrad(
            self.dy, self.x, self.splits, self.out, accumulate=accumulate, flags=self.flags
        )

    def te_split_path(self) -> None:
        """One cuBLAS GEMM for each group, over several streams."""
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

        general_grouped_gemm(
            *self.lists, self.outs, [None] * self.case.groups, torch.float32,
            layout="NT", grad=True, accumulate=True, use_split_accumulator=True,
        )  # fmt: skip

    def mslk(self) -> None:
        """One launch of mslk-cuda's kernel."""
        torch.ops.mslk.bf16bf16bf16_grouped_wgrad(
            self.dy_rows, self.x_rows, self.splits, self.out, True
        )

    def torch_grouped(self) -> torch.Tensor:
        """Bf16 results, not accumulated."""
        return torch._grouped_mm(self.dy_rows.t(), self.x_rows, offs=self.offsets)

    def torch_grouped_add(self) -> None:
        """The same, then added."""
        self.out.add_(self.torch_grouped())

    def dense(self) -> torch.Tensor:
        """As many operations in one GEMM."""
        return self.dy_rows.t() @ self.x_rows

    def check(self) -> float:
        """Raise where results are wrong; return the largest error."""
        worst, starts = 0.0, [0]
        for count in self.counts:
            starts.append(starts[-1] + count)

        def compare(before) -> None:
            nonlocal worst
            for group, count in enumerate(self.counts):
                start, stop = starts[group], starts[group + 1]
                if count == 0:
                    kept = torch.zeros_like(self.out[group]) if before is None else before[group]
                    assert torch.equal(self.out[group], kept), f"empty group {group} changed"
                    continue
                wanted = self.dy[start:stop].double().t() @ self.x[start:stop].double()
                if before is not None:
                    wanted += before[group]
                error = ((self.out[group] - wanted).norm() / wanted.norm()).item()
                assert error < LIMIT, f"group {group}: error {error}"
                worst = max(worst, error)

        self.out.fill_(float("nan"))
        self.ours(accumulate=False)
        compare(None)
        before = self.out.normal_().clone()
        self.ours()
        compare(before)
        first = self.out.clone()
        for _ in range(2):
            self.out.copy_(before)
            self.ours()
            assert torch.equal(self.out, first), "runs differ"
        return worst

    def check_peers(self, peers: dict) -> None:
        """Raise where a peer does other work than ours."""
        self.out.zero_()
        self.ours()
        wanted = self.out.clone()
        for name, function in peers.items():
            self.out.zero_()
            function()
            error = ((self.out - wanted).norm() / wanted.norm()).item()
            assert error < PEER_LIMIT, f"{name}: error {error}"

    def temporary_bytes(self) -> int:
        """Device memory that a call takes above what was there."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.ours()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


# What --check-only runs: widths, rows of each group.
SMALL = [
    (136, 264, (1, 15, 16, 0, 17, 33, 65)),  # edges, tails, an empty group
    (512, 640, (130, 40, 300)),  # several tiles a cluster
    (256, 256, (700, 3, 0, 40, 1, 90)),  # skewed
]
PORTABLE = 1 << 16  # the flag for the kernel of other GPUs


def check_small(wgrad) -> None:
    """Every way to call the kernels once, on small operands, against float64."""
    for flags, dtype, same, accumulate, (out_features, in_features, counts) in itertools.product(
        (-1, PORTABLE), (torch.bfloat16, torch.float16), (False, True), (False, True), SMALL
    ):
        rows, types = sum(counts) + SLACK, {"device": "cuda", "dtype": dtype}
        dy, x = torch.randn(rows, out_features, **types), torch.randn(rows, in_features, **types)
        dy[sum(counts) :], x[sum(counts) :] = float("nan"), float("nan")
        splits = torch.tensor(counts, device="cuda")
        out = torch.randn(
            len(counts), out_features, in_features, device="cuda",
            dtype=dtype if same else torch.float32,
        )  # fmt: skip
        if not accumulate:
            out.fill_(float("nan"))
        wanted = wgrad.grouped_wgrad_reference(dy, x, splits, out, accumulate=accumulate)
        wgrad.grouped_wgrad(dy, x, splits, out, accumulate=accumulate, flags=flags)
        error = ((out - wanted).norm() / wanted.norm()).item()
        limit = torch.finfo(dtype).eps if same else LIMIT
        assert error < limit, f"{flags=} {dtype=} {same=} {accumulate=} {counts=}: {error}"
    print("all small cases are right")


def has_te() -> bool:
    """Whether Transformer Engine can be imported."""
    try:
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
    except ImportError:
        return False
    return callable(general_grouped_gemm)


def has_mslk() -> bool:
    """Whether mslk-cuda can be imported."""
    try:
        import mslk  # noqa: F401
    except (ImportError, OSError):
        return False
    return hasattr(torch.ops.mslk, "bf16bf16bf16_grouped_wgrad")


def peers_of(buffers: Buffers) -> dict:
    """What does the same work."""
    table = {}
    if has_te():
        table["te_split_path"] = buffers.te_split_path
    if has_mslk():
        table["mslk"] = buffers.mslk
    if hasattr(torch, "_grouped_mm"):
        table["torch_grouped_mm_add"] = buffers.torch_grouped_add
    return table


def context_of(buffers: Buffers) -> dict:
    """What does less, or the same without groups."""
    table = {"dense_gemm": buffers.dense}
    if hasattr(torch, "_grouped_mm"):
        table["torch_grouped_mm"] = buffers.torch_grouped
    return table


def device_times(table: dict, rounds: int, rest: float, flush: torch.Tensor):
    """Milliseconds of each contestant, and the clock after ours in GHz."""
    times = {name: [] for name in table}
    clocks, cycles = [], 50_000
    for function in table.values():
        function()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, function in table.items():
            begin, end, later = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            flush.zero_()
            begin.record()
            function()
            end.record()
            torch.cuda._sleep(cycles)
            later.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
            if name == "ours":
                clocks.append(cycles / end.elapsed_time(later) / 1e6)
            time.sleep(rest * times[name][-1] / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}, statistics.median(
        clocks
    )


def host_time(function, calls: int = 20) -> float:
    """Microseconds of the host for one call while the device is busy with something else."""
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    values = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        values.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(values)


def measure(case: Case, wgrad, options, flush: torch.Tensor) -> dict:
    """One row of the report."""
    buffers = Buffers(case, wgrad, options.flags)
    error = buffers.check()
    peers, context = peers_of(buffers), context_of(buffers)
    buffers.check_peers(peers)
    # The kernel takes its turn twice: the difference is noise.
    table = {"ours": buffers.ours, "again": buffers.ours, **peers, **context}
    times, clock = device_times(table, options.rounds, options.rest, flush)
    return {
        "name": case.name,
        "ms": times["ours"],
        "again_ms": times["again"],
        "roofline_ms": case.roofline_ms(),
        "of_roofline": case.roofline_ms() / times["ours"],
        "host_us": host_time(buffers.ours),
        "temporary_bytes": buffers.temporary_bytes(),
        "clock_ghz": clock,
        "error": error,
        "peers_ms": {name: times[name] for name in peers},
        "context_ms": {name: times[name] for name in context},
    }


def environment(options) -> dict:
    """What was measured on what."""
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    te = sys.modules.get("transformer_engine")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": smi.stdout.strip().splitlines()[0] if smi.stdout.strip() else "unknown",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformer_engine": str(getattr(te, "__version__", "not installed")),
        "python": sys.version.split()[0],
        "commit": os.environ.get("TE_WGRAD_COMMIT", "unknown"),
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/grouped_wgrad.py --rounds {options.rounds}"
        f" --rest {options.rest:g}" + (f" --flags {options.flags}" if options.flags != -1 else ""),
        "ceilings": {"tflops": CEILINGS[0] / 1e12, "terabytes_per_s": CEILINGS[1] / 1e12},
    }


def line(row: dict) -> str:
    """One row as text."""
    others = {**row["peers_ms"], **row["context_ms"]}
    return (
        f"{row['name']:24} {row['roofline_ms']:7.3f} {row['ms']:7.3f} {row['of_roofline']:5.2f}"
        f" {abs(row['again_ms'] / row['ms'] - 1):6.3f} {row['host_us']:6.1f}"
        f" {row['clock_ghz']:5.2f} {row['error']:8.1e}  "
        + "  ".join(f"{name} {value:.3f}" for name, value in others.items())
    )


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report")
    parser.add_argument("--module", default="", help="file of the Python side, not the package's")
    parser.add_argument("--check-only", action="store_true", help="small cases, nothing timed")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rest", type=float, default=2.0, help="pause, in lengths of the run")
    parser.add_argument("--flags", type=int, default=-1, help="a variant of the kernel")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "error: torch sees no GPU\n  next: run this benchmark where there is one",
            file=sys.stderr,
        )
        return 2
    wgrad = load_module(options.module)
    if options.check_only:
        check_small(wgrad)
        return 0
    has_te(), has_mslk()  # imported before the environment is described
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    report = {
        "what": "benchmark-grouped_wgrad",
        "date": datetime.date.today().isoformat(),
        "environment": environment(options),
        "rows": [],
    }
    print(json.dumps(report["environment"]))
    print(
        f"{'case':24} {'roof ms':>7} {'ms':>7} {'of it':>5} {'noise':>6} {'host':>6} {'GHz':>5}"
        f" {'error':>8}  others, ms"
    )
    for case in CASES:
        if options.only in case.name:
            report["rows"].append(measure(case, wgrad, options, flush))
            print(line(report["rows"][-1]), flush=True)
            torch.cuda.empty_cache()
    if options.json:
        temporary = options.json.with_suffix(".part")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
