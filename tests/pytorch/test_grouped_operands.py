# SPDX-License-Identifier: Apache-2.0
"""The binding of grouped GEMM: packed operands, and checks of every operand.

The compiled extension runs here, without a GPU too: it checks its operands before it asks for one.
"""

import sys

import pytest
import torch

import transformer_engine.pytorch  # noqa: F401

tex = sys.modules["transformer_engine_torch"]
# The CPU executor puts a reference in the binding's place, and keeps the binding in no name.
if not hasattr(tex, "grouped_operand_layout"):
    pytest.skip("this extension takes lists only", allow_module_level=True)


def test_c1_packed_matrices_are_found():
    packed = torch.zeros(3, 4, 8, dtype=torch.bfloat16)
    assert tex.grouped_operand_layout(packed) == [(i * 64, [4, 8]) for i in range(3)]


def test_c1_packed_rows_are_found():
    packed = torch.zeros(7, 8, dtype=torch.float32)
    found = tex.grouped_operand_layout(packed, [2, 0, 4])
    assert found == [(0, [2, 8]), (64, [0, 8]), (64, [4, 8])]


@pytest.mark.parametrize("splits", [[4, 4], [8, -1]], ids=["too-many-rows", "negative"])
def test_c1_wrong_splits_name_the_group(splits):
    with pytest.raises(RuntimeError, match="operand, group 1, should have"):
        tex.grouped_operand_layout(torch.zeros(7, 8), splits)


def test_c1_strided_packed_operand_is_refused():
    with pytest.raises(RuntimeError, match="must be contiguous"):
        tex.grouped_operand_layout(torch.zeros(3, 8, 4).transpose(1, 2))


def test_c1_strided_group_is_named():
    tensors = [torch.zeros(4, 8), torch.zeros(8, 4).t()]
    with pytest.raises(RuntimeError, match="group 1, must be contiguous"):
        tex.grouped_operand_layout(tensors)
