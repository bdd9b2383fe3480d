# SPDX-License-Identifier: Apache-2.0
"""A single grouped parameter is a parameter: assignment, copies, optimizers, checkpoints."""

import copy
import io
import warnings

import grouped_cases
import pytest
import torch
from grouped_cases import (
    GROUPS,
    HAS_GPU,
    IN,
    OUT,
    Case,
    assert_same,
    build,
    call,
    gradients,
    inputs,
    loss_of,
    packed,
    plain,
)
from transformer_engine.common import recipe as recipes

import transformer_engine.pytorch as te

every_kind = pytest.mark.parametrize("kind", ["module", "ops"])
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="the CPU executor has no fused optimizers")
# Layouts: one parameter an expert, one weight beside separate biases, one of each.
LAYOUTS = {"separate": None, "single-weight": "separate", "single": "single"}
both_layouts = pytest.mark.parametrize(
    ("source", "target"),
    [(a, b) for a in LAYOUTS for b in LAYOUTS],
    ids=[f"{a}-to-{b}" for a in LAYOUTS for b in LAYOUTS],
)


@pytest.fixture(autouse=True)
def single_parameters(monkeypatch):
    """Single parameters are behind a gate, which warns; cuBLAS runs in both layouts."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    monkeypatch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def layer_of(layout, device, kind="module", **case):
    """A layer in a layout, with the same numbers in each."""
    bias = LAYOUTS[layout] or "separate"
    return build(Case(kind=kind, bias=bias, **case), device, single=LAYOUTS[layout] is not None)


def values(layer) -> dict:
    """Copies of the parameters' values by stem, one tensor each."""
    return {stem: packed(layer, stem, plain).clone() for stem in ("weight", "bias")}


def step(layer, device, dtype=torch.bfloat16, count=1):
    """Forward and backward passes."""
    for x in inputs(device, count, dtype):
        loss_of(call(layer, x)).backward()


# --- optimizers -------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-default": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name, dtype, device):
    """Three steps give the values that separate parameters get."""

    def scenario(layout):
        layer = layer_of(layout, device, dtype=dtype)
        optimizer = OPTIMIZERS[name](layer.parameters())
        for x in inputs(device, 3, dtype):
            optimizer.zero_grad()
            loss_of(call(layer, x)).backward()
            optimizer.step()
        return values(layer)

    if name == "adamw-default" and HAS_GPU:
        pytest.skip("torch steps separate parameters with its foreach kernels, other types without")
    assert_same(scenario("single"), scenario("separate"))


@needs_gpu
@pytest.mark.parametrize("master", [False, True], ids=["plain", "master-weights"])
def test_fused_adam(master, device):
    """The fused kernel gives the same three steps."""

    def scenario(layout):
        layer = layer_of(layout, device)
        optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.01, master_weights=master)
        for x in inputs(device, 3):
            optimizer.zero_grad()
            loss_of(call(layer, x)).backward()
            optimizer.step()
        return values(layer)

    assert_same(scenario("single"), scenario("separate"))


@needs_gpu
def test_b5_fused_sgd(device):
    """The fused SGD kernel, with momentum."""

    def scenario(layout):
        layer = layer_of(layout, device)
        optimizer = te.optimizers.FusedSGD(layer.parameters(), lr=0.1, momentum=0.9)
        for x in inputs(device, 3):
            optimizer.zero_grad()
            loss_of(call(layer, x)).backward()
            optimizer.step()
        return values(layer)

    assert_same(scenario("single"), scenario("separate"))


