# SPDX-License-Identifier: Apache-2.0
"""Delayed weight gradients of Linear and LayerNormLinear equal the regular path, bit for bit."""

import copy

import pytest
import torch

import transformer_engine.pytorch as te

SIZE = 16
SPLIT = {"q": 16, "k": 8, "v": 8}
KINDS = {
    "linear": te.Linear,
    "layernorm_linear": te.LayerNormLinear,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make(kind, device, *, delay, dtype=torch.bfloat16, out=SIZE, seed=7, **extra):
    """One module with seeded random parameters."""
    torch.manual_seed(seed)
    module = KINDS[kind](
        SIZE, out, bias=True, params_dtype=dtype, device=device, delay_wgrad_compute=delay, **extra
    )
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape).to(dtype))
    return module


def inputs(device, count, dtype=torch.bfloat16):
    """``count`` seeded inputs ``[32, SIZE]``."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(32, SIZE, generator=generator).to(dtype).to(device).requires_grad_()
        for _ in range(count)
    ]


def loss_of(out):
    """A loss whose gradient differs from element to element."""
    return (out.float() * out.float().detach().sin()).sum()


def tie(first, second):
    """Make the second module use the first one's weight and bias."""
    second.weight, second.bias = first.weight, first.bias


def grads(module):
    """Gradients by parameter name, copied."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def assert_same(got, want):
    """All gradients are there and have the same bits."""
    assert got.keys() == want.keys()
    for name in want:
        assert want[name] is not None, name
        assert got[name] is not None, f"{name} has no gradient"
        assert torch.equal(got[name], want[name]), f"{name} differs"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights(kind, dtype, device):
    """The first public report: two modules, one weight and one bias."""

    def run(delay):
        first, second = (make(kind, device, delay=delay, dtype=dtype, seed=s) for s in (1, 2))
        tie(first, second)
        (x,) = inputs(device, 1, dtype)
        loss_of(second(first(x) * 0.125)).backward()
        if delay:
            assert first.weight.grad is None and first.bias.grad is None
            second.backward_dw()
            first.backward_dw()
        return grads(first)

    assert_same(run(True), run(False))


# Order of forward/backward pairs (B) and deliveries (W); each is a way real
# schedules (1F1B, zero bubble) interleave them.
ORDERS = {"alternating": "BWBW", "all-then-all": "BBWW", "one-behind": "BBWBWW"}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_microbatches(kind, order, device):
    """Contributions arrive in the order of the backward passes."""

    def run(delay):
        module = make(kind, device, delay=delay)
        batches = iter(inputs(device, 3))
        for action in order:
            if action == "B":
                loss_of(module(next(batches))).backward()
            elif delay:
                module.backward_dw()
        return grads(module)

    assert_same(run(True), run(False))


@pytest.mark.parametrize("kind", KINDS)
def test_existing_grad_is_added_to_in_place(kind, device):
    """A slice of a flat buffer as .grad stays that slice; its neighbours stay as they are."""

    def run(delay):
        module = make(kind, device, delay=delay)
        flat = torch.full((SIZE * SIZE + 64,), 0.5, dtype=torch.bfloat16, device=device)
        grad = flat[32:-32].view(SIZE, SIZE)
        module.weight.grad = grad
        loss_of(module(inputs(device, 1)[0])).backward()
        if delay:
            assert torch.equal(flat, torch.full_like(flat, 0.5))
            module.backward_dw()
        assert module.weight.grad is grad
        return flat

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("kind", KINDS)
def test_split_parameters(kind, device):
    """Each split weight and bias gets its own slice."""

    def run(delay):
        module = make(kind, device, delay=delay, out=32, parameters_split=SPLIT)
        for x in inputs(device, 2):
            loss_of(module(x)).backward()
        if delay:
            module.backward_dw()
            module.backward_dw()
        assert module.q_weight.grad.shape == (16, SIZE)
        return grads(module)

    assert_same(run(True), run(False))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameter(kind, frozen, device):
    """A frozen weight or bias gets nothing and disturbs nothing.

    2.20.2's regular path gives no bias gradient beside a frozen weight; the
    delayed path then gives none either.
    """

    def run(delay):
        module = make(kind, device, delay=delay)
        getattr(module, frozen).requires_grad_(False)
        loss_of(module(inputs(device, 1)[0])).backward()
        if delay:
            module.backward_dw()
        assert getattr(module, frozen).grad is None
        return {n: p.grad for n, p in module.named_parameters() if p.requires_grad}

    got, want = run(True), run(False)
    assert got.keys() == want.keys() and frozen not in want
    for name, grad in want.items():
        assert (got[name] is None) == (grad is None), name
        assert grad is None or torch.equal(got[name], grad), name


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_pending_is_a_no_op(kind, device):
    """A second backward_dw changes no bit and fires no hook."""
    module = make(kind, device, delay=True)
    fired = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append("module"))
    loss_of(module(inputs(device, 1)[0])).backward()
    module.backward_dw()
    module.weight.register_post_accumulate_grad_hook(lambda _: fired.append("weight"))
    before = grads(module)
    assert fired == ["module"]
    module.backward_dw()
    assert fired == ["module"]
    assert_same(grads(module), before)


@pytest.mark.parametrize("kind", KINDS)
def test_module_hooks_see_final_gradients(kind, device):
    """Hooks run once a delivery, in order, after weight and bias are both there."""
    module = make(kind, device, delay=True)
    seen = []
    for name in ("first", "second"):
        module.register_wgrad_accumulation_and_reduce_hooks(
            lambda name=name: seen.append(
                (name, module.weight.grad is not None, module.bias.grad is not None)
            )
        )
    loss_of(module(inputs(device, 1)[0])).backward()
    module.backward_dw()
    assert seen == [("first", True, True), ("second", True, True)]


def test_failed_gemm_keeps_the_contribution(device):
    """After a GEMM that raises nothing has changed, and a second call delivers."""
    module, regular = (make("linear", device, delay=delay) for delay in (True, False))
    for one in (module, regular):
        loss_of(one(inputs(device, 1)[0])).backward()
    entry = module.wgrad_store.context.queue[0]
    good = entry[1]

    def broken(*_):
        raise RuntimeError("out of memory")

    entry[1] = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        module.backward_dw()
    assert module.weight.grad is None and module.bias.grad is None
    entry[1] = good
    module.backward_dw()
    assert_same(grads(module), grads(regular))


def test_fused_main_grad(device):
    """Tied and fused: the GEMM adds to one fp32 main_grad; the bias goes through autograd."""

    def run(delay):
        first, second = (
            make("linear", device, delay=delay, seed=s, fuse_wgrad_accumulation=True)
            for s in (1, 2)
        )
        tie(first, second)
        first.weight.main_grad = torch.full((SIZE, SIZE), 256.0, device=device)
        loss_of(second(first(inputs(device, 1)[0]) * 0.125)).backward()
        if delay:
            assert torch.equal(
                first.weight.main_grad, torch.full_like(first.weight.main_grad, 256.0)
            )
            second.backward_dw()
            first.backward_dw()
        return first.weight.main_grad, first.bias.grad

    for got, want in zip(run(True), run(False)):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_first_gradient_is_not_copied(device):
    """autograd takes the GEMM's output as .grad: no second weight-sized buffer."""
    module = make("linear", device, delay=True)
    loss_of(module(inputs(device, 1)[0])).backward()
    entry = module.wgrad_store.context.queue[0]
    gemm, pointers = entry[1], []

    def watched(*tensors):
        result = gemm(*tensors)
        pointers.append(result[0].data_ptr())
        return result

    entry[1] = watched
    module.backward_dw()
    assert module.weight.grad.data_ptr() == pointers[0]


def test_regular_module_is_untouched(device):
    """Without the delay backward_dw stays a no-op."""
    module = make("linear", device, delay=False)
    loss_of(module(inputs(device, 1)[0])).backward()
    before = grads(copy.copy(module))
    module.backward_dw()
    assert_same(grads(module), before)
