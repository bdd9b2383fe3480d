# SPDX-License-Identifier: Apache-2.0
"""Keep what a test run showed, and make the documents' tables from it.

    python ci/results.py record --xml build/xml --out results/2026-11-30-h200-tests.json
    python ci/results.py tables            # writes the tables into the documents
    python ci/results.py tables --check    # fails when they are not up to date
    python ci/results.py prove             # each patch's tests fail on stock, pass here

A results file holds the versions, the device, the commit, the command and the
outcome of every test. The tables stand between two marker comments in the
documents, so that nobody types a result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
KINDS = ["linear", "layernorm_linear", "layernorm_mlp", "grouped", "ops_grouped"]
ROWS = {
    "a1": "never dropped, never doubled, in order",
    "a2": "nothing changes before backward_dw",
    "a3": "through autograd: hooks, in place, no copy, DDP",
    "a4": "split parameters",
    "a5": "biases and norms, once",
    "a6": "frozen parameters",
    "a7": "nothing pending",
    "a8": "a GEMM that raises",
    "a9": "what a contribution needs is kept with it",
    "a10": "main_grad",
    "a11": "module hooks and marks",
    "a12": "freed, copied, pickled",
    "a13": "CUDA graphs",
    "a14": "refused before anything changes",
}
# Single grouped weights. A test whose name does not carry its row (test_b6_...) stands here.
ROWS_B = {
    "b1": (
        "trains wherever separate weights do",
        "equals_separate module_arguments splits autocast scaled_bias debug_features cpu_offload "
        "calibration quantized_compute quantized_weights "
        "quantized_weights_without_quantized_compute fallback_warns_once "
        "strict_makes_the_fallback_an_error default_arguments_do_not_warn",
    ),
    "b2": (
        "the bits of the per-expert path; main_grad checked",
        "equals_separate output_buffers cached_quantized_weights quantized_compute "
        "quantized_weights bad_main_grad native_path native_path_bad_main_grad "
        "native_and_split_path_take_turns",
    ),
    "b3": ("experts without tokens", "two_splits_of_one_layer zero_token_expert_keeps_main_grad"),
    "b4": (
        "delayed, fused, frozen, biases, with section A's promises",
        "equals_separate module_arguments first_microbatch "
        "frozen_weights_leave_the_bias_its_gradient delayed_hooks_fire_once_at_delivery "
        "failed_gemm_can_be_repeated existing_grad_is_added_to_in_place tied_layers "
        "deepcopy_keeps_the_delay meta_device",
    ),
    "b5": (
        "a parameter: optimizers, data, checkpoints, copies, meta device",
        "optimizer fused_adam fused_adam_quantized fused_adam_gets_memory data_rebinds "
        "data_that_does_not_fit module_conversions deepcopy deepcopy_keeps_the_delay meta_device "
        "meta_device_with_only_a_single_bias reset_parameters single_bias_without_bias load "
        "strict_load_names_what_is_missing optimizer_state",
    ),
    "b6": ("no work an expert in Python", ""),
    "b7": ("deterministic mode", "deterministic"),
}

# The binding of grouped GEMM: tests carry their row (test_c1_...).
ROWS_C = {
    "c1": "packed or listed operands, each one checked",
    "c2": "outputs that no GEMM writes",
    "c3": "callers as they were",
}

# Why stock passes some tests of delayed gradients; a test that is not here and passes is an error.
STOCK_PASSES = {
    "test_a1_interleavings": "`BW` is one contribution to an empty `.grad`; nothing is overwritten",
    "test_a5_layernorm_mlp_activations": "one contribution; guards each activation's bias gradient",
    "test_a5_returned_bias": "the module does not add that bias, so nothing of it is delayed",
    "test_a5_taken_between_the_halves": "stock leaves a bias that was taken alone, but in"
    " `LayerNormMLP`",
    "test_a9_inside_a_backward": "one contribution; guards that the engine may be entered again",
    "test_a10_256_plus_1": "the fused GEMM adds in fp32 in stock too",
    "test_a10_accumulates_into_main_grad": "operations accumulate fused gradients in stock too",
    "test_a10_first_microbatch_overwrites": "decided in the main half, which is right with one"
    " microbatch in flight",
    "test_a11_module_hooks": "guards names and order that must stay",
    "test_a11_megatron_ddp": "unfused, one contribution a step, hooks of the module",
    "test_a11_megatron_fsdp1": "unfused, one contribution a step, hooks of the module",
    "test_a11_megatron_fsdp2": "unfused, one contribution a step, hooks of the module",
}


def write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(name, 0o644)
    os.replace(name, path)


def commit() -> str:
    """The checkout's commit; +edits when tracked files differ."""
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=+edits", "--exclude=*"],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def read_junit(folder: Path) -> tuple[dict, dict]:
    """Properties and outcomes of every JUnit file in a folder.

    Returns
    -------
    dict, dict
        Facts about the run; outcome by ``file::test``: "passed", "failed" or
        "skipped: reason".
    """
    facts, tests = {}, {}
    files = sorted(folder.glob("*.xml"))
    if not files:
        raise SystemExit(f"error: no JUnit XML in {folder}\n  next: run ci/pytorch.sh first")
    for path in files:
        for suite in ET.parse(path).getroot().iter("testsuite"):
            for entry in suite.iterfind("properties/property"):
                facts[entry.get("name")] = entry.get("value")
            for case in suite.iterfind("testcase"):
                name = f"{case.get('classname', '').split('.')[-1]}.py::{case.get('name')}"
                if case.find("failure") is not None or case.find("error") is not None:
                    tests[name] = "failed"
                elif (skip := case.find("skipped")) is not None:
                    tests[name] = f"skipped: {skip.get('message', '')}"
                else:
                    tests[name] = "passed"
    return facts, tests