@needs_gpu
@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_fused_adam_quantized(recipe, device):
    """Quantized weights are stepped through fp32 masters."""
    recipe = getattr(recipes, recipe)()

    def scenario(layout):
        with te.quantized_model_init(enabled=True, recipe=recipe):
            layer = layer_of(layout, device)
        optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.01, master_weights=True)
        for x in inputs(device, 3):
            optimizer.zero_grad()
            with te.autocast(enabled=True, recipe=recipe):
                out = call(layer, x)
            loss_of(out).backward()
            optimizer.step()
        return values(layer)

    assert_same(scenario("single"), scenario("separate"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_fused_adam_gets_memory(dtype, device, monkeypatch):
    """The kernel is handed the memory that the forward reads."""
    layer = layer_of("single", device, dtype=dtype)
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.01)
    seen = []
    monkeypatch.setattr(
        optimizer, "multi_tensor_adam", lambda _size, _flag, lists, *_args: seen.extend(lists[1])
    )
    step(layer, device, dtype)
    optimizer.step()
    want = [param.rowwise_data.data_ptr() for param in layer.parameters()]
    assert [tensor.data_ptr() for tensor in seen] == want


# --- assignment -------------------------------------------------------------


@pytest.mark.parametrize("shape", [(GROUPS, OUT, IN), (-1,)], ids=["same-shape", "flat"])
@every_kind
def test_data_rebinds(kind, shape, device):
    """Kernels and optimizers use the assigned memory; the parameter stays itself."""
    layer = layer_of("single", device, kind)
    weight = layer.weight
    buffer = (values(layer)["weight"] * 0.5).contiguous()
    want = layer_of("separate", device, kind)
    with torch.no_grad():
        for i in range(GROUPS):
            getattr(want, f"weight{i}").copy_(buffer[i])
    weight.data = buffer.view(shape)
    (x,) = inputs(device, 1)
    assert torch.equal(call(layer, x), call(want, x))
    with torch.no_grad():
        weight.mul_(0.5)
        buffer[0].zero_()
    assert layer.weight is weight and weight.shape == (GROUPS, OUT, IN)
    assert torch.equal(values(layer)["weight"], buffer)
    with torch.no_grad():
        for i in range(GROUPS):
            getattr(want, f"weight{i}").copy_(buffer[i])
    assert torch.equal(call(layer, x), call(want, x))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(GROUPS, OUT, IN + 1, device=d),
        lambda d: torch.zeros(GROUPS, IN, OUT, device=d).transpose(1, 2),
        lambda d: torch.zeros(0, device=d),
    ],
    ids=["too-large", "strided", "empty"],
)
def test_data_that_does_not_fit(make, device):
    """It raises and leaves the parameter as it was."""
    layer = layer_of("single", device)
    before = values(layer)
    with pytest.raises(RuntimeError, match="grouped parameter of shape"):
        layer.weight.data = make(device)
    assert_same(values(layer), before)


def test_module_conversions(device):
    """float() and to_empty() convert what the kernels read."""
    layer, want = layer_of("single", device), layer_of("separate", device)
    weight = layer.weight
    layer.float(), want.float()
    assert layer.weight is weight and weight.dtype == torch.float32
    (x,) = inputs(device, 1, torch.float32)
    assert torch.equal(call(layer, x), call(want, x))
    layer.to_empty(device=device)
    layer.load_state_dict(want.state_dict())
    assert torch.equal(call(layer, x), call(want, x))


# --- copies -----------------------------------------------------------------


@every_kind
def test_deepcopy(kind, device):
    """The copy has the values, memory of its own, and trains."""
    layer = layer_of("single", device, kind)
    twin = copy.deepcopy(layer)
    before = values(twin)
    assert_same(values(layer), before)
    assert isinstance(twin.weight, torch.nn.Parameter) and twin.weight.requires_grad
    with torch.no_grad():
        layer.weight.zero_()
    assert_same(values(twin), before)
    step(twin, device)
    want = layer_of("separate", device, kind)
    step(want, device)
    assert_same(gradients(twin), gradients(want))


@every_kind
def test_deepcopy_keeps_the_delay(kind, device):
    """skip_backward_post_hook is there, and the copy delays."""
    twin = copy.deepcopy(layer_of("single", device, kind, delay=True))
    assert twin.weight.skip_backward_post_hook
    step(twin, device)
    assert twin.weight.grad is None
    twin.backward_dw()
    assert twin.weight.grad is not None


# --- initialization ---------------------------------------------------------


