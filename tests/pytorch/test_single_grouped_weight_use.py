# SPDX-License-Identifier: Apache-2.0
"""torch's own tools do with a single grouped parameter what they do with separate ones.

Each scenario gets a function that makes layers, and returns tensors; it runs
with single parameters and with separate ones, and the bits must agree.
"""

import contextlib
import copy
import functools
import io
import sys
import warnings

import grouped_cases
import pytest
import torch
from grouped_cases import (
    GROUPS,
    HAS_GPU,
    IN,
    OUT,
    RECIPES,
    SPLITS,
    Case,
    assert_same,
    build,
    call,
    give_main_grads,
    gradients,
    inputs,
    loss_of,
    packed,
    plain,
    splits_as,
)

import transformer_engine.pytorch as te
from transformer_engine.pytorch import quantization

# With a GPU some scenarios run on quantized weights and quantized compute too.
NUMERICS = ["plain", "delayed", "current", "block"] if HAS_GPU else ["plain"]
every_numerics = pytest.mark.parametrize("numerics", NUMERICS)
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="the CPU executor has no CUDA graphs")
every_kind = pytest.mark.parametrize("kind", ["module", "ops"])
both_delays = pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])


@pytest.fixture(autouse=True)
def single_parameters(monkeypatch):
    """Single parameters are behind a gate, which warns; cuBLAS runs in both layouts."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    monkeypatch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Layers:
    """Makes and calls layers in one layout: ``single`` or one parameter an expert."""

    def __init__(self, single, device, kind, numerics):
        self.single, self.device, self.kind = single, device, kind
        self.recipe = None if numerics == "plain" else RECIPES[numerics]()

    def __call__(self, **case):
        case = Case(**{"kind": self.kind, "bias": "single", **case})
        if self.recipe is None:
            return build(case, self.device, single=self.single)
        init = functools.partial(te.quantized_model_init, enabled=True, recipe=self.recipe)
        return build(case, self.device, single=self.single, init=init)

    def x(self, count=1, dtype=torch.bfloat16):
        """Inputs."""
        return inputs(self.device, count, dtype)

    def run(self, layer, x):
        """The layer's output."""
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return call(layer, x)

    def backward(self, layer, x, run=None):
        """Forward, backward and, where delayed, the weight gradients; the output."""
        out = (run or self.run)(layer, x)
        loss_of(out).backward()
        while layer.pending_backward_dw:
            layer.backward_dw()
        return out.detach()


both_paths = pytest.mark.parametrize("path", ["split", "native"])


def extra_for(kind, path, request) -> dict:
    """Arguments for the native path, which has references for its kernels on the CPU executor."""
    if path == "split":
        return {}
    if HAS_GPU:
        pytest.skip("the CPU executor stands for kernels that not every GPU has")
    tex = sys.modules["transformer_engine_torch"]
    request.getfixturevalue("monkeypatch").setattr(tex, "get_cublasLt_version", lambda: 130600)
    return {"use_grouped_tensor": True} if kind == "module" else {}


def values(layer) -> dict:
    """Copies of the parameters' values by stem, one tensor each."""
    found = {stem: packed(layer, stem, plain) for stem in ("weight", "bias")}
    return {stem: value.clone() for stem, value in found.items() if value is not None}


def check(scenario, device, kind="module", numerics="plain"):
    """The scenario gives the same with both layouts."""
    if (kind, numerics) == ("ops", "block"):
        pytest.skip("cuBLAS refuses ops' biases with block scaling, and then other GEMMs too")
    try:
        want = scenario(Layers(False, device, kind, numerics))
    except Exception as error:  # pylint: disable=broad-exception-caught
        if numerics == "plain":
            raise
        pytest.skip(f"separate parameters refuse: {error}")
    assert any(value is not None for value in want.values())
    assert_same(scenario(Layers(True, device, kind, numerics)), want)


# --- passes -----------------------------------------------------------------

CHECKPOINTS = {
    "torch-reentrant": lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=True),
    "torch": lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False),
    "te-reentrant": lambda f, x: te.checkpoint(f, x, use_reentrant=True),
    "te": lambda f, x: te.checkpoint(f, x, use_reentrant=False),
}


