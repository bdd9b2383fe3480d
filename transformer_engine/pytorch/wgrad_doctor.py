# SPDX-License-Identifier: Apache-2.0
"""Is my Transformer Engine affected?

Runs two public reports about wrong or missing weight gradients and the main promises around
them against whichever Transformer Engine is installed, and prints one table::

    python wgrad_doctor.py     # this file alone, any release

Every expected value is computed here by the *regular path* of the same installation (no delay,
separate weights) and compared bit for bit, so the table holds for any release and any device.

Verdicts: ``ok`` the promise holds; ``WRONG`` it does not; ``raises`` an exception came (its type
and first line are shown); ``n/a`` this release has no such argument or class.

Exit codes: 0 no row is affected; 1 at least one row is WRONG or raises; 2 nothing could be run.

For tests on machines without a GPU, ``--executor FILE`` names a Python file with a function
``install()``. It is loaded and called before Transformer Engine is imported (where the file runs
alone), and everything then runs on CPU tensors.
"""

import os
import sys

# Run by path, Python puts this file's folder first on sys.path. Inside the package that folder
# holds names such as ``triton`` and ``distributed``, which would hide the real ones.
if __name__ == "__main__" and not __package__ and sys.path:
    if os.path.realpath(sys.path[0] or ".") == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]

# pylint: disable=wrong-import-position
import argparse
import contextlib
import copy
import importlib
import importlib.util
import inspect
import json
import tempfile
import textwrap
import traceback
import warnings

SCHEMA = 1
WIDTH = 120
OK, WRONG, RAISES, ABSENT = "ok", "WRONG", "raises", "n/a"

# The packed weight is experimental upstream: without this variable the request is dropped.
_SINGLE_WEIGHT_GATE = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
# Arguments that are the feature under test. Any other one, and these where they are switched off,
# are left out where they are unknown.
_FEATURES = (
    "delay_wgrad_compute",
    "fuse_wgrad_accumulation",
    "parameters_split",
    "single_grouped_weight",
)
_LAYERS = {
    "linear": ("Linear", {"in_features": 16, "out_features": 16}),
    "layernorm-linear": ("LayerNormLinear", {"in_features": 64, "out_features": 64}),
    "layernorm-mlp": ("LayerNormMLP", {"hidden_size": 64, "ffn_hidden_size": 128}),
    "grouped": ("GroupedLinear", {"num_gemms": 2, "in_features": 16, "out_features": 32}),
}
_SPLITS = [5, 3]
_SEED = 1234

ROWS = {}


class CannotRun(Exception):
    """Nothing can be checked here; the message says what to do next."""


class FeatureAbsent(Exception):
    """The installed release lacks the class or argument that a row is about."""


class Check:
    """Collects what one row saw.

    Attributes
    ----------
    problems : list of str
        Broken expectations, in words.
    held : int
        Number of expectations that held.
    step : str
        What is being done right now; shown with an exception.
    """

    def __init__(self):
        self.problems = []
        self.held = 0
        self.step = "set-up"

    def that(self, condition, problem):
        """Note ``problem`` unless ``condition`` holds."""
        if condition:
            self.held += 1
        else:
            self.problems.append(problem)

    def equal(self, name, got, want):
        """Note how ``got`` differs from ``want``, compared bit for bit."""
        difference = describe_difference(got, want)
        self.that(difference is None, f"{name}: {difference}")

    def equal_all(self, got, want):
        """Compare two dictionaries of named tensors."""
        self.that(set(got) == set(want), f"parameters {sorted(got)} != {sorted(want)}")
        for name in want:
            if name in got:
                self.equal(name, got[name], want[name])


