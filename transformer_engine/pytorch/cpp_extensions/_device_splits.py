# SPDX-License-Identifier: Apache-2.0
"""The native grouped-tensor path on Hopper without cuBLASLt 13.4: splits stay on the device.

TE's own grouped GEMM needs cuBLASLt 13.4 there. With an older one, bf16 runs on other kernels that
read the splits on the device: ``torch._grouped_mm`` for the forward pass and dgrad,
:func:`~transformer_engine.pytorch.grouped_wgrad.grouped_wgrad` for wgrad. A call neither waits for
the device nor copies from it, so a CUDA graph can capture it and replay it with other splits.

``torch._grouped_mm`` takes weights in one tensor and makes its own result. The path's callers
therefore pass :func:`output` as the result's memory and read it back with :func:`result`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import transformer_engine_torch as tex
import triton
import triton.language as tl

from .. import grouped_wgrad
from ..distributed_weight import is_distributed_weight
from ..tensor.storage.grouped_tensor_storage import GroupedTensorStorage
from ..utils import get_device_compute_capability
from . import _grouped_kernels
from ._grouped_kernels import side_by_side

__all__ = ["grouped_bias_add", "grouped_gemm", "output", "result", "serves", "takes", "why_not"]

_CUBLASLT = 130400  # the oldest with a grouped GEMM for Hopper
_MAX_GROUPS = 1023  # of torch._grouped_mm


# --- what it serves ---------------------------------------------------------


def serves(recipe, dtype: torch.dtype, weights: Sequence) -> bool:
    """Whether these kernels run the grouped-tensor path for ``weights``; see :func:`why_not`."""
    return why_not(recipe, dtype, weights) is None


def why_not(recipe, dtype: torch.dtype, weights: Sequence) -> str | None:
    """Why these kernels cannot stand in for cuBLASLt's, or None where they do.

    Parameters
    ----------
    recipe : Recipe or None
        Of quantized compute; only None is served.
    dtype : torch.dtype
        Of the compute; only bfloat16 is served (``torch._grouped_mm`` asks the host for others).
    weights : sequence of torch.Tensor
        One ``GroupedTensor [groups, out, in]``, or ``[out, in]`` an expert, side by side in memory.
    """
    if not stands_in():
        return "other kernels are for Hopper with an older cuBLASLt"
    if recipe is not None or dtype != torch.bfloat16:
        return "other kernels are for bfloat16 without quantization"
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no _grouped_mm for other kernels"
    lead = weights[0]
    packed = isinstance(lead, GroupedTensorStorage)
    groups = lead.num_tensors if packed else len(weights)
    out_features, in_features = lead.shape[-2:]
    if out_features % 8 or in_features % 8 or groups > _MAX_GROUPS:
        return f"other kernels take widths that 8 divides and at most {_MAX_GROUPS} experts"
    memory = lead.rowwise_data if packed else lead
    plain = lead.quantizer is None if packed else type(lead) in (torch.Tensor, torch.nn.Parameter)
    if memory is None or not plain or is_distributed_weight(lead):
        return "other kernels take plain weights"
    if not _grouped_kernels.hopper_kernels(memory.device):
        return "the grouped wgrad kernel is off (NVTE_GROUPED_WGRAD_KERNEL=0) or was not built"
    if not packed and (lead.dtype != dtype or side_by_side(weights) is None):
        return "other kernels take weights that lie side by side in memory (single_grouped_weight)"
    return None


def stands_in() -> bool:
    """Whether this is a Hopper GPU whose cuBLASLt has no grouped GEMM for it."""
    return get_device_compute_capability() == (9, 0) and tex.get_cublasLt_version() < _CUBLASLT


def takes(b, alpha, beta) -> bool:
    """Whether :func:`grouped_gemm` runs this call, which cuBLASLt cannot."""
    plain = b.quantizer is None and b.fake_dtype == torch.bfloat16 and b.first_dims is not None
    return plain and alpha is None and beta is None and stands_in()


# --- memory of results ------------------------------------------------------


def output(allocate: Callable, buffer: torch.Tensor | None, *where) -> torch.Tensor:
    """``allocate(buffer, *where)``, or a stand-in without memory where the GEMM makes its own.

    Parameters
    ----------
    allocate : callable
        Checks a caller's ``buffer``, or makes one.
    where : tuple
        The sizes (several or one sequence), the type, the device.
    """
    *sizes, dtype, device = where
    sizes = sizes if len(sizes) > 1 else sizes[0]
    if buffer is not None or dtype != torch.bfloat16 or not stands_in():
        return allocate(buffer, *where)
    return torch.empty((), dtype=dtype, device=device).expand(tuple(sizes))


def result(out: torch.Tensor, grouped: GroupedTensorStorage) -> torch.Tensor:
    """What a GEMM wrote for ``out``: ``out`` itself or, for a stand-in, the GEMM's own memory."""
    return grouped.rowwise_data.view(out.shape)


# --- the GEMMs --------------------------------------------------------------