@pytest.mark.parametrize("bias", ["none", "separate", "single"])
@every_kind
def test_meta_device(kind, bias, device):
    """A layer made on the meta device trains after reset_parameters()."""

    def scenario(single):
        extra = {"single_grouped_weight": True, "single_grouped_bias": bias == "single"}
        module = kind == "module"
        torch.manual_seed(11)
        layer = (te.GroupedLinear if module else te.ops.GroupedLinear)(
            GROUPS,
            IN,
            OUT,
            bias=bias != "none",
            device="meta",
            delay_wgrad_compute=True,
            **{"params_dtype" if module else "dtype": torch.bfloat16},
            **(extra if single else {}),
        )
        layer.reset_parameters()
        for name, param in layer.named_parameters():
            assert param.device.type == torch.device(device).type
            if name.startswith("weight") or module:
                assert param.skip_backward_post_hook
        step(layer, device)
        layer.backward_dw()
        return {"values": packed(layer, "weight", plain), **gradients(layer)}

    assert_same(scenario(True), scenario(False))


MATERIALIZE = {
    "load-assign": lambda m, state, d: m.load_state_dict(state, assign=True),
    "to_empty-load": lambda m, state, d: m.to_empty(device=d).load_state_dict(state),
    "reset-load": lambda m, state, d: (m.reset_parameters(), m.load_state_dict(state)),
    "to_empty-reset-load": lambda m, state, d: (
        m.to_empty(device=d),
        m.reset_parameters(),
        m.load_state_dict(state),
    ),
}


@pytest.mark.parametrize("saved", [False, True], ids=["live", "saved"])
@pytest.mark.parametrize("way", MATERIALIZE)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", [name for name in LAYOUTS if name != "separate"])
@every_kind
def test_b5_meta_device_and_checkpoint(kind, source, target, way, saved, device):
    """A layer made on the meta device takes a checkpoint of either layout and trains."""
    old, new = layer_of(source, device, kind), layer_of(target, "meta", kind, delay=True)
    state = old.state_dict()
    if saved:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    names = [name for name, _ in new.named_parameters()]
    assert names == [name for name, _ in layer_of(target, device, kind).named_parameters()]
    MATERIALIZE[way](new, state, device)
    assert [name for name, _ in new.named_parameters()] == names
    for name, param in new.named_parameters():
        assert isinstance(param, torch.nn.Parameter) and param.is_leaf
        if name in ("weight", "bias"):  # the native path takes them
            assert param.rowwise_data.numel() == param.numel()
        if name == "weight":
            assert param.skip_backward_post_hook
    assert_same(values(new), values(old))
    step(new, device)
    new.backward_dw()
    step(old, device)
    assert_same(gradients(new), gradients(old))


def test_meta_device_with_only_a_single_bias(device):
    """Separate weights beside one bias."""
    layer = te.GroupedLinear(
        GROUPS, IN, OUT, params_dtype=torch.bfloat16, device="meta", single_grouped_bias=True
    )
    layer.reset_parameters()
    step(layer, device)
    assert layer.bias.grad.shape == (GROUPS, OUT)


@needs_gpu
@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
@every_kind
def test_b5_meta_device_quantized(kind, recipe, device):
    """Quantized weights made on the meta device have the values of separate ones, and train."""
    if (kind, recipe) == ("ops", "Float8BlockScaling"):
        pytest.skip("cuBLAS refuses ops' biases with block scaling, and then other GEMMs too")
    recipe = getattr(recipes, recipe)()

    def scenario(layout):
        torch.manual_seed(11)
        with te.quantized_model_init(enabled=True, recipe=recipe):
            layer = layer_of(layout, "meta", kind)
        layer.reset_parameters()
        first = values(layer)
        with te.autocast(enabled=True, recipe=recipe):
            out = call(layer, inputs(device, 1)[0])
        loss_of(out).backward()
        return {
            **first,
            "out": out.detach(),
            **{f"{n} grad": g for n, g in gradients(layer).items()},
        }

    assert_same(scenario("single"), scenario("separate"))


