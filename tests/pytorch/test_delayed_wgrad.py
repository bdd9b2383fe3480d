# SPDX-License-Identifier: Apache-2.0
"""Delayed weight gradients equal the regular path, bit for bit, in every kind.

The number in a test's name is the row of the contract in docs/delayed_wgrad.md.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from delayed_kinds import (
    DTYPES,
    KINDS,
    SIZE,
    assert_same,
    backward,
    give_main_grads,
    grads,
    inputs,
    late_names,
    loss_of,
    main_grads,
    make,
    run,
    tie,
    weight_names,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
# Kinds whose parameters can be split.
split_kinds = pytest.mark.parametrize("kind", ["linear", "layernorm_linear"])


@pytest.fixture(autouse=True)
def poison():
    """Memory that no kernel wrote is NaN (the CPU executor does so by itself)."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(was)


def both(scenario):
    """Results of a scenario with and without the delay."""
    return scenario(True), scenario(False)


# --- A1: never dropped, never doubled, in order -----------------------------

# Order of forward/backward pairs (B) and deliveries (W); each is a way real
# schedules (1F1B, zero bubble) interleave them.
ORDERS = ["BW", "BWBW", "BBWW", "BBWBWW"]


@every_dtype
@pytest.mark.parametrize("order", ORDERS)
@every_kind
def test_a1_interleavings(kind, order, dtype, device):
    """Contributions arrive in the order of the backward passes."""

    def scenario(delay):
        module = make(kind, device, delay=delay, dtype=dtype)
        batches = iter(inputs(device, 3, dtype))
        for action in order:
            if action == "B":
                backward(kind, module, next(batches))
            elif delay:
                module.backward_dw()
        return grads(module)

    assert_same(*both(scenario))


@every_dtype
@every_kind
def test_a1_tied(kind, dtype, device):
    """The first public report: two modules, one set of parameters."""

    def scenario(delay):
        first, second = (make(kind, device, delay=delay, dtype=dtype, seed=s) for s in (1, 2))
        tie(kind, first, second)
        (x,) = inputs(device, 1, dtype)
        loss_of(run(kind, second, run(kind, first, x) * 0.125)).backward()
        if delay:
            second.backward_dw()
            first.backward_dw()
        return grads(first)

    assert_same(*both(scenario))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@every_kind
def test_a1_tied_three_times_in_any_order(kind, order, device):
    """Each delivery adds its module's contribution; the sum is rounded in the delivered order."""
    xs = inputs(device, 3)

    def contribution(index):
        module = make(kind, device, delay=False)
        backward(kind, module, xs[index])
        return {n: p.grad for n, p in module.named_parameters() if n in late_names(kind, module)}

    modules = [make(kind, device, delay=True) for _ in xs]
    for other in modules[1:]:
        tie(kind, modules[0], other)
    for module, x in zip(modules, xs):
        backward(kind, module, x)
    for index in order:
        modules[index].backward_dw()
    parts = [contribution(index) for index in order]
    want = {n: parts[0][n] + parts[1][n] + parts[2][n] for n in parts[0]}
    got = {n: getattr(modules[0], n).grad for n in want}
    assert_same(got, want)


@every_kind
def test_a1_other_users_of_the_weight(kind, device):
    """A delayed module, a regular one and plain torch share a weight."""

    def scenario(delay):
        first = make(kind, device, delay=delay)
        second = make(kind, device, delay=False)
        tie(kind, first, second)
        x, y, z = inputs(device, 3)
        name = weight_names(kind, first)[0]
        loss_of(torch.nn.functional.linear(z[:, :SIZE], getattr(first, name))).backward()
        backward(kind, second, y)
        backward(kind, first, x)
        if delay:
            first.backward_dw()
        return grads(first)

    assert_same(*both(scenario), missing=True)


@every_kind
def test_a1_input_without_gradient(kind, device):
    """The main backward runs although nothing but delayed parameters wants a gradient."""

    def scenario(delay):
        module = make(kind, device, delay=delay)
        for name, param in module.named_parameters():
            param.requires_grad_(name in weight_names(kind, module))
        backward(kind, module, inputs(device)[0].detach())
        if delay:
            assert module.pending_backward_dw == 1
            module.backward_dw()
        return grads(module)

    assert_same(*both(scenario), missing=True)


