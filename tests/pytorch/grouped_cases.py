# SPDX-License-Identifier: Apache-2.0
"""Grouped linear layers with one parameter or one an expert, on the same numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import sys

import pytest
import torch
from transformer_engine.common import recipe as recipes

import transformer_engine.pytorch as te

GROUPS, OUT, IN = 4, 256, 128
SPLITS = [128, 0, 64, 32]
ROWS = sum(SPLITS)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HAS_GPU = "cpu_executor" not in sys.modules
# How callers give the splits; a slice is a column of a [groups, 2] tensor.
FORMS = ["list", "cpu", "cpu-int32", "device", "device-int32", "device-slice"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train.

    Parameters
    ----------
    kind : str
        "module" or "ops".
    bias : str
        "none", "separate" or "single" (which is separate in the reference).
    side_by_side : bool
        Separate weights lie in one buffer.
    single_weight : bool
        False tests a single bias beside separate weights.
    frozen : str
        "", "weight", "bias" or "weight bias".
    fuse, delay : bool
        main_grad; backward_dw().
    main_grad : str
        A layout of :func:`give_main_grads`; in the reference, "same".
    splits : tuple or None
        Token counts; None for SPLITS.
    form : str
        Of the splits: one of FORMS.
    extra : dict
        More constructor arguments.
    """

    kind: str = "module"
    bias: str = "separate"
    single_weight: bool = True
    side_by_side: bool = False
    frozen: str = ""
    fuse: bool = False
    delay: bool = False
    main_grad: str = "same"
    dtype: torch.dtype = torch.bfloat16
    splits: tuple | None = None
    form: str = "list"
    extra: dict = dataclasses.field(default_factory=dict)


def build(case: Case, device, *, single: bool, init=contextlib.nullcontext):
    """A layer with seeded parameters; ``single=False`` is the reference."""
    module = case.kind == "module"
    names = ("params_dtype", "fuse_wgrad_accumulation") if module else ("dtype", None)
    extra = {names[0]: case.dtype, **case.extra}
    extra["fuse_wgrad_accumulation" if module else "accumulate_into_main_grad"] = case.fuse
    if single:
        extra["single_grouped_weight"] = case.single_weight
        extra["single_grouped_bias"] = case.bias == "single"
    cls = te.GroupedLinear if module else te.ops.GroupedLinear
    with init():
        layer = cls(
            GROUPS,
            IN,
            OUT,
            bias=case.bias != "none",
            device=device,
            delay_wgrad_compute=case.delay,
            **extra,
        )
    fill(layer)
    if case.side_by_side and not single:
        side_by_side(layer)
    for name, param in layer.named_parameters():
        param.requires_grad_(name.rstrip("0123456789") not in case.frozen.split())
    return layer