class Bench:
    """What a row works with: the package, torch, the device, and small builders.

    Parameters
    ----------
    te, torch : module
        ``transformer_engine.pytorch`` and ``torch``.
    device : str
        Where tensors are made.
    """

    def __init__(self, te, torch, device):
        self.te = te
        self.torch = torch
        self.device = device

    def layer(self, kind, delay, seed=_SEED, dtype=None, **more):
        """Build one layer; equal seeds give equal weights, None draws on the current stream."""
        name, arguments = _LAYERS[kind]
        maker = getattr(self.te, name, None)
        if maker is None:
            raise FeatureAbsent(f"no class {name}")
        wanted = dict(arguments, params_dtype=dtype or self.torch.bfloat16, device=self.device)
        wanted.update(more)
        if delay is not None:
            wanted["delay_wgrad_compute"] = delay
        known = inspect.signature(maker).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            for argument in [name for name in wanted if name not in known]:
                if argument in _FEATURES and wanted[argument]:
                    raise FeatureAbsent(f"{name} has no argument {argument}")
                del wanted[argument]
        if seed is not None:
            self.torch.manual_seed(seed)
        return maker(**wanted)

    def inputs(self, layer, count, dtype=None):
        """Make ``count`` microbatches that fit ``layer``."""
        width = getattr(layer, "in_features", None) or _LAYERS["layernorm-mlp"][1]["hidden_size"]
        generator = self.torch.Generator().manual_seed(77)
        made = []
        for _ in range(count):
            x = self.torch.randn(sum(_SPLITS), width, generator=generator)
            made.append(x.to(device=self.device, dtype=dtype or self.torch.bfloat16))
        return [x.requires_grad_() for x in made]

    def backward(self, layers, x):
        """Forward through ``layers`` in order, then backward; returns the output."""
        y = x
        for layer in layers:
            grouped = type(layer).__name__ == "GroupedLinear"
            y = layer(y, list(_SPLITS)) if grouped else layer(y)
        y.float().square().sum().backward()
        return y.detach()

    def noise(self, param, seed, dtype=None):
        """Make a reproducible tensor of a parameter's shape."""
        generator = self.torch.Generator().manual_seed(seed)
        value = self.torch.randn(tuple(param.shape), generator=generator)
        return value.to(device=self.device, dtype=dtype or param.dtype)

    def tied_pair(self, delay, bias=False, **more):
        """Build two Linears that own the same parameters."""
        first = self.layer("linear", delay, seed=1, bias=bias, **more)
        second = self.layer("linear", delay, seed=2, bias=bias, **more)
        second.weight = first.weight
        if bias:
            second.bias = first.bias
        return [first, second]


def describe_difference(got, want):
    """Say how two tensors differ; None where they are bit-identical."""
    import torch  # pylint: disable=import-outside-toplevel

    if got is None or want is None:
        if got is want:
            return None
        return "no gradient (None)" if got is None else "a gradient where none is expected"
    if tuple(got.shape) != tuple(want.shape):
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype} instead of {want.dtype}"
    if torch.equal(got, want):
        return None
    unequal = got != want
    distance = (got.double() - want.double()).abs()
    finite = torch.nan_to_num(distance, nan=float("inf"), posinf=float("inf"))
    worst = int(finite.flatten().argmax())
    place = []
    for size in reversed(tuple(got.shape)):
        place.insert(0, worst % size)
        worst //= size
    value = distance[tuple(place)].item()
    return "{} of {} elements differ, max |diff| {!r} at ({})".format(
        int(unequal.sum()), unequal.numel(), value, ", ".join(str(i) for i in place)
    )


def _gradients(*layers):
    """Gradients by parameter name; a parameter that two layers own is listed once."""
    found, seen = {}, set()
    for number, layer in enumerate(layers):
        for name, param in layer.named_parameters():
            if id(param) not in seen:
                seen.add(id(param))
                main = getattr(param, "main_grad", None)
                key = name if len(layers) == 1 else f"{number}.{name}"
                found[key] = param.grad if main is None else main
    return {name: None if g is None else g.detach().clone() for name, g in found.items()}


def row(name, promise):
    """Register a function ``(bench, check)`` as the row ``name``."""

    def register(function):
        ROWS[name] = (promise, function)
        return function

    return register


# ---------------------------------------------------------------------------------------------
# The two public reports
# ---------------------------------------------------------------------------------------------


