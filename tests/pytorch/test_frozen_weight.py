# SPDX-License-Identifier: Apache-2.0
"""A frozen weight takes no other parameter's gradient away."""

import pytest
import torch

from delayed_kinds import DTYPES, backward, inputs, make

CASES = {
    "linear": ("linear", ["weight"], "bias"),
    "layernorm_linear": ("layernorm_linear", ["weight"], "bias"),
    "layernorm_mlp-fc1": ("layernorm_mlp", ["fc1_weight"], "fc1_bias"),
    "layernorm_mlp-fc2": ("layernorm_mlp", ["fc2_weight"], "fc2_bias"),
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("delay", [False, True], ids=["regular", "delayed"])
@pytest.mark.parametrize("case", CASES)
def test_bias_gradient(case, delay, dtype, device):
    """The bias gradient is that of the same module with the weight trained.

    The sum over 64 rows is rounded once to the gradient's type in both; the
    order of the fp32 partial sums may differ, by less than one rounding.
    """
    kind, frozen, bias = CASES[case]
    module, whole = (make(kind, device, delay=d, dtype=dtype) for d in (delay, False))
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    for one in (module, whole):
        backward(kind, one, inputs(device, 1, dtype)[0])
        one.backward_dw()
    got, want = getattr(module, bias).grad, getattr(whole, bias).grad
    assert got is not None
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=step, atol=step * want.abs().max().item())
    assert all(getattr(module, name).grad is None for name in frozen)
