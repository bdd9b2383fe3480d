# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdicts, table, exit codes and reports.

The verdicts are checked on a stand-in for ``te.Linear`` in plain torch that is right or wrong on
purpose, and then on the installed package.
"""

import json
import os
import subprocess
import sys
import types

import pytest
import torch

from transformer_engine.pytorch import wgrad_doctor as doctor


class _Matmul(torch.autograd.Function):
    """x @ w.T whose weight gradient goes to a queue."""

    @staticmethod
    def forward(ctx, x, weight, queue):
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wgrad = None
        if ctx.queue is None:
            wgrad = grad.t() @ x
        else:
            ctx.queue.append(grad.t() @ x)
        return grad @ weight, wgrad, None


def _stand_in(fault=None):
    """Make a package whose Linear delivers late: right, or with one ``fault``."""

    class Linear(torch.nn.Module):
        def __init__(
            self,
            in_features,
            out_features,
            bias=True,
            params_dtype=None,
            device=None,
            delay_wgrad_compute=False,
        ):
            super().__init__()
            self.in_features = in_features
            made = torch.randn(out_features, in_features).to(dtype=params_dtype, device=device)
            self.weight = torch.nn.Parameter(made)
            self.queue = [] if delay_wgrad_compute else None

        def forward(self, x):
            return _Matmul.apply(x, self.weight, self.queue)

        def backward_dw(self):
            if fault == "raise":
                raise RuntimeError("first line\nsecond line")
            value = self.queue.pop(0)
            if fault == "drop":
                return
            if fault == "assign" or self.weight.grad is None:
                self.weight.grad = value
            else:
                self.weight.grad += value

    return doctor.Bench(types.SimpleNamespace(Linear=Linear), torch, "cpu")


def _report(*rows):
    named = [dict(zip(("id", "promise", "verdict", "seen"), row)) for row in rows]
    return {"schema": 1, "versions": {"transformer_engine": "9.9"}, "rows": named}


@pytest.mark.parametrize(
    "fault, verdict, said",
    [
        (None, "ok", "hold"),
        ("assign", "WRONG", "of 256 elements differ"),
        ("drop", "WRONG", "None"),
        ("raise", "raises", "RuntimeError: first line (in backward_dw)"),
    ],
)
def test_verdict_on_the_stand_in(fault, verdict, said):
    entry = doctor.run_row(_stand_in(fault), "report-3437")
    assert entry["verdict"] == verdict, entry
    assert said in entry["seen"]


def test_absent_only_by_signature():
    bench = _stand_in()
    for name in ("a4-parameters-split", "a10-main-grad-tied", "a7-nothing-pending-grouped"):
        assert doctor.run_row(bench, name)["verdict"] == "n/a"


def test_difference_in_words():
    want = torch.zeros(2, 3)
    got = want.clone()
    got[1, 2] = 0.5
    assert doctor.describe_difference(want, want.clone()) is None
    said = doctor.describe_difference(got, want)
    assert said == "1 of 6 elements differ, max |diff| 0.5 at (1, 2)"
    got[0, 1] = float("nan")
    assert doctor.describe_difference(got, want).endswith("max |diff| nan at (0, 1)")
    assert "shape" in doctor.describe_difference(got[:1], want)
    assert "dtype" in doctor.describe_difference(got.double(), want)
    assert "None" in doctor.describe_difference(None, want)


@pytest.mark.parametrize(
    "verdicts, code",
    [(("ok", "n/a"), 0), (("ok", "WRONG"), 1), (("raises",), 1), (("n/a",), 0)],
)
def test_exit_code(verdicts, code):
    assert doctor.exit_code(_report(*(("r", "p", v, "s") for v in verdicts))) == code


def test_table_is_aligned_and_narrow():
    long = "word " * 60 + "x" * 300
    before = _report(("one", "p", "WRONG", long), ("gone", "p", "ok", "fine"))
    after = _report(("one", "p", "ok", long), ("new", "p", "raises", "E: m"))
    for text in (doctor.render(None, after), doctor.render(before, after)):
        assert max(map(len, text.splitlines())) <= 120
        assert text.endswith("AFFECTED: 1 of 2 rows are WRONG or raise.")
        # Nothing is cut off.
        assert text.count("x") >= 300
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("row "))
    for name, left, right in (("one", "WRONG", "ok"), ("gone", "ok", "-"), ("new", "-", "raises")):
        line = next(line for line in lines if line.startswith(name + " "))
        assert line[head.index("before") :].split()[0] == left
        assert line[head.index("after") :].split()[0] == right


def test_json_and_compare(tmp_path, monkeypatch, capsys):
    bench = _stand_in("assign")
    monkeypatch.setattr(doctor, "open_bench", lambda executor: bench)
    target = tmp_path / "report.json"
    assert doctor.main(["--row", "report-3437", "--json", str(target)]) == 1
    report = json.loads(target.read_text(encoding="utf-8"))
    assert report["schema"] == 1
    assert [entry["id"] for entry in report["rows"]] == ["report-3437"]
    assert set(report["rows"][0]) == {"id", "promise", "verdict", "seen"}
    assert os.listdir(tmp_path) == ["report.json"], "a part file was left"
    capsys.readouterr()

    # The exit code is the present run's, whatever the earlier one was.
    bench = _stand_in()
    assert doctor.main(["--row", "report-3437", "--compare", str(target)]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("report-3437"))
    assert line.split()[1:3] == ["WRONG", "ok"]

    assert doctor.main(["--row", "report-3437", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rows"][0]["verdict"] == "ok"
    assert "verdict" in captured.err


def test_could_not_run(tmp_path, monkeypatch, capsys):
    assert doctor.main(["--row", "no-such-row"]) == 2
    assert doctor.main(["--compare", str(tmp_path / "absent.json")]) == 2
    assert doctor.main(["--json", str(tmp_path / "absent" / "x.json")]) == 2
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    assert doctor.main(["--compare", str(tmp_path / "other.json")]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main([]) == 2
    assert "nvidia-smi" in capsys.readouterr().err


def test_alone_by_path_without_the_package(tmp_path):
    """A copy beside a file named like a library starts, and says that nothing is installed."""
    copied = tmp_path / "wgrad_doctor.py"
    with open(doctor.__file__, encoding="utf-8") as stream:
        copied.write_text(stream.read(), encoding="utf-8")
    (tmp_path / "textwrap.py").write_text("raise SystemExit('shadowed')", encoding="utf-8")
    nothing = tmp_path / "nothing"
    (nothing / "transformer_engine").mkdir(parents=True)
    (nothing / "transformer_engine" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "noop.py").write_text("def install(): pass\n", encoding="utf-8")
    environment = dict(os.environ, PYTHONPATH=str(nothing))

    def start(*arguments):
        return subprocess.run(
            [sys.executable, str(copied), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    done = start("--executor", str(tmp_path / "noop.py"))
    assert done.returncode == 2, done.stderr
    assert "transformer_engine.pytorch cannot be imported" in done.stderr
    # Whatever stops it, exit code 1 is kept for "affected".
    (tmp_path / "broken.py").write_text("def install(): raise TypeError('x')\n", encoding="utf-8")
    done = start("--executor", str(tmp_path / "broken.py"))
    assert done.returncode == 2, done.stderr
    assert "TypeError: x" in done.stderr
    shown = start("--help")
    assert shown.returncode == 0
    assert "--compare" in shown.stdout


def _installed(device):
    import transformer_engine.pytorch as te  # pylint: disable=import-outside-toplevel

    return doctor.Bench(te, torch, str(device))


def test_installed_package_is_not_affected_by_report_3437(device):
    entry = doctor.run_row(_installed(device), "report-3437")
    assert entry["verdict"] == "ok", entry


@pytest.mark.parametrize("fault", ["assign", "drop"])
def test_a_wrong_delivery_is_seen(device, monkeypatch, fault):
    bench = _installed(device)
    right = bench.te.Linear.backward_dw

    def wrong(self):
        if fault == "assign":
            for param in self.parameters():
                param.grad = None
            right(self)

    monkeypatch.setattr(bench.te.Linear, "backward_dw", wrong)
    entry = doctor.run_row(bench, "report-3437")
    assert entry["verdict"] == "WRONG", entry


def test_every_row_gives_a_verdict(device):
    report = doctor.examine(_installed(device))
    assert [entry["id"] for entry in report["rows"]] == list(doctor.ROWS)
    for entry in report["rows"]:
        assert entry["verdict"] in ("ok", "WRONG", "raises", "n/a")
        assert entry["seen"]
