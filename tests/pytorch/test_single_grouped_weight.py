# SPDX-License-Identifier: Apache-2.0
"""One parameter for all experts trains like one parameter an expert, bit for bit.

Each row runs a layer with single grouped parameters and the same layer with
separate ones on the same numbers.
"""

import dataclasses
import sys
import warnings
from pathlib import Path

import pytest
import torch
from grouped_cases import (
    DTYPES,
    FORMS,
    GROUPS,
    HAS_GPU,
    IN,
    OUT,
    RECIPES,
    ROWS,
    SPLITS,
    Case,
    assert_same,
    build,
    call,
    give_main_grads,
    gradients,
    inputs,
    loss_of,
    recipe_is_available,
    splits_as,
    train,
)
from transformer_engine.common import recipe as recipes

import transformer_engine.pytorch as te

KINDS = ["module", "ops"]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="the CPU executor has no quantized compute")


@pytest.fixture(autouse=True)
def single_parameters(monkeypatch):
    """Single parameters are behind a gate; memory that no kernel wrote is NaN.

    Both layouts run cuBLAS here. Kernels that take one tensor for all experts have tests of their
    own: test_wgrad_dispatch.py, test_device_splits.py.
    """
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    monkeypatch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
    ours = sys.modules.get("transformer_engine.pytorch.module._grouped_params")
    if ours is not None:
        monkeypatch.setattr(ours, "_reported", set())
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single_grouped_weight")
        warnings.filterwarnings("ignore", message=".*asks for the native grouped-tensor path")
        yield
    torch.use_deterministic_algorithms(was)


def check(case, device, **how):
    """The layer with single parameters and the reference do the same."""
    got, want = (train(case, device, single=single, **how)[1] for single in (True, False))
    assert_same(got, want)


# --- B1, B2, B4: what trains ------------------------------------------------

CASES = {
    "default": Case(),
    "no-bias": Case(bias="none"),
    "single-bias": Case(bias="single"),
    "single-bias-alone": Case(bias="single", single_weight=False),
    "fused": Case(fuse=True),
    "fused-single-bias": Case(fuse=True, bias="single"),
    "delayed": Case(delay=True),
    "delayed-no-bias": Case(delay=True, bias="none"),
    "delayed-single-bias": Case(delay=True, bias="single"),
    "delayed-single-bias-alone": Case(delay=True, bias="single", single_weight=False),
    "delayed-fused": Case(delay=True, fuse=True),
    "delayed-fused-single-bias": Case(delay=True, fuse=True, bias="single"),
    "frozen": Case(frozen="weight bias", bias="single"),
    "empty-batch": Case(splits=(0, 0, 0, 0), bias="single"),
    "empty-batch-fused": Case(splits=(0, 0, 0, 0), fuse=True),
    "empty-batch-delayed": Case(splits=(0, 0, 0, 0), delay=True, bias="single"),
    "one-expert-has-all": Case(splits=(0, 0, ROWS, 0)),
    "main-grad-flat": Case(fuse=True, main_grad="flat"),
    "main-grad-2d": Case(fuse=True, main_grad="2d"),
    "main-grad-in-a-larger-buffer": Case(fuse=True, main_grad="band"),
    "delayed-main-grad-in-a-larger-buffer": Case(fuse=True, delay=True, main_grad="band"),
}


@every_dtype
@every_kind
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_separate(case, kind, dtype, device):
    """Outputs, input gradients and parameter gradients have the same bits."""
    check(dataclasses.replace(case, kind=kind, dtype=dtype), device)


# Arguments that only te.GroupedLinear has, or combinations that ops refuses in both layouts.
MODULE_CASES = {
    "grouped-tensor-asked": Case(extra={"use_grouped_tensor": True}),
    "grouped-tensor-asked-delayed": Case(
        delay=True, bias="single", extra={"use_grouped_tensor": True}
    ),
    "grouped-tensor-off": Case(extra={"use_grouped_tensor": False}),
    "return-bias": Case(extra={"return_bias": True}),
    "return-single-bias": Case(bias="single", extra={"return_bias": True}),
    "save-original-input": Case(extra={"save_original_input": True}),
    "frozen-weight": Case(frozen="weight"),
    "frozen-weight-single-bias": Case(frozen="weight", bias="single"),
    "frozen-weight-delayed": Case(frozen="weight", bias="single", delay=True),
    "frozen-bias": Case(frozen="bias"),
    "frozen-single-bias": Case(frozen="bias", bias="single"),
    "frozen-single-bias-delayed": Case(frozen="bias", bias="single", delay=True),
}