@every_numerics
@both_delays
@every_kind
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_b4_activation_checkpointing(way, kind, delay, numerics, device):
    """The recomputed forward uses the same parameter."""

    def scenario(layers):
        layer = layers(delay=delay)

        def run(module, x):
            return CHECKPOINTS[way](functools.partial(layers.run, module), x)

        seen = {}
        for i, x in enumerate(layers.x(2)):
            seen |= {f"out{i}": layers.backward(layer, x, run), f"dx{i}": x.grad}
        return {**seen, **gradients(layer)}

    check(scenario, device, kind, numerics)


@every_numerics
@every_kind
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_b5_without_gradients(mode, kind, numerics, device):
    """Inference, then training."""

    def scenario(layers):
        layer = layers()
        x, y = layers.x(2)
        with mode():
            out = layers.run(layer, x)
        assert not out.requires_grad
        return {"out": out.clone(), "trained": layers.backward(layer, y), **gradients(layer)}

    check(scenario, device, kind, numerics)


@every_numerics
@both_delays
def test_b4_frozen_between_passes(delay, numerics, device):
    """Parameters are frozen and thawed, one stem at a time."""

    def scenario(layers):
        layer = layers(delay=delay)
        seen = {}
        for i, (x, frozen) in enumerate(zip(layers.x(3), ("weight", "bias", ""))):
            for name, param in layer.named_parameters():
                param.requires_grad_(name.rstrip("0123456789") != frozen)
            layers.backward(layer, x)
            copies = gradients(layer).items()
            seen |= {f"{n}{i}": None if g is None else g.clone() for n, g in copies}
        return seen

    check(scenario, device, "module", numerics)


def test_b1_autocast_nested(device):
    """fp32 parameters under bf16 autocast, with a region where it is off."""

    def scenario(layers):
        first, second = layers(dtype=torch.float32), layers(dtype=torch.float32)
        (x,) = layers.x(1, torch.float32)
        with torch.autocast("cuda", torch.bfloat16):
            y = call(first, x)
            with torch.autocast("cuda", enabled=False):
                z = call(second, x)
        loss_of(y).backward()
        loss_of(z).backward()
        return {"y": y.detach(), "z": z.detach(), "dx": x.grad, **gradients(first)}

    check(scenario, device)


@both_delays
def test_b4_tied_layers_of_two_dtypes(delay, device):
    """One parameter, two layers, of which one computes in bf16."""

    def scenario(layers):
        first, second = (layers(dtype=torch.float32, delay=delay) for _ in range(2))
        for name, _ in list(first.named_parameters()):
            setattr(second, name, getattr(first, name))
        x, y = layers.x(2, torch.float32)
        layers.backward(first, x)
        with torch.autocast("cuda", torch.bfloat16):
            out = call(second, y)
        loss_of(out).backward()
        second.backward_dw()
        return {"out": out.detach(), "dx": y.grad, **gradients(first)}

    check(scenario, device)


def test_b5_gradients_asked_for(device):
    """torch.autograd.grad gives them without .grad."""

    def scenario(layers):
        layer = layers()
        (x,) = layers.x()
        found = torch.autograd.grad(loss_of(call(layer, x)), list(layer.parameters()))
        named = dict(zip((n for n, _ in layer.named_parameters()), found))
        assert all(param.grad is None for param in layer.parameters())
        if layers.single:
            return named
        return {
            stem: torch.stack([g for n, g in named.items() if n.startswith(stem)])
            for stem in ("weight", "bias")
        }

    check(scenario, device)


def test_b5_parameters_in_a_loss(device):
    """A penalty on the parameters themselves adds to what the layer gives."""

    def scenario(layers):
        layer = layers()
        (x,) = layers.x()
        penalty = sum((param.float() ** 2).sum() for param in layer.parameters())
        (loss_of(call(layer, x)) + penalty * 0).backward()
        loss = sum(param.float().pow(3).sum() for param in layer.parameters())
        loss.backward()
        return gradients(layer)

    check(scenario, device)


