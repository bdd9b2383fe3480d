# SPDX-License-Identifier: Apache-2.0
"""use_grouped_tensor=True on Hopper with an older cuBLASLt: splits stay on the device.

The split path is the reference. Both sum in fp32; the order differs, and a bias is added to the
rounded product here, to the unrounded one there. Without a GPU, torch's own CPU grouped GEMM and
the wgrad kernel's reference run.
"""

import contextlib
import copy
import dataclasses
import gc
import sys
import warnings
import weakref

import pytest
import torch
from grouped_cases import (
    HAS_GPU,
    IN,
    OUT,
    ROWS,
    SPLITS,
    Case,
    assert_near,
    assert_same,
    build,
    call,
    give_main_grads,
    gradients,
    grouped_wgrad_calls,
    inputs,
    linear_loss,
    numbers,
    train,
)

import transformer_engine.pytorch as te

# None on stock, where every test fails.
_device_splits, _grouped_kernels, _grouped_params = (
    sys.modules.get(f"transformer_engine.pytorch.{name}")
    for name in (
        "cpp_extensions._device_splits", "cpp_extensions._grouped_kernels", "module._grouped_params"
    )
)  # fmt: skip
RUNS = not HAS_GPU or (
    _device_splits is None
    or _device_splits.stands_in()
    and _grouped_kernels.hopper_kernels(torch.device("cuda", 0))
)
needs_kernels = pytest.mark.skipif(
    not RUNS, reason="needs a Hopper GPU, cuBLASLt older than 13.4 and the kernels' library"
)
needs_hopper = pytest.mark.skipif(not (HAS_GPU and RUNS), reason="needs the kernels on a GPU")
every_layout = pytest.mark.parametrize("single", [True, False], ids=["single", "side-by-side"])
ASKED = {"use_grouped_tensor": True}