@pytest.mark.parametrize("case", MODULE_CASES.values(), ids=MODULE_CASES.keys())
def test_module_arguments(case, device):
    """The same for what only the module takes."""
    check(case, device)


def test_frozen_weights_leave_the_bias_its_gradient(device):
    """A bias trains where the weights do not."""
    for bias in ("separate", "single"):
        _, seen = train(Case(frozen="weight", bias=bias), device, single=True)
        assert seen["weight"] is None
        assert seen["bias"].any()


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
def test_first_microbatch(first, delay, device):
    """The first microbatch overwrites main_grad, later ones add to it."""
    check(Case(fuse=True, delay=delay), device, is_first_microbatch=first)


@pytest.mark.parametrize("native", [False, True], ids=["split", "grouped-tensor-asked"])
@pytest.mark.parametrize("form", FORMS)
def test_splits(form, native, device):
    """Every form of the splits gives the numbers of a list."""
    case = Case(bias="single", extra={"use_grouped_tensor": native})

    def results(single, splits):
        layer = build(case, device, single=single)
        (x,) = inputs(device, 1)
        out = layer(x, splits)
        loss_of(out).backward()
        return {"out": out.detach(), "dx": x.grad, **gradients(layer)}

    splits = splits_as(form, SPLITS, device)
    assert_same(results(True, splits), results(False, splits))


def test_autocast(device):
    """fp32 parameters, bf16 compute: gradients have the parameters' type."""

    def results(single):
        layer = build(Case(dtype=torch.float32, bias="single"), device, single=single)
        (x,) = inputs(device, 1, torch.float32)
        with torch.autocast("cuda", torch.bfloat16):
            out = call(layer, x)
        loss_of(out).backward()
        return {"out": out.detach(), "dx": x.grad, **gradients(layer)}

    assert_same(results(True), results(False))


def test_output_buffers(device):
    """The caller's buffers get the same output and input gradient."""

    def results(single):
        layer = build(Case(bias="single"), device, single=single)
        buffers = {"out": (ROWS, OUT), "dgrad_out": (ROWS, IN)}
        buffers = {
            n: torch.empty(shape, dtype=torch.bfloat16, device=device)
            for n, shape in buffers.items()
        }
        loss_of(call(layer, inputs(device, 1)[0], **buffers)).backward()
        return {**{n: b.detach() for n, b in buffers.items()}, **gradients(layer)}

    assert_same(results(True), results(False))


@pytest.mark.parametrize("bias", ["separate", "single"])
def test_scaled_bias(bias, device):
    """ops.GroupedLinear's bias times a number a token, and that number's gradient."""

    def results(single):
        case = Case(kind="ops", bias=bias, extra={"scale_bias": True})
        layer = build(case, device, single=single)
        (x,) = inputs(device, 1)
        scales = torch.linspace(0.5, 1.5, ROWS, device=device).requires_grad_()
        out = layer(x, torch.tensor(SPLITS, device=device), scales)
        loss_of(out).backward()
        return {"out": out.detach(), "dx": x.grad, "dscales": scales.grad, **gradients(layer)}

    assert_same(results(True), results(False))


def test_two_splits_of_one_layer(device):
    """A zero-token expert's gradient is zero when written and stays when added to."""
    layer = build(Case(), device, single=True)
    (x,) = inputs(device, 1)
    loss_of(call(layer, x)).backward()
    assert not layer.weight.grad[1].any() and layer.weight.grad[0].any()
    before = layer.weight.grad[0].clone()
    loss_of(call(layer, x, (0, ROWS, 0, 0))).backward()
    assert torch.equal(layer.weight.grad[0], before)
    assert layer.weight.grad[1].any()


@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@every_kind
def test_zero_token_expert_keeps_main_grad(kind, delay, device):
    """Bit-unchanged where added to, zero where overwritten; flags are set and hooks fire."""
    for overwrite in (False, True):
        layer = build(Case(kind=kind, fuse=True, delay=delay), device, single=True)
        give_main_grads(
            layer, grad_added_to_main_grad=False, zero_out_wgrad=True, overwrite_main_grad=overwrite
        )
        fired = []
        layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad))
        loss_of(call(layer, inputs(device, 1)[0])).backward()
        layer.backward_dw()
        want = 0.0 if overwrite else 0.25
        assert torch.equal(
            layer.weight.main_grad[1], torch.full_like(layer.weight.main_grad[1], want)
        )
        assert layer.weight.grad_added_to_main_grad
        assert len(fired) == 1 and fired[0].shape == (GROUPS, OUT, IN) and not fired[0].any()


