# SPDX-License-Identifier: Apache-2.0
"""Delivery of delayed weight gradients.

``backward_dw()`` of a module calls :func:`deliver`. The delayed half of the
backward pass is a real autograd node: its backward runs the stored wgrad GEMM
and *returns* the gradients, so that autograd itself accumulates them. It adds
to an existing ``.grad`` in place, moves a first one without a copy, and fires
the parameters' hooks once a contribution, as in the regular path::

    backward():     dY --> [module: dgrad GEMM] --> dX
                                 |
                                 +--> store: (X, dY, wgrad GEMM)   first in ...
    backward_dw():               |                                 ... first out
                           [_DelayedHalf: wgrad GEMM] --> AccumulateGrad --> .grad
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class _DelayedHalf(torch.autograd.Function):
    """The wgrad half of a module's backward, as a node of its own.

    The forward returns a scalar that only serves to start the backward from.
    """

    @staticmethod
    def forward(ctx, compute: Callable[[], Sequence], *params: torch.Tensor) -> torch.Tensor:
        # pylint: disable=missing-function-docstring
        ctx.compute = compute
        return torch.zeros((), dtype=torch.float32, device=params[0].device)

    @staticmethod
    def backward(ctx, _grad: torch.Tensor) -> tuple:
        # pylint: disable=missing-function-docstring
        compute, ctx.compute = ctx.compute, None
        return (None, *compute())


def _rows(grad: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split a gradient of the concatenated parameters along dim 0, one slice a parameter."""
    if len(params) == 1:
        return [grad.to(params[0].dtype).view_as(params[0])]
    # Slices of one buffer must not alias each other's storage in .grad: an
    # optimizer or a flat-buffer reducer may resize or free one of them.
    parts = torch.split(grad, [p.shape[0] for p in params], dim=0)
    return [part.to(p.dtype, copy=True).view_as(p) for part, p in zip(parts, params)]


def _run_oldest(store) -> tuple:
    """Run the oldest pending GEMM; take it off the queue only when that worked.

    Returns
    -------
    tuple of torch.Tensor or None
        The weight gradient ``[out, in]`` and the bias gradient ``[out]``.
    """
    tensors, func = store.context.queue[0]
    for tensor in tensors:
        # The memory may have been allocated on another stream than this one.
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
            if not torch.cuda.is_current_stream_capturing():
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
    wgrad, bgrad, *_ = func(*tensors)
    store.context.get()
    return wgrad, bgrad


def deliver(module: torch.nn.Module) -> bool:
    """Run a module's oldest pending wgrad GEMM and accumulate what it gives.

    For modules with the names ``weight_names`` and ``bias_names`` (``Linear``,
    ``LayerNormLinear``). With fused accumulation the GEMM itself adds to
    ``main_grad``; only the bias then goes through autograd.

    Returns
    -------
    bool
        False when nothing was pending; nothing is changed then.

    Raises
    ------
    Exception
        What the GEMM raises. The contribution stays pending and no gradient
        has changed; the call can be repeated.
    """
    store = module.wgrad_store
    if store.context.empty():
        return False
    weights = [getattr(module, name) for name in module.weight_names]
    biases = [getattr(module, name) for name in module.bias_names] if module.use_bias else []
    if module.fuse_wgrad_accumulation:
        weights = []
    wanted = [p for p in (*weights, *biases) if p.requires_grad]

    def compute() -> list:
        wgrad, bgrad = _run_oldest(store)
        grads = list(_rows(wgrad, weights)) if weights else []
        # No bias gradient here: the main backward made and delivered it (FP8).
        missing = bgrad is None or bgrad.numel() == 0
        grads += [None] * len(biases) if missing else _rows(bgrad, biases) if biases else []
        del wgrad, bgrad
        picked = [g for g, p in zip(grads, (*weights, *biases)) if p.requires_grad]
        grads.clear()
        return picked

    with torch.enable_grad():
        node = _DelayedHalf.apply(compute, *wanted) if wanted else None
    if node is None:
        compute()
    else:
        torch.autograd.backward(node)
    return True