@pytest.fixture(autouse=True)
def single_parameters(monkeypatch):
    """Single parameters are behind a gate, and each test sees the first warning."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    if _grouped_params is not None:
        monkeypatch.setattr(_grouped_params, "_reported", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single_grouped_weight")
        yield


@contextlib.contextmanager
def device_gemms():
    """The layouts of the GEMMs that ran with splits on the device in the block."""
    seen, run = [], _device_splits.grouped_gemm

    def spy(*args, **kwargs):
        seen.append(kwargs["layout"])
        return run(*args, **kwargs)

    with grouped_wgrad_calls(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device_splits, "grouped_gemm", spy)
        yield seen


def check(case, device, single, **late):
    """The same numbers as the split path; each microbatch ran three GEMMs."""
    case = dataclasses.replace(case, form="device", side_by_side=True)
    with device_gemms() as seen:
        _, got = train(case, device, single=single, loss=linear_loss, **late)
    assert sorted(seen) == sorted(2 * ["TN", "NN", "NT"])
    with pytest.MonkeyPatch.context() as patch, device_gemms() as seen:
        patch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*asks for the native grouped-tensor path")
            _, want = train(case, device, single=single, loss=linear_loss, **late)
    assert not seen
    assert_near(got, want)
    return got


CASES = {
    "no-bias": Case(bias="none"),
    "bias": Case(),
    "single-bias": Case(bias="single"),
    "fused": Case(fuse=True),
    "delayed": Case(delay=True),
    "delayed-no-bias": Case(delay=True, bias="none"),
    "delayed-single-bias": Case(delay=True, bias="single"),
    "delayed-fused": Case(delay=True, fuse=True),
    "main-grad-2d": Case(fuse=True, main_grad="2d"),
    "main-grad-in-a-larger-buffer": Case(fuse=True, delay=True, main_grad="band"),
    "all-empty": Case(splits=(0, 0, 0, 0)),
    "all-empty-fused": Case(splits=(0, 0, 0, 0), fuse=True, delay=True),
    "one-expert-has-all": Case(splits=(0, 0, ROWS, 0)),
}


@needs_kernels
@every_layout
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_module(case, single, device):
    """te.GroupedLinear, one weight and separate ones that lie side by side."""
    check(dataclasses.replace(case, extra=ASKED), device, single)


@needs_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_operation(case, device):
    """te.ops.GroupedLinear with a single weight, whose splits are always on the device."""
    check(dataclasses.replace(case, kind="ops"), device, True)


@needs_kernels
def test_operation_with_separate_weights(device):
    """It makes them side by side, a copy has them apart: both take the split path."""
    layer = build(Case(kind="ops", bias="none"), device, single=False)
    seen = []
    for one in (layer, copy.deepcopy(layer)):
        with device_gemms() as ran:
            linear_loss(call(one, inputs(device, 1)[0])).backward()
        assert not ran
        seen.append(gradients(one))
    assert_same(*seen)


@needs_kernels
@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("kind", ["module", "ops"])
def test_layouts_and_delay_have_the_same_bits(kind, fuse, device):
    """They run the same kernels."""
    case = Case(
        kind=kind, bias="none", fuse=fuse, side_by_side=True, form="device",
        extra=ASKED if kind == "module" else {},
    )  # fmt: skip
    with device_gemms() as seen:
        _, want = train(case, device, single=True)
        _, delayed = train(dataclasses.replace(case, delay=True), device, single=True)
        assert len(seen) == 12
        assert_same(delayed, want)
        if kind == "module":
            assert_same(train(case, device, single=False)[1], want)
            assert len(seen) == 18


@needs_kernels
@pytest.mark.parametrize("kind", ["module", "ops"])
def test_pending_contributions_do_not_keep_the_graph(kind, device):
    """A12: they keep X, not what made it."""

    class Upstream(torch.autograd.Function):
        """Identity that saves something."""

        @staticmethod
        def forward(ctx, x):
            ctx.saved = torch.zeros(8)
            alive.append(weakref.ref(ctx.saved))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    alive = []
    case = Case(kind=kind, bias="none", delay=True, extra=ASKED if kind == "module" else {})
    layer = build(case, device, single=True)
    with device_gemms() as seen:
        x = Upstream.apply(inputs(device, 1)[0])
        linear_loss(call(layer, x, torch.tensor(SPLITS, device=device))).backward()
        del x
        gc.collect()
        assert layer.pending_backward_dw == 1 and alive[0]() is None
        layer.backward_dw()
    assert len(seen) == 3


@needs_kernels
def test_more_arguments(device):
    """What else the module takes."""
    case = Case(extra={**ASKED, "save_original_input": True})
    check(case, device, True)
    check(Case(fuse=True, extra=ASKED), device, True, is_first_microbatch=True)


@needs_kernels
def test_scaled_bias(device):
    """ops.GroupedLinear's bias times a number a token, and that number's gradient."""

    def results():
        case = Case(kind="ops", bias="single", extra={"scale_bias": True})
        layer = build(case, device, single=True)
        (x,) = inputs(device, 1)
        scales = torch.linspace(0.5, 1.5, ROWS, device=device).requires_grad_()
        out = layer(x, torch.tensor(SPLITS, device=device), scales)
        linear_loss(out).backward()
        return {"out": out.detach(), "dx": x.grad, "dscales": scales.grad, **gradients(layer)}

    with device_gemms() as seen:
        got = results()
    assert len(seen) == 3
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
        warnings.simplefilter("ignore")
        assert_near(got, results())


@needs_kernels
def test_autocast(device):
    """fp32 weights are cast, the packed one in one step."""
    case = Case(bias="none", extra=ASKED, dtype=torch.float32)

    def results():
        layer = build(case, device, single=True)
        (x,) = inputs(device, 1)
        with torch.autocast("cuda", torch.bfloat16):
            out = call(layer, x, torch.tensor(SPLITS, device=device))
        linear_loss(out).backward()
        weight = layer.weight.grad
        return {"out": out.detach(), "dx": x.grad, "weight": weight.bfloat16()}, weight.dtype

    with device_gemms() as seen:
        got = results()
    assert len(seen) == 3
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
        warnings.simplefilter("ignore")
        want = results()
    assert_near(got[0], want[0])
    assert got[1] == want[1] == torch.float32


# --- rows after the last group ----------------------------------------------


@needs_kernels
@pytest.mark.parametrize("buffers", [False, True], ids=["own", "callers-buffers"])
@pytest.mark.parametrize("bias", ["none", "single"])
def test_rows_after_the_last_group(bias, buffers, device):
    """They are not read; a caller's buffers keep theirs."""
    slack = 32
    case = Case(bias=bias, extra=ASKED)
    x = torch.cat([numbers((ROWS, IN), 40), torch.full((slack, IN), float("nan"))])
    x = x.bfloat16().to(device).requires_grad_()
    dy = torch.cat([numbers((ROWS, OUT), 41), torch.full((slack, OUT), float("nan"))])
    dy = dy.bfloat16().to(device)
    splits = torch.tensor(SPLITS, device=device)
    layer = build(case, device, single=True)
    given = {}
    if buffers:
        sizes = {"out": (ROWS + slack, OUT), "dgrad_out": (ROWS + slack, IN)}
        given = {n: torch.full(s, 7.0, device=device).bfloat16() for n, s in sizes.items()}
    with device_gemms() as seen:
        out = layer(x, splits, **given)
        out.backward(dy)
    assert sorted(seen) == ["NN", "NT", "TN"]
    if buffers:
        assert out.data_ptr() == given["out"].data_ptr()
        for value in given.values():
            assert torch.equal(value[ROWS:], torch.full_like(value[ROWS:], 7.0))
    else:
        given = {"out": out.detach(), "dgrad_out": x.grad}
    want = build(Case(bias=bias), device, single=False)
    inner = x.detach()[:ROWS].requires_grad_()
    expected = want(inner, SPLITS)
    expected.backward(dy[:ROWS])
    got = {n: v[:ROWS].detach() for n, v in given.items()}
    assert_near(
        {**got, **gradients(layer)},
        {"out": expected.detach(), "dgrad_out": inner.grad, **gradients(want)},
    )