def numbers(shape, seed: int) -> torch.Tensor:
    """Seeded numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(layer) -> None:
    """The same numbers for one parameter as for one an expert."""
    values = {"weight": numbers((GROUPS, OUT, IN), 5) * 0.1, "bias": numbers((GROUPS, OUT), 6)}
    with torch.no_grad():
        for name, param in layer.named_parameters():
            stem = name.rstrip("0123456789")
            value = values[stem] if name == stem else values[stem][int(name[len(stem) :])]
            param.copy_(value.to(device=param.device, dtype=param.dtype))


def inputs(device, count=2, dtype=torch.bfloat16, rows=ROWS) -> list[torch.Tensor]:
    """Seeded inputs ``[rows, IN]``."""
    return [numbers((rows, IN), 40 + i).to(dtype).to(device).requires_grad_() for i in range(count)]


def splits_as(form: str, splits, device):
    """Token counts in one of FORMS."""
    if form == "list":
        return list(splits)
    where, _, kind = form.partition("-")
    tensor = torch.tensor(
        splits,
        dtype=torch.int32 if kind == "int32" else torch.int64,
        device=device if where == "device" else "cpu",
    )
    return torch.stack([tensor, tensor], dim=1)[:, 0] if kind == "slice" else tensor


def call(layer, x, splits=None, **extra):
    """The layer's output; splits as the kind's callers usually give them, or a tensor as it is."""
    splits = SPLITS if splits is None else splits
    if not isinstance(splits, torch.Tensor):
        module = isinstance(layer, te.GroupedLinear)
        splits = list(splits) if module else splits_as("device", splits, x.device)
    return layer(x, splits, **extra)


def loss_of(out) -> torch.Tensor:
    """A loss whose gradient differs from element to element."""
    return (out.float() * out.float().detach().sin()).sum()


def linear_loss(out) -> torch.Tensor:
    """A loss whose gradient does not depend on the output, so that it is the same for two of them."""
    return (out.float() * numbers(out.shape, 41).to(out.device)).sum()


def packed(layer, stem: str, of=lambda param: param) -> torch.Tensor | None:
    """``of(parameter)`` of the one parameter, or of the experts' ones, stacked."""
    single = getattr(layer, stem, None)
    if single is not None:
        return of(single)
    found = [getattr(layer, f"{stem}{i}", None) for i in range(GROUPS)]
    found = [None if param is None or not param.numel() else of(param) for param in found]
    return None if found[0] is None else torch.stack([f.detach() for f in found])


def plain(param) -> torch.Tensor:
    """A parameter's values as a plain tensor."""
    return torch.stack([v.detach() for v in param.unbind()]) if param.dim() == 3 else param + 0


def gradients(layer) -> dict:
    """``.grad`` by stem, as one tensor; None where there is none."""
    return {stem: packed(layer, stem, lambda p: p.grad) for stem in ("weight", "bias")}


def give_main_grads(layer, layout="same", value=0.25, **attributes) -> torch.Tensor:
    """An fp32 main_grad for each weight in one buffer, which is returned with its guards.

    Layouts: "same" (as the weight), "flat", "2d", "band" (guarded), "apart" (a gap after each).
    """
    weights = [p for n, p in layer.named_parameters() if n.startswith("weight")]
    guard, gap = 32 if layout == "band" else 0, 64 if layout == "apart" else 0
    size = sum(weight.numel() + gap for weight in weights)
    buffer = torch.full((size + 2 * guard,), value, device=weights[0].device)
    place = guard
    for weight in weights:
        part = buffer[place : place + weight.numel()]
        place += weight.numel() + gap
        shapes = {"flat": (-1,), "2d": (-1, IN)}
        weight.main_grad = part.view(shapes.get(layout, tuple(weight.shape)))
        for key, attribute in attributes.items():
            setattr(weight, key, attribute)
    return buffer


def train(
    case: Case, device, *, single: bool, init=contextlib.nullcontext, autocast=None, loss=loss_of,
    **late,
):  # fmt: skip
    """Two microbatches; outputs and gradients by name, one tensor a parameter."""
    layer = build(case, device, single=single, init=init)
    layout = case.main_grad if single or case.main_grad == "apart" else "same"
    buffer = give_main_grads(layer, layout) if case.fuse else None
    rows = sum(case.splits or SPLITS)
    seen = {}
    for number, x in enumerate(inputs(device, 2, case.dtype, rows)):
        with autocast() if autocast else contextlib.nullcontext():
            splits = splits_as(case.form, case.splits or SPLITS, x.device)
            out = call(layer, x, splits, **late)
        out = out[0] if isinstance(out, tuple) else out
        loss(out).backward()
        seen |= {f"out{number}": out.detach(), f"dx{number}": x.grad}
        if case.delay:
            before = gradients(layer)["weight"]
            assert number or before is None, "a gradient before backward_dw()"
            while layer.pending_backward_dw:
                layer.backward_dw()
    seen |= gradients(layer)
    if case.fuse:
        guard = 32 if layout == "band" else 0
        edges = torch.cat([buffer[:guard], buffer[buffer.numel() - guard :]])
        assert torch.equal(edges, torch.full_like(edges, 0.25)), "written outside main_grad"
        weights = (p for n, p in layer.named_parameters() if n.startswith("weight"))
        seen["main_grad"] = torch.cat([weight.main_grad.reshape(-1) for weight in weights])
    return layer, seen


