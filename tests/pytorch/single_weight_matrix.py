#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where single grouped weights train: every combination against one parameter an expert.

    python tests/pytorch/single_weight_matrix.py --jobs 8 --json results/<date>-h200-matrix.json

Each cell trains a layer for two microbatches and compares outputs, input
gradients, weight gradients (or main_grad) and bias gradients bit for bit with the
per-expert layer, whose splits are a list (a tensor in ops). What that layer refuses
cannot be compared, and its reason is kept; whatever else the single-weight layer
refuses is a failure. Without a GPU this runs on the CPU executor, which has no
quantized compute. Exit code 0: no failure.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import re
import sys
import warnings
from pathlib import Path

os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"
os.environ["NVTE_GROUPED_WGRAD_KERNEL"] = "0"  # cuBLAS runs in both layouts

import conftest  # noqa: E402  installs the CPU executor where there is no GPU
import torch  # noqa: E402
from grouped_cases import (  # noqa: E402
    DTYPES,
    FORMS,
    RECIPES,
    Case,
    assert_same,
    recipe_is_available,
    train,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: E402

import transformer_engine.pytorch as te  # noqa: E402

tex = sys.modules["transformer_engine_torch"]
DEVICE = "cuda" if conftest.HAS_GPU else "cpu"
EQUAL = "equal"
NO_REFERENCE = "the per-expert layer refuses: "
# On the CPU executor the native path runs where cuBLASLt says that it has a grouped GEMM.
CUBLASLT = [None] if conftest.HAS_GPU else [130000, 130600]


def rows() -> list[dict]:
    """Layer kind, dtype, recipe, whether the weights are quantized, cuBLASLt's version."""
    chosen = ["none", *RECIPES] if conftest.HAS_GPU else ["none"]
    return [
        {"kind": k, "recipe": r, "quantized_weights": q, "dtype": d, "cublaslt": c}
        for k, r, q, c, d in itertools.product(
            ("module", "ops"), chosen, (False, True), CUBLASLT, DTYPES
        )
        if r != "none" or not q
    ]


def variants(kind: str) -> dict[str, Case]:
    """Bias, delay, fuse and, in the module, use_grouped_tensor, by name."""
    found = {}
    natives = (False, True) if kind == "module" else (None,)
    for fuse, delay, native, bias in itertools.product(
        (False, True), (False, True), natives, ("none", "separate", "single")
    ):
        words = [f"{bias}-bias", "delayed" * delay, "fused" * fuse, "grouped-tensor" * bool(native)]
        extra = {} if native is None else {"use_grouped_tensor": native}
        name = " ".join(word for word in words if word)
        found[name] = Case(kind=kind, bias=bias, delay=delay, fuse=fuse, extra=extra)
    return found


def attempt(case: Case, row: dict, single: bool) -> dict | str:
    """What :func:`train` saw, or why it refused."""
    how = {}
    if row["recipe"] != "none":
        recipe = RECIPES[row["recipe"]]()
        how["autocast"] = lambda: te.autocast(enabled=True, recipe=recipe)
        if row["quantized_weights"]:
            how["init"] = lambda: te.quantized_model_init(enabled=True, recipe=recipe)
    try:
        return train(case, DEVICE, single=single, **how)[1]
    except Exception as error:  # pylint: disable=broad-exception-caught
        text = re.sub(r"/\S*/", "", str(error)).strip().split("\n")[0][:200]
        return f"{type(error).__name__}: {text}"
    finally:
        FP8GlobalStateManager.reset()


def outcome(got: dict | str, want: dict | str) -> str:
    """One cell's verdict."""
    if isinstance(want, str):
        return NO_REFERENCE + want
    if isinstance(got, str):
        return f"REFUSES: {got}"
    try:
        assert_same(got, want)
    except AssertionError as error:
        return f"DIFFERS: {str(error).splitlines()[0][:200]}"
    return EQUAL


def is_failure(verdict: str) -> bool:
    """Whether the single-weight layer does not do what the per-expert layer does."""
    return verdict != EQUAL and not verdict.startswith(NO_REFERENCE)


def healthy() -> bool:
    """Whether this process still computes: some refusals of cuBLAS end that."""
    return isinstance(attempt(Case(), {"recipe": "none"}, single=False), dict)


def run_row(row: dict, refusals: dict) -> dict[str, list[str]] | None:
    """Verdicts by form of the splits, in the order of :func:`variants`.

    None where this process is of no more use; what the per-expert layer refused is
    then in ``refusals``, and is not tried again.
    """
    forms = FORMS if row["kind"] == "module" else FORMS[1:]  # ops takes tensors only
    if not recipe_is_available(row["recipe"]):
        text = f"{NO_REFERENCE}this GPU has no {row['recipe']}"
        return {form: [text] * len(variants(row["kind"])) for form in forms}
    if row["cublaslt"] is not None:
        tex.get_cublasLt_version = lambda: row["cublaslt"]
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory no kernel wrote is NaN
    cells, references = {form: [] for form in forms}, dict(refusals)
    for case in variants(row["kind"]).values():
        case = dataclasses.replace(case, dtype=DTYPES[row["dtype"]])
        key = (case.bias != "none", case.delay, case.fuse, str(case.extra))
        if key not in references:
            references[key] = attempt(case, row, single=False)
            if isinstance(references[key], str):
                refusals[key] = references[key]
                if not healthy():
                    return None
        for form in forms:
            want = got = references[key]
            if not isinstance(want, str):
                got = attempt(dataclasses.replace(case, form=form), row, single=True)
            cells[form].append(outcome(got, want))
    return cells


def work(task: tuple[dict, dict]) -> tuple[dict, dict, dict | None]:
    """:func:`run_row` in a process that may have been of no more use before."""
    return *task, run_row(*task) if healthy() else None


def run(chosen: list[dict], jobs: int) -> list[tuple[dict, dict]]:
    """Rows and their verdicts, each from a process that computed to its end."""
    context, done, left = multiprocessing.get_context("spawn"), {}, [(row, {}) for row in chosen]
    quiet = {"initializer": warnings.simplefilter, "initargs": ("ignore",)}
    try:
        while left:
            tasks, left = left, []
            with context.Pool(min(jobs, len(tasks)), **quiet) as pool:
                for row, refusals, cells in pool.imap_unordered(work, tasks):
                    if cells is None:
                        left.append((row, refusals))
                    else:
                        done[json.dumps(row)] = cells
            print(f"{len(done)} rows are done", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: {len(chosen) - len(done)} rows are left out")
    return [(row, done[json.dumps(row)]) for row in chosen if json.dumps(row) in done]


def report(results: list[tuple[dict, dict]]) -> dict:
    """The results file: verdicts as one letter a cell, and what each letter means."""
    letters = {EQUAL: "="}
    for _, cells in results:
        for verdict in itertools.chain(*cells.values()):
            letters.setdefault(verdict, chr(ord("a") + len(letters) - 1))
    return {
        "what": "single-weight-matrix-" + ("gpu" if conftest.HAS_GPU else "cpu"),
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("TE_WGRAD_COMMIT", "unknown"),
        "command": "python tests/pytorch/single_weight_matrix.py",
        "versions": {**conftest.environment(), "cublaslt": str(tex.get_cublasLt_version())},
        "variants": {kind: list(variants(kind)) for kind in ("module", "ops")},
        "outcomes": {letter: verdict for verdict, letter in letters.items()},
        "rows": [
            {**row, "cells": {f: "".join(letters[v] for v in vs) for f, vs in cells.items()}}
            for row, cells in results
        ],
    }


def main() -> int:
    """Run every row, print the counts, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--only", default="", help="rows whose description has this text")
    options = parser.parse_args()
    chosen = [row for row in rows() if options.only in " ".join(map(str, row.values()))]
    results = run(chosen, options.jobs)
    made = report(results)
    if options.json:
        temporary = options.json.with_suffix(".part")
        temporary.write_text(json.dumps(made, indent=0) + "\n")
        temporary.replace(options.json)
    count = collections.Counter("".join("".join(row["cells"].values()) for row in made["rows"]))
    for letter, number in count.most_common():
        print(f"{number:6d} {made['outcomes'][letter]}")
    failures = 0
    for row in made["rows"]:
        for form, cells in row["cells"].items():
            for variant, letter in zip(made["variants"][row["kind"]], cells):
                if is_failure(made["outcomes"][letter]):
                    failures += 1
                    where = [str(v) for k, v in row.items() if k != "cells"]
                    print("failed:", *where, form, variant, made["outcomes"][letter], sep=" | ")
    return 1 if failures or not count or len(results) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