@split_kinds
def test_a1_entry_of_other_code(kind, device):
    """What other code puts into a module's store (fused MLA does) is accumulated too."""
    split = {"q": SIZE // 2, "k": SIZE // 2}
    module = make(kind, device, delay=True, parameters_split=split)
    for value in (1.0, 2.0):
        grads_of = (
            torch.full((SIZE, SIZE), value, dtype=torch.bfloat16, device=device),
            torch.full((SIZE,), value, dtype=torch.bfloat16, device=device),
        )
        module.wgrad_store.put([*grads_of], lambda dw, db: (dw.clone(), db.clone()))
    assert module.pending_backward_dw == 2
    module.backward_dw()
    module.backward_dw()
    for name in late_names(kind, module) or ["q_weight", "k_weight", "q_bias", "k_bias"]:
        assert (getattr(module, name).grad == 3.0).all()


def test_a1_tied_operations_of_both_sorts(device):
    """A delayed operation and a regular one in one pipeline share their weights."""
    te = pytest.importorskip("transformer_engine.pytorch")
    kind = "ops_grouped"

    def scenario(delay):
        first, second = make(kind, device, delay=delay), make(kind, device, delay=False)
        tie(kind, first, second)
        (x,) = inputs(device)
        splits = torch.tensor([32, 0, 24, 8], dtype=torch.int64, device=device)
        loss_of(te.ops.Sequential(first, second)(x * 0.1, splits, splits)).backward()
        if delay:
            first.backward_dw()
        return grads(first)

    got, want = both(scenario)
    for name, grad in want.items():
        # regular sums the two before it rounds into .grad; two addends commute.
        assert torch.equal(got[name], grad), name


@every_kind
def test_a1_weights_exchanged_after_the_forward(kind, device):
    """The gradient goes to the parameters of the forward."""

    def scenario(delay):
        module = make(kind, device, delay=delay)
        names = weight_names(kind, module)
        old = {n: getattr(module, n) for n in names}
        out = loss_of(run(kind, module, inputs(device)[0]))
        for name in names:
            setattr(module, name, torch.nn.Parameter(torch.zeros_like(old[name])))
        out.backward()
        if delay:
            module.backward_dw()
        assert all(getattr(module, n).grad is None for n in names)
        return {n: p.grad for n, p in old.items()}

    assert_same(*both(scenario))


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "grouped"])
def test_a1_computed_weight_used_twice(kind, device):
    """Weights need not be leaves: two contributions go through what computed them."""

    def scenario(delay):
        module = make(kind, device, delay=delay)
        leaves = {n: torch.nn.Parameter(p.detach().clone()) for n, p in module.named_parameters()}
        values = {n: p.tanh() for n, p in leaves.items()}
        total = 0
        for x in inputs(device, 2):
            args = (x, [32, 0, 24, 8]) if kind == "grouped" else (x,)
            total = total + loss_of(torch.func.functional_call(module, values, args))
        total.backward(retain_graph=True)
        if delay:
            module.backward_dw()
            module.backward_dw()
        return {n: p.grad for n, p in leaves.items()}

    got, want = both(scenario)
    for name, grad in want.items():
        # One rounding more: the contributions are accumulated after the tanh, not before it.
        assert got[name] is not None, name
        step = 4 * torch.finfo(grad.dtype).eps
        torch.testing.assert_close(got[name], grad, rtol=step, atol=step * grad.abs().max().item())


# --- A2: nothing before backward_dw -----------------------------------------


@pytest.mark.parametrize("earlier", [False, True], ids=["none", "earlier"])
@every_dtype
@every_kind
def test_a2_grad_untouched(kind, dtype, earlier, device):
    """Between the halves .grad is None or the earlier value, and no hook has fired."""
    module = make(kind, device, delay=True, dtype=dtype)
    late = late_names(kind, module)
    params = {n: getattr(module, n) for n in late}
    fired = []
    for name, param in params.items():
        if earlier:
            param.grad = torch.full_like(param, 0.25)
        param.register_hook(lambda grad, name=name: fired.append(name))
        param.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    before = {n: (p.grad, None if p.grad is None else p.grad.clone()) for n, p in params.items()}
    backward(kind, module, inputs(device, 1, dtype)[0])
    assert not fired
    for name, param in params.items():
        grad, value = before[name]
        assert param.grad is grad, name
        assert grad is None or torch.equal(grad, value), name
    module.backward_dw()
    assert set(fired) == set(late)