@every_numerics
def test_b5_optimizer_in_backward(numerics, device):
    """A hook steps each parameter as soon as its gradient is there."""

    def scenario(layers):
        layer = layers()

        def step(param):
            with torch.no_grad():
                param.sub_(param.grad, alpha=0.01)
            param.grad = None

        for param in layer.parameters():
            param.register_post_accumulate_grad_hook(step)
        for x in layers.x(2):
            layers.backward(layer, x)
        return values(layer)

    check(scenario, device, "module", numerics)


@both_delays
@every_kind
@pytest.mark.parametrize("how", ["sum", "transposed", "strided-input", "no-input-gradient"])
def test_b1_odd_operands(how, kind, delay, device):
    """Output gradients and inputs that are not contiguous; a first layer."""

    def scenario(layers):
        layer = layers(delay=delay)
        x, y = layers.x(2)
        if how == "no-input-gradient":
            x = x.detach()
        out = call(layer, torch.cat([x, x], 1)[:, :IN] if how == "strided-input" else x)
        dy = torch.cat([y, y], 1).detach()
        dy = {"sum": torch.ones_like(out[:1, :1]).expand_as(out), "transposed": dy.t().clone().t()}
        out.backward(dy.get(how, torch.sin(out.detach())))
        layer.backward_dw()
        return {"out": out.detach(), "dx": x.grad, **gradients(layer)}

    check(scenario, device, kind)


@both_delays
@every_kind
def test_b4_plain_torch_users(kind, delay, device):
    """The experts' weights are used by plain torch too, through unbind()."""

    def scenario(layers):
        layer = layers(delay=delay)
        x, y = layers.x(2)
        out = layers.backward(layer, x)
        names = [f"weight{i}" for i in range(GROUPS)]
        weights = layer.weight.unbind() if layers.single else [getattr(layer, n) for n in names]
        outs = [part @ weight.t() for part, weight in zip(y.split(SPLITS), weights)]
        loss_of(torch.cat(outs)).backward()
        return {"out": out, "dy": y.grad, **gradients(layer)}

    check(scenario, device, kind)


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@both_delays
@every_kind
def test_b2_weights_changed_before_the_backward(kind, delay, single, device):
    """autograd's check of saved tensors holds: the input gradient would be wrong."""
    layers = Layers(single, device, kind, "plain")
    layer = layers(delay=delay, bias="none")
    optimizer = torch.optim.AdamW(layer.parameters())
    x, y = layers.x(2)
    layers.backward(layer, x)
    loss = loss_of(call(layer, y))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


ORDERS = ["B W B W B W", "B B W W B W", "B B W B W W", "B B B W W W"]


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@every_kind
@pytest.mark.parametrize("order", ORDERS)
def test_b4_orders(order, kind, fuse, device):
    """Interleaved backward() and backward_dw() give the bits of the regular path."""

    def scenario(layers):
        layer = layers(delay=layers.single, fuse=fuse, bias="separate")
        buffer = give_main_grads(layer) if fuse else None
        xs = iter(layers.x(3))
        for word in order.split():
            layer.backward_dw() if word == "W" else loss_of(call(layer, next(xs))).backward()
        return {**gradients(layer), "main_grad": buffer}

    check(scenario, device, kind)


@both_delays
@every_kind
@pytest.mark.parametrize("groups", [1, 12])
def test_b1_other_numbers_of_experts(groups, kind, delay, device, monkeypatch):
    """One expert; so many that their names sort otherwise."""
    splits = [224] if groups == 1 else [16] * 10 + [64, 0]
    monkeypatch.setattr(grouped_cases, "GROUPS", groups)

    def scenario(layers):
        layer, twin = layers(delay=delay), layers(delay=delay)
        x, y = layers.x(2)
        run = functools.partial(call, splits=splits)
        seen = {"out": layers.backward(layer, x, run), **gradients(layer)}
        with torch.no_grad():
            for param in layer.parameters():
                param.mul_(0.5)
        twin.load_state_dict(layer.state_dict())
        return {**seen, "twin": layers.backward(twin, y, run)}

    check(scenario, device, kind)


