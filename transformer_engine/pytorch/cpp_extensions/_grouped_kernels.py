# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of the split path in one launch, where its operands lie side by side.

The split path hands over lists, one tensor an expert. Most are slices of one tensor: the input and
the output gradient (``torch.split``), and gradients that are made in one buffer. Then
:func:`~transformer_engine.pytorch.grouped_wgrad.grouped_wgrad` takes them all at once, on Hopper.
Everything else keeps one GEMM an expert.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence

import torch
import transformer_engine.common as te_common

from .. import grouped_wgrad
from ..utils import get_device_compute_capability

__all__ = ["hopper_kernels", "side_by_side", "splits_on_device", "wgrad_in_one_launch"]


def hopper_kernels(device: torch.device) -> bool:
    """Whether the kernel runs on this device and beats one cuBLAS GEMM an expert there."""
    return device.type == "cuda" and grouped_wgrad.enabled() and _built_for(device)


@functools.lru_cache(maxsize=None)
def _built_for(device: torch.device) -> bool:
    return grouped_wgrad.is_available(device) and get_device_compute_capability() == (9, 0)


def side_by_side(
    tensors: Sequence[torch.Tensor] | torch.Tensor, rows: Sequence[int] | None = None
) -> torch.Tensor | None:
    """One tensor with the memory of several that follow each other, or None where they do not.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Plain tensors of one type. One tensor counts as packed already.
    rows : sequence of int, optional
        Tensor ``i`` is ``[rows[i], width]``, and the result ``[sum(rows), width]``. Without,
        all have the first one's shape, and the result is ``[len(tensors), *shape]``.
    """
    if isinstance(tensors, torch.Tensor):
        return tensors
    pointers = [tensor.data_ptr() for tensor in tensors]  # 0 for those without elements
    first = tensors[0]
    if rows is None:
        shape, step = first.shape, first.numel() * first.element_size()
        places = range(pointers[0], pointers[0] + len(tensors) * step, step or 1)
        size = (len(tensors), *shape)
    else:
        width = tensors[0].shape[-1]
        pitch = width * first.element_size()
        first = next((tensor for tensor, pointer in zip(tensors, pointers) if pointer), None)
        if first is None:
            return None if any(rows) else torch.empty_like(tensors[0][:0])
        # In one go: this is on the way of every call, for every expert.
        places = list(itertools.accumulate(map(pitch.__mul__, rows), initial=first.data_ptr()))
        size = ((places.pop() - places[0]) // pitch, width)
        if 0 in rows:
            places = [place if count else 0 for place, count in zip(places, rows)]
    if pointers != list(places) or not all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    strides = [1]
    for length in size[:0:-1]:
        strides.insert(0, strides[0] * length)
    try:
        return first.as_strided(size, strides)
    except RuntimeError:  # neighbours by chance, in different storages
        return None


def splits_on_device(splits: Sequence[int], device: torch.device) -> torch.Tensor:
    """Splits, int32, on a GPU: they travel as kernel arguments.

    Nothing waits and no host memory must stay alive, so that a CUDA graph can capture it.
    """
    values = (ctypes.c_int32 * len(splits))(*splits)
    out = torch.empty(len(splits), dtype=torch.int32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    _copy_to_device()(ctypes.addressof(values), out.data_ptr(), ctypes.sizeof(values), stream)
    return out


@functools.lru_cache(maxsize=1)
def _copy_to_device():
    copy = te_common._TE_LIB_CTYPES.nvte_copy_host_to_device_via_kernel
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    copy.restype = None
    return copy


def wgrad_in_one_launch(
    inp: Sequence[torch.Tensor] | torch.Tensor,
    grad_output: Sequence[torch.Tensor] | torch.Tensor,
    out: Sequence[torch.Tensor] | torch.Tensor,
    m_splits: Sequence[int] | None,
    quantizers: Sequence,
    accumulate: bool,
) -> bool:
    """``out[i] (+)= grad_output[i].T @ inp[i]`` for all ``i``; False, and nothing done, where not.

    Parameters
    ----------
    inp, grad_output : sequence of torch.Tensor, or torch.Tensor
        ``[m_splits[i], in_features]`` and ``[m_splits[i], out_features]``, or all rows.
    out : sequence of torch.Tensor, or torch.Tensor
        ``[out_features, in_features]`` each, or one ``[len(m_splits), out_features, in_features]``.
    m_splits : sequence of int
        Rows of each.
    quantizers : sequence
        Of the results; only None is taken.
    accumulate : bool
        Add to ``out``.
    """
    if m_splits is None or quantizers[0] is not None:
        return False
    leads = [o if isinstance(o, torch.Tensor) else o[0] for o in (out, inp, grad_output)]
    if any(type(lead) is not torch.Tensor for lead in leads):
        return False  # quantized, or of debug mode
    lead = leads[0]
    if not hopper_kernels(lead.device):
        return False
    x, dy = (side_by_side(operand, m_splits) for operand in (inp, grad_output))
    packed = side_by_side(out)
    if x is None or dy is None or packed is None:
        return False
    try:
        splits = splits_on_device(m_splits, lead.device)
        grouped_wgrad.check(dy, x, splits, packed)
    except (TypeError, ValueError):  # a type, width or alignment that the kernel does not take
        return False
    grouped_wgrad.grouped_wgrad(dy, x, splits, packed, accumulate=accumulate)
    return True
