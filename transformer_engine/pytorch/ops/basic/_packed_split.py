# SPDX-License-Identifier: Apache-2.0
"""The split path of ``ops.GroupedLinear`` where one parameter holds all experts, unquantized.

See :mod:`transformer_engine.pytorch.module._packed_split`.
"""

from __future__ import annotations

import functools

import torch

from ...cpu_offload import is_cpu_offload_enabled
from ...module import _packed_split
from ...tensor._packed_parameter import plain
from ...triton.grouped_dbias_dscales import compute_grouped_dbias, compute_grouped_dbias_dscales
from ...utils import cast_if_needed
from .._common import (
    get_accumulate_flag_in_param,
    get_dummy_wgrads_for_params,
    get_main_grad_from_param,
    maybe_dequantize,
    validate_or_alloc_output,
    view_main_grad_as_grouped_buffer,
)

__all__ = ["backward", "forward", "takes"]


def takes(op, inp: torch.Tensor) -> bool:
    """Whether an unquantized pass of ``op`` on ``inp`` runs on packed operands."""
    return (
        op.single_grouped_weight
        and inp.dim() == 2
        and not is_cpu_offload_enabled()
        and _packed_split.takes(op.weight)
    )


def forward(
    op,
    inp: torch.Tensor,
    split_sizes: torch.Tensor,
    scales: torch.Tensor | None,
    dtype: torch.dtype,
    input_requires_grad: bool,
    weight_requires_grad: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple]:
    """``inp[group i] @ weight[i].T + bias[i]``, the bias times ``scales`` where there are any.

    Parameters
    ----------
    op : GroupedLinear
        Of which :func:`takes` says yes.
    inp : torch.Tensor
        ``[rows, in]``.
    split_sizes : torch.Tensor
        ``[groups]``, int64: rows of each group.
    scales : torch.Tensor, optional
        ``[rows]``.
    out : torch.Tensor, optional
        The caller's ``[rows, out]``.

    Returns
    -------
    torch.Tensor, tuple
        ``[rows, out]``, and what :func:`backward` needs. Its second entry, which is None on the
        path with one tensor an expert, says which path ran.
    """
    x = maybe_dequantize(inp, dtype).contiguous()
    splits = _packed_split.splits_of(split_sizes, x)
    matrices = cast_if_needed(plain(op.weight).detach(), dtype)
    out = validate_or_alloc_output(out, [x.shape[0], op.out_features], dtype, op.weight.device)
    bias = None
    if op.has_bias and not op._scale_bias:
        bias = _packed_bias(op, dtype)
        if bias is None:
            bias = op._get_discrete_bias_tensors(dtype)
    _packed_split.grouped_gemm(matrices, x, out, "TN", splits, bias=bias)
    if op.has_bias and op._scale_bias:
        parts = zip(op._get_discrete_bias_tensors(dtype), out.split(splits), scales.split(splits))
        for each, rows, factors in parts:
            rows.add_(each.unsqueeze(0) * factors.unsqueeze(-1))
    saved = [split_sizes, split_sizes, None, None, None]
    if op._scale_bias:
        saved.append(scales)
    saved += [x if weight_requires_grad else None, matrices if input_requires_grad else None]
    return out, tuple(saved)


def _packed_bias(op, dtype: torch.dtype) -> torch.Tensor | None:
    """The single bias ``[groups, out]``, whatever holds it; None where there is one an expert."""
    if not op.single_grouped_bias:
        return None
    return cast_if_needed(plain(op.bias).detach(), dtype).contiguous()


def backward(op, ctx, grad_output: torch.Tensor) -> tuple:
    """What ``fuser_backward`` returns: gradients of the input, the parameters, the scales.

    Raises
    ------
    RuntimeError
        Where ``main_grad`` does not fit, before it is written.
    """
    split_sizes, *_, x, matrices = ctx.saved_tensors
    splits = split_sizes.tolist()
    groups, weight = op.num_groups, op.weight
    dy = maybe_dequantize(grad_output, ctx.dtype).reshape(-1, op.out_features).contiguous()

    bias_grads, scale_grads = [], None
    if op.has_bias:
        offsets = torch.zeros(groups + 1, dtype=torch.int64, device=dy.device)
        offsets[1:] = split_sizes.cumsum(0)
        if op._scale_bias:
            factors = ctx.saved_tensors[5].to(dtype=torch.float32)
            packed = _packed_bias(op, ctx.dtype)
            if packed is None:
                packed = torch.stack(op._get_discrete_bias_tensors(ctx.dtype))
            made, scale_grads = compute_grouped_dbias_dscales(dy, factors, packed, offsets=offsets)
        else:
            made = compute_grouped_dbias(dy, offsets, groups)
        made = made.to(dtype=ctx.dtype)
        bias_grads = [made] if op.single_grouped_bias else list(made.unbind())

    delayed = op.need_backward_dw()
    fused = op._accumulate_into_main_grad
    wgrad = None
    if ctx.weight_requires_grad and not delayed:
        shape = (op.out_features, op.in_features)
        if fused:
            wgrad = view_main_grad_as_grouped_buffer(
                get_main_grad_from_param(weight, op_label="GroupedLinear"),
                groups,
                shape,
                label="GroupedLinear weight",
            )
        else:
            wgrad = torch.empty(groups, *shape, dtype=ctx.dtype, device=dy.device)

    grad_input = None
    if ctx.input_requires_grad:
        where = ([dy.shape[0], op.in_features], ctx.dtype, dy.device)
        grad_input = validate_or_alloc_output(getattr(ctx, "dgrad_out", None), *where)
        how = {"grad": False, "split_accumulator": True}
        _packed_split.grouped_gemm(matrices, dy, grad_input, "NN", splits, **how)

    if ctx.weight_requires_grad:
        gemm = functools.partial(_packed_split.weight_grad, splits=splits)
        if delayed:
            op.put_delayed_wgrad(ctx, x, dy, gemm)
        else:
            gemm(x, dy, wgrad, accumulate=fused and get_accumulate_flag_in_param(weight))
            if fused:
                (wgrad,) = get_dummy_wgrads_for_params([weight])
    # Separate biases are registered before the one weight.
    one_bias = not op.has_bias or op.single_grouped_bias
    params = [wgrad, *bias_grads] if one_bias else [*bias_grads, wgrad]
    return grad_input, [params], [(None, scale_grads) if op._scale_bias else (None,)]