def test_b4_module_hooks(device):
    """register_wgrad_accumulation_and_reduce_hooks: after all parameters, once a delivery."""

    def scenario(layers):
        layer, seen = layers(delay=True), []
        layer.register_wgrad_accumulation_and_reduce_hooks(
            lambda: seen.append([gradient.clone() for gradient in gradients(layer).values()])
        )
        for x in layers.x(2):
            layers.backward(layer, x)
        layer.backward_dw()
        assert len(seen) == 2
        return dict(enumerate(gradient for gradients in seen for gradient in gradients))

    check(scenario, device)


@both_delays
def test_b4_lazy_main_grad(delay, device):
    """get_main_grad() is asked when the GEMM runs."""

    def scenario(layers):
        layer, buffers = layers(delay=delay, fuse=True, bias="none"), {}

        def get(name, shape):
            return buffers.setdefault(name, torch.full(shape, 0.25, device=device))

        for name, param in layer.named_parameters():
            param.__fsdp_param__, param.grad_added_to_main_grad = True, False
            param.get_main_grad = functools.partial(get, name, tuple(param.shape))
        (x,) = layers.x()
        loss = loss_of(call(layer, x))
        assert not buffers
        loss.backward()
        layer.backward_dw()
        assert all(param.grad_added_to_main_grad for param in layer.parameters())
        found = list(buffers.values())
        return {"main_grad": found[0] if layers.single else torch.stack(found), "dx": x.grad}

    check(scenario, device)


# --- CUDA graphs ------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@both_delays
def test_b4_plain_capture(delay, fuse, device):
    """A captured pass, replayed with other inputs."""

    def scenario(layers):
        layer = layers(delay=delay, fuse=fuse)
        buffer = give_main_grads(layer) if fuse else None
        xs = layers.x(3)
        replay = functools.partial(layers.backward, layer)
        if layers.single:
            static = xs[0].detach().clone().requires_grad_()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2):
                    layers.backward(layer, static)
            torch.cuda.synchronize()
            for param in (*layer.parameters(), static):
                param.grad = None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                layers.backward(layer, static)

            def replay(x):
                with torch.no_grad():
                    static.copy_(x)
                graph.replay()

        seen = {}
        for i, x in enumerate(xs):
            if fuse:
                buffer.zero_()
            if not layers.single:
                layer.zero_grad()
            replay(x)
            torch.cuda.synchronize()
            found = {**gradients(layer), "main_grad": buffer}
            seen |= {f"{n}{i}": None if g is None else g.clone() for n, g in found.items()}
        return seen

    check(scenario, device)