@row("report-3437", "two tied delayed Linears give the gradient of two tied regular ones")
def _report_3437(bench, check):
    """Issue 3437 with its numbers: seed 9, 16x16 bf16 without bias, batch 2, sum as the loss."""
    torch = bench.torch
    torch.manual_seed(9)
    models = {}
    for delay in (True, False):
        models[delay] = [
            bench.layer("linear", delay, seed=None, bias=False, fuse_wgrad_accumulation=False)
            for _ in range(2)
        ]
        models[delay][1].weight = models[delay][0].weight
    with torch.no_grad():
        models[False][0].weight.copy_(models[True][0].weight)
    x = torch.randn(2, 16, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    for pair in models.values():
        check.step = "backward"
        pair[1](pair[0](x)).float().sum().backward()
    check.step = "backward_dw"
    for layer in models[True]:
        layer.backward_dw()
    got, want = models[True][0].weight.grad, models[False][0].weight.grad
    check.equal("weight.grad", got, want)
    # The report counts as torch.testing.assert_close does: beyond its default
    # tolerances, and with the difference taken in the gradient's own dtype.
    try:
        torch.testing.assert_close(got, want)
        close = True
    except AssertionError as error:
        close = False
        lines = [line for line in str(error).splitlines() if " / " in line or "absolute" in line]
        text = "; ".join(line.split(" (")[0] if " / " in line else line for line in lines)
        text = text.split(" (up to")[0]
    check.that(close, "" if close else f"by assert_close: {text}")


@contextlib.contextmanager
def _single_weight_gate():
    """Let this release build packed weights, and put the environment back."""
    before = os.environ.get(_SINGLE_WEIGHT_GATE)
    os.environ[_SINGLE_WEIGHT_GATE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SINGLE_WEIGHT_GATE]
        else:
            os.environ[_SINGLE_WEIGHT_GATE] = before


def _packed(bench, check, dtype, fused):
    """Build a layer with one packed weight and, where fused, a zeroed fp32 buffer for it."""
    with _single_weight_gate():
        layer = bench.layer(
            "grouped",
            None,
            dtype=dtype,
            bias=False,
            fuse_wgrad_accumulation=fused,
            single_grouped_weight=True,
        )
    names = [name for name, _ in layer.named_parameters()]
    check.that(names == ["weight"], f"parameters are {names}, not one weight")
    if fused:
        _give_main_grads(bench, layer)
    return layer


def _give_main_grads(bench, layer, filled=False):
    """Give each weight an fp32 slice of one buffer, as a training framework does.

    One and the same kernel then writes packed and separate experts.
    """
    weights = [param for param in layer.parameters() if param.dim() > 1]
    sizes = [param.numel() for param in weights]
    buffer = bench.torch.zeros(sum(sizes), dtype=bench.torch.float32, device=bench.device)
    for number, (param, part) in enumerate(zip(weights, buffer.split(sizes))):
        param.main_grad = part.view(tuple(param.shape))
        if filled:
            param.main_grad.copy_(bench.noise(param, 50 + number, bench.torch.float32))
        param.grad_added_to_main_grad = False


@row("report-3234", "GroupedLinear with one packed weight gives a weight gradient")
def _report_3234(bench, check):
    """Issue 3234: bf16, default arguments, once with .grad and once with main_grad."""
    for fused in (False, True):
        where = "main_grad" if fused else ".grad"
        layer = _packed(bench, check, bench.torch.bfloat16, fused)
        check.step = f"forward and backward, {where}"
        bench.backward([layer], bench.inputs(layer, 1)[0])
        gradient = _gradients(layer).get("weight")
        if gradient is None:
            check.that(False, f"weight{where} is None")
        else:
            check.that(bool(gradient.any()), f"weight{where} is all zero")


def _packed_equals_separate(bench, check, dtype_name, fused):
    """Compare one packed weight with separate ones on the same numbers."""
    dtype = getattr(bench.torch, dtype_name)
    separate = bench.layer("grouped", None, dtype=dtype, bias=False, fuse_wgrad_accumulation=fused)
    if fused:
        _give_main_grads(bench, separate)
    packed = _packed(bench, check, dtype, fused)
    x = bench.inputs(separate, 1, dtype)[0]
    twin = x.detach().clone().requires_grad_()
    check.step = "separate weights"
    want_y = bench.backward([separate], x)
    want = _gradients(separate)
    check.step = "packed weight"
    got_y = bench.backward([packed], twin)
    check.equal("output", got_y, want_y)
    check.equal("input gradient", twin.grad, x.grad)
    where = "main_grad" if fused else "grad"
    stacked = bench.torch.stack([want[f"weight{i}"] for i in range(len(want))])
    check.equal(f"weight.{where}", _gradients(packed).get("weight"), stacked)


for _fused in (False, True):
    for _dtype, _short in (("bfloat16", "bf16"), ("float32", "fp32")):
        row(
            "b1-packed-{}-{}".format("fused" if _fused else "unfused", _short),
            "one packed weight trains like separate ones: {}, {}".format(
                "main_grad" if _fused else ".grad", _short
            ),
        )(lambda b, c, d=_dtype, f=_fused: _packed_equals_separate(b, c, d, f))


# ---------------------------------------------------------------------------------------------
# Delay changes when a gradient comes, never what it is
# ---------------------------------------------------------------------------------------------


def _both_ways(bench, check, build, schedule="BBWW", prepare=None):
    """Train delayed and regular on the same numbers and compare every gradient.

    Parameters
    ----------
    build : callable
        Takes ``delay``; returns a list of layers that are applied in order.
    schedule : str
        ``B``: forward and backward of the next microbatch; ``W``: one ``backward_dw()`` of
        each layer, last layer first, which is the order of the regular path.
    prepare : callable, optional
        Called with the layers before the first microbatch.
    """
    results = {}
    for delay in (False, True):
        layers = build(delay)
        if prepare is not None:
            prepare(layers)
        waiting = bench.inputs(layers[0], schedule.count("B"))
        for letter in schedule:
            if letter == "B":
                check.step = "backward, {} path".format("delayed" if delay else "regular")
                bench.backward(layers, waiting.pop(0))
            elif delay:
                for layer in reversed(layers):
                    check.step = f"backward_dw of {type(layer).__name__}"
                    layer.backward_dw()
        results[delay] = _gradients(*layers)
    check.equal_all(results[True], results[False])


@row("a1-tied-bias", "tied weight and bias: every contribution arrives once")
def _tied_bias(bench, check):
    _both_ways(bench, check, lambda delay: bench.tied_pair(delay, bias=True), "BW")


@row("a1-interleaved", "Linear, two microbatches as B1 W1 B2 W2")
def _interleaved(bench, check):
    _both_ways(bench, check, lambda delay: [bench.layer("linear", delay)], "BWBW")


for _kind in _LAYERS:
    row(
        f"a1-microbatches-{_kind}",
        f"{_LAYERS[_kind][0]}, two microbatches as B1 B2 W1 W2",
    )(lambda b, c, k=_kind: _both_ways(b, c, lambda delay: [b.layer(k, delay)]))


@row("a2-grad-untouched-grouped", "GroupedLinear: .grad is untouched before backward_dw()")
def _untouched(bench, check):
    for earlier in (False, True):
        layer = bench.layer("grouped", True)
        params = dict(layer.named_parameters())
        if earlier:
            for number, param in enumerate(params.values()):
                param.grad = bench.noise(param, number)
        before = _gradients(layer)
        check.step = "backward"
        bench.backward([layer], bench.inputs(layer, 1)[0])
        for name, param in params.items():
            same = before[name] is None and param.grad is None
            if before[name] is not None and param.grad is not None:
                same = bench.torch.equal(before[name], param.grad)
            kind = "earlier value" if earlier else "None"
            check.that(same, f"{name}.grad changed from {kind} in backward")


@row("a3-hooks", "post-accumulate hooks fire once per contribution, none before backward_dw()")
def _hooks(bench, check):
    layer = bench.layer("linear", True)
    fired = []
    for name, param in layer.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda p, n=name: fired.append((n, None if p.grad is None else p.grad.clone()))
        )
    check.step = "backward"
    for x in bench.inputs(layer, 2):
        bench.backward([layer], x)
    early = len(fired)
    check.that(early == 0, f"{early} hook calls before backward_dw()")
    for number in (1, 2):
        del fired[:]
        check.step = f"backward_dw {number}"
        layer.backward_dw()
        for name, param in layer.named_parameters():
            values = [value for hooked, value in fired if hooked == name]
            check.that(
                len(values) == 1,
                f"{name}: {len(values)} calls in backward_dw() {number}",
            )
            for value in values:
                check.equal(f"{name} seen by its hook", value, param.grad)