# --- A3: through autograd's own accumulation --------------------------------


def accumulator(param):
    """The node of autograd that adds to ``param.grad``; DDP hooks this one."""
    return param.expand_as(param).grad_fn.next_functions[0][0]


@every_kind
def test_a3_hooks(kind, device):
    """Each kind of hook fires once a contribution, with the value of the regular path."""

    def scenario(delay):
        module = make(kind, device, delay=delay)
        log, keep = {}, []
        for name, param in module.named_parameters():
            seen = log.setdefault(name, [])
            param.register_hook(lambda g, seen=seen: seen.append(("tensor", g.clone())))
            param.register_post_accumulate_grad_hook(
                lambda p, seen=seen: seen.append(("accumulated", p.grad.clone()))
            )
            keep.append(accumulator(param))
            keep[-1].register_hook(lambda *_, seen=seen: seen.append(("node", None)))
        for x in inputs(device, 2):
            backward(kind, module, x)
        if delay:
            module.backward_dw()
            module.backward_dw()
        return log

    got, want = both(scenario)
    assert got.keys() == want.keys()
    for name in want:
        assert [what for what, _ in got[name]] == [what for what, _ in want[name]], name
        assert len(want[name]) == 6, name
        for (_, one), (_, two) in zip(got[name], want[name]):
            assert one is two or torch.equal(one, two), name


@every_kind
def test_a3_tensor_hook_changes_the_gradient(kind, device):
    """What a hook returns is what is accumulated."""

    def scenario(delay):
        module = make(kind, device, delay=delay)
        for param in module.parameters():
            param.register_hook(lambda grad: grad * 2)
        backward(kind, module, inputs(device)[0])
        if delay:
            module.backward_dw()
        return grads(module)

    assert_same(*both(scenario))


@every_kind
def test_a3_in_place(kind, device):
    """A slice of a flat buffer as .grad stays that slice; its neighbours stay as they are."""

    def scenario(delay):
        module = make(kind, device, delay=delay)
        flats = {}
        for name in late_names(kind, module):
            param = getattr(module, name)
            flat = torch.full((param.numel() + 64,), 0.5, dtype=param.dtype, device=device)
            param.grad = flat[32:-32].view(param.shape)
            flats[name] = (flat, param.grad)
        backward(kind, module, inputs(device)[0])
        if delay:
            module.backward_dw()
        for name, (_, grad) in flats.items():
            assert getattr(module, name).grad is grad, name
        return {name: flat for name, (flat, _) in flats.items()}

    got, want = both(scenario)
    assert_same(got, want)
    for flat in got.values():
        assert (flat[:32] == 0.5).all() and (flat[-32:] == 0.5).all()


@every_kind
def test_a3_first_gradient_is_not_copied(kind, device):
    """autograd takes the GEMM's output as .grad: no second weight-sized buffer."""
    module = make(kind, device, delay=True)
    backward(kind, module, inputs(device)[0])
    pointers = []

    def watch(piece):
        gemm = piece.gemm

        def watched(x, dy, *outputs, **late):
            done = gemm(x, dy, *outputs, **late)
            made = outputs[0] if outputs else done[:1]
            pointers.extend(tensor.data_ptr() for tensor in made)
            return done

        piece.gemm = watched

    for piece in module.wgrad_store.context.oldest().pieces:
        watch(piece)
    del piece
    module.backward_dw()
    found = {getattr(module, n).grad.data_ptr() for n in weight_names(kind, module)}
    assert found == set(pointers)


# --- A4: split parameters ---------------------------------------------------