class OneInput(torch.nn.Module):
    """Takes one tensor, as graphed callables want it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return call(self.inner, x)


@needs_gpu
@both_delays
def test_b4_graphed_callable(delay, device):
    """make_graphed_callables: replays accumulate as eager code does."""

    def scenario(layers):
        layer = layers(delay=delay and layers.single)
        module = OneInput(layer)
        if layers.single:
            (sample,) = layers.x()
            module = te.make_graphed_callables(module, (sample.detach().requires_grad_(),))
            assert all(param.grad is None for param in layer.parameters())
        for x in layers.x(3):
            loss_of(module(x)).backward()
            if delay and layers.single:
                module.backward_dw()
        return gradients(layer)

    check(scenario, device)


# --- conversions and copies -------------------------------------------------


def there_and_back(module, device):
    """To the CPU, and to where it was: the place is asked for before it changes."""
    return module.cpu().to(device)


CONVERSIONS = {
    "to": lambda m: m.to(torch.float32),
    "half": lambda m: m.half(),
    "there-and-back": lambda m: m.float().bfloat16(),
    "cpu": lambda m: there_and_back(m, next(m.parameters()).device),
}


@every_numerics
@every_kind
@pytest.mark.parametrize("way", CONVERSIONS)
def test_b5_conversion_between_passes(way, kind, numerics, device):
    """Values and gradients are converted; training goes on."""

    def scenario(layers):
        layer = layers()
        x, y = layers.x(2)
        layers.backward(layer, x)
        CONVERSIONS[way](layer)
        dtype = next(layer.parameters()).dtype
        before = {f"{n} then": g.clone() for n, g in gradients(layer).items()}
        layers.backward(layer, y.detach().to(dtype).requires_grad_())
        return {**before, **gradients(layer), **{f"{n} value": v for n, v in values(layer).items()}}

    check(scenario, device, kind, numerics)


@every_numerics
@both_delays
@every_kind
def test_b5_deepcopy_of_a_trained_layer(kind, delay, numerics, device):
    """The copy and the original train apart."""

    def scenario(layers):
        layer = layers(delay=delay)
        x, y = layers.x(2)
        layers.backward(layer, x)
        twin = copy.deepcopy(layer)
        layers.backward(twin, y)
        return {**gradients(layer), **{f"{n} twin": g for n, g in gradients(twin).items()}}

    check(scenario, device, kind, numerics)


@contextlib.contextmanager
def identity_weights():
    """``quantized_model_init``, which the CPU executor refuses; Identity needs no kernel."""
    with pytest.MonkeyPatch.context() as patch:
        state = quantization.FP8GlobalStateManager.quantization_state
        patch.setattr(state, "fp8_parameters", True)
        patch.setattr(state, "fp8_recipe", RECIPES["custom-identity"]())
        yield


def test_b5_deepcopy_of_a_quantized_gradient(device):
    """torch copies .grad with every tensor but a plain parameter; Identity needs no kernel.

    Not in ops: torch cannot copy a gradient of its separate Identity weights.
    """

    def scenario(layers):
        layer = build(Case(bias="none"), device, single=layers.single, init=identity_weights)
        for param in layer.parameters():
            param.grad = torch.full(param.shape, 2.0, dtype=param.dtype, device=device)
        twin = copy.deepcopy(layer)
        for param in layer.parameters():
            param.grad.zero_()
        return gradients(twin)

    check(scenario, device)


@pytest.mark.parametrize("source", ["quantized", "plain", "float32"])
@pytest.mark.parametrize("numerics", [*NUMERICS, "identity"])
def test_b5_copy_between_quantized_weights(numerics, source, device):
    """Bits of a quantized weight, values of a plain one; the target keeps its memory."""

    def make(layers):
        if numerics == "identity":
            return build(Case(bias="none"), device, single=layers.single, init=identity_weights)
        return layers(bias="none")

    def scenario(layers):
        first, second = make(layers), make(layers)
        with torch.no_grad():
            for param in first.parameters():
                param.mul_(3.0)
            for old, new in zip(first.parameters(), second.parameters()):
                if source != "quantized":
                    old = plain(old).to(torch.bfloat16 if source == "plain" else torch.float32)
                    old = old * 1.001
                assert new.detach().copy_(old).shape == new.shape
        return values(second)

    check(scenario, device, numerics="plain" if numerics == "identity" else numerics)


@pytest.mark.parametrize("numerics", [*NUMERICS[1:], "identity"])
def test_b5_quantized_weight_on_another_device(numerics, device):
    """It stays quantized, with the same bits, there and back."""
    layers = Layers(True, device, "module", "plain" if numerics == "identity" else numerics)
    if numerics == "identity":
        layer = build(Case(bias="none"), device, single=True, init=identity_weights)
    else:
        layer = layers(bias="none")
    moved = layer.weight.detach().cpu()
    assert moved.device.type == "cpu" and type(moved) is type(layer.weight)
    assert moved.quantizer is not None
    assert all(type(new) is type(old) for new, old in zip(moved.members, layer.weight.members))
    assert torch.equal(moved.dequantize(), plain(layer.weight).cpu())
    moved.members[0].copy_(moved.members[1])  # memory of its own
    back = layer.weight.detach().to("cpu", copy=True).to(layer.weight.device)
    assert_same({"weight": plain(back)}, {"weight": plain(layer.weight)})


@pytest.mark.parametrize("numerics", [*NUMERICS[1:], "identity"])
def test_b5_clone_of_a_quantized_weight(numerics, device):
    """It stays quantized, in memory of its own; a module goes to the meta device and back."""
    layers = Layers(True, device, "module", "plain" if numerics == "identity" else numerics)
    if numerics == "identity":
        layer = build(Case(bias="none"), device, single=True, init=identity_weights)
    else:
        layer = layers(bias="none")
    weight = layer.weight
    before = plain(weight)
    copied = weight.detach().clone()
    assert type(copied) is type(weight) and copied.quantizer is not None
    with torch.no_grad():
        weight.mul_(2.0)
        assert torch.equal(plain(copied), before)
        weight.copy_(copied)
    assert torch.equal(plain(weight), before)
    layer.to("meta")
    moved = layer.weight
    assert moved.quantizer is not None and moved.device.type == "meta"
    assert torch._C.TensorBase.device.__get__(moved.members[0]).type == "meta"


def test_b5_attributes_of_a_quantized_weight(device):
    """A deep copy has them, as torch does it for every tensor but a plain parameter."""
    layer = build(Case(bias="none"), device, single=True, init=identity_weights)
    layer.weight.tag = ["kept"]
    twin = copy.deepcopy(layer)
    assert twin.weight.tag == ["kept"] and twin.weight.tag is not layer.weight.tag


@every_numerics
@both_delays
@every_kind
def test_b5_saved_module(kind, delay, numerics, device):
    """torch.save of the module itself."""

    def scenario(layers):
        # The module's default initializers cannot be pickled, in either layout.
        extra = {"init_method": torch.nn.init.normal_} if kind == "module" else {}
        layer = layers(delay=delay, bias="none" if kind == "module" else "single", extra=extra)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        with torch.no_grad():
            for param in layer.parameters():
                param.zero_()
        (x,) = layers.x()
        assert all(isinstance(param, torch.nn.Parameter) for param in twin.parameters())
        left = {f"{stem} left": value for stem, value in values(layer).items()}
        return {"out": layers.backward(twin, x), **gradients(twin), **left}

    check(scenario, device, kind, numerics)


@every_numerics
def test_b5_averaged_model(numerics, device):
    """torch's running average of a model."""

    def scenario(layers):
        layer = layers()
        average = torch.optim.swa_utils.AveragedModel(
            layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for x in layers.x(3):
            optimizer.zero_grad()
            layers.backward(layer, x)
            optimizer.step()
            average.update_parameters(layer)
        return values(average.module)

    check(scenario, device, "module", numerics)


@both_paths
@every_kind
def test_b5_functional_call(kind, path, device, request):
    """Other tensors in place of the parameters."""

    extra = extra_for(kind, path, request)

    def scenario(layers):
        layer = layers(extra=extra)
        (x,) = layers.x()
        others = {
            n: (p.detach().clone() * 0.5).requires_grad_() for n, p in layer.named_parameters()
        }
        splits = splits_as("device", SPLITS, device)
        out = torch.func.functional_call(layer, others, (x, splits))
        loss_of(out).backward()
        assert all(param.grad is None for param in layer.parameters())
        found = {n: other.grad for n, other in others.items()}
        if not layers.single:
            found = {
                stem: torch.stack([found[f"{stem}{i}"] for i in range(GROUPS)])
                for stem in ("weight", "bias")
            }
        return {"out": out.detach(), **found}

    check(scenario, device, kind)


@both_paths
@every_kind
def test_b5_assigned_parameters(kind, path, device, request):
    """Plain parameters in the place of grouped ones: marked as delayed, copied, trained."""

    extra = extra_for(kind, path, request)
    run = functools.partial(call, splits=splits_as("device", SPLITS, device))

    def scenario(layers):
        layer = layers(delay=True, extra=extra)
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, torch.nn.Parameter(param.detach() * 0.5))
        (x,) = layers.x()
        out = layers.backward(layer, x, run)
        late = [p for n, p in layer.named_parameters() if kind == "module" or "weight" in n]
        assert all(param.skip_backward_post_hook for param in late)
        return {"out": out, **gradients(layer), **values(copy.deepcopy(layer).float())}

    check(scenario, device, kind)