# --- B2: main_grad is checked -----------------------------------------------

BAD = {
    "too-small": lambda d: torch.full((GROUPS, OUT, IN - 1), 0.25, device=d),
    "too-large": lambda d: torch.full((GROUPS + 1, OUT, IN), 0.25, device=d),
    "transposed": lambda d: torch.full((GROUPS, IN, OUT), 0.25, device=d).transpose(1, 2),
    "strided": lambda d: torch.full((GROUPS, OUT, 2 * IN), 0.25, device=d)[..., ::2],
    "experts-apart": lambda d: torch.full((2 * GROUPS, OUT, IN), 0.25, device=d)[::2],
}


@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@every_kind
@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_bad_main_grad(make, kind, delay, device):
    """A main_grad that does not fit is an error by name, and nothing is written."""
    layer = build(Case(kind=kind, fuse=True, delay=delay, bias="none"), device, single=True)
    layer.weight.main_grad = make(device)
    with pytest.raises(RuntimeError, match="main_grad"):
        loss_of(call(layer, inputs(device, 1)[0])).backward()
        layer.backward_dw()
    buffer = layer.weight.main_grad
    assert torch.equal(buffer, torch.full_like(buffer, 0.25))


# --- fallback ---------------------------------------------------------------


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
def test_fallback_warns_once(single, device):
    """The setting and the reason are named once; the numbers are those of the split path."""
    layer = build(Case(extra={"use_grouped_tensor": True}), device, single=single)
    (x,) = inputs(device, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = layer(x, SPLITS)
        layer(x, SPLITS)
    texts = [str(w.message) for w in caught if "asks for the native" in str(w.message)]
    assert len(texts) == 1
    assert "use_grouped_tensor=True" in texts[0] and "m_splits is a list" in texts[0]
    assert torch.equal(out, build(Case(), device, single=False)(x, SPLITS))


@every_kind
def test_strict_makes_the_fallback_an_error(kind, device, monkeypatch):
    """NVTE_GROUPED_LINEAR_STRICT=1 is for those who want to know."""
    extra = {"use_grouped_tensor": True} if kind == "module" else {}
    layer = build(Case(kind=kind, dtype=torch.float32, extra=extra), device, single=True)
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_STRICT", "1")
    with pytest.raises(RuntimeError, match="NVTE_GROUPED_LINEAR_STRICT"):
        call(layer, inputs(device, 1, torch.float32)[0])


def test_default_arguments_do_not_warn(device):
    """Nobody asked for the native path."""
    layer = build(Case(), device, single=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(layer, inputs(device, 1)[0])
    assert not [w for w in caught if "asks for the native" in str(w.message)]


# --- the native path --------------------------------------------------------


@pytest.fixture
def native(monkeypatch):
    """The grouped-tensor path, with references in place of its kernels."""
    if HAS_GPU:
        pytest.skip("the CPU executor stands for kernels that not every GPU has")
    tex = sys.modules["transformer_engine_torch"]
    monkeypatch.setattr(tex, "get_cublasLt_version", lambda: 130600)


NATIVE_CASES = [
    "default", "single-bias", "fused", "delayed", "delayed-single-bias", "delayed-fused",
    "main-grad-flat", "frozen",
]  # fmt: skip


@pytest.mark.parametrize("name", NATIVE_CASES)
@every_kind
def test_native_path(kind, name, device, native):
    """Single parameters on the grouped-tensor path equal separate ones on it."""
    extra = {"use_grouped_tensor": True} if kind == "module" else {}
    case = dataclasses.replace(CASES[name], kind=kind, extra=extra, form="device")
    check(case, device)


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_native_path_bad_main_grad(make, device, native):
    """main_grad is checked there too."""
    extra = {"use_grouped_tensor": True}
    layer = build(Case(fuse=True, bias="none", extra=extra), device, single=True)
    layer.weight.main_grad = make(device)
    with pytest.raises(RuntimeError, match="main_grad"):
        loss_of(layer(inputs(device, 1)[0], torch.tensor(SPLITS, device=device))).backward()
    buffer = layer.weight.main_grad
    assert torch.equal(buffer, torch.full_like(buffer, 0.25))


def test_native_and_split_path_take_turns(device, native):
    """A layer whose splits come from either side gets one sum of gradients."""
    layer = build(Case(delay=True, extra={"use_grouped_tensor": True}), device, single=True)
    want = build(Case(), device, single=False)
    for i, x in enumerate(inputs(device, 2)):
        loss_of(layer(x, torch.tensor(SPLITS, device=device) if i else SPLITS)).backward()
        loss_of(want(x.detach(), SPLITS)).backward()
    layer.backward_dw()
    layer.backward_dw()
    assert_same(gradients(layer), gradients(want))


# --- B4: section A holds ----------------------------------------------------


@every_kind
def test_delayed_hooks_fire_once_at_delivery(kind, device):
    """Nothing fires in the main backward; one value a contribution at delivery."""
    layer = build(Case(kind=kind, delay=True, bias="single"), device, single=True)
    fired = []
    layer.weight.register_hook(lambda g: fired.append(g.clone()))
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    loss_of(call(layer, inputs(device, 1)[0])).backward()
    assert not fired
    layer.backward_dw()
    assert len(fired) == 2 and torch.equal(fired[0], fired[1])
    before = layer.weight.grad.clone()
    layer.backward_dw()
    assert len(fired) == 2 and torch.equal(layer.weight.grad, before)


@every_kind
def test_failed_gemm_can_be_repeated(kind, device):
    """A8: the contribution stays pending and the second call succeeds."""
    case = Case(kind=kind, delay=True, bias="none")
    layer = build(case, device, single=True)
    loss_of(call(layer, inputs(device, 1)[0])).backward()
    piece = layer.wgrad_store.context.oldest().pieces[0]
    gemm = piece.gemm

    def failing(*_args, **_kwargs):
        raise RuntimeError("out of luck")

    piece.gemm = failing
    with pytest.raises(RuntimeError, match="luck"):
        layer.backward_dw()
    assert layer.weight.grad is None and layer.pending_backward_dw == 1
    piece.gemm = gemm
    layer.backward_dw()
    want = build(dataclasses.replace(case, delay=False), device, single=False)
    loss_of(call(want, inputs(device, 1)[0])).backward()
    assert torch.equal(layer.weight.grad, gradients(want)["weight"])


@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@every_kind
def test_existing_grad_is_added_to_in_place(kind, delay, device):
    """A slice of a flat buffer as .grad stays that slice."""

    def scenario(single):
        layer = build(Case(kind=kind, delay=delay, bias="none"), device, single=single)
        flat = torch.full((GROUPS * OUT * IN + 64,), 0.5, dtype=torch.bfloat16, device=device)
        parts = flat[32:-32].view(GROUPS, OUT, IN)
        weights = [layer.weight] if single else [getattr(layer, f"weight{i}") for i in range(4)]
        for weight, part in zip(weights, [parts] if single else parts):
            weight.grad = part
        loss_of(call(layer, inputs(device, 1)[0])).backward()
        layer.backward_dw()
        return {"flat": flat}

    assert_same(scenario(True), scenario(False))


def test_tied_layers(device):
    """Two layers that share one packed weight."""

    def scenario(single, delay):
        layers = [build(Case(delay=delay, bias="none"), device, single=single) for _ in range(2)]
        names = [n for n, _ in layers[0].named_parameters()]
        for name in names:
            setattr(layers[1], name, getattr(layers[0], name))
        for layer, x in zip(layers, inputs(device, 2)):
            loss_of(call(layer, x)).backward()
        for layer in layers:
            layer.backward_dw()
        return gradients(layers[0])

    want = scenario(False, False)
    assert_same(scenario(True, False), want)
    assert_same(scenario(True, True), want)


# --- debug ------------------------------------------------------------------

STATISTICS = """
statistics:
  enabled: True
  layers: {layer_name_regex_pattern: experts.*}
  transformer_engine:
    LogTensorStats: {enabled: True, tensors: [weight, gradient], stats: [max], freq: 1}
"""


@pytest.fixture
def debug_log(tmp_path):
    """TE's debug features, which log a statistic of each expert."""
    api = pytest.importorskip("nvdlfw_inspect.api")
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    import transformer_engine

    config = tmp_path / "config.yaml"
    config.write_text(STATISTICS)
    features = Path(transformer_engine.__file__).parent / "debug" / "features"
    api.initialize(str(config), feature_dirs=[str(features)], log_dir=str(tmp_path))
    read = 0

    def statistics():
        """Names and values since the last call."""
        nonlocal read
        api.step()
        (file,) = tmp_path.glob("nvdlfw_inspect_statistics_logs/*.log")
        lines = file.read_text().splitlines()
        new, read = lines[read:], len(lines)
        return sorted((line.split()[-3], line.split()[-1]) for line in new)

    yield statistics
    api.end_debug()
    TEDebugState._reset()


@pytest.mark.parametrize("bias", ["separate", "single"])
def test_debug_features(bias, device, debug_log):
    """They see each expert's tensors, and change nothing."""
    case = Case(bias=bias, splits=(96, 32, 64, 32), extra={"name": "experts"})
    want, seen = train(case, device, single=False)[1], debug_log()
    got = train(case, device, single=True)[1]
    assert_same(got, want)
    assert len(seen) == 2 * GROUPS and debug_log() == seen


# --- B7: deterministic ------------------------------------------------------


@pytest.mark.parametrize("case", ["default", "fused", "delayed-single-bias"])
def test_deterministic(case, device, monkeypatch):
    """Two runs are bit-equal, and deterministic mode refuses nothing."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    case = dataclasses.replace(CASES[case], extra={"use_grouped_tensor": True})
    first, second = (train(case, device, single=True)[1] for _ in range(2))
    assert_same(first, second)


@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@pytest.mark.parametrize("bias", ["none", "separate", "single"])
@every_kind
def test_b7_as_separate(kind, bias, delay, device, native, monkeypatch):
    """With kernels for the native path: deterministic mode gives and refuses the same."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    extra = {"use_grouped_tensor": True} if kind == "module" else {}
    case = Case(kind=kind, bias=bias, delay=delay, form="device", extra=extra)
    if kind == "ops" and bias != "none":
        for single in (False, True):
            with pytest.raises(RuntimeError, match="non-deterministic"):
                train(case, device, single=single)
    else:
        check(case, device)


# --- quantized compute and quantized weights --------------------------------


every_recipe = pytest.mark.parametrize("name", RECIPES)


def _recipe(name):
    if not recipe_is_available(name):
        pytest.skip(f"{name} is not available on this GPU")
    return RECIPES[name]()


def _reference_or_skip(case, device, **how):
    """What the per-expert path does; where that refuses, there is nothing to compare with."""
    try:
        return train(case, device, single=False, **how)[1]
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        pytest.skip(f"the per-expert path refuses: {error}")


QUANTIZED_CASES = {
    name: CASES[name]
    for name in (
        "default", "single-bias", "fused", "delayed", "delayed-single-bias", "delayed-fused", "frozen"
    )
}  # fmt: skip


@needs_gpu
@every_recipe
@every_kind
@pytest.mark.parametrize("case", QUANTIZED_CASES.values(), ids=QUANTIZED_CASES.keys())
def test_quantized_compute(case, kind, name, device):
    """Quantized compute on high-precision weights."""
    case = dataclasses.replace(case, kind=kind)
    recipe = _recipe(name)
    how = {"autocast": lambda: te.autocast(enabled=True, recipe=recipe)}
    want = _reference_or_skip(case, device, **how)
    assert_same(train(case, device, single=True, **how)[1], want)


@needs_gpu
@every_recipe
@every_kind
@pytest.mark.parametrize("case", QUANTIZED_CASES.values(), ids=QUANTIZED_CASES.keys())
def test_quantized_weights(case, kind, name, device):
    """Weights that are stored quantized."""
    case = dataclasses.replace(case, kind=kind)
    recipe = _recipe(name)
    how = {
        "autocast": lambda: te.autocast(enabled=True, recipe=recipe),
        "init": lambda: te.quantized_model_init(enabled=True, recipe=recipe),
    }
    want = _reference_or_skip(case, device, **how)
    assert_same(train(case, device, single=True, **how)[1], want)


@needs_gpu
@every_recipe
def test_quantized_weights_without_quantized_compute(name, device):
    """They are dequantized, as separate ones are."""
    recipe = _recipe(name)
    how = {"init": lambda: te.quantized_model_init(enabled=True, recipe=recipe)}
    want = _reference_or_skip(Case(), device, **how)
    if want["weight"] is None:
        pytest.skip("the per-expert path gives the weights no gradient")
    assert_same(train(Case(), device, single=True, **how)[1], want)


@needs_gpu
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_cached_quantized_weights(name, device):
    """The first microbatch's quantized weights serve the later ones; a new step makes new ones."""
    recipe = _recipe(name)

    def scenario(single):
        layer = build(Case(), device, single=single)
        outs = {}
        xs = inputs(device, 4)
        for step, (x, first) in enumerate(zip(xs, (True, False, True, False))):
            if step == 2:
                with torch.no_grad():
                    for param in layer.parameters():
                        param.mul_(0.5)
            with te.autocast(enabled=True, recipe=recipe):
                out = call(layer, x, is_first_microbatch=first)
            loss_of(out).backward()
            outs[f"out{step}"] = out.detach()
        return {**outs, **gradients(layer)}

    assert_same(scenario(True), scenario(False))


@needs_gpu
def test_calibration(device):
    """Calibration records the same scales."""

    def scenario(single):
        layer = build(Case(extra={"use_grouped_tensor": True}), device, single=single)
        with te.autocast(enabled=False, calibrating=True, recipe=recipes.DelayedScaling()):
            loss_of(call(layer, inputs(device, 1)[0])).backward()
        amax = layer.fp8_meta["scaling_fwd"].amax_history
        return {"amax": amax.clone(), **gradients(layer)}

    try:
        want = scenario(False)
    except AttributeError as error:
        pytest.skip(f"the per-expert path cannot calibrate: {error}")
    assert_same(scenario(True), want)


@needs_gpu
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
def test_cpu_offload(quantized, device):
    """Offloaded activations come back; packed weights are not offloaded."""
    recipe = recipes.Float8CurrentScaling() if quantized else None

    splits = (4096, 0, 2048, 2048)  # large enough to be offloaded

    def scenario(single):
        context, sync = te.get_cpu_offload_context(
            enabled=True, num_layers=1, model_layers=2, offload_activations=True
        )
        layers = [
            te.GroupedLinear(
                GROUPS,
                IN,
                IN,
                bias=False,
                params_dtype=torch.bfloat16,
                single_grouped_weight=single,
            )
            for _ in range(2)
        ]
        with torch.no_grad():
            for layer in layers:
                for param in layer.parameters():
                    param.fill_(0.01)
        (x,) = inputs(device, 1, rows=sum(splits))
        out = x
        for layer in layers:
            with te.autocast(enabled=quantized, recipe=recipe), context:
                out = call(layer, out, splits)
            out = sync(out)
        loss_of(out).backward()
        return {"dx": x.grad, "first": gradients(layers[0])["weight"]}

    assert_same(scenario(True), scenario(False))


# --- the support matrix -----------------------------------------------------


@pytest.mark.parametrize("broken", ["", "differs", "refuses", "both refuse"])
def test_b1_matrix_tells_what_fails(broken, monkeypatch):
    """single_weight_matrix.py compares, and excuses only what the per-expert layer refuses."""
    import single_weight_matrix as matrix

    def train_or_fail(case, device, *, single, **_how):
        if broken == "both refuse" or single and broken == "refuses":
            raise ValueError("no such kernel")
        return None, {"weight": torch.full((2,), float(single and broken == "differs"))}

    monkeypatch.setattr(matrix, "train", train_or_fail)
    row = next(row for row in matrix.rows() if row["recipe"] == "none")
    monkeypatch.setattr(matrix, "healthy", lambda: True)
    made = matrix.report([(row, matrix.run_row({**row, "cublaslt": None}, {}))])
    (verdict,) = {made["outcomes"][v] for v in "".join(made["rows"][0]["cells"].values())}
    assert (
        verdict
        == {
            "": "equal",
            "differs": "DIFFERS: weight differs",
            "refuses": "REFUSES: ValueError: no such kernel",
            "both refuse": "the per-expert layer refuses: ValueError: no such kernel",
        }[broken]
    )
    assert matrix.is_failure(verdict) == (broken in ("differs", "refuses"))


def test_b1_matrix_leaves_a_broken_process(monkeypatch):
    """A process that computes nothing any more blames nobody; another one goes on."""
    import single_weight_matrix as matrix

    calls = []

    def train_or_fail(case, device, *, single, **_how):
        calls.append(case)
        if len(calls) == 1:
            raise ValueError("broken")
        return None, {"weight": torch.zeros(2)}

    monkeypatch.setattr(matrix, "train", train_or_fail)
    monkeypatch.setattr(matrix, "healthy", lambda: len(calls) != 1)
    row = {**next(row for row in matrix.rows() if row["recipe"] == "none"), "cublaslt": None}
    refusals = {}
    assert matrix.run_row(row, refusals) is None and len(refusals) == 1
    verdicts, *_ = matrix.run_row(row, refusals).values()
    assert len([v for v in verdicts if v != matrix.EQUAL]) == 1