@every_dtype
@split_kinds
def test_a4_parameters_split(kind, dtype, device):
    """Each split weight and bias gets its own slice, once a contribution."""
    split = {"q": SIZE // 2, "k": SIZE // 4, "v": SIZE // 4}

    def scenario(delay):
        module = make(kind, device, delay=delay, dtype=dtype, parameters_split=split)
        for x in inputs(device, 2, dtype):
            backward(kind, module, x)
        if delay:
            module.backward_dw()
            module.backward_dw()
        assert module.q_weight.grad.shape == (SIZE // 2, SIZE)
        return grads(module)

    assert_same(*both(scenario))


# --- A5: biases and norms ---------------------------------------------------


@every_kind
def test_a5_taken_between_the_halves(kind, device):
    """A consumer that takes and clears every .grad gets each contribution once in all."""

    def scenario(delay):
        module = make(kind, device, delay=delay)
        total = {}

        def take():
            for name, param in module.named_parameters():
                if param.grad is not None:
                    total[name] = total[name] + param.grad if name in total else param.grad.clone()
                    param.grad = None

        for x in inputs(device, 2):
            backward(kind, module, x)
            take()
            if delay:
                module.backward_dw()
                take()
        return total

    assert_same(*both(scenario))


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_a5_layernorm_mlp_activations(activation, device):
    """Each way of making the first bias gradient."""

    def scenario(delay):
        module = make("layernorm_mlp", device, delay=delay, activation=activation)
        backward("layernorm_mlp", module, inputs(device)[0])
        if delay:
            module.backward_dw()
        return grads(module)

    assert_same(*both(scenario))


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp"])
def test_a5_returned_bias(kind, device):
    """With return_bias the caller adds the bias; its gradient comes once, from there."""

    def scenario(delay):
        module = make(kind, device, delay=delay, return_bias=True)
        out, bias = run(kind, module, inputs(device)[0])
        loss_of(out + bias).backward()
        if delay:
            module.backward_dw()
        return grads(module)

    assert_same(*both(scenario))


# --- A6: frozen parameters --------------------------------------------------

FREEZE = {
    "first-weight": lambda names: [n for n in names if "weight" in n][:1],
    "last-weight": lambda names: [n for n in names if "weight" in n][-1:],
    "weights": lambda names: [n for n in names if "weight" in n],
    "first-bias": lambda names: [n for n in names if "bias" in n][:1],
    "biases": lambda names: [n for n in names if "bias" in n],
    "all": list,
}


@pytest.mark.parametrize("which", FREEZE)
@every_kind
def test_a6_frozen(kind, which, device):
    """Frozen parameters get nothing and disturb nothing; nothing raises."""

    def scenario(delay):
        module = make(kind, device, delay=delay)
        names = [n for n, _ in module.named_parameters() if not n.startswith("layer_norm")]
        frozen = FREEZE[which](names)
        assert frozen
        for name in frozen:
            getattr(module, name).requires_grad_(False)
        for x in inputs(device, 2):
            backward(kind, module, x)
        if delay:
            module.backward_dw()
            module.backward_dw()
            assert module.pending_backward_dw == 0
        assert all(getattr(module, name).grad is None for name in frozen)
        return grads(module)

    assert_same(*both(scenario), missing=True)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a6_unfrozen_after_the_forward(name, device):
    """What was frozen in the forward has no contribution."""

    def scenario(delay):
        module = make("linear", device, delay=delay)
        getattr(module, name).requires_grad_(False)
        out = loss_of(run("linear", module, inputs(device)[0]))
        out.backward()
        getattr(module, name).requires_grad_(True)
        if delay:
            module.backward_dw()
        return grads(module)

    assert_same(*both(scenario), missing=True)


# --- A7: nothing pending ----------------------------------------------------


@every_kind
def test_a7_nothing_pending(kind, device):
    """More calls than contributions change no bit and fire no hook; the count says so."""
    module = make(kind, device, delay=True)
    fired = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append("module"))
    module.backward_dw()
    assert not fired and module.pending_backward_dw == 0
    for x in inputs(device, 2):
        backward(kind, module, x)
    assert module.pending_backward_dw == 2
    module.backward_dw()
    module.backward_dw()
    assert module.pending_backward_dw == 0 and module.need_backward_dw()
    for param in module.parameters():
        param.register_hook(lambda grad: fired.append("hook"))
    before = grads(module)
    assert fired == ["module"] * 2
    module.backward_dw()
    assert fired == ["module"] * 2
    assert_same(grads(module), before)
    with pytest.raises(AttributeError):
        module.pending_backward_dw = 3


@every_kind
def test_a7_regular_module(kind, device):
    """Without the delay backward_dw stays a no-op."""
    module = make(kind, device, delay=False)
    backward(kind, module, inputs(device)[0])
    before = grads(module)
    module.backward_dw()
    assert not module.need_backward_dw() and module.pending_backward_dw == 0
    assert_same(grads(module), before)


# --- A8: a GEMM that raises -------------------------------------------------


@pytest.mark.parametrize("failing", ["first", "last"])
@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@every_kind
def test_a8_failed_gemm(kind, fuse, failing, device):
    """The contribution stays, gradients stay, and a second call delivers once."""
    module, regular = (make(kind, device, delay=delay, fuse=fuse) for delay in (True, False))
    for one in (module, regular):
        if fuse:
            give_main_grads(kind, one, 256.0)
        backward(kind, one, inputs(device)[0])
    before = grads(module)
    fired = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append("module"))
    piece = module.wgrad_store.context.oldest().pieces[0 if failing == "first" else -1]
    good = piece.gemm

    def broken(*_args, **_late):
        raise RuntimeError("out of memory")

    piece.gemm = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        module.backward_dw()
    assert module.pending_backward_dw == 1 and not fired
    assert_same(grads(module), before, missing=True)
    piece.gemm = good
    module.backward_dw()
    assert module.pending_backward_dw == 0 and fired == ["module"]
    assert_same(grads(module), grads(regular), missing=fuse)
    if fuse:
        assert_same(main_grads(kind, module), main_grads(kind, regular))