def test_b5_values_set_in_place(device):
    """torch.nn.init, .data read, changed and assigned."""

    def scenario(layers):
        layer = layers()
        (x,) = layers.x()
        for param in layer.parameters():
            torch.nn.init.constant_(param, 0.125)
            param.data.mul_(2.0)
            param.data = param.data * 0.5
            param.data.add_(1.0)
        return {
            "out": call(layer, x).detach(),
            **{f"{n} value": v for n, v in values(layer).items()},
        }

    check(scenario, device)


class Halved(torch.nn.Module):
    """A parametrization."""

    def forward(self, x):
        return x * 0.5


@both_paths
@both_delays
def test_b5_parametrization(delay, path, device, request):
    """Weights that are computed from others."""

    extra = extra_for("module", path, request)
    run = functools.partial(call, splits=splits_as("device", SPLITS, device))

    def scenario(layers):
        layer = layers(delay=delay, extra=extra)
        names = [n for n, _ in layer.named_parameters() if n.startswith("weight")]
        for name in names:
            torch.nn.utils.parametrize.register_parametrization(layer, name, Halved())
        (x,) = layers.x()
        out = layers.backward(layer, x, run)
        found = [getattr(layer.parametrizations, name).original.grad for name in names]
        return {"out": out, "weight": found[0] if layers.single else torch.stack(found)}

    check(scenario, device)


