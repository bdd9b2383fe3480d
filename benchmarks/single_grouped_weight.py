# SPDX-License-Identifier: Apache-2.0
"""One packed weight against separate weights: GroupedLinear with 128 experts.

Device time, host time and peak memory of forward + backward. Targets: at most
1.00 of the separate weights' device time and 0.5 of their host time. Gradients
are compared bit for bit first. How times are taken: see delayed_wgrad.py.

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
        self, *, single: bool, fuse: bool
    ) -> None:  # pylint: disable=super-init-not-called
        import torch

        import transformer_engine.pytorch as te

        self.delay, self.fuse = False, fuse
        self.module = te.GroupedLinear(
            GROUPS, IN, OUT, bias=False, params_dtype=torch.bfloat16, device="cuda",
            fuse_wgrad_accumulation=fuse, single_grouped_weight=single,
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
        self.extra = ([ROWS // GROUPS] * GROUPS,)

    def packed_gradient(self):
        """What a step adds, ``[groups, out, in]``."""
        import torch

        found = [value.reshape(-1, OUT, IN) for value in self.gradients().values()]
        return torch.cat(found)


def measure(fuse: bool) -> dict:
    """One row: medians of the packed layer, the separate one and its twin."""
    import torch

    steps = {
        "single": Experts(single=True, fuse=fuse),
        "separate": Experts(single=False, fuse=fuse),
        "again": Experts(single=False, fuse=fuse),
    }
    equal = torch.equal(steps["single"].packed_gradient(), steps["separate"].packed_gradient())
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = {name: [] for name in steps}
    for number in range(-4, ROUNDS):
        for name in list(steps) if number % 2 else list(reversed(steps)):
            sample = steps[name].time(flush)
            if number >= 0:
                times[name].append(sample)
    row = {"name": f"GroupedLinear {GROUPS} x {IN} x {OUT}", "fused": fuse, "bit_equal": equal}
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
        print("This benchmark needs a GPU.", file=sys.stderr)
        return 2
    env = {**environment(), "command": "python benchmarks/single_grouped_weight.py"}
    report = {"what": "benchmark-single_grouped_weight", "date": env["date"], "environment": env}
    report["rows"] = []
    for fuse in (False, True):
        report["rows"].append(measure(fuse))
        gc.collect()
    if options.json:
        temporary = options.json.with_suffix(".part")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(options.json)
    print(json.dumps(env))
    for row in report["rows"]:
        print(
            f"{row['name']}{' fused' if row['fused'] else ''}: device {row['separate_device_ms']:.3f}"
            f" -> {row['single_device_ms']:.3f} ms"
            f" ({row['single_device_ms'] / row['separate_device_ms']:.3f}, again"
            f" {row['again_device_ms'] / row['separate_device_ms']:.3f}),"
            f" host {row['separate_host_ms']:.3f} -> {row['single_host_ms']:.3f} ms"
            f" ({row['single_host_ms'] / row['separate_host_ms']:.2f}),"
            f" bit-equal {row['bit_equal']}"
        )
    return 0 if all(row["bit_equal"] for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