@row("a3-grad-in-place", "an existing .grad is added to in place: right value, same object")
def _in_place(bench, check):
    owned = {}

    def prepare(layers):
        for number, (name, param) in enumerate(layers[0].named_parameters()):
            param.grad = bench.noise(param, number)
            owned[name] = (param, param.grad, param.grad.data_ptr())

    _both_ways(bench, check, lambda delay: [bench.layer("linear", delay)], "BW", prepare)
    # The delayed layers come last, so these are theirs.
    for name, (param, gradient, address) in owned.items():
        check.that(param.grad is gradient, f"{name}.grad is another object")
        moved = param.grad is not None and param.grad.data_ptr() != address
        check.that(not moved, f"{name}.grad has other storage")


@row("a4-parameters-split", "parameters_split: each parameter gets its own slice")
def _split(bench, check):
    parts = ("query", "key")
    _both_ways(
        bench, check, lambda delay: [bench.layer("linear", delay, parameters_split=parts)], "BW"
    )


@row("a6-frozen-weight", "frozen weight, trained bias: the bias gradient arrives")
def _frozen(bench, check):
    def build(delay):
        layer = bench.layer("linear", delay)
        layer.weight.requires_grad_(False)
        return [layer]

    _both_ways(bench, check, build, "BW")


def _nothing_pending(bench, check, kind):
    """Call ``backward_dw()`` once before and once after everything was delivered."""
    layer = bench.layer(kind, True)
    check.step = "backward_dw before any backward"
    layer.backward_dw()
    check.that(all(g is None for g in _gradients(layer).values()), "a gradient came from nothing")
    check.step = "backward and backward_dw"
    bench.backward([layer], bench.inputs(layer, 1)[0])
    layer.backward_dw()
    before = _gradients(layer)
    fired = []
    for name, param in layer.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, n=name: fired.append(n))
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append("reduce"))
    check.step = "backward_dw after all was delivered"
    layer.backward_dw()
    check.equal_all(_gradients(layer), before)
    check.that(not fired, "hooks fired: {}".format(", ".join(fired)))