@every_kind
def test_reset_parameters(kind, device):
    """A trained layer gets the first values of separate parameters, in its own memory."""

    layer, want = layer_of("single", device, kind), layer_of("separate", device, kind)
    weight, memory = layer.weight, layer.weight.rowwise_data.data_ptr()
    for one in (layer, want):
        torch.manual_seed(11)
        one.reset_parameters()
    assert layer.weight is weight and weight.rowwise_data.data_ptr() == memory
    assert_same(values(layer), values(want))


def test_single_bias_without_bias(device):
    """The flag means nothing without a bias."""
    layer = build(Case(bias="none", extra={"single_grouped_bias": True}), device, single=False)
    step(layer, device)
    assert gradients(layer)["weight"] is not None


# --- checkpoints ------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True], ids=["top", "nested"])
@pytest.mark.parametrize("saved", [False, True], ids=["live", "saved"])
@both_layouts
@every_kind
def test_load(kind, source, target, saved, nested, device):
    """A strict load gives the values of the other layout, and the output."""
    old, new = layer_of(source, device, kind), layer_of(target, device, kind)
    with torch.no_grad():
        for param in new.parameters():
            param.zero_()
    wrap = (lambda m: torch.nn.ModuleDict({"experts": torch.nn.Sequential(m)})) if nested else None
    state = (wrap(old) if wrap else old).state_dict()
    if saved:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    keys = list(state)
    (wrap(new) if wrap else new).load_state_dict(state, strict=True)
    assert list(state) == keys, "the caller's state dict was changed"
    assert_same(values(new), values(old))
    (x,) = inputs(device, 1)
    assert torch.equal(call(new, x), call(old, x))


@every_kind
def test_strict_load_names_what_is_missing(kind, device):
    """A checkpoint that lacks one expert does not load."""
    state = layer_of("separate", device, kind).state_dict()
    del state["weight2"]
    with pytest.raises(RuntimeError, match="weight"):
        layer_of("single", device, kind).load_state_dict(state)


@pytest.mark.parametrize("count", [GROUPS - 1, GROUPS + 1])
@both_layouts
@every_kind
def test_b5_load_of_other_numbers_of_experts(kind, source, target, count, device, monkeypatch):
    """A strict load does not leave experts out."""
    new = layer_of(target, device, kind)
    monkeypatch.setattr(grouped_cases, "GROUPS", count)
    old = layer_of(source, device, kind)
    with pytest.raises(RuntimeError, match="weight|bias"):
        new.load_state_dict(old.state_dict())


def test_b5_optimizer_state_of_some_experts(device):
    """Experts without a state, beside others with one, are an error by name."""
    from transformer_engine.pytorch.module._grouped_params import convert_optimizer_state

    old, new = layer_of("separate", device), layer_of("single", device)
    optimizer = OPTIMIZERS["adamw"](old.parameters())
    for frozen in (old.weight0, old.weight2):
        frozen.requires_grad_(False)
        step(old, device)
        optimizer.step()
        names = ([name for name, _ in layer.named_parameters()] for layer in (old, new))
        with pytest.raises(ValueError, match="experts of (weight|bias) have a state"):
            convert_optimizer_state(optimizer.state_dict(), *names)
        frozen.requires_grad_(True)
        optimizer = OPTIMIZERS["adamw"](old.parameters())
        old.zero_grad()


@both_layouts
def test_optimizer_state(source, target, device):
    """Training goes on bit-identically after a change of the layout."""
    from transformer_engine.pytorch.module._grouped_params import convert_optimizer_state

    def run(layer, optimizer, xs):
        for x in xs:
            optimizer.zero_grad()
            loss_of(call(layer, x)).backward()
            optimizer.step()

    def names(layer):
        return [name for name, _ in layer.named_parameters()]

    make = OPTIMIZERS["adamw"]
    xs = inputs(device, 4)
    old, new = layer_of(source, device), layer_of(target, device)
    first, second = make(old.parameters()), make(new.parameters())
    run(old, first, xs[:2])
    new.load_state_dict(old.state_dict())
    state = convert_optimizer_state(first.state_dict(), names(old), names(new))
    second.load_state_dict(copy.deepcopy(state))  # torch shares tensors with what it loads
    run(old, first, xs[2:])
    run(new, second, xs[2:])
    assert_same(values(new), values(old))