# --- what it does not serve -------------------------------------------------


def run_and_warnings(layer, x, device):
    """The layouts that ran with splits on the device, and the fallback's warnings."""
    with device_gemms() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear_loss(call(layer, x, torch.tensor(SPLITS, device=device))).backward()
    return seen, [str(w.message) for w in caught if "asks for the native" in str(w.message)]


REFUSED = {
    "separate-weights": (Case(bias="none"), False, {}, "side by side"),
    "fp16": (Case(bias="none", dtype=torch.float16), True, {}, "bfloat16"),
    "fp32": (Case(bias="none", dtype=torch.float32), True, {}, "bfloat16"),
    "turned-off": (Case(bias="none"), True, {"NVTE_GROUPED_WGRAD_KERNEL": "0"}, "KERNEL=0"),
    "deterministic-bias": (
        Case(bias="single"), True, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, "not deterministic",
    ),
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("case, single, env, why", REFUSED.values(), ids=REFUSED.keys())
def test_split_path_serves_the_rest(case, single, env, why, device, monkeypatch):
    """One warning says why; strict makes it an error."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    layer = build(dataclasses.replace(case, extra=ASKED), device, single=single)
    x = inputs(device, 1, case.dtype)[0]
    seen, told = run_and_warnings(layer, x, device)
    assert not seen
    assert len(told) == 1 and why in told[0], told
    assert gradients(layer)["weight"].any()
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_STRICT", "1")
    with grouped_wgrad_calls(), pytest.raises(RuntimeError, match="STRICT"):
        call(layer, x, torch.tensor(SPLITS, device=device))


@needs_kernels
def test_reasons(device, monkeypatch):
    """What is refused before anything runs."""
    weights = [build(Case(bias="none"), device, single=True).weight]

    def why(recipe=None, dtype=torch.bfloat16, weights=weights):
        with grouped_wgrad_calls():
            return _device_splits.why_not(recipe, dtype, weights)

    assert why() is None
    assert "quantization" in why(recipe=object())
    narrow = [torch.zeros(2, 8, 12, device=device).bfloat16()[i] for i in range(2)]
    assert "widths" in why(weights=narrow)
    assert "experts" in why(weights=list(torch.zeros(1024, 8, 8, device=device).bfloat16()))
    assert "side by side" in why(weights=[w.float() for w in weights[0].unbind()])
    with monkeypatch.context() as patch:
        patch.delattr(torch, "_grouped_mm")
        assert "_grouped_mm" in why()
    with monkeypatch.context() as patch:
        patch.setattr(_device_splits.tex, "get_cublasLt_version", lambda: 130400)
        assert "older cuBLASLt" in why()
    with monkeypatch.context() as patch:
        patch.setattr(_device_splits, "get_device_compute_capability", lambda: (10, 0))
        assert "Hopper" in why()


@needs_kernels
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_gradients_that_do_not_lie_side_by_side(accumulate, dtype, device):
    """Right at the cost of a temporary."""
    x, dy = (numbers((ROWS, width), 3).bfloat16().to(device) for width in (IN, OUT))
    splits = torch.tensor(SPLITS, device=device)
    out = [torch.full((OUT, IN), 0.25, dtype=dtype, device=device) for _ in SPLITS]
    with grouped_wgrad_calls():
        _device_splits._wgrad(x, dy, splits, out, accumulate)
    for got, a, b in zip(out, dy.split(SPLITS), x.split(SPLITS)):
        want = a.double().t() @ b.double() + (0.25 if accumulate else 0.0)
        assert (got.double() - want).norm() <= (1e-5 if dtype == torch.float32 else 2**-9) * max(
            want.norm(), 1.0
        )


# --- on a GPU ---------------------------------------------------------------


def step(layer, x, splits, dy):
    """Forward, backward, backward_dw."""
    call(layer, x, splits).backward(dy)
    layer.backward_dw()


@needs_hopper
@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("bias", ["none", "single"])
@pytest.mark.parametrize("kind", ["module", "ops"])
def test_captured_with_changing_splits(kind, bias, fuse, delay):
    """Replays follow the splits in the static tensor, and equal eager steps; nothing waits.

    Bias gradients are summed with atomic additions, in an order that changes.
    """
    extra = ASKED if kind == "module" else {}
    case = Case(kind=kind, bias=bias, fuse=fuse, delay=delay, extra=extra)
    static_splits = torch.tensor(SPLITS, device="cuda")
    dy = numbers((ROWS, OUT), 41).bfloat16().cuda()

    def state(layer, x):
        weight = layer.weight.main_grad if fuse else layer.weight.grad
        return {"weight": weight, "dx": x.grad}, {"bias": gradients(layer)["bias"]}

    layer = build(case, "cuda", single=True)
    if fuse:
        give_main_grads(layer, value=0.0)
    (static,) = inputs("cuda", 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(layer, static, static_splits, dy)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(layer, static, static_splits, dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for param in (*layer.parameters(), static):
        param.grad = None
    graph = torch.cuda.CUDAGraph()
    with device_gemms() as seen, torch.cuda.graph(graph, stream=stream):
        step(layer, static, static_splits, dy)
    assert sorted(seen) == ["NN", "NT", "TN"]
    for splits, x in zip([SPLITS, (0, 0, 0, ROWS), (3, 100, 121, 0)], inputs("cuda", 3)):
        with torch.no_grad():
            static.copy_(x)
            static_splits.copy_(torch.tensor(splits))
        if fuse:
            layer.weight.main_grad.zero_()
        graph.replay()
        eager = build(dataclasses.replace(case, delay=False), "cuda", single=True)
        if fuse:
            give_main_grads(eager, value=0.0)
        step(eager, x, torch.tensor(splits, device="cuda"), dy)
        (got, got_bias), (want, want_bias) = state(layer, static), state(eager, x)
        assert_same(got, want)
        assert_near(got_bias, want_bias)


@needs_hopper
@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
def test_memory(fuse):
    """Above what stays: the results and nothing as large as the weights (P3)."""
    groups, width, rows = 16, 1024, 256
    layer = te.GroupedLinear(
        groups, width, width, bias=False, params_dtype=torch.bfloat16, device="cuda",
        single_grouped_weight=True, fuse_wgrad_accumulation=fuse, use_grouped_tensor=True,
    )  # fmt: skip
    weights = groups * width * width * 2
    if fuse:
        layer.weight.main_grad = torch.zeros(groups, width, width, device="cuda")
    x = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    splits = torch.full((groups,), rows // groups, device="cuda")
    for _ in range(2):
        layer.weight.grad = x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with device_gemms() as seen:
            layer(x, splits).sum().backward()
        assert len(seen) == 3
    above = torch.cuda.max_memory_allocated() - before
    assert above < (0 if fuse else weights) + weights // 4


@needs_hopper
@pytest.mark.parametrize("scaled", [False, True], ids=["bias", "scaled-bias"])
@pytest.mark.parametrize("width", [8, 136, 1536])
def test_bias_kernel(width, scaled):
    """One rounding of the sum; rows after the last group are left alone."""
    splits, slack = [5, 0, 300, 1, 77], 9
    rows = sum(splits)
    out = torch.randn(rows + slack, width, device="cuda").bfloat16()
    bias = torch.randn(len(splits), width, device="cuda").bfloat16()
    scales = torch.rand(rows + slack, device="cuda") if scaled else None
    which = torch.repeat_interleave(torch.arange(5), torch.tensor(splits)).cuda()
    added = bias[which].float() * (scales[:rows, None] if scaled else 1.0)
    want = out.clone()
    want[:rows] = (out[:rows].float() + added).bfloat16()
    offsets = torch.tensor(splits, device="cuda").cumsum(0).int()
    _device_splits.grouped_bias_add(out, bias, offsets, scales)
    if scaled:  # the product may be fused into the sum
        torch.testing.assert_close(out, want, rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(out, want)