@every_kind
def test_a8_failed_main_backward(kind, device, monkeypatch):
    """A main backward that raises leaves nothing in the queue."""
    module = make(kind, device, delay=True)

    from transformer_engine.pytorch.module._delayed_wgrad import MainHalf

    def broken(*_):
        assert module.pending_backward_dw + len(stored) > 0
        raise RuntimeError("out of memory")

    # The main backward fails after the GEMM was stored: at its last step.
    stored = []
    put = MainHalf.put
    monkeypatch.setattr(MainHalf, "put", lambda *args: stored.append(put(*args)))
    monkeypatch.setattr(MainHalf, "take_out", broken)
    out = run(kind, module, inputs(device)[0])
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.autograd.backward(out, torch.ones_like(out))
    assert module.pending_backward_dw == 0
    monkeypatch.undo()
    backward(kind, module, inputs(device)[0])
    assert module.pending_backward_dw == 1


# --- A9: what a contribution needs is kept with it --------------------------


@every_kind
def test_a9_inside_a_backward(kind, device):
    """backward_dw may run inside an autograd function's backward."""

    class Deliver(torch.autograd.Function):
        """Identity whose backward delivers."""

        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            ctx.module.backward_dw()
            return grad, None

    def scenario(delay):
        first, second = (make(kind, device, delay=delay, seed=s) for s in (1, 2))
        (x,) = inputs(device)
        hidden = run(kind, first, x) * 0.125
        if delay:
            hidden = Deliver.apply(hidden, second)
        loss_of(run(kind, second, hidden)).backward()
        if delay:
            first.backward_dw()
        return {**{f"1.{n}": g for n, g in grads(first).items()}, **grads(second)}

    assert_same(*both(scenario))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensors", "reentrant"])
@every_kind
def test_a9_activation_checkpoint(kind, reentrant, device):
    """Recomputed forwards contribute once."""

    def scenario(delay):
        module = make(kind, device, delay=delay)
        for x in inputs(device, 2):
            out = torch.utils.checkpoint.checkpoint(
                lambda t: run(kind, module, t), x, use_reentrant=reentrant
            )
            loss_of(out).backward()
        if delay:
            assert module.pending_backward_dw == 2
            module.backward_dw()
            module.backward_dw()
        return grads(module)

    assert_same(*both(scenario))


# --- A10: main_grad ---------------------------------------------------------


@every_dtype
@every_kind
def test_a10_accumulates_into_main_grad(kind, dtype, device):
    """Two contributions on top of 256 in fp32; nothing before backward_dw."""

    def scenario(delay):
        module = make(kind, device, delay=delay, dtype=dtype, fuse=True)
        give_main_grads(kind, module, 256.0)
        for x in inputs(device, 2, dtype):
            backward(kind, module, x)
        if delay:
            for grad in main_grads(kind, module).values():
                assert (grad == 256.0).all()
            module.backward_dw()
            module.backward_dw()
        return {**main_grads(kind, module), **grads(module)}

    assert_same(*both(scenario), missing=True)