@torch.no_grad()
def grouped_gemm(a, b, out, *, layout: str, accumulate: bool, bias, bias_scale):
    """What ``general_grouped_gemm_for_grouped_tensor`` says, for bfloat16.

    Parameters
    ----------
    a : GroupedTensorStorage or list of torch.Tensor
        Weights ``[groups, out, in]`` (layouts TN and NN), or the input ``[rows, in]`` (NT).
    b : GroupedTensorStorage
        ``[rows, in]`` (TN) or ``[rows, out]``; ``first_dims`` holds the splits. Rows after the
        last group are not read.
    out : GroupedTensorStorage or list of torch.Tensor
        ``[rows, out]`` (TN) or ``[rows, in]`` (NN), whose rows after the last group are left alone,
        or the weight gradients (NT). A stand-in of :func:`output` is replaced.
    accumulate : bool
        Add to ``out``; for NT only.
    bias, bias_scale
        ``[groups, out]`` and fp32 ``[rows]`` or None, for TN: ``bias * scale`` is added.

    Returns
    -------
    GroupedTensorStorage or list of torch.Tensor
        ``out``.

    Raises
    ------
    ValueError
        Where weights do not lie side by side, or a type or width is not supported.
    """
    rows = _aligned(b.rowwise_data.view(b.logical_shape))
    if layout == "NT":
        _wgrad(_aligned(a.rowwise_data.view(a.logical_shape)), rows, b.first_dims, out, accumulate)
        return out
    if accumulate:
        raise ValueError(f"grouped GEMM of layout {layout} cannot accumulate with these kernels")
    weights = _weights(a)
    offsets = torch.cumsum(b.first_dims, 0, dtype=torch.int32)
    matrices = weights.transpose(1, 2) if layout == "TN" else weights
    if rows.shape[0]:
        made = torch._grouped_mm(rows, matrices, offs=offsets)
    else:
        made = rows.new_empty(0, matrices.shape[2])
    if bias is not None:
        grouped_bias_add(made, bias.rowwise_data.view(weights.shape[:2]), offsets, bias_scale)
    target = out.rowwise_data
    if target.stride() == (0,):
        out.rowwise_data = made.view(-1)
    else:
        target = target.view(made.shape)
        inside = torch.arange(made.shape[0], device=made.device) < offsets[-1]
        torch.where(inside[:, None], made, target, out=target)
    return out


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at a multiple of 16 bytes, as the kernels want."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _weights(a) -> torch.Tensor:
    """``[groups, out, in]``."""
    if isinstance(a, GroupedTensorStorage):
        rows, columns = a.logical_shape
        return a.rowwise_data.view(a.num_tensors, rows // a.num_tensors, columns)
    packed = side_by_side(a)
    if packed is None:
        raise ValueError(
            "separate weights that do not lie side by side in memory need cuBLASLt 13.4 for splits "
            "on the device; set single_grouped_weight=True or use_grouped_tensor=False"
        )
    return packed


def _wgrad(x, dy, splits, out, accumulate: bool) -> None:
    """``out[i] (+)= dy[i].T @ x[i]``."""
    shape = (splits.shape[0], dy.shape[1], x.shape[1])
    packed = side_by_side(out) if isinstance(out, (list, tuple)) else out.rowwise_data.view(shape)
    if packed is not None and packed.dtype in (torch.float32, x.dtype):
        grouped_wgrad.grouped_wgrad(dy, x, splits, packed.view(shape), accumulate=accumulate)
        return
    # Gradients in separate memory, or of another type: a temporary, as splits are not known here.
    made = torch.empty(shape, dtype=torch.float32, device=x.device)
    grouped_wgrad.grouped_wgrad(dy, x, splits, made)
    targets = list(out) if packed is None else [packed]
    values = list(made.unbind()) if packed is None else [made]
    if accumulate:
        torch._foreach_add_(targets, [v.to(t.dtype) for v, t in zip(values, targets)])
    else:
        torch._foreach_copy_(targets, values)


# --- bias -------------------------------------------------------------------


@triton.jit
def _grouped_bias_add_kernel(
    out, bias, offsets, scales, width,
    HAS_SCALES: tl.constexpr, ROW_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # pylint: disable=missing-function-docstring
    group = tl.program_id(0)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0)
    stop = tl.load(offsets + group)
    value = tl.load(bias + group * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    for first in range(start + tl.program_id(1) * BLOCK_M, stop, ROW_SPLITS * BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        inside = (rows[:, None] < stop) & (columns[None, :] < width)
        place = out + rows[:, None].to(tl.int64) * width + columns[None, :]
        added = value[None, :]
        if HAS_SCALES:
            added = added * tl.load(scales + rows, mask=rows < stop, other=0.0)[:, None]
        total = tl.load(place, mask=inside, other=0.0).to(tl.float32) + added
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def grouped_bias_add(
    out: torch.Tensor,
    bias: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Add ``bias[g]``, times ``scales`` of the row, to the rows of group ``g`` of ``out``.

    Parameters
    ----------
    out : torch.Tensor
        ``[rows, width]``, contiguous; rows after the last group are left alone.
    bias : torch.Tensor
        ``[groups, width]``, contiguous.
    offsets : torch.Tensor
        ``[groups]``, int32: where each group ends.
    scales : torch.Tensor, optional
        ``[rows]``, float32.
    """
    blocks = {"ROW_SPLITS": 4, "BLOCK_M": 32, "BLOCK_N": 128}
    grid = (bias.shape[0], blocks["ROW_SPLITS"], triton.cdiv(out.shape[1], blocks["BLOCK_N"]))
    _grouped_bias_add_kernel[grid](
        out, bias, offsets, out if scales is None else scales, out.shape[1],
        HAS_SCALES=scales is not None, **blocks,
    )  # fmt: skip
