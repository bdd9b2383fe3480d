# SPDX-License-Identifier: Apache-2.0
"""What the delay costs: forward + backward + backward_dw against the regular path.

For each kind and shape, unfused and fused: device time, host time and peak
memory of one training step of one module. Targets: unfused at most 1.03 of the
regular path's device time and 1.05 of its host time, peak memory at most the
regular path's and what the queue holds; fused at most 1.00 of the device time,
noise aside, which the regular path timed against itself shows.

Gradients are compared bit for bit before anything is timed. The module and its
twin take turns, and a kernel that only waits keeps the device busy while a step
is put into its queue: events around the step then time the device alone, and
the clock of the host times the host alone.

    python benchmarks/delayed_wgrad.py --json results/out.json
    python benchmarks/delayed_wgrad.py --stock /path/with/stock   # beside it
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Case:
    """One module: kind, rows of the input, features, groups."""

    name: str
    kind: str
    rows: int
    size: int
    groups: int = 0


CASES = [
    Case("Linear 4096", "linear", 8192, 4096),
    Case("LayerNormLinear 4096", "layernorm_linear", 8192, 4096),
    Case("LayerNormMLP 4096", "layernorm_mlp", 8192, 4096),
    Case("GroupedLinear 8 x 4096", "grouped", 16384, 4096, 8),
    Case("GroupedLinear 64 x 2048", "grouped", 32768, 2048, 64),
    Case("ops.GroupedLinear 8 x 4096", "ops_grouped", 16384, 4096, 8),
]
# How many timed steps of each, and how long the waiting kernel runs (clock cycles).
ROUNDS, WAIT = 40, 20_000_000


class Step:
    """A module and one training step of it."""

    def __init__(self, case: Case, *, delay: bool, fuse: bool) -> None:
        import torch

        import transformer_engine.pytorch as te

        self.case, self.delay, self.fuse = case, delay, fuse
        common = {"device": "cuda", "delay_wgrad_compute": delay}
        module = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fuse, **common}
        size = case.size
        if case.kind == "linear":
            self.module = te.Linear(size, size, **module)
        elif case.kind == "layernorm_linear":
            self.module = te.LayerNormLinear(size, size, **module)
        elif case.kind == "layernorm_mlp":
            self.module = te.LayerNormMLP(size, 4 * size, **module)
        elif case.kind == "grouped":
            self.module = te.GroupedLinear(case.groups, size, size, bias=False, **module)
        else:
            self.module = te.ops.GroupedLinear(
                case.groups, size, size, bias=False, dtype=torch.bfloat16,
                accumulate_into_main_grad=fuse, **common,
            )  # fmt: skip
        generator = torch.Generator("cuda").manual_seed(1)
        with torch.no_grad():
            for name, param in self.module.named_parameters():
                param.normal_(0, 0.02, generator=generator)
                if fuse and "weight" in name and not name.startswith("layer_norm"):
                    param.main_grad = torch.zeros_like(param, dtype=torch.float32)
                    param.grad_added_to_main_grad = False
        self.x = torch.randn(
            case.rows, size, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        self.dy = torch.randn(
            case.rows, size, generator=generator, device="cuda", dtype=torch.bfloat16
        )
        self.extra = ()
        if case.groups:
            splits = [case.rows // case.groups] * case.groups
            self.extra = (splits,)
            if case.kind == "ops_grouped":
                self.extra = (torch.tensor(splits, dtype=torch.int64, device="cuda"),)

    def clear(self) -> None:
        """No gradients."""
        self.x.grad = None
        for param in self.module.parameters():
            param.grad = None

    def __call__(self) -> None:
        """Forward, backward and, with the delay, backward_dw."""
        self.module(self.x, *self.extra).backward(self.dy)
        if self.delay:
            self.module.backward_dw()

    def gradients(self) -> dict:
        """What a step adds, by parameter name."""
        self.clear()
        for param in self.module.parameters():
            if hasattr(param, "main_grad"):
                param.main_grad.zero_()
        self()
        result = {}
        for name, param in self.module.named_parameters():
            result[name] = getattr(param, "main_grad", param.grad).clone()
        return result

    def peak(self) -> int:
        """Peak bytes of a step above what lies there before."""
        import torch

        self()
        self.clear()
        gc.collect()
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start

    def queued(self) -> int:
        """Bytes of the operands that wait for backward_dw."""
        elements = self.case.rows * self.case.size
        width = 4 if self.case.kind == "layernorm_mlp" else 1
        # Two bytes each: X and dY; the MLP has two GEMMs, one operand of each four times as wide.
        return 2 * 2 * elements if width == 1 else 2 * (1 + width + width + 1) * elements

    def time(self, flush) -> tuple[float, float]:
        """Milliseconds of the device and of the host."""
        import torch

        self.clear()
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT)
        start.record()
        before = time.perf_counter()
        self()
        after = time.perf_counter()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end), (after - before) * 1e3


def measure(case: Case, fuse: bool) -> dict:
    """One row: medians of the delayed module, the regular one and its twin."""
    import torch

    steps = {
        "delayed": Step(case, delay=True, fuse=fuse),
        "regular": Step(case, delay=False, fuse=fuse),
        "again": Step(case, delay=False, fuse=fuse),
    }
    got, want = (steps[name].gradients() for name in ("delayed", "regular"))
    equal = all(torch.equal(got[name], want[name]) for name in want)
    del got, want
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        for step in steps.values():
            step.time(flush)
    times = {name: [] for name in steps}
    gc.disable()
    for number in range(ROUNDS):
        order = list(steps) if number % 2 else list(reversed(steps))
        for name in order:
            times[name].append(steps[name].time(flush))
    gc.enable()
    row = {"name": case.name, "fused": fuse, "bit_equal": equal}
    for name, samples in times.items():
        row[f"{name}_device_ms"] = statistics.median(device for device, _ in samples)
        row[f"{name}_host_ms"] = statistics.median(host for _, host in samples)
    row["delayed_peak_bytes"] = steps["delayed"].peak()
    row["regular_peak_bytes"] = steps["regular"].peak()
    row["queued_bytes"] = steps["delayed"].queued()
    return row


def environment() -> dict:
    """Versions and the device."""
    import torch

    import transformer_engine

    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": smi.stdout.strip().splitlines()[0] if smi.stdout.strip() else "unknown",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformer_engine": str(transformer_engine.__version__),
        "python": sys.version.split()[0],
        "commit": os.environ.get("TE_WGRAD_COMMIT", "unknown"),
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/delayed_wgrad.py",
        "rounds": ROUNDS,
    }


def run_stock(folder: str, only: str) -> dict:
    """The report of another Transformer Engine, in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "stock.json"
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        command = [sys.executable, os.path.abspath(__file__), "--json", str(out), "--quiet"]
        subprocess.run(
            command + (["--only", only] if only else []),
            env={**os.environ, "PYTHONPATH": path}, cwd=temporary, check=True,
        )  # fmt: skip
        return json.loads(out.read_text())