@every_kind
def test_b5_views(kind, device):
    """Indexing and views share memory with the parameter, and carry gradients."""
    layer = Layers(True, device, kind, "plain")()
    weight = layer.weight
    with torch.no_grad():
        weight[1].zero_()
        weight.view(-1, IN)[:OUT].fill_(1.0)
        for expert in weight.data.split(1)[2:]:
            expert.copy_(torch.full_like(expert, 2.0))
    want = torch.tensor([1.0, 0.0, 2.0, 2.0], device=device)
    assert torch.equal(values(layer)["weight"].float(), want[:, None, None].expand(-1, OUT, IN))
    (weight[0].float().sum() + weight.flatten(1)[2].float().sum() * 3).backward()
    want = torch.tensor([1.0, 0.0, 3.0, 0.0], device=device)
    assert torch.equal(weight.grad.float(), want[:, None, None].expand(-1, OUT, IN))


def test_b5_printed(device):
    """repr() of the parameter and of the layer."""
    layer = Layers(True, device, "module", "plain")()
    assert "GroupedLinear" in repr(layer)
    assert str(tuple(layer.weight.shape)) in repr(layer.weight) or "GroupedTensor" in repr(
        layer.weight
    )


# --- gradients and optimizers -----------------------------------------------


def test_b5_gradient_tools(device):
    """Norms, clipping, zeroing in place."""

    def scenario(layers):
        layer = layers()
        x, y = layers.x(2)
        layers.backward(layer, x)
        grads = [p.grad for p in layer.parameters()]
        torch.nn.utils.clip_grad_value_(layer.parameters(), 0.5)
        seen = {f"{n} clipped": g.clone() for n, g in gradients(layer).items()}
        layer.zero_grad(set_to_none=False)
        assert all(p.grad is g and not g.any() for p, g in zip(layer.parameters(), grads))
        layers.backward(layer, y)
        return {**seen, **gradients(layer)}

    check(scenario, device)


def test_b5_gradient_norm(device):
    """The total norm is one of other partial sums: equal to rounding, and it clips."""

    def scenario(layers):
        layer = layers()
        (x,) = layers.x()
        layers.backward(layer, x)
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        after = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
        return norm.double(), after.double()

    got, want = (scenario(Layers(single, device, "module", "plain")) for single in (True, False))
    # bf16 norms of four tensors, then of their norms, against one: half a unit each.
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0.0)


