# SPDX-License-Identifier: Apache-2.0
"""The kinds of modules with delayed weight gradients, for the tests.

A kind makes a module with seeded parameters, runs it, and names its
parameters. The same code drives the regular and the delayed module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

import transformer_engine.pytorch as te

SIZE, ROWS = 32, 64
SPLITS = [32, 0, 24, 8]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Kind:
    """How to make and call one kind.

    Parameters
    ----------
    build : callable
        ``build(delay_wgrad_compute, fuse, dtype, device, **extra)``.
    call : callable
        ``call(module, x)`` for x of ``[ROWS, SIZE]``, giving ``[ROWS, SIZE]``.
    late : tuple of str
        Prefixes of the parameters whose gradient comes late.
    """

    build: Callable
    call: Callable = lambda module, x: module(x)
    late: tuple = ("weight", "bias")


def _dense(cls, *sizes):
    def build(*, delay, fuse, dtype, device, **extra):
        return cls(
            *sizes,
            bias=True,
            params_dtype=dtype,
            device=device,
            delay_wgrad_compute=delay,
            fuse_wgrad_accumulation=fuse,
            **extra,
        )

    return build


def _grouped(size, splits):
    def build(*, delay, fuse, dtype, device, **extra):
        return te.GroupedLinear(
            len(splits),
            size,
            size,
            bias=True,
            params_dtype=dtype,
            device=device,
            delay_wgrad_compute=delay,
            fuse_wgrad_accumulation=fuse,
            **extra,
        )

    return build


def _operation(size, splits):
    def build(*, delay, fuse, dtype, device, **extra):
        return te.ops.GroupedLinear(
            len(splits),
            size,
            size,
            bias=True,
            dtype=dtype,
            device=device,
            delay_wgrad_compute=delay,
            accumulate_into_main_grad=fuse,
            **extra,
        )

    return build


def kinds(size: int, splits: list[int]) -> dict[str, Kind]:
    """Every kind, for inputs of ``[sum(splits), size]``."""

    def call_operation(module, x):
        return module(x, torch.tensor(splits, dtype=torch.int64, device=x.device))

    return {
        "linear": Kind(_dense(te.Linear, size, size)),
        "layernorm_linear": Kind(_dense(te.LayerNormLinear, size, size)),
        "layernorm_mlp": Kind(_dense(te.LayerNormMLP, size, 2 * size), late=("fc1_", "fc2_")),
        "grouped": Kind(_grouped(size, splits), lambda module, x: module(x, list(splits))),
        "ops_grouped": Kind(_operation(size, splits), call_operation, late=("weight",)),
    }


KINDS = kinds(SIZE, SPLITS)


def make(kind: str, device, *, delay, dtype=torch.bfloat16, fuse=False, seed=7, **extra):
    """One module with seeded random parameters."""
    module = KINDS[kind].build(delay=delay, fuse=fuse, dtype=dtype, device=device, **extra)
    fill(module, seed)
    return module


def fill(module, seed=7) -> None:
    """Seeded random parameters, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator).to(param.dtype) * 0.5)


def run(kind: str, module, x):
    """The module's output."""
    return KINDS[kind].call(module, x)


def inputs(device, count=1, dtype=torch.bfloat16, seed=3) -> list[torch.Tensor]:
    """Seeded inputs ``[ROWS, SIZE]`` that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(ROWS, SIZE, generator=generator).to(dtype).to(device).requires_grad_()
        for _ in range(count)
    ]


def loss_of(out) -> torch.Tensor:
    """A loss whose gradient differs from element to element."""
    return (out.float() * out.float().detach().sin()).sum()


def backward(kind: str, module, x) -> None:
    """One forward and backward pass."""
    loss_of(run(kind, module, x)).backward()


def late_names(kind: str, module) -> list[str]:
    """Names of the parameters that ``backward_dw()`` serves."""
    return [n for n, _ in module.named_parameters() if n.startswith(KINDS[kind].late)]


def weight_names(kind: str, module) -> list[str]:
    """Those of them that are weights."""
    return [n for n in late_names(kind, module) if "weight" in n]


def tie(kind: str, first, second) -> None:
    """Make the second module use the first one's late parameters."""
    for name in late_names(kind, first):
        setattr(second, name, getattr(first, name))


def give_main_grads(kind: str, module, value=0.0, **attributes) -> None:
    """An fp32 ``main_grad`` for each weight, and other attributes."""
    for name in weight_names(kind, module):
        param = getattr(module, name)
        param.main_grad = torch.full(param.shape, value, dtype=torch.float32, device=param.device)
        for key, attribute in attributes.items():
            setattr(param, key, attribute)


def main_grads(kind: str, module) -> dict:
    """Copies of ``main_grad`` by name."""
    return {n: getattr(module, n).main_grad.clone() for n in weight_names(kind, module)}


def grads(module) -> dict:
    """Copies of the gradients by parameter name; None where there is none."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def assert_same(got: dict, want: dict, *, missing=False) -> None:
    """All gradients have the same bits; ``missing`` allows None on both sides."""
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert missing or grad is not None, f"{name} has no gradient in the regular path"
        assert (got[name] is None) == (grad is None), f"{name}: {got[name]} against {grad}"
        if grad is not None:
            assert got[name].dtype == grad.dtype
            assert torch.isfinite(grad).all(), f"{name} is not finite"
            assert torch.equal(got[name], grad), f"{name} differs"