def table(report: dict) -> str:
    """The rows as text."""
    lines = [
        f"{'':28} {'':7} {'device ms':>20} {'':>13} {'host ms':>15} {'':>6} {'peak MiB':>15} {'':>7}",
        f"{'module':28} {'':7} {'regular':>9} {'delayed':>9} {'ratio':>6} {'noise':>6}"
        f" {'regular':>8} {'delayed':>8} {'ratio':>5} {'over':>7} {'queue':>7} {'stock':>7}",
    ]
    stock = {(r["name"], r["fused"]): r for r in report.get("stock", {}).get("rows", [])}
    for row in report["rows"]:
        regular, again = row["regular_device_ms"], row["again_device_ms"]
        other = stock.get((row["name"], row["fused"]))
        ratio = "" if other is None else (
            f"{other['delayed_device_ms'] / other['regular_device_ms']:7.3f}"
            if other["bit_equal"] else "  wrong"
        )  # fmt: skip
        lines.append(
            f"{row['name']:28} {'fused' if row['fused'] else '':7} {regular:9.3f}"
            f" {row['delayed_device_ms']:9.3f} {row['delayed_device_ms'] / regular:6.3f}"
            f" {abs(again / regular - 1):6.3f} {row['regular_host_ms']:8.3f}"
            f" {row['delayed_host_ms']:8.3f} {row['delayed_host_ms'] / row['regular_host_ms']:5.2f}"
            f" {(row['delayed_peak_bytes'] - row['regular_peak_bytes']) / 2**20:7.1f}"
            f" {row['queued_bytes'] / 2**20:7.1f} {ratio}{'' if row['bit_equal'] else '  NOT EQUAL'}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report")
    parser.add_argument("--stock", help="folder with an unpatched package, measured beside")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--quiet", action="store_true", help="no table")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print(
            "error: torch sees no GPU\n  next: run this benchmark where there is one",
            file=sys.stderr,
        )
        return 2
    env = environment()
    report = {
        "what": "benchmark-delayed_wgrad",
        "date": env["date"],
        "environment": env,
        "rows": [],
    }
    for case in CASES:
        for fuse in (False, True):
            if options.only in case.name:
                report["rows"].append(measure(case, fuse))
                gc.collect()
    if options.stock:
        report["stock"] = run_stock(options.stock, options.only)
    if options.json:
        temporary = options.json.with_suffix(".part")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(options.json)
    if not options.quiet:
        print(json.dumps(report["environment"]))
        print(table(report))
    return 0 if all(row["bit_equal"] for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