for _kind in _LAYERS:
    row(
        f"a7-nothing-pending-{_kind}",
        f"{_LAYERS[_kind][0]}: backward_dw() with nothing pending does nothing",
    )(lambda b, c, k=_kind: _nothing_pending(b, c, k))


@row("a10-main-grad-tied", "tied weight, fused: an fp32 main_grad gets every contribution")
def _main_grad(bench, check):
    owned = []

    def prepare(layers):
        _give_main_grads(bench, layers[0], filled=True)
        owned[:] = [layers[0].weight]

    _both_ways(
        bench,
        check,
        lambda delay: bench.tied_pair(delay, fuse_wgrad_accumulation=True),
        "BW",
        prepare,
    )
    check.that(owned[0].grad_added_to_main_grad, "grad_added_to_main_grad is not set")


@row("a12-deepcopy", "a delayed layer can be deep-copied and the copy trains like a regular one")
def _deepcopy(bench, check):
    def build(delay):
        layer = bench.layer("linear", delay)
        check.step = "deepcopy of the {} layer".format("delayed" if delay else "regular")
        return [copy.deepcopy(layer)]

    _both_ways(bench, check, build, "BW")


# ---------------------------------------------------------------------------------------------
# Running and reporting
# ---------------------------------------------------------------------------------------------


def _first_line(error):
    """Exception type and first line of its message."""
    lines = str(error).strip().splitlines()
    return "{}: {}".format(type(error).__name__, lines[0].strip() if lines else "(no message)")


def run_row(bench, name):
    """Run one row.

    Returns
    -------
    dict
        ``id``, ``promise``, ``verdict``, ``seen``.
    """
    promise, function = ROWS[name]
    check = Check()
    try:
        with warnings.catch_warnings():
            # Deprecation and experimental notices would tear the table apart.
            warnings.simplefilter("ignore")
            function(bench, check)
    except FeatureAbsent as absent:
        verdict, seen = ABSENT, str(absent)
    except Exception as error:  # pylint: disable=broad-exception-caught
        verdict = RAISES
        seen = "; ".join(check.problems + [f"{_first_line(error)} (in {check.step})"])
    else:
        verdict = WRONG if check.problems else OK
        seen = "; ".join(check.problems) or f"all {check.held} checks hold"
    return {"id": name, "promise": promise, "verdict": verdict, "seen": seen}