@every_kind
def test_a10_256_plus_1(kind, device):
    """Small contributions are not lost to bf16 rounding: 256 + 1 = 257."""
    module = make(kind, device, delay=True, fuse=True)
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.fill_(0.0 if "bias" in name else 1.0)
    give_main_grads(kind, module, 256.0)
    name = weight_names(kind, module)[-1]
    x = torch.zeros_like(inputs(device)[0])
    # One row, one feature: its weight gradient is dY in one column.
    x[-1, 0] = 1.0
    out = run(kind, module, x.requires_grad_())
    grad = torch.zeros_like(out)
    grad[-1] = 1.0
    out.backward(grad)
    module.backward_dw()
    main_grad = getattr(module, name).main_grad
    assert main_grad.dtype == torch.float32
    if kind in ("linear", "grouped", "ops_grouped"):
        assert (main_grad[:, 0] == 257.0).all() and (main_grad[:, 1:] == 256.0).all()
    else:
        # Not representable in bf16 next to 256, and not lost.
        assert (main_grad != main_grad.to(torch.bfloat16).float()).any()


@every_kind
def test_a10_decided_at_delivery(kind, device):
    """overwrite_main_grad and the buffer itself are looked at when the GEMM runs."""
    module, regular = (make(kind, device, delay=delay, fuse=True) for delay in (True, False))
    give_main_grads(kind, regular, 0.0)
    (x,) = inputs(device)
    backward(kind, regular, x)
    # No main_grad at all in the main backward.
    backward(kind, module, x)
    give_main_grads(kind, module, 8.0, overwrite_main_grad=True)
    module.backward_dw()
    assert_same(main_grads(kind, module), main_grads(kind, regular))


@every_kind
def test_a10_get_main_grad_is_asked_late(kind, device):
    """A lazily made buffer (Megatron-FSDP) is not asked for in the main backward."""
    module = make(kind, device, delay=True, fuse=True)
    asked = []
    for name in weight_names(kind, module):
        param = getattr(module, name)
        setattr(param, "__fsdp_param__", True)

        def get(param=param, name=name):
            asked.append(name)
            return torch.zeros(param.shape, dtype=torch.float32, device=param.device)

        param.get_main_grad = get
    backward(kind, module, inputs(device)[0])
    assert not asked
    module.backward_dw()
    assert sorted(asked) == sorted(weight_names(kind, module))


@pytest.mark.parametrize("zero", [False, True], ids=["any", "zero"])
@every_kind
def test_a10_flag_and_dummy_before_hooks(kind, zero, device):
    """Hooks find the flag set and a dummy .grad, zero where it is asked for."""
    module = make(kind, device, delay=True, fuse=True)
    names = weight_names(kind, module)
    give_main_grads(kind, module, grad_added_to_main_grad=False, zero_out_wgrad=zero)
    seen = []

    def hook():
        for name in names:
            param = getattr(module, name)
            seen.append((name, param.grad_added_to_main_grad, param.grad.clone()))
            param.grad_added_to_main_grad = False
            param.grad = None

    module.register_wgrad_accumulation_and_reduce_hooks(hook)
    for x in inputs(device, 2):
        backward(kind, module, x)
        assert not any(getattr(module, name).grad_added_to_main_grad for name in names)
        assert all(getattr(module, name).grad is None for name in names)
        module.backward_dw()
    assert [name for name, *_ in seen] == names * 2
    for name, flag, grad in seen:
        assert flag and grad.shape == getattr(module, name).shape
        assert not zero or (grad == 0).all()


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "grouped"])
def test_a10_first_microbatch_overwrites(kind, device):
    """is_first_microbatch belongs to its own contribution."""

    def scenario(delay):
        module = make(kind, device, delay=delay, fuse=True)
        give_main_grads(kind, module, 99.0)
        for first, x in zip((True, False, False), inputs(device, 3)):
            args = (x, [32, 0, 24, 8]) if kind == "grouped" else (x,)
            loss_of(module(*args, is_first_microbatch=first)).backward()
        for _ in range(3 if delay else 0):
            module.backward_dw()
        return main_grads(kind, module)

    assert_same(*both(scenario))


BAD_MAIN_GRADS = {
    "missing": lambda p: None,
    "too-small": lambda p: torch.zeros(p.numel() - 1, device=p.device),
    "strided": lambda p: torch.zeros(p.shape[0], 2 * p.shape[1], device=p.device)[:, ::2],
}


