# SPDX-License-Identifier: Apache-2.0
"""The split path's weight gradients: which operands one launch takes, and the same numbers.

Without a GPU the kernel's reference runs in its place.
"""

import dataclasses
import sys

import pytest
import torch
from grouped_cases import (
    GROUPS,
    HAS_GPU,
    IN,
    OUT,
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
    loss_of,
    train,
)

from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

# None on stock, where every test fails.
_grouped_kernels = sys.modules.get("transformer_engine.pytorch.cpp_extensions._grouped_kernels")
_device_splits = sys.modules.get("transformer_engine.pytorch.cpp_extensions._device_splits")
HOPPER = HAS_GPU and (
    _grouped_kernels is None or _grouped_kernels.hopper_kernels(torch.device("cuda", 0))
)
needs_kernel = pytest.mark.skipif(
    HAS_GPU and not HOPPER, reason="needs a Hopper GPU and the kernels' library"
)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and the kernels' library")
every_kind = pytest.mark.parametrize("kind", ["module", "ops"])
every_layout = pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])


@pytest.fixture(autouse=True)
def single_parameters(monkeypatch):
    """Single parameters are behind a gate. Operations take the split path."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    if _device_splits is not None:
        monkeypatch.setattr(_device_splits, "serves", lambda *_: False)


# --- layers -----------------------------------------------------------------

# Two microbatches each: two launches.
TAKEN = {
    "bf16": Case(bias="none"),
    "fp16": Case(bias="none", dtype=torch.float16),
    "fused": Case(bias="none", fuse=True),
    "delayed": Case(bias="none", delay=True),
    "delayed-fused": Case(bias="none", delay=True, fuse=True),
    "main-grad-flat": Case(bias="none", fuse=True, main_grad="flat"),
    "main-grad-in-a-larger-buffer": Case(bias="none", fuse=True, main_grad="band"),
    "one-expert-has-all": Case(bias="none", fuse=True, splits=(0, 0, sum(SPLITS), 0)),
    "all-empty": Case(bias="none", fuse=True, splits=(0, 0, 0, 0)),
    "all-empty-unfused": Case(bias="none", splits=(0, 0, 0, 0)),
}


@needs_kernel
@every_layout
@every_kind
@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN.keys())
def test_one_launch(case, kind, single, device, monkeypatch):
    """One launch a backward pass, and the numbers of one GEMM an expert."""
    case = dataclasses.replace(case, kind=kind)
    with grouped_wgrad_calls() as calls:
        _, got = train(case, device, single=single)
    assert len(calls) == 2
    monkeypatch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
    with grouped_wgrad_calls() as calls:
        _, want = train(case, device, single=single)
    assert not calls
    assert_near(got, want)


@needs_kernel
@every_kind
@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
def test_layouts_and_delay_have_the_same_bits(kind, fuse, delay, device):
    """Where both take the kernel, as they do here, one parameter or many, now or later."""
    regular = Case(kind=kind, bias="none", fuse=fuse)
    with grouped_wgrad_calls() as calls:
        _, want = train(regular, device, single=False)
        _, got = train(dataclasses.replace(regular, delay=delay), device, single=True)
    assert len(calls) == 4
    assert_same(got, want)


# Layers that keep one GEMM an expert, and why.
KEPT = {
    "fp32": Case(bias="none", dtype=torch.float32),
    "bias-gradient-from-the-gemm": Case(),
    "delayed-bias-gradient": Case(delay=True),
    "main-grads-apart": Case(bias="none", fuse=True, main_grad="apart"),
}


@pytest.mark.parametrize("case", KEPT.values(), ids=KEPT.keys())
def test_kept(case, device, monkeypatch):
    """The same bits as with the kernel turned off."""
    with grouped_wgrad_calls() as calls:
        _, got = train(case, device, single=False)
    assert not calls
    monkeypatch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
    assert_same(got, train(case, device, single=False)[1])


@needs_kernel
def test_bias_of_operations_does_not_matter(device):
    """te.ops.GroupedLinear computes it beside the GEMM."""
    with grouped_wgrad_calls() as calls:
        train(Case(kind="ops"), device, single=False)
    assert len(calls) == 2


@needs_kernel
def test_against_fp64(device):
    """An fp32 main_grad that had numbers in it, an expert without tokens among others."""
    layer = build(Case(bias="none", fuse=True), device, single=True)
    give_main_grads(layer, value=0.25)
    (x,) = inputs(device, 1)
    out = call(layer, x)
    dy = torch.autograd.grad(loss_of(out), out, retain_graph=True)[0]
    with grouped_wgrad_calls() as calls:
        out.backward(dy)
    assert len(calls) == 1
    got, start = layer.weight.main_grad, 0
    for i, split in enumerate(SPLITS):
        rows = slice(start, start + split)
        start += split
        want = 0.25 + dy[rows].double().t() @ x.detach()[rows].double()
        assert (got[i].double() - want).norm() <= 1e-5 * want.norm()
        if not split:
            assert torch.equal(got[i], torch.full_like(got[i], 0.25))


# --- operands ---------------------------------------------------------------


def rows_of(*counts, width=8):
    """Rows that follow each other."""
    return list(torch.arange(sum(counts) * width).view(-1, width).split(list(counts)))


def gap():
    """Two tensors with a row between them."""
    whole = torch.arange(80).view(10, 8)
    return [whole[:4], whole[5:9]]


# Tensors, rows (None: of one shape), and what is found: the packed tensor's shape or None.
NEIGHBOURS = {
    "slices": (lambda: rows_of(4, 2, 3), [4, 2, 3], (9, 8)),
    "empty-ones": (lambda: rows_of(0, 4, 0, 3, 0), [0, 4, 0, 3, 0], (7, 8)),
    "all-empty": (lambda: rows_of(0, 0), [0, 0], (0, 8)),
    "one": (lambda: rows_of(5), [5], (5, 8)),
    "packed": (lambda: torch.zeros(5, 8), [2, 3], (5, 8)),
    "of-one-shape": (lambda: list(torch.arange(48).view(3, 2, 8)), None, (3, 2, 8)),
    "other-order": (lambda: rows_of(4, 4)[::-1], [4, 4], None),
    "other-order-of-one-shape": (lambda: rows_of(4, 4)[::-1], None, None),
    "gap": (gap, [4, 4], None),
    "gap-of-one-shape": (gap, None, None),
    "wrong-rows": (lambda: rows_of(4, 4), [3, 5], None),
    "fewer-rows-than-said": (lambda: rows_of(4, 2), [4, 3], None),
    "not-empty-as-said": (lambda: rows_of(4, 2), [4, 0], None),
    "empty-where-rows-are-said": (lambda: rows_of(0, 0), [1, 0], None),
    "same-twice": (lambda: rows_of(4) * 2, [4, 4], None),
    "nothing-in-them": (lambda: [torch.zeros(0, 8)] * 2, None, None),
    "transposed": (lambda: [t.t() for t in torch.zeros(2, 8, 8)], None, None),
    "columns": (lambda: [torch.zeros(4, 16)[:, :8]], [4], None),
    "copies": (lambda: [t.clone() for t in rows_of(4, 4)], [4, 4], None),
}


@pytest.mark.parametrize("make, rows, shape", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_side_by_side(make, rows, shape):
    """Only tensors that follow each other in one storage, in order, are one tensor."""
    tensors = make()
    found = _grouped_kernels.side_by_side(tensors, rows)
    if shape is None:
        assert found is None
        return
    assert tuple(found.shape) == shape and found.is_contiguous()
    if isinstance(tensors, list):
        parts = found if rows is None else found.split(rows)
        for part, tensor in zip(parts, tensors):
            assert torch.equal(part, tensor) and part.data_ptr() == tensor.data_ptr()


def test_neighbours_in_other_storages_are_not_one(monkeypatch):
    """Two allocations that happen to touch."""
    whole = torch.arange(64).view(8, 8)
    first = torch.frombuffer(memoryview(whole.numpy())[:4], dtype=torch.int64).view(4, 8)
    second = torch.frombuffer(memoryview(whole.numpy())[4:], dtype=torch.int64).view(4, 8)
    assert second.data_ptr() == first.data_ptr() + 4 * 8 * 8
    assert _grouped_kernels.side_by_side([first, second], [4, 4]) is None
    assert _grouped_kernels.side_by_side([first, second]) is None


WIDTHS = {"in": (12, 16), "out": (16, 12)}


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_widths_that_8_does_not_divide(widths, device):
    """They keep one GEMM an expert, with right numbers."""
    (k, n), splits = widths, [5, 3]
    x, dy = (torch.randn(8, w, device=device).bfloat16() for w in (k, n))
    out = torch.zeros(2, n, k, device=device)
    with grouped_wgrad_calls() as calls:
        general_grouped_gemm(
            list(x.split(splits)), list(dy.split(splits)), list(out), [None] * 2, torch.float32,
            layout="NT", m_splits=splits, grad=True,
        )  # fmt: skip
    assert not calls
    for got, a, b in zip(out, dy.split(splits), x.split(splits)):
        torch.testing.assert_close(got, a.float().t() @ b.float(), rtol=1e-4, atol=1e-4)


@needs_kernel
def test_first_call_overwrites_what_was_there(device):
    """Not accumulating: an expert without tokens becomes zero, whatever was in the buffer."""
    x, dy = (torch.randn(6, w, device=device).bfloat16() for w in (IN, OUT))
    out = torch.full((3, OUT, IN), float("nan"), device=device)
    splits = [4, 0, 2]
    with grouped_wgrad_calls() as calls:
        general_grouped_gemm(
            list(x.split(splits)), list(dy.split(splits)), list(out), [None] * 3, torch.float32,
            layout="NT", m_splits=splits, grad=True,
        )  # fmt: skip
    assert len(calls) == 1 and not out[1].any() and torch.isfinite(out).all()


@needs_kernel
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
def test_whole_tensors(accumulate, device):
    """Operands that are one tensor for all experts need no look at each of them."""
    x, dy = (torch.randn(6, w, device=device).bfloat16() for w in (IN, OUT))
    out = torch.full((3, OUT, IN), 0.25, device=device)
    parts = out.clone()
    splits = [4, 0, 2]
    how = {"layout": "NT", "m_splits": splits, "grad": True, "accumulate": accumulate}
    with grouped_wgrad_calls() as calls:
        _, bias_grads, _ = general_grouped_gemm(x, dy, out, [None], torch.float32, **how)
        lists = [list(x.split(splits)), list(dy.split(splits)), list(parts)]
        general_grouped_gemm(*lists, [None] * 3, torch.float32, **how)
    assert len(calls) == 2 and bias_grads is None
    assert torch.equal(out, parts)


# --- on a GPU ---------------------------------------------------------------


@needs_hopper
@pytest.mark.parametrize("count", [1, 5, 128, 1000, 4096])
def test_splits_on_device(count):
    """All of them arrive, in order, without a wait."""
    values = [(i * 7919) % 100003 for i in range(count)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = _grouped_kernels.splits_on_device(values, torch.device("cuda", 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.tolist() == values


@needs_hopper
@every_layout
def test_backward_does_not_wait(single):
    """List splits: nothing in forward or backward asks the device."""
    layer = build(Case(bias="none", fuse=True), "cuda", single=single)
    give_main_grads(layer)
    (x,) = inputs("cuda", 1)
    loss_of(call(layer, x)).backward()  # what is made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        with grouped_wgrad_calls() as calls:
            loss_of(call(layer, x)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(calls) == 1


@needs_hopper
@every_layout
@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
def test_captured(single, delay, fuse):
    """A captured step with list splits equals the eager one, for changed inputs."""
    case = Case(bias="none", fuse=fuse, delay=delay)

    def step(layer, x):
        loss_of(call(layer, x)).backward()
        layer.backward_dw()

    def state(layer):
        weights = [p for n, p in layer.named_parameters() if n.startswith("weight")]
        return {i: w.main_grad if fuse else w.grad for i, w in enumerate(weights)}

    layer = build(case, "cuda", single=single)
    if fuse:
        give_main_grads(layer, value=0.0)
    (static,) = inputs("cuda", 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(layer, static)
    torch.cuda.synchronize()
    for param in (*layer.parameters(), static):
        param.grad = None
    graph = torch.cuda.CUDAGraph()
    with grouped_wgrad_calls() as calls, torch.cuda.graph(graph, stream=stream):
        step(layer, static)
    assert len(calls) == 1
    for x in inputs("cuda", 3):
        with torch.no_grad():
            static.copy_(x)
        if fuse:
            for value in state(layer).values():
                value.zero_()
        graph.replay()
        eager = build(dataclasses.replace(case, delay=False), "cuda", single=single)
        if fuse:
            give_main_grads(eager, value=0.0)
        loss_of(call(eager, x)).backward()
        assert_same(state(layer), state(eager))


@needs_hopper
def test_no_temporary_of_the_weights_size():
    """P3: fused, a backward pass needs no memory as large as the weights."""
    groups, rows, width = 8, 256, 2048
    x, dy = (torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2))
    out = torch.zeros(groups, width, width, device="cuda")
    splits = [rows // groups] * groups
    operands = list(x.split(splits)), list(dy.split(splits)), list(out), [None] * groups
    how = {"layout": "NT", "m_splits": splits, "grad": True, "accumulate": True}
    general_grouped_gemm(*operands, torch.float32, **how)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with grouped_wgrad_calls() as calls:
        general_grouped_gemm(*operands, torch.float32, **how)
    assert len(calls) == 1
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_turned_off(device, monkeypatch):
    """NVTE_GROUPED_WGRAD_KERNEL=0 keeps cuBLAS."""
    monkeypatch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
    assert not _grouped_kernels.grouped_wgrad.is_available(torch.device("cuda", 0))
    with grouped_wgrad_calls() as calls:
        layer, _ = train(Case(bias="none"), device, single=True)
    assert not calls
    assert gradients(layer)["weight"].shape == (GROUPS, OUT, IN)
