# SPDX-License-Identifier: Apache-2.0
"""Delayed weight gradients: what only a GPU shows (streams, graphs, FP8, memory)."""

import gc

import pytest
import torch
from conftest import HAS_GPU
from delayed_kinds import (
    assert_same,
    fill,
    give_main_grads,
    grads,
    kinds,
    loss_of,
    main_grads,
    weight_names,
)
from transformer_engine.common import recipe as recipes

import transformer_engine.pytorch as te

pytestmark = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
SIZE, SPLITS = 256, [128, 0, 256, 128]
ROWS = sum(SPLITS)
KINDS = kinds(SIZE, SPLITS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, *, delay, fuse=False, size=None, **extra):
    """A bf16 module on the GPU with seeded parameters."""
    table = KINDS if size is None else kinds(size, SPLITS)
    module = table[kind].build(delay=delay, fuse=fuse, dtype=torch.bfloat16, device="cuda", **extra)
    fill(module)
    return module


def batches(count, size=SIZE):
    """Seeded inputs ``[ROWS, size]``."""
    generator = torch.Generator("cuda").manual_seed(5)
    return [
        torch.randn(ROWS, size, generator=generator, device="cuda")
        .to(torch.bfloat16)
        .requires_grad_()
        for _ in range(count)
    ]


# --- A9: side stream --------------------------------------------------------


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@every_kind
def test_a9_side_stream(kind, fuse):
    """A flush on a busy side stream reads its operands before their memory is used again."""
    size = 2048

    def scenario(delay):
        module = make(kind, delay=delay, fuse=fuse, size=size)
        if fuse:
            give_main_grads(kind, module)
        side = torch.cuda.Stream()
        for x in batches(3, size):
            loss_of(kinds(size, SPLITS)[kind].call(module, x)).backward()
            if delay:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(50_000_000)
                    module.backward_dw()
                # What the queue gave back must not be handed out yet.
                junk = [torch.full((ROWS, size), float("nan"), device="cuda") for _ in range(8)]
                junk += [
                    torch.full((ROWS, 2 * size), float("nan"), device="cuda", dtype=torch.bfloat16)
                    for _ in range(8)
                ]
                del junk
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        return {**(main_grads(kind, module) if fuse else {}), **grads(module)}

    assert_same(scenario(True), scenario(False), missing=True)


# --- A9: recipes ------------------------------------------------------------

RECIPES = {
    "delayed-scaling": recipes.DelayedScaling,
    "current-scaling": recipes.Float8CurrentScaling,
    "block-scaling": recipes.Float8BlockScaling,
}
UNSUPPORTED = {
    # Upstream refuses these in the regular path too.
    ("ops_grouped", "delayed-scaling"),
    ("ops_grouped", "block-scaling"),
}


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("primary", [False, True], ids=["bf16-weights", "fp8-weights"])
@pytest.mark.parametrize("recipe", RECIPES)
@every_kind
def test_a9_recipes(kind, recipe, primary, fuse):
    """Each FP8 recipe of Hopper, delivered outside autocast and after another recipe ran."""
    chosen = RECIPES[recipe]()
    other = (
        recipes.Float8CurrentScaling() if recipe != "current-scaling" else recipes.DelayedScaling()
    )

    def scenario(delay):
        with te.quantized_model_init(enabled=primary, recipe=chosen):
            module = KINDS[kind].build(delay=delay, fuse=fuse, dtype=torch.bfloat16, device="cuda")
        fill(module)
        if fuse:
            give_main_grads(kind, module, 1.0)
        bystander = te.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device="cuda")
        for x in batches(2):
            with te.autocast(enabled=True, recipe=chosen):
                out = KINDS[kind].call(module, x)
            loss_of(out).backward()
            with te.autocast(enabled=True, recipe=other):
                bystander(x.detach()).float().sum().backward()
        for _ in range(2 if delay else 0):
            module.backward_dw()
        return {**(main_grads(kind, module) if fuse else {}), **grads(module)}

    try:
        want = scenario(False)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        if (kind, recipe) in UNSUPPORTED:
            pytest.skip(f"the regular path refuses it: {str(error).splitlines()[0][:120]}")
        raise
    assert_same(scenario(True), want, missing=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "grouped"])
def test_a5_bias_of_the_main_backward(kind, recipe):
    """FP8 makes the bias gradient in the main backward; taken there, it does not come twice."""

    def scenario(delay):
        module = make(kind, delay=delay)
        total = {}
        for x in batches(2):
            with te.autocast(enabled=True, recipe=RECIPES[recipe]()):
                out = KINDS[kind].call(module, x)
            loss_of(out).backward()
            for final in range(1 + delay):
                if final:
                    module.backward_dw()
                for name, param in module.named_parameters():
                    if param.grad is not None:
                        seen = total.get(name)
                        total[name] = param.grad.clone() if seen is None else seen + param.grad
                        param.grad = None
        return total

    assert_same(scenario(True), scenario(False))


