# SPDX-License-Identifier: Apache-2.0
"""One packed weight against separate weights: GroupedLinear with 128 experts.

Device time, host time and peak memory of forward + backward. Targets: at most
1.00 of the separate weights' device time and 0.5 of their host time. The packed
layer runs with list splits as the separate one does, then with its splits on the
device (use_grouped_tensor=True). Gradients are compared first: kernels differ, so
bf16 ones may be 2**-8 apart (one rounding), fp32 ones 1e-5 (the order of sums).
How times are taken: see delayed_wgrad.py.

    python benchmarks/single_grouped_weight.py --json results/out.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from pathlib import Path

from delayed_wgrad import ROUNDS, Step, environment

GROUPS, IN, OUT, ROWS = 128, 2048, 1536, 65536


class Experts(Step):
    """A GroupedLinear with one or 128 weights."""

    def __init__(
        self, *, single: bool, fuse: bool, on_device: bool = False
    ) -> None:  # pylint: disable=super-init-not-called
        import torch

        import transformer_engine.pytorch as te

        self.delay, self.fuse = False, fuse
        self.module = te.GroupedLinear(
            GROUPS, IN, OUT, bias=False, params_dtype=torch.bfloat16, device="cuda",
            fuse_wgrad_accumulation=fuse, single_grouped_weight=single,
            use_grouped_tensor=on_device,
        )  # fmt: skip
        generator = torch.Generator("cuda").manual_seed(1)
        values = torch.randn(GROUPS, OUT, IN, generator=generator, device="cuda") * 0.02
        params = [self.module.weight] if single else list(self.module.parameters())
        with torch.no_grad():
            for param, value in zip(params, [values] if single else values):
                param.copy_(value)
                if fuse:
                    param.main_grad = torch.zeros(
                        tuple(param.shape), dtype=torch.float32, device="cuda"
                    )
                    param.grad_added_to_main_grad = False
        like = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(ROWS, IN, **like).requires_grad_()
        self.dy = torch.randn(ROWS, OUT, **like)
        splits = [ROWS // GROUPS] * GROUPS
        self.extra = (torch.tensor(splits, device="cuda") if on_device else splits,)

    def packed_gradient(self):
        """What a step adds, ``[groups, out, in]``."""
        import torch

        found = [value.reshape(-1, OUT, IN) for value in self.gradients().values()]
        return torch.cat(found)


def measure(fuse: bool, on_device: bool) -> dict:
    """One row: medians of the packed layer, the separate one and its twin."""
    import torch

    steps = {
        "single": Experts(single=True, fuse=fuse, on_device=on_device),
        "separate": Experts(single=False, fuse=fuse),
        "again": Experts(single=False, fuse=fuse),
    }
    want = steps["separate"].packed_gradient().double()
    error = ((steps["single"].packed_gradient().double() - want).norm() / want.norm()).item()
    del want
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = {name: [] for name in steps}
    for number in range(-4, ROUNDS):
        for name in list(steps) if number % 2 else list(reversed(steps)):
            sample = steps[name].time(flush)
            if number >= 0:
                times[name].append(sample)
    row = {"name": f"GroupedLinear {GROUPS} x {IN} x {OUT}", "fused": fuse}
    row |= {"splits": "device" if on_device else "list", "error": error}
    row["right"] = error <= (1e-5 if fuse else 2**-8)
    for name, samples in times.items():
        row[f"{name}_device_ms"] = statistics.median(device for device, _ in samples)
        row[f"{name}_host_ms"] = statistics.median(host for _, host in samples)
        row[f"{name}_peak_bytes"] = steps[name].peak()
    return row


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report")
    options = parser.parse_args()
    os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"
    import torch

    if not torch.cuda.is_available():
        print(
            "error: torch sees no GPU\n  next: run this benchmark where there is one",
            file=sys.stderr,
        )
        return 2
    env = {**environment(), "command": "python benchmarks/single_grouped_weight.py"}
    report = {"what": "benchmark-single_grouped_weight", "date": env["date"], "environment": env}
    report["rows"] = []
    for on_device in (False, True):
        for fuse in (False, True):
            report["rows"].append(measure(fuse, on_device))
            gc.collect()
    if options.json:
        temporary = options.json.with_suffix(".part")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(options.json)
    print(json.dumps(env))
    for row in report["rows"]:
        print(
            f"{row['name']}{' fused' if row['fused'] else ''}, splits {row['splits']}:"
            f" device {row['separate_device_ms']:.3f}"
            f" -> {row['single_device_ms']:.3f} ms"
            f" ({row['single_device_ms'] / row['separate_device_ms']:.3f}, again"
            f" {row['again_device_ms'] / row['separate_device_ms']:.3f}),"
            f" host {row['separate_host_ms']:.3f} -> {row['single_host_ms']:.3f} ms"
            f" ({row['single_host_ms'] / row['separate_host_ms']:.2f}),"
            f" error {row['error']:.1e}{'' if row['right'] else ' WRONG'}"
        )
    return 0 if all(row["right"] for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
