# SPDX-License-Identifier: Apache-2.0
"""A single weight on the split path is one operand (B6); its numbers are tested with section B."""

import sys

import grouped_cases as cases
import pytest
import torch

import transformer_engine.pytorch as te

pytestmark = pytest.mark.filterwarnings("ignore:GroupedLinear is using single_grouped")
tex = sys.modules["transformer_engine_torch"]


class Binding:
    """Stands before the binding: keeps its operands, and what Python runs outside of it."""

    def __init__(self, patch) -> None:
        self.run, self.calls, self.inside, self.python = tex.te_general_grouped_gemm, [], False, 0
        patch.setattr(tex, "te_general_grouped_gemm", self)

    def __call__(self, *args):
        self.calls.append(args)
        self.inside = True
        try:
            return self.run(*args)
        finally:
            self.inside = False

    def count(self, _frame, event, _arg) -> None:
        """For ``sys.setprofile``: calls of Python functions."""
        self.python += event == "call" and not self.inside


@pytest.fixture(autouse=True)
def single_parameters(monkeypatch):
    """Single parameters are behind a gate; the wgrad kernel would take the binding's work."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    monkeypatch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")


@pytest.fixture
def binding(monkeypatch):
    """Keeps the operands of every grouped GEMM."""
    return Binding(monkeypatch)


def layer_of(groups: int, bias: bool, device, **extra):
    """A layer with one weight, and an input with 16 rows an expert."""
    layer = te.GroupedLinear(
        groups, 32, 64, bias=bias, device=device, params_dtype=torch.bfloat16,
        single_grouped_weight=True, single_grouped_bias=bias, **extra,
    )  # fmt: skip
    x = torch.randn(16 * groups, 32, device=device).to(torch.bfloat16).requires_grad_()
    return layer, x


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main-grad"])
@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_b6_one_operand(bias, delay, fuse, binding, device):
    """The binding reads the parameter's memory and writes the gradient's, as one tensor each."""
    layer, x = layer_of(4, bias, device, delay_wgrad_compute=delay, fuse_wgrad_accumulation=fuse)
    if fuse:
        layer.weight.main_grad = torch.zeros(4, 64, 32, device=device)
    layer(x, [16, 0, 16, 32]).sum().backward()
    layer.backward_dw()
    forward, dgrad, wgrad = binding.calls
    memory = layer.weight.data_ptr() or layer.weight.rowwise_data.data_ptr()
    for call in (forward, dgrad):
        assert call[0].data_ptr() == memory and call[0].shape == (4, 64, 32)
    assert wgrad[4].shape == (4, 64, 32)
    if fuse:  # torch copies .grad where, as here, something else holds its memory
        assert wgrad[4].data_ptr() == layer.weight.main_grad.data_ptr()
    for call in binding.calls:
        packed = [call[i] for i in (0, 2, 4)] + ([call[7]] if bias and call is not dgrad else [])
        assert all(type(operand) is torch.Tensor for operand in packed)


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main-grad"])
@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@pytest.mark.parametrize("bias", ["none", "separate", "single"])
def test_b6_operation(bias, delay, fuse, binding, device):
    """The same for the operation."""
    case = cases.Case(kind="ops", bias=bias, delay=delay, fuse=fuse)
    op = cases.build(case, device, single=True)
    if fuse:
        cases.give_main_grads(op)
    (x,) = cases.inputs(device, 1)
    cases.loss_of(cases.call(op, x)).backward()
    op.backward_dw()
    assert len(binding.calls) == 3
    memory = op.weight.rowwise_data.data_ptr()
    assert [call[0].data_ptr() == memory for call in binding.calls] == [True, True, False]
    for call in binding.calls:
        assert all(type(call[i]) is torch.Tensor for i in (0, 2, 4))


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_b6_no_python_for_an_expert(bias, binding, device):
    """Sixteen times the experts, the same calls in Python (on the CPU, in the backward too)."""

    def calls(groups: int) -> int:
        layer, x = layer_of(groups, bias, device)
        splits = [16] * groups
        for _ in range(2):  # the second has nothing to look up
            binding.python = 0
            sys.setprofile(binding.count)
            try:
                out = layer(x, splits)
                out.backward(torch.ones_like(out))
            finally:
                sys.setprofile(None)
        return binding.python

    assert calls(4) == calls(64)


@pytest.mark.parametrize("splits", [[16, 16, 16, 17], [16, 16, 16, 15], [17, 16, 16, -1]])
def test_b6_splits_must_add_up(splits, device):
    layer, x = layer_of(4, False, device)
    with pytest.raises(RuntimeError, match="split"):
        layer(x, splits)


def test_b6_width_must_fit(device):
    layer, x = layer_of(4, False, device)
    with pytest.raises(ValueError, match="not compatible with weight tensor"):
        layer(x[:, :16].contiguous(), [16] * 4)


@pytest.mark.parametrize("cast", [False, True], ids=["as-it-is", "cast"])
def test_b6_buffers_of_the_caller(cast, device):
    """``out`` and ``dgrad_out`` receive the results."""
    case = cases.Case(bias="single", dtype=torch.float32 if cast else torch.bfloat16)
    results = []
    for single in (True, False):
        layer = cases.build(case, device, single=single)
        (x,) = cases.inputs(device, 1)
        out = torch.full((cases.ROWS, cases.OUT), 7.0, device=device, dtype=torch.bfloat16)
        dx = torch.full((cases.ROWS, cases.IN), 7.0, device=device, dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            y = layer(x, cases.SPLITS, out=out, dgrad_out=dx)
        cases.loss_of(y).backward()
        results.append((out, dx))
    for single, separate in zip(*results):
        assert torch.equal(single, separate)
        assert not single.isnan().any() and not (single == 7.0).all()


def test_b6_what_is_taken(device):
    """Anything but one contiguous plain tensor keeps the path with one view an expert."""
    from transformer_engine.pytorch.module import _packed_split

    layer, _ = layer_of(4, False, device)
    assert _packed_split.takes(layer.weight)
    assert not _packed_split.takes(torch.zeros(4, 32, 64, device=device).transpose(1, 2))


both_layouts = pytest.mark.parametrize("single", [False, True], ids=["separate", "single"])


@both_layouts
def test_b4_frozen_after_the_forward(single, device):
    """main_grad is written, as the forward decided, and the flag says so."""
    layer = cases.build(cases.Case(fuse=True), device, single=single)
    cases.give_main_grads(layer, grad_added_to_main_grad=False)
    weights = [p for name, p in layer.named_parameters() if name.startswith("weight")]
    (x,) = cases.inputs(device, 1)
    out = cases.call(layer, x)
    for weight in weights:
        weight.requires_grad_(False)
    before = [weight.main_grad.clone() for weight in weights]
    cases.loss_of(out).backward()
    assert any(not torch.equal(old, weight.main_grad) for old, weight in zip(before, weights))
    assert all(weight.grad_added_to_main_grad for weight in weights)


def test_b4_biases_of_two_types(device):
    """Each is cast where autocast wants another type."""
    seen = []
    for single in (True, False):
        layer = cases.build(cases.Case(), device, single=single)
        for i in range(1, cases.GROUPS):
            value = getattr(layer, f"bias{i}").detach().float() + 0.001
            setattr(layer, f"bias{i}", torch.nn.Parameter(value))
        (x,) = cases.inputs(device, 1, torch.float32)
        with torch.autocast("cuda", torch.bfloat16):
            out = cases.call(layer, x)
        cases.loss_of(out).backward()
        grads = [getattr(layer, f"bias{i}").grad for i in range(cases.GROUPS)]
        seen.append([out.detach(), x.grad, *grads])
    assert all(torch.equal(single, separate) for single, separate in zip(*seen))


@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@pytest.mark.parametrize("frozen", ["", "weight"], ids=["trained", "frozen-weight"])
@both_layouts
def test_b4_separate_bias_gradients_have_memory_of_their_own(single, frozen, delay, device):
    """One that is kept or saved does not hold the others."""
    layer = cases.build(cases.Case(frozen=frozen, delay=delay), device, single=single)
    (x,) = cases.inputs(device, 1)
    cases.loss_of(cases.call(layer, x)).backward()
    layer.backward_dw()
    grad = layer.bias0.grad
    assert grad.untyped_storage().nbytes() == grad.nbytes