@pytest.mark.parametrize("bad", BAD_MAIN_GRADS)
@every_kind
def test_a10_bad_main_grad(kind, bad, device):
    """A buffer that does not fit is an error before anything is written."""
    module = make(kind, device, delay=True, fuse=True)
    give_main_grads(kind, module, 1.0)
    last = getattr(module, weight_names(kind, module)[-1])
    good, last.main_grad = last.main_grad, BAD_MAIN_GRADS[bad](last)
    backward(kind, module, inputs(device)[0])
    with pytest.raises(RuntimeError, match="main_grad"):
        module.backward_dw()
    last.main_grad = good
    assert all((grad == 1.0).all() for grad in main_grads(kind, module).values())
    module.backward_dw()
    assert module.pending_backward_dw == 0


# --- A11: module hooks and marks --------------------------------------------


@every_kind
def test_a11_module_hooks(kind, device):
    """Once a delivery, in order of registration, after every parameter is final."""
    module = make(kind, device, delay=True)
    seen = []
    for label in ("first", "second"):
        module.register_wgrad_accumulation_and_reduce_hooks(
            lambda label=label: seen.append(
                (label, all(p.grad is not None for p in module.parameters()))
            )
        )
    backward(kind, module, inputs(device)[0])
    assert not seen
    module.backward_dw()
    assert seen == [("first", True), ("second", True)]


def marked(module):
    """Names of parameters that DDP is to leave to backward_dw."""
    return [n for n, p in module.named_parameters() if hasattr(p, "skip_backward_post_hook")]


@every_kind
def test_a11_mark_survives(kind, device):
    """skip_backward_post_hook is there after meta-device init, deepcopy and late attachment."""
    module = make(kind, device, delay=True)
    late = late_names(kind, module)
    assert marked(module) == late
    assert marked(copy.deepcopy(module)) == late
    name = weight_names(kind, module)[0]
    setattr(module, name, torch.nn.Parameter(torch.zeros_like(getattr(module, name))))
    assert marked(module) == late
    if kind != "ops_grouped":
        assert not marked(make(kind, device, delay=False))
    meta = KINDS[kind].build(delay=True, fuse=False, dtype=torch.bfloat16, device="meta")
    meta.reset_parameters()
    assert marked(meta) == late
    backward(kind, meta, inputs(device)[0])
    meta.backward_dw()
    assert all(p.grad is not None for p in meta.parameters())


# --- A12: freed, copied, pickled --------------------------------------------


@every_kind
def test_a12_freed(kind, device):
    """A delivered contribution keeps nothing alive."""
    module = make(kind, device, delay=True)
    (x,) = inputs(device)
    out = run(kind, module, x)
    loss_of(out).backward()
    contribution = module.wgrad_store.context.oldest()
    from transformer_engine.pytorch.module import _delayed_wgrad

    held = [
        weakref.ref(t)
        for piece in contribution.pieces
        for t in _delayed_wgrad._data_tensors(piece.tensors)
        if t is not x
    ]
    del contribution, out
    assert held and all(ref() is not None for ref in held)
    module.backward_dw()
    gc.collect()
    assert all(ref() is None for ref in held)


@every_kind
def test_a12_copies(kind, device):
    """Deep copies are modules of their own; with something pending the copy is refused."""
    module = make(kind, device, delay=True)
    twin = copy.deepcopy(module)
    (x,) = inputs(device)
    backward(kind, module, x)
    assert twin.pending_backward_dw == 0
    with pytest.raises(RuntimeError, match="backward_dw"):
        copy.deepcopy(module)
    module.backward_dw()
    backward(kind, twin, x)
    twin.backward_dw()
    assert_same(grads(twin), grads(module))


def test_a12_queue_pickles_and_reads():
    """The queue pickles when empty, says why not otherwise, and prints what it holds."""
    from transformer_engine.pytorch.module._delayed_wgrad import PendingWgrads

    queue = PendingWgrads()
    assert len(pickle.loads(pickle.dumps(queue))) == 0
    queue.put("contribution")
    assert "1 pending" in repr(queue) and queue.qsize() == 1
    with pytest.raises(RuntimeError, match="1 delayed weight gradients are pending"):
        pickle.dumps(queue)
    assert queue.get() == "contribution" and queue.empty()


@every_kind
def test_a12_upstream_graph_is_not_kept(kind, device):
    """A pending contribution keeps its operands, not the graph that made them."""

    class Upstream(torch.autograd.Function):
        """Identity that saves something large."""

        @staticmethod
        def forward(ctx, x):
            ctx.large = torch.zeros(1000)
            alive.append(weakref.ref(ctx.large))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    alive = []
    module = make(kind, device, delay=True)
    loss_of(run(kind, module, Upstream.apply(inputs(device)[0]))).backward()
    gc.collect()
    assert module.pending_backward_dw == 1 and alive[0]() is None
    module.backward_dw()


