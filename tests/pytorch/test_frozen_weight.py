# SPDX-License-Identifier: Apache-2.0
"""A frozen weight takes no other parameter's gradient away."""

import pytest
import torch
from delayed_kinds import DTYPES, backward, inputs, make

CASES = {
    "linear": ("linear", ["weight"], "bias"),
    "layernorm_linear": ("layernorm_linear", ["weight"], "bias"),
    "layernorm_mlp-fc2": ("layernorm_mlp", ["fc2_weight"], "fc2_bias"),
}


# 2.20.2 has this one right, without the delay.
RIGHT_BEFORE = {"layernorm_mlp-fc1": ("layernorm_mlp", ["fc1_weight"], "fc1_bias")}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
both_ways = pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])


@every_dtype
@both_ways
@pytest.mark.parametrize("case", CASES)
def test_bias_gradient(case, delay, dtype, device):
    """Modules whose bias gradient is fused into a GEMM that a frozen weight does not need."""
    check_bias(*CASES[case], delay, dtype, device)


@every_dtype
@both_ways
@pytest.mark.parametrize("case", RIGHT_BEFORE)
def test_other_bias_gradient(case, delay, dtype, device):
    """Modules that make the bias gradient elsewhere."""
    check_bias(*RIGHT_BEFORE[case], delay, dtype, device)


def check_bias(kind, frozen, bias, delay, dtype, device):
    """The bias gradient is that of the same module with the weight trained.

    Both sum 64 rows in fp32, in another order, and round once: 8 = sqrt(64)
    roundings of the sum for fp32, one of the result for the narrow types.
    """
    module, whole = (make(kind, device, delay=d, dtype=dtype) for d in (delay, False))
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    for one in (module, whole):
        backward(kind, one, inputs(device, 1, dtype)[0])
        one.backward_dw()
    got, want = getattr(module, bias).grad, getattr(whole, bias).grad
    assert got is not None
    step = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    torch.testing.assert_close(got, want, rtol=step, atol=step * want.abs().max().item())
    assert all(getattr(module, name).grad is None for name in frozen)


SUBSETS = {
    "first-weight": ["weight0"],
    "weights": ["weight0", "weight1", "weight2", "weight3"],
    "all-but-one-weight": ["weight0", "weight1", "weight3", "bias0", "bias1", "bias2", "bias3"],
}


# 2.20.2 has these right in GroupedLinear, without the delay.
OTHER_SUBSETS = {"last-weight": ["weight3"], "first-bias": ["bias0"]}
grouped_kinds = pytest.mark.parametrize("kind", ["grouped", "ops_grouped"])


@both_ways
@pytest.mark.parametrize("subset", SUBSETS)
@grouped_kinds
def test_grouped_subset(kind, subset, delay, device):
    """The first weight is among the frozen ones."""
    check_subset(kind, SUBSETS[subset], delay, device)


@both_ways
@pytest.mark.parametrize("subset", OTHER_SUBSETS)
@grouped_kinds
def test_other_grouped_subset(kind, subset, delay, device):
    """The first weight is trained."""
    check_subset(kind, OTHER_SUBSETS[subset], delay, device)


def check_subset(kind, frozen, delay, device):
    """What is not frozen gets the gradient that it gets when nothing is."""
    module, whole = (make(kind, device, delay=d) for d in (delay, False))
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    for one in (module, whole):
        backward(kind, one, inputs(device)[0])
        one.backward_dw()
    for name, param in module.named_parameters():
        want = getattr(whole, name).grad
        if name in frozen:
            assert param.grad is None, name
        elif len([n for n in frozen if "weight" in n]) == 4:
            # Summed by another kernel than the wgrad GEMM's epilogue: one rounding apart.
            step = torch.finfo(want.dtype).eps
            torch.testing.assert_close(param.grad, want, rtol=step, atol=step * want.abs().max())
        else:
            assert torch.equal(param.grad, want), name