# --- A3, A12: memory --------------------------------------------------------


def peak(action):
    """Result, peak bytes above the start, and bytes kept."""
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = action()
    torch.cuda.synchronize()
    gc.collect()
    return result, torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@every_kind
def test_a3_peak_memory(kind, fuse):
    """Peak memory is at most the regular path's and what the queue holds; all is freed."""
    size = 2048

    def one(delay):
        module = make(kind, delay=delay, fuse=fuse, size=size)
        if fuse:
            give_main_grads(kind, module, grad_added_to_main_grad=False)
        call = kinds(size, SPLITS)[kind].call

        def step():
            (x,) = batches(1, size)
            loss_of(call(module, x)).backward()
            queued = 0
            if delay:
                queued = sum(
                    t.numel() * t.element_size()
                    for piece in module.wgrad_store.context.oldest().pieces
                    for t in _tensors(piece.tensors)
                )
                module.backward_dw()
            return queued

        step()
        for param in module.parameters():
            param.grad = None
        return peak(step)

    queued, high, kept = one(True)
    _, regular_high, regular_kept = one(False)
    slack = 1 << 16
    assert queued > 0
    assert high <= regular_high + queued + slack, (high, regular_high, queued)
    assert kept <= regular_kept + slack, (kept, regular_kept)


def _tensors(things):
    from transformer_engine.pytorch.module import _delayed_wgrad

    return list(_delayed_wgrad._data_tensors(things))


# --- A13: graphs ------------------------------------------------------------


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "grouped"])
def test_a13_plain_capture(kind, fuse):
    """forward + backward + backward_dw in one graph equals eager for changed inputs."""

    def eager(x):
        module = make(kind, delay=False, fuse=fuse)
        if fuse:
            give_main_grads(kind, module)
        loss_of(KINDS[kind].call(module, x)).backward()
        return {**(main_grads(kind, module) if fuse else {}), **grads(module)}

    module = make(kind, delay=True, fuse=fuse)
    if fuse:
        give_main_grads(kind, module)
    static = batches(1)[0].detach().clone().requires_grad_()
    splits = [torch.cuda.Stream()]
    with torch.cuda.stream(splits[0]):
        for _ in range(2):
            loss_of(KINDS[kind].call(module, static)).backward()
            module.backward_dw()
    torch.cuda.synchronize()
    for param in (*module.parameters(), static):
        param.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=splits[0]):
        loss_of(KINDS[kind].call(module, static)).backward()
        module.backward_dw()
    for x in batches(3):
        with torch.no_grad():
            static.copy_(x)
        if fuse:
            for name in weight_names(kind, module):
                getattr(module, name).main_grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
        got = {**(main_grads(kind, module) if fuse else {}), **grads(module)}
        assert_same(got, eager(x.detach().requires_grad_()), missing=True)


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "grouped"])
def test_a13_graphed_callable(kind, fuse):
    """make_graphed_callables: three replays accumulate as eager code does, hooks included."""

    class Wrapped(torch.nn.Module):
        """Takes one tensor, as graphed callables want it."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return KINDS[kind].call(self.inner, x)

    def scenario(graphed):
        inner = make(kind, delay=graphed, fuse=fuse)
        fired = []
        inner.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(1))
        if fuse:
            give_main_grads(kind, inner, grad_added_to_main_grad=False, zero_out_wgrad=True)
        module = Wrapped(inner)
        if graphed:
            sample = torch.randn(ROWS, SIZE, device="cuda", dtype=torch.bfloat16)
            module = te.make_graphed_callables(module, (sample.requires_grad_(),))
            assert all(p.grad is None for p in inner.parameters()), "warmup left gradients behind"
            if fuse:
                give_main_grads_again(inner)
        fired.clear()
        for x in batches(3):
            loss_of(module(x)).backward()
            if graphed:
                module.backward_dw()
        assert len(fired) == (3 if graphed else 0)
        return {**(main_grads(kind, inner) if fuse else {}), **grads(inner)}

    def give_main_grads_again(inner):
        # Warmup and capture accumulate into it, in the regular path too.
        for name in weight_names(kind, inner):
            getattr(inner, name).main_grad.zero_()

    assert_same(scenario(True), scenario(False), missing=True)


# --- A14: torch.compile -----------------------------------------------------


@every_kind
def test_a14_torch_compile(kind):
    """A module that leaves the traced region is right; one that is traced is refused."""

    def scenario(delay):
        module = make(kind, delay=delay)

        def function(x):
            return KINDS[kind].call(module, x) * 0.5

        (x,) = batches(1)
        torch._dynamo.reset()
        loss_of((torch.compile(function) if delay else function)(x)).backward()
        if delay:
            assert module.pending_backward_dw == 1
            module.backward_dw()
        return grads(module)

    try:
        got = scenario(True)
    except Exception as error:  # Dynamo wraps what it meets while tracing.
        assert "delay_wgrad_compute=True does not work with torch.compile" in str(error)
        return
    assert_same(got, scenario(False))
