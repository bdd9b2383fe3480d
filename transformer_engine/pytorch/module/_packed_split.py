# SPDX-License-Identifier: Apache-2.0
"""The split path of ``GroupedLinear`` where one parameter holds all experts, unquantized.

The grouped GEMM binding takes the packed weight, the packed gradient and the rows of all experts as
they are: nothing is done an expert in Python. The GEMMs and their order are those of the split path
with one parameter an expert, and so are the numbers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
import transformer_engine_torch as tex

from ..constants import TE_DType
from ..cpp_extensions._grouped_kernels import wgrad_in_one_launch
from ..cpp_extensions.gemm import get_cublas_workspace, get_sm_count
from ..distributed_weight import is_distributed_weight
from ..tensor._packed_parameter import plain
from ..utils import cast_if_needed
from ._delayed_wgrad import Group, any_requires_grad

__all__ = ["backward", "forward", "grouped_gemm", "splits_of", "takes", "weight_grad"]


def takes(weight: torch.Tensor) -> bool:
    """Whether the packed weight ``[groups, out, in]`` is one plain tensor, contiguous."""
    return (
        hasattr(tex, "grouped_operand_layout")  # an older extension takes lists only
        and not is_distributed_weight(weight)
        and type(memory := plain(weight)) in (torch.Tensor, torch.nn.Parameter)
        and memory.is_contiguous()
    )


@functools.lru_cache(maxsize=None)
def _nothing(groups: int, device: torch.device) -> list[torch.Tensor]:
    """Operands that a call does not have, one a group."""
    return [torch.empty(0, device=device)] * groups


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    layout: str,
    splits: Sequence[int],
    *,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    grad: bool = False,
    accumulate: bool = False,
    split_accumulator: bool = False,
) -> None:
    """One GEMM a group, of packed operands: ``out[i] (+)= op(b[i]) @ op(a[i])``.

    Parameters
    ----------
    a : torch.Tensor
        Weights ``[groups, out, in]`` (layouts TN and NN), or the input ``[rows, in]`` (NT).
    b : torch.Tensor
        ``[rows, in]`` (TN) or ``[rows, out]``; group ``i`` has ``splits[i]`` rows.
    out : torch.Tensor
        ``[rows, out]`` (TN), ``[rows, in]`` (NN), ``[groups, out, in]`` (NT); written.
    bias : torch.Tensor or sequence of torch.Tensor, optional
        ``[groups, out]`` or one ``[out]`` a group: added, or with ``grad`` written.
    grad : bool
        Whether this is a GEMM of the backward pass.
    accumulate : bool
        Add to ``out``.
    split_accumulator : bool
        As in ``general_grouped_gemm``.

    Raises
    ------
    RuntimeError
        Where an operand does not fit; it names the operand and the group.
    """
    groups = len(splits)
    nothing = _nothing(groups, out.device)
    workspaces = get_cublas_workspace(out.device.index, False, True)
    sm_count = get_sm_count()
    tex.te_general_grouped_gemm(
        a,
        layout[0] == "T",
        b,
        layout[1] == "T",
        out,
        TE_DType[out.dtype],
        splits,
        nothing if bias is None else bias,
        TE_DType[_bias_type(bias)],
        True,  # one output for all groups
        nothing,  # no GELU
        grad,
        workspaces,
        workspaces[0].shape[0],
        accumulate,
        split_accumulator,
        sm_count - int(os.getenv("NVTE_EXT_MARGIN_SM", str(sm_count))),
    )


def _bias_type(bias) -> torch.dtype:
    if bias is None:
        return torch.bfloat16
    return bias.dtype if isinstance(bias, torch.Tensor) else bias[0].dtype


def splits_of(m_splits: torch.Tensor, rows: torch.Tensor) -> list[int]:
    """The splits of ``rows``, which they must add up to."""
    splits = m_splits.tolist()
    if sum(splits) != rows.shape[0] or min(splits) < 0:
        torch.split(rows, splits)  # raises what the split path raises
    return splits


def forward(
    function: type,
    ctx,
    inp: torch.Tensor,
    m_splits: torch.Tensor,
    weight: torch.Tensor,
    biases: Sequence[torch.Tensor],
    out: torch.Tensor | None,
    dgrad_out: torch.Tensor | None,
    *,
    use_bias: bool,
    is_first_microbatch: bool | None,
    wgrad_store,
    fused: bool,
    dtype: torch.dtype,
    is_grad_enabled: bool,
    save_original_input: bool,
    packed_bias: bool,
) -> tuple[torch.Tensor, list]:
    """``inp[group i] @ weight[i].T + bias[i]``; takes and returns what ``_GroupedLinear`` does.

    Parameters
    ----------
    function : type
        ``_GroupedLinear``, for its checks of callers' buffers.
    inp : torch.Tensor
        ``[*, in]``.
    m_splits : torch.Tensor
        ``[groups]``, int64: rows of each group.
    weight : torch.Tensor
        ``[groups, out, in]``, of which :func:`takes` says yes.
    biases : sequence of torch.Tensor
        One ``[groups, out]`` where ``packed_bias``, else ``[out]`` a group.

    Raises
    ------
    ValueError
        Where the input's width is not the weight's.
    """
    memory = plain(weight)
    groups, out_features, in_features = memory.shape
    if inp.size(-1) != in_features:
        raise ValueError(
            f"Input tensor (shape={tuple(inp.size())}) is not compatible with "
            f"weight tensor (shape={tuple(memory.shape[1:])})"
        )
    x = cast_if_needed(inp.reshape(-1, in_features), dtype).contiguous()
    splits = splits_of(m_splits, x)
    matrices = cast_if_needed(memory.detach(), dtype)
    bias = None
    if use_bias:
        bias = plain(biases[0]) if packed_bias else biases
        if packed_bias:
            bias = cast_if_needed(bias.detach(), dtype).contiguous()
        else:
            bias = [cast_if_needed(b, dtype) for b in bias]
    out = function._validate_or_alloc_output(out, x.shape[0], out_features, dtype, inp.device)
    grouped_gemm(matrices, x, out, "TN", splits, bias=bias)

    if is_grad_enabled:
        ctx.packed_split = True
        ctx.group = Group(
            [weight],
            layout="packed",
            fused=fused,
            dtype=dtype,
            first_microbatch=is_first_microbatch,
        )
        ctx.accumulate = fused and ctx.group.accumulates()  # as the weight says now
        wants_weight = weight.requires_grad
        kept = None if not wants_weight else inp if save_original_input else x
        ctx.save_for_backward(kept, matrices if inp.requires_grad else None)
        ctx.requires_dgrad, ctx.inp_shape = inp.requires_grad, inp.shape
        ctx.wants_weight, ctx.wants_bias = wants_weight, use_bias and any_requires_grad(biases)
        ctx.use_bias, ctx.packed_bias, ctx.bias_args = use_bias, packed_bias, len(biases)
        ctx.splits, ctx.shape, ctx.dtype = splits, memory.shape, dtype
        ctx.wgrad_store, ctx.dgrad_out, ctx.function = wgrad_store, dgrad_out, function
    return out.view(-1, *inp.shape[1:-1], out_features), [None] * groups


def backward(ctx, grad_output: torch.Tensor) -> tuple:
    """Gradients in the order of the arguments of ``_GroupedLinear``."""
    # pylint: disable=import-outside-toplevel
    from ..ops._common import get_dummy_wgrads_for_params  # ops are made of modules

    kept, matrices = ctx.saved_tensors
    groups, out_features, in_features = ctx.shape
    splits = ctx.splits
    dy = cast_if_needed(grad_output.contiguous().view(-1, out_features), ctx.dtype)
    dgrad = None
    if ctx.requires_dgrad:
        where = (dy.shape[0], in_features, ctx.dtype, dy.device)
        dgrad = ctx.function._validate_or_alloc_output(ctx.dgrad_out, *where)
        grouped_gemm(matrices, dy, dgrad, "NN", splits, grad=True, split_accumulator=True)

    wgrad, bias_grad = None, None
    if ctx.wants_weight:
        x = cast_if_needed(kept.reshape(-1, in_features), ctx.dtype).contiguous()
        bias = None if not ctx.use_bias else "packed" if ctx.packed_bias else "each"
        gemm = functools.partial(weight_grad, splits=splits, bias=bias)
        if ctx.wgrad_store is not None:
            ctx.wgrad_store.put([x, dy, None], gemm)
        else:
            (wgrad,) = ctx.group.main_grads() if ctx.group.fused else ctx.group.new_wgrads()
            _, bias_grad, _ = gemm(x, dy, wgrad, accumulate=ctx.accumulate)
            if ctx.group.fused:
                # As the forward saw the weight, which may have been frozen since.
                (wgrad,) = get_dummy_wgrads_for_params(ctx.group.weights)
    elif ctx.wants_bias:
        bias_grad = [part.sum(dim=0) for part in dy.split(splits)]
        bias_grad = torch.stack(bias_grad) if ctx.packed_bias else bias_grad

    bias_grads = [None] * ctx.bias_args
    if bias_grad is not None:
        bias_grads = [bias_grad] if ctx.packed_bias else bias_grad
    dgrad = dgrad.view(ctx.inp_shape) if ctx.requires_dgrad else None
    return (dgrad, None, None, None, None, wgrad, *bias_grads)


def weight_grad(
    x: torch.Tensor,
    dy: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulate: bool,
    splits: Sequence[int],
    bias: str | None = None,
) -> tuple[None, torch.Tensor | list[torch.Tensor] | None, None]:
    """``out[i] (+)= dy[i].T @ x[i]`` and, unless ``bias`` is None, the sums of ``dy[i]``'s rows.

    Parameters
    ----------
    bias : str, optional
        "packed" for sums ``[groups, out]``, "each" for one ``[out]`` a group, in memory of its own.
    """
    groups, out_features, _ = out.shape
    made = None
    if bias == "packed":
        made = torch.empty(groups, out_features, dtype=out.dtype, device=out.device)
    elif bias == "each":
        how = {"dtype": out.dtype, "device": out.device}
        made = [torch.empty(out_features, **how) for _ in range(groups)]
    elif wgrad_in_one_launch(x, dy, out, splits, (None,), accumulate):
        return None, None, None
    how = {"grad": True, "accumulate": accumulate, "split_accumulator": True}
    grouped_gemm(x, dy, out, "NT", splits, bias=made, **how)
    return None, made, None