def test_b5_grad_scaler(device):
    """Scaled losses, unscaled gradients, a step that is left out."""

    def scenario(layers):
        layer = layers(dtype=torch.float32)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=8.0)
        for number, x in enumerate(layers.x(3, torch.float32)):
            optimizer.zero_grad()
            scaler.scale(
                loss_of(call(layer, x)) * (float("inf") if number == 1 else 1.0)
            ).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
        return values(layer)

    check(scenario, device)


def test_b5_vector_of_parameters(device):
    """torch.nn.utils.parameters_to_vector, and back."""

    def scenario(layers):
        layer = layers()
        params = list(layer.parameters())
        with torch.no_grad():
            vector = torch.nn.utils.parameters_to_vector(params)
            torch.nn.utils.vector_to_parameters(vector * 0.5, params)
        (x,) = layers.x()
        # named_parameters() of separate weights has weight and bias of each expert in turn.
        return {
            "sorted": vector.float().sort().values,
            "out": layers.backward(layer, x),
            **values(layer),
        }

    check(scenario, device)


OPTIMIZERS = {
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, weight_decay=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_b5_more_optimizers(name, device):
    """Three steps, also with one kernel for all parameters."""

    def scenario(layers):
        layer = layers(dtype=torch.float32)
        optimizer = OPTIMIZERS[name](layer.parameters())
        for x in layers.x(3, torch.float32):
            optimizer.zero_grad()
            layers.backward(layer, x)
            optimizer.step()
        return values(layer)

    check(scenario, device)


def test_b5_lbfgs(device):
    """An optimizer with a closure, on one flat vector of all gradients."""

    def scenario(layers):
        layer = layers(dtype=torch.float32, delay=False)
        optimizer = torch.optim.LBFGS(layer.parameters(), lr=1e-3, max_iter=1)
        (x,) = layers.x(1, torch.float32)
        start = values(layer)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(call(layer, x))
            loss.backward()
            return loss

        optimizer.step(closure)
        got = values(layer)
        assert not torch.equal(got["weight"], start["weight"])
        return got

    check(scenario, device)


# --- state dicts ------------------------------------------------------------


@every_kind
def test_b5_state_dict_hooks(kind, device):
    """Hooks see the parameter; keep_vars gives the parameter itself."""
    layer = Layers(True, device, kind, "plain")()
    seen = []
    layer.register_state_dict_post_hook(lambda m, s, p, _: seen.append(s[p + "weight"].shape))
    layer.register_load_state_dict_pre_hook(lambda m, s, *_: seen.append(s["weight"].shape))
    layer.register_load_state_dict_post_hook(lambda m, keys: seen.append(keys.missing_keys))
    state = layer.state_dict(keep_vars=True)
    assert state["weight"] is layer.weight
    layer.load_state_dict(layer.state_dict())
    shape = torch.Size((GROUPS, OUT, IN))
    assert seen == [shape, shape, shape, []]


@every_kind
def test_b5_state_dict_is_live(kind, device):
    """A state dict holds plain tensors on the parameters' memory, as savers of bytes want them."""
    layer = Layers(True, device, kind, "plain")()
    state = torch.nn.ModuleDict({"experts": layer}).state_dict()
    with torch.no_grad():
        for param in layer.parameters():
            param.mul_(2.0)
    for name, param in layer.named_parameters():
        saved = state[f"experts.{name}"]
        assert type(saved) is torch.Tensor and not saved.requires_grad
        assert saved.data_ptr() == param.rowwise_data.data_ptr() and saved.shape == param.shape


@every_numerics
def test_b5_distributed_checkpoint(tmp_path, numerics, device):
    """torch.distributed.checkpoint writes and reads it, without a process group."""
    import torch.distributed.checkpoint as dcp

    def scenario(layers):
        layer = layers()
        folder = tmp_path / str(layers.single)
        dcp.save({"model": layer.state_dict()}, checkpoint_id=folder, no_dist=True)
        want = values(layer)
        with torch.no_grad():
            for param in layer.parameters():
                param.zero_()
        state = {"model": layer.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        layer.load_state_dict(state["model"])
        assert_same(values(layer), want)
        return want

    check(scenario, device, "module", numerics)