def test_a12_pop_of_the_store(device):
    """``wgrad_store.pop`` runs the oldest entry and hands its gradients over."""
    module, regular = (make("linear", device, delay=delay) for delay in (True, False))
    for one in (module, regular):
        backward("linear", one, inputs(device)[0])
    (wgrad, bgrad, *_), operands = module.wgrad_store.pop()
    assert torch.equal(wgrad, regular.weight.grad) and torch.equal(bgrad, regular.bias.grad)
    assert len(operands) == 2 and module.pending_backward_dw == 0


# --- A14: refused before anything changes -----------------------------------


@pytest.mark.parametrize(
    "setting", ["ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"]
)
def test_a14_userbuffers(setting, device):
    """Userbuffers overlap in the backward reuses memory that a contribution needs."""
    module = make("linear", device, delay=True)
    setattr(module, setting, True)
    from transformer_engine.pytorch.module._delayed_wgrad import check_supported

    with pytest.raises(RuntimeError, match=f"{setting}=False"):
        check_supported(module, [module.weight])


@pytest.mark.parametrize("setting", ["find_unused_parameters", "static_graph"])
@every_kind
def test_a14_ddp(kind, setting, device, monkeypatch):
    """DDP would take delayed parameters for finished."""
    module = make(kind, device, delay=True)
    ddp = type("DDP", (), {setting: True})()
    monkeypatch.setattr(
        torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", ddp, raising=False
    )
    with pytest.raises(RuntimeError, match=f"{setting}=False"):
        run(kind, module, inputs(device)[0])
    assert module.pending_backward_dw == 0


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear"])
def test_a14_fsdp2(kind, device, monkeypatch):
    """Sharded gradients are reduced before backward_dw makes them."""
    module = make(kind, device, delay=True)
    monkeypatch.setattr(type(module), "is_fsdp2", True)
    with pytest.raises(RuntimeError, match="FSDP2.*delay_wgrad_compute=False"):
        run(kind, module, inputs(device)[0])
    assert module.pending_backward_dw == 0


@every_kind
def test_a14_distributed_weight(kind, device, monkeypatch):
    """Weights with a gather and reduce protocol of their own."""
    from transformer_engine.pytorch.module import _delayed_wgrad

    module = make(kind, device, delay=True)
    monkeypatch.setattr(_delayed_wgrad, "is_distributed_weight", lambda _: True)
    with pytest.raises(RuntimeError, match="distributed weights.*delay_wgrad_compute=False"):
        run(kind, module, inputs(device)[0])
    assert module.pending_backward_dw == 0


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear"])
def test_a14_distributed_part_of_a_weight(kind, device, monkeypatch):
    """One of the parameters that a weight is put together from has the protocol."""
    from transformer_engine.pytorch.module import _delayed_wgrad

    parts = {"query_": SIZE // 2, "key_": SIZE // 2}
    module = make(kind, device, delay=True, parameters_split=parts)
    monkeypatch.setattr(_delayed_wgrad, "is_distributed_weight", lambda w: w is module.key_weight)
    with pytest.raises(RuntimeError, match="distributed weights.*delay_wgrad_compute=False"):
        run(kind, module, inputs(device)[0])
    assert module.pending_backward_dw == 0


def test_a14_setting_that_changes_later(device):
    """Settings are looked at in every forward."""
    module = make("linear", device, delay=True)
    backward("linear", module, inputs(device)[0])
    module.backward_dw()
    module.ub_bulk_wgrad = True
    with pytest.raises(RuntimeError, match="ub_bulk_wgrad=False"):
        run("linear", module, inputs(device)[0])
    assert module.pending_backward_dw == 0


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "grouped"])
def test_a14_debug_mode(kind, device, monkeypatch):
    """Debug features look at the weight gradient in the main backward."""
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    module = make(kind, device, delay=True)
    monkeypatch.setattr(TEDebugState, "debug_enabled", True)
    monkeypatch.setattr(TEDebugState, "get_iteration", lambda: 1)
    module.next_iter_when_debug_should_be_run = 0
    with pytest.raises(RuntimeError, match="debug mode.*Set delay_wgrad_compute=False"):
        run(kind, module, inputs(device)[0])
    assert module.pending_backward_dw == 0