def load_executor(path):
    """Load a Python file by path and call its ``install()``."""
    path = os.path.realpath(path)
    name = os.path.splitext(os.path.basename(path))[0]
    module = sys.modules.get(name)
    # A test session may have it loaded already; patching torch a second time is not wanted.
    if os.path.realpath(getattr(module, "__file__", None) or "") != path:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or not os.path.isfile(path):
            raise CannotRun(f"--executor {path}: no such Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    module.install()


def open_bench(executor=None):
    """Import torch and Transformer Engine and choose the device.

    Returns
    -------
    Bench
    """
    try:
        import torch  # pylint: disable=import-outside-toplevel
    except Exception as error:  # pylint: disable=broad-exception-caught
        raise CannotRun(
            f"torch cannot be imported ({_first_line(error)}). Install PyTorch with CUDA."
        ) from error
    if executor is not None:
        load_executor(executor)
    elif not torch.cuda.is_available():
        raise CannotRun(
            f"torch {torch.__version__} sees no GPU (torch.cuda.is_available() is False). Run this where "
            "nvidia-smi lists a GPU, with a CUDA build of PyTorch."
        )
    try:
        te = importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # pylint: disable=broad-exception-caught
        raise CannotRun(
            f"transformer_engine.pytorch cannot be imported ({_first_line(error)}). Install it for this Python, {sys.executable}, "
            f"and check that it was built for torch {torch.__version__}."
        ) from error
    if not hasattr(te, "Linear"):
        raise CannotRun(
            f"the transformer_engine found in {_origin(te)} has no Linear: a bare source folder hides the "
            "installed package. Run this from another folder."
        )
    return Bench(te, torch, "cpu" if executor is not None else "cuda")


def _origin(module):
    """Folder a module was imported from."""
    if getattr(module, "__file__", None):
        return os.path.dirname(os.path.realpath(module.__file__))
    return ", ".join(getattr(module, "__path__", [])) or "(unknown)"


def versions(bench):
    """Facts for the header, as a dictionary."""
    package = sys.modules["transformer_engine"]
    version = getattr(package, "__version__", None)
    if version is None:
        from importlib import metadata  # pylint: disable=import-outside-toplevel

        try:
            version = metadata.version("transformer_engine")
        except metadata.PackageNotFoundError:
            version = "unknown"
    if bench.device == "cpu":
        device = "cpu (executor)"
    else:
        major, minor = bench.torch.cuda.get_device_capability()
        device = f"{bench.torch.cuda.get_device_name()} (sm{major}{minor})"
    return {
        "transformer_engine": str(version),
        "imported_from": _origin(package),
        "torch": str(bench.torch.__version__),
        "cuda": str(bench.torch.version.cuda),
        "device": device,
    }


def examine(bench, names=None):
    """Run rows (all by default) and return the report that ``--json`` writes."""
    chosen = list(ROWS) if names is None else names
    rows = [run_row(bench, name) for name in chosen]
    return {"schema": SCHEMA, "versions": versions(bench), "rows": rows}


def exit_code(report):
    """0 where no row is affected, else 1."""
    return int(any(entry["verdict"] in (WRONG, RAISES) for entry in report["rows"]))


def _table(heads, lines):
    """Align cells; the columns named ``seen`` share what is left of the width and wrap."""
    free = [number for number, head in enumerate(heads) if head.startswith("seen")]
    widths = [max(len(cell) for cell in column) for column in zip(heads, *lines)]
    taken = sum(w for number, w in enumerate(widths) if number not in free)
    share = max(20, (WIDTH - taken - 2 * (len(heads) - 1)) // len(free))
    for number in free:
        widths[number] = min(widths[number], share)
    out = []
    for line in [heads, ["-" * width for width in widths]] + lines:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(line, widths)]
        for depth in range(max(len(cell) for cell in cells)):
            parts = [cell[depth] if depth < len(cell) else "" for cell in cells]
            out.append("  ".join(p.ljust(w) for p, w in zip(parts, widths)).rstrip())
    return "\n".join(out)


def render(before, after):
    """Make the table as text, at most 120 columns wide.

    Parameters
    ----------
    before : dict or None
        Report of another run, shown beside this one.
    after : dict
        Report of this run.

    Returns
    -------
    str
    """
    labels = ("transformer_engine", "imported_from", "torch", "cuda", "device")
    header = []
    for title, report in (("before", before), ("after", after)):
        if report is not None:
            for label in labels:
                text = "{}: {}".format(label, report["versions"].get(label, "unknown"))
                header.append(text if before is None else f"{title} {text}")
    if before is None:
        lines = [[e["id"], e["verdict"], e["seen"]] for e in after["rows"]]
        table = _table(["row", "verdict", "seen"], lines)
    else:
        old = {entry["id"]: entry for entry in before["rows"]}
        new = {entry["id"]: entry for entry in after["rows"]}
        none = {"verdict": "-", "seen": "not run"}
        lines = []
        for name in list(new) + [name for name in old if name not in new]:
            left, right = old.get(name, none), new.get(name, none)
            lines.append([name, left["verdict"], right["verdict"], left["seen"], right["seen"]])
        table = _table(["row", "before", "after", "seen before", "seen after"], lines)
    wrapped = [part for line in header for part in textwrap.wrap(line, WIDTH)]
    return "\n".join(wrapped + ["", table, "", summary(after)])


def summary(report):
    """Answer the question in one line."""
    bad = [e["id"] for e in report["rows"] if e["verdict"] in (WRONG, RAISES)]
    absent = sum(e["verdict"] == ABSENT for e in report["rows"])
    total = len(report["rows"])
    if bad:
        return f"AFFECTED: {len(bad)} of {total} rows are WRONG or raise."
    return f"Not affected in any of {total} rows ({absent} of them n/a)."


def write_json(report, target):
    """Write a report to a file in one step, or to standard output for ``-``."""
    text = json.dumps(report, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    folder = os.path.dirname(os.path.abspath(target))
    handle, part = tempfile.mkstemp(dir=folder, prefix=".wgrad_doctor.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise


def read_json(path):
    """Read a report that ``--json`` wrote."""
    try:
        with open(path, encoding="utf-8") as stream:
            report = json.load(stream)
    except (OSError, ValueError) as error:
        raise CannotRun(f"--compare {path}: {_first_line(error)}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise CannotRun(f"--compare {path}: not a report of schema {SCHEMA}")
    return report


def _parser():
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="wgrad_doctor",
        description="Is my Transformer Engine affected by wrong or missing weight gradients?",
        epilog="Exit code: 0 not affected, 1 affected, 2 could not run. For tests without a GPU, "
        "--executor FILE names a Python file whose install() makes CPU tensors work.",
    )
    parser.add_argument("--row", action="append", metavar="ID", help="run only this row; repeat")
    parser.add_argument("--list", action="store_true", help="list the rows and what they promise")
    parser.add_argument("--json", metavar="FILE", help="write the report; - is standard output")
    parser.add_argument("--compare", metavar="FILE", help="show an earlier report as 'before'")
    parser.add_argument("--executor", metavar="FILE", help=argparse.SUPPRESS)
    return parser


def main(arguments=None):
    """Run the command line and return the exit code."""
    options = _parser().parse_args(arguments)
    if options.list:
        for name, (promise, _) in ROWS.items():
            print("{:<{}}{}".format(name, max(map(len, ROWS)) + 2, promise))
        return 0
    try:
        unknown = [name for name in options.row or [] if name not in ROWS]
        if unknown:
            raise CannotRun("no row {}; --list shows them".format(", ".join(unknown)))
        # Read and checked first: a mistyped name must not cost a whole run.
        before = read_json(options.compare) if options.compare else None
        if options.json and options.json != "-":
            folder = os.path.dirname(os.path.abspath(options.json))
            if not os.path.isdir(folder):
                raise CannotRun(f"--json {options.json}: no folder {folder}")
        report = examine(open_bench(options.executor), options.row)
    except CannotRun as error:
        print(f"wgrad_doctor could not run: {error}", file=sys.stderr)
        return 2
    except Exception:  # pylint: disable=broad-exception-caught
        # Python would exit with 1 here, which says "affected".
        traceback.print_exc()
        print("wgrad_doctor could not run: the error above is none of a row's", file=sys.stderr)
        return 2
    # With JSON on standard output the table moves aside, so that a pipe gets JSON only.
    print(render(before, report), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        write_json(report, options.json)
    return exit_code(report)


if __name__ == "__main__":
    sys.exit(main())