def assert_same(got: dict, want: dict) -> None:
    """The same names, and the same bits."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] is None) == (value is None), f"{name}: {got[name]} against {value}"
        if value is not None:
            assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
            assert torch.isfinite(value).all(), f"{name} is not finite"
            assert torch.equal(got[name], value), f"{name} differs"


# --- recipes ----------------------------------------------------------------


def _identity(role):
    from transformer_engine.pytorch.tensor import IdentityQuantizer

    return IdentityQuantizer()


def _hybrid(role):
    from transformer_engine.pytorch.tensor import HybridQuantizer

    return HybridQuantizer(rowwise_quantizer=_current(role), columnwise_quantizer=_current(role))


def _current(role):
    import transformer_engine_torch as tex

    from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

    backward = role is not None and "grad" in role.tensor_type
    dtype = tex.DType.kFloat8E5M2 if backward else tex.DType.kFloat8E4M3
    return Float8CurrentScalingQuantizer(dtype, device=torch.device("cuda"))


RECIPES = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "custom-current": lambda: recipes.CustomRecipe(qfactory=_current),
    "custom-identity": lambda: recipes.CustomRecipe(qfactory=_identity),
    "custom-hybrid": lambda: recipes.CustomRecipe(qfactory=_hybrid),
    "backward-high-precision": lambda: recipes.Float8CurrentScaling(
        backward_override="high_precision"
    ),
    "backward-dequantized": lambda: recipes.Float8CurrentScaling(backward_override="dequantized"),
}


def recipe_is_available(name: str) -> bool:
    """Whether this GPU has the recipe of that name in RECIPES."""
    query = {
        "block": "is_fp8_block_scaling_available",
        "mxfp8": "is_mxfp8_available",
        "nvfp4": "is_nvfp4_available",
    }.get(name)
    return query is None or getattr(te, query)()


def side_by_side(layer) -> None:
    """Put a layer's separate weights into one buffer, expert after expert."""
    weights = [getattr(layer, f"weight{i}") for i in range(GROUPS)]
    buffer = torch.stack([weight.detach() for weight in weights])
    for weight, part in zip(weights, buffer):
        weight.data = part


@contextlib.contextmanager
def grouped_wgrad_calls():
    """The calls of the grouped wgrad kernel in the block; its reference runs without a GPU."""
    kernels = "transformer_engine.pytorch.cpp_extensions._grouped_kernels"
    kernels, module = sys.modules[kernels], sys.modules["transformer_engine.pytorch.grouped_wgrad"]
    calls, kernel = [], module.grouped_wgrad

    def spy(grad_output, inp, splits, out, *, accumulate=False):
        calls.append(out)
        if HAS_GPU:
            return kernel(grad_output, inp, splits, out, accumulate=accumulate)
        module.check(grad_output, inp, splits, out)
        return out.copy_(
            module.grouped_wgrad_reference(
                grad_output, inp, splits, out, accumulate=accumulate, dtype=torch.float32
            )
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "grouped_wgrad", spy)
        if not HAS_GPU:
            patch.setattr(kernels, "hopper_kernels", lambda device: module.enabled())
            patch.setattr(
                kernels, "splits_on_device", lambda s, device: torch.tensor(s, dtype=torch.int32)
            )
        yield calls


def assert_near(got: dict, want: dict) -> None:
    """The same names, and the same numbers up to the order of sums.

    Sums are formed in fp32 and rounded once, so that a result of 16 bits may be one unit in the
    last place away: 2**-8 of it in bf16, 2**-11 in fp16.
    """
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
            limit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(value.dtype, 1e-5)
            distance = (got[name].double() - value.double()).norm()
            assert distance <= limit * value.double().norm(), f"{name}: {distance}"