def record(options: argparse.Namespace) -> None:
    """Write a results file from JUnit XML."""
    facts, tests = read_junit(options.xml)
    report = {
        "schema": 1,
        "kind": "tests",
        "what": options.what,
        "date": options.date or datetime.date.today().isoformat(),
        "commit": options.commit or commit(),
        "command": options.command,
        "versions": dict(sorted(facts.items())),
        "tests": dict(sorted(tests.items())),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, json.dumps(report, indent=0) + "\n")
    counts = Counter(outcome.split(":")[0] for outcome in tests.values())
    print(f"{options.out}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))


def latest(what: str) -> dict | None:
    """The newest results file about ``what``."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    found = [report for report in found if report.get("what") == what]
    return max(found, key=lambda report: report["date"]) if found else None


def kind_of(name: str) -> str:
    """The module kind that a test id names, or "other"."""
    inside = re.search(r"\[(.*)\]$", name)
    parts = inside[1].split("-") if inside else []
    return next((kind for kind in KINDS if kind in parts), "other")


def cell(tests: dict) -> str:
    """``passed/run`` of some outcomes; skipped ones are not run."""
    run = [outcome for outcome in tests.values() if not outcome.startswith("skipped")]
    return f"{run.count('passed')}/{len(run)}" if run else ""


def contract_table() -> str:
    """Row x kind: how many tests pass on stock, on the fork's CPU run and its GPU run."""
    runs = {what: latest(what) for what in ("stock-cpu", "fork-cpu", "fork-gpu")}
    lines = []
    for what, report in runs.items():
        if report is not None:
            v = report["versions"]
            lines.append(
                f"- {what}: TE {v['transformer_engine']}, torch {v['torch']}, CUDA {v['cuda']}, "
                f"Python {v['python']}, {v['device']}; {report['date']}, commit "
                f"`{report['commit']}`, `{report['command']}`"
            )
    head = " | ".join(f"`{kind}`" for kind in [*KINDS, "other"])
    lines += ["", f"| row | | {head} |", "|---|---|" + "---|" * (len(KINDS) + 1)]
    ids = defaultdict(list)
    for row, title in ROWS.items():
        by_kind = defaultdict(lambda: defaultdict(dict))
        for what, report in runs.items():
            for name, outcome in (report or {"tests": {}})["tests"].items():
                if re.search(rf"::test_{row}_", name):
                    by_kind[kind_of(name)][what][name] = outcome
                    if name.split("[")[0] not in ids[row]:
                        ids[row].append(name.split("[")[0])
        cells = []
        for kind in [*KINDS, "other"]:
            parts = [cell(by_kind[kind][what]) for what in runs]
            cells.append(" · ".join(part or "–" for part in parts) if any(parts) else "")
        lines.append(f"| {row.upper()} | {title} | " + " | ".join(cells) + " |")
    lines += ["", "Each cell: passed/run on stock (CPU) · fork (CPU) · fork (GPU).", ""]
    for row in ROWS:
        links = ", ".join(
            f"[{name.split('::')[1]}](../tests/pytorch/{name.split('::')[0]})" for name in ids[row]
        )
        lines.append(f"- {row.upper()}: {links}")
    passing = Counter(
        name.split("::")[1].split("[")[0]
        for name, outcome in (runs["stock-cpu"] or {"tests": {}})["tests"].items()
        if re.search(r"::test_a\d+_", name) and outcome == "passed"
    )
    lines += ["", "Stock passes these, and why:", ""]
    for test, count in sorted(passing.items()):
        if test not in STOCK_PASSES:
            raise SystemExit(f"error: {test} passes on stock\n  next: say why in STOCK_PASSES")
        lines.append(f"- {test} ({count}): {STOCK_PASSES[test]}")
    return "\n".join(lines)


def benchmark_table() -> str:
    """Delayed against regular, from the newest benchmark file."""
    report = latest("benchmark-delayed_wgrad")
    if report is None:
        return "Not measured yet."
    env = report["environment"]
    lines = [
        f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, "
        f"TE {env['transformer_engine']}, {env['date']}, commit `{env['commit']}`: "
        f"`{env['command']}`, median of {env['rounds']} steps.",
        "",
        "| module | | device ms, regular | delayed | ratio | regular again | host ms, regular |"
        " delayed | ratio | peak over regular, MiB | queue, MiB | stock's ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    stock = {(r["name"], r["fused"]): r for r in report.get("stock", {}).get("rows", [])}
    for row in report["rows"]:
        other = stock.get((row["name"], row["fused"]))
        beside = "not run"
        if other is not None:
            ratio = other["delayed_device_ms"] / other["regular_device_ms"]
            beside = f"{ratio:.3f}" if other["bit_equal"] else "wrong result"
        over = (row["delayed_peak_bytes"] - row["regular_peak_bytes"]) / 2**20
        regular = row["regular_device_ms"]
        lines.append(
            f"| {row['name']} | {'fused' if row['fused'] else ''} | {regular:.3f} "
            f"| {row['delayed_device_ms']:.3f} | {row['delayed_device_ms'] / regular:.3f} "
            f"| {row['again_device_ms'] / regular:.3f} | {row['regular_host_ms']:.3f} "
            f"| {row['delayed_host_ms']:.3f} "
            f"| {row['delayed_host_ms'] / row['regular_host_ms']:.2f} | {over:.1f} "
            f"| {row['queued_bytes'] / 2**20:.1f} | {beside} |"
        )
    return "\n".join(lines)


def runs_table() -> str:
    """One line a run: what ran where, and how it ended."""
    lines = ["| run | passed | failed | skipped | on |", "|---|---|---|---|---|"]
    for what, title in (
        ("stock-cpu", "the same tests on stock, CPU executor"),
        ("fork-cpu", "fork, CPU executor"),
        ("fork-gpu", "fork, GPU"),
        ("fork-2gpu", "fork, two GPUs: DistributedDataParallel"),
    ):
        report = latest(what)
        if report is None:
            continue
        count = Counter(outcome.split(":")[0] for outcome in report["tests"].values())
        v = report["versions"]
        lines.append(
            f"| {title} | {count['passed']} | {count['failed']} | {count['skipped']} | "
            f"{v['device']}, TE {v['transformer_engine']}, torch {v['torch']}, Python {v['python']}; "
            f"{report['date']}, `{report['commit']}`, `{report['command']}` |"
        )
    return "\n".join(lines)


def rows_of(test: str) -> list[str]:
    """The rows of section B that ``file::test`` belongs to."""
    name = test.split("::")[1].removeprefix("test_")
    named = [row for row in ROWS_B if name.startswith(f"{row}_")]
    return named or [row for row, (_, tests) in ROWS_B.items() if name in tests.split()]


def single_weight_tests() -> str:
    """Each row of section B: passed/run on stock, the CPU run, the GPU run, and its tests."""
    runs = [latest(what) for what in ("stock-cpu", "fork-cpu", "fork-gpu")]
    names = {
        name.split("[")[0]
        for run in runs[1:]
        if run is not None
        for name in run["tests"]
        if name.startswith("test_single_grouped_weight") or re.search(r"::test_b\d_", name)
    }
    unknown = sorted(test for test in names if not rows_of(test))
    if unknown:
        raise SystemExit(
            f"error: no row of section B for {', '.join(unknown)}\n"
            "  next: name them in ROWS_B of ci/results.py"
        )
    lines = ["| row | | stock (CPU) | fork (CPU) | fork (GPU) |", "|---|---|---|---|---|"]
    links = []
    for row, (title, _) in ROWS_B.items():
        tests = sorted(test for test in names if row in rows_of(test))
        cells = []
        for run in runs:
            outcomes = {} if run is None else run["tests"]
            found = {n: outcome for n, outcome in outcomes.items() if n.split("[")[0] in tests}
            cells.append(cell(found) or "–")
        lines.append(f"| {row.upper()} | {title} | " + " | ".join(cells) + " |")
        each = (f"[{t.split('::')[1]}](../tests/pytorch/{t.split('::')[0]})" for t in tests)
        links.append(f"- {row.upper()}: {', '.join(each) or 'no recorded run has a test of it'}")
    lines += ["", "Each cell: passed/run. A test may stand in several rows.", "", *links]
    refused = Counter(
        outcome.split(": ", 1)[1]
        for name, outcome in (runs[2] or {"tests": {}})["tests"].items()
        if name.startswith("test_single_grouped_weight") and outcome.startswith("skipped")
    )
    lines += ["", "Not run on the GPU, and why:", ""]
    for reason, number in refused.most_common():
        reason = re.sub(r"/[^ ]*/", "", reason.removeprefix("Skipped: ")).split("\n")[0][:160]
        lines.append(f"- {number}: {reason}")
    return "\n".join(lines)


def binding_tests() -> str:
    """Each row of section C: passed/run on stock, the CPU run, the GPU run, and its tests."""
    runs = [latest(what) for what in ("stock-cpu", "fork-cpu", "fork-gpu")]
    lines = ["| row | | stock (CPU) | fork (CPU) | fork (GPU) |", "|---|---|---|---|---|"]
    links = []
    for row, title in ROWS_C.items():
        found = [
            {
                n: o
                for n, o in ({} if run is None else run["tests"]).items()
                if f"::test_{row}_" in n
            }
            for run in runs
        ]
        cells = [cell(outcomes) or "–" for outcomes in found]
        lines.append(f"| {row.upper()} | {title} | " + " | ".join(cells) + " |")
        tests = sorted({name.split("[")[0] for outcomes in found for name in outcomes})
        each = (f"[{t.split('::')[1]}](../tests/pytorch/{t.split('::')[0]})" for t in tests)
        links.append(f"- {row.upper()}: {', '.join(each) or 'no recorded run has a test of it'}")
    return "\n".join([*lines, "", "Each cell: passed/run.", "", *links])


def support_matrix() -> str:
    """Where single weights train, from the newest runs of single_weight_matrix.py."""
    lines = []
    for what in ("single-weight-matrix-gpu", "single-weight-matrix-cpu"):
        run = latest(what)
        if run is not None:
            lines += [*matrix_lines(run), ""]
    return "\n".join(lines).rstrip() or "Not run yet."


def matrix_lines(run: dict) -> list[str]:
    """One run's table; dtypes with the same cells share a line, a reason is a letter below."""
    v, forms = run["versions"], list(run["rows"][0]["cells"])
    lines = [
        f"{v['device']}, TE {v['transformer_engine']}, torch {v['torch']}, CUDA {v['cuda']}, "
        f"cuBLASLt {v['cublaslt']}, Python {v['python']}; {run['date']}, commit `{run['commit']}`, "
        f"`{run['command']}`:",
        "",
        "| layer | recipe | weights | dtype | " + " | ".join(forms) + " |",
        "|---|---|---|---|" + "---|" * len(forms),
    ]
    merged: dict[tuple, list[str]] = {}
    for row in run["rows"]:
        recipe = row["recipe"]
        if row["cublaslt"] is not None:
            recipe += f", cuBLASLt {row['cublaslt']}"
        cells = tuple(matrix_cell(run["outcomes"], row["cells"].get(form, "")) for form in forms)
        layer = "GroupedLinear" if row["kind"] == "module" else "ops.GroupedLinear"
        weights = "quantized" if row["quantized_weights"] else "plain"
        merged.setdefault((layer, recipe, weights, *cells), []).append(row["dtype"])
    for (layer, recipe, weights, *cells), dtypes in merged.items():
        lines.append(
            f"| {layer} | {recipe} | {weights} | {', '.join(dtypes)} | {' | '.join(cells)} |"
        )
    notes = [f"- {k}: {text}" for k, text in run["outcomes"].items() if k != "="]
    return lines + ([""] + notes if notes else [])


def matrix_cell(outcomes: dict, cells: str) -> str:
    """``equal of all``, with the letters of the other outcomes; a failure is bold."""
    if not cells:
        return "–"
    text = f"{cells.count('=')}/{len(cells)}"
    for letter in sorted(set(cells) - {"="}):
        refused = outcomes[letter].startswith("the per-expert layer refuses")
        text += f" {letter}" if refused else f" **{letter}**"
    return text


def example_table() -> str:
    """Each run of the example: the losses and whether all bits agree."""
    lines = ["| on | steps | first loss | last loss | parameters |", "|---|---|---|---|---|"]
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*moe_single_weight*"))]
    for run in runs:
        (old, new), agree = run["loss"].values(), "bit-equal" if run["equal"] else "**differ**"
        both = [f"{a:.5f}" if a == b else f"{a:.5f}, {b:.5f}" for a, b in zip(old, new)]
        lines.append(
            f"| {run['device']}, torch {run['torch']}; {run['date']}, `{run['command']}` "
            f"| {run['steps']} | {both[0]} | {both[-1]} | {agree} |"
        )
    return "\n".join(lines)


def single_weight_table() -> str:
    """One packed weight against separate ones, from the newest benchmark file."""
    report = latest("benchmark-single_grouped_weight")
    if report is None:
        return "Not measured yet."
    env = report["environment"]
    lines = [
        f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, "
        f"TE {env['transformer_engine']}, {env['date']}, commit `{env['commit']}`: "
        f"`{env['command']}`, median of {env['rounds']} steps, forward + backward.",
        "",
        "| layer | | device ms, separate | single | ratio | separate again | host ms, separate |"
        " single | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        device, host = row["separate_device_ms"], row["separate_host_ms"]
        how = ["fused"] * row["fused"] + ["device splits"] * (row.get("splits") == "device")
        lines.append(
            f"| {row['name']} | {', '.join(how)} | {device:.3f} "
            f"| {row['single_device_ms']:.3f} | {row['single_device_ms'] / device:.3f} "
            f"| {row['again_device_ms'] / device:.3f} | {host:.3f} | {row['single_host_ms']:.3f} "
            f"| {row['single_host_ms'] / host:.2f} |"
        )
    return "\n".join(lines)


TABLES = {
    "runs": runs_table,
    "contract-b": single_weight_tests,
    "contract-c": binding_tests,
    "single-weight-matrix": support_matrix,
    "example-moe_single_weight": example_table,
    "benchmark-single_grouped_weight": single_weight_table,
    "contract-a": contract_table,
    "benchmark-delayed_wgrad": benchmark_table,
}


def tables(options: argparse.Namespace) -> None:
    """Write the tables between their markers, or check them."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        old = text = path.read_text()
        for name, make in TABLES.items():
            begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
            if begin in text and end in text:
                before, rest = text.split(begin, 1)
                text = f"{before}{begin}\n{make()}\n{end}{rest.split(end, 1)[1]}"
        if text != old:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                write(path, text)
    if stale and options.check:
        raise SystemExit(
            f"error: tables are not those of results/: {', '.join(stale)}\n"
            "  next: python ci/results.py tables, and commit"
        )
    print("tables are up to date" if not stale else "written: " + ", ".join(stale))


def prove(_options: argparse.Namespace) -> None:
    """Every ``Test:`` of a patch fails on stock and passes on the fork, in the newest results."""
    stock, fork, gpu = (latest(what) for what in ("stock-cpu", "fork-cpu", "fork-gpu"))
    if stock is None or fork is None:
        raise SystemExit("error: no stock-cpu and fork-cpu results\n  next: CONTRIBUTING.md")
    problems, newer, number = [], [], 0
    for path in sorted((ROOT / "patches").glob("**/*.patch")):
        for test in re.findall(r"^Test: tests/pytorch/(\S+)$", path.read_text(), re.M):
            number += 1
            before, after, device = (
                {
                    n: o
                    for n, o in (run or {"tests": {}})["tests"].items()
                    if n.split("[")[0] == test
                }
                for run in (stock, fork, gpu)
            )
            ran = [o for o in before.values() if not o.startswith("skipped")]
            alone = all(o.startswith("skipped") for o in after.values()) and not device
            if not before or not after or alone:  # the last: only a GPU can tell
                newer.append(f"{path.name}: {test}")
            elif ran and set(ran) != {"failed"}:
                problems.append(f"{path.name}: {test} passes on stock {ran.count('passed')} times")
            elif "failed" in (*after.values(), *device.values()):
                problems.append(f"{path.name}: {test} fails on the fork")
            elif "passed" not in (*after.values(), *device.values()):
                problems.append(f"{path.name}: {test} never ran on the fork")
    if problems:
        raise SystemExit("error: " + "\n  ".join(problems))
    print(f"{number - len(newer)} tests named by patches: fail on stock, pass on the fork")
    for test in newer:
        print(f"warning: not proven, newer than the recorded runs (CONTRIBUTING.md): {test}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    one = verbs.add_parser("record", help="JUnit XML to a results file")
    one.add_argument("--xml", type=Path, required=True, help="folder with the JUnit files")
    one.add_argument("--out", type=Path, required=True, help="results file to write")
    one.add_argument("--what", required=True, help="e.g. stock-cpu, fork-cpu, fork-gpu")
    one.add_argument("--command", default="ci/pytorch.sh", help="what was run")
    one.add_argument("--commit", help="default: this checkout's")
    one.add_argument("--date", help="default: today")
    one.set_defaults(call=record)
    two = verbs.add_parser("tables", help="write the tables into the documents")
    two.add_argument("--check", action="store_true", help="change nothing; fail on a difference")
    two.set_defaults(call=tables)
    three = verbs.add_parser("prove", help="the tests that patches name tell stock from fork")
    three.set_defaults(call=prove)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    sys.exit(main())
