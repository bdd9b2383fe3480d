# SPDX-License-Identifier: Apache-2.0
"""Grouped weights and biases that are one parameter each, where kernels take one an expert.

``GroupedLinear(single_grouped_weight=True)`` holds ``weight [groups, out, in]``.
The native grouped-tensor path hands it to one kernel. Everywhere else the split
path runs, and sees one view an expert; autograd sees one parameter::

    weight [groups, out, in] --members()--> weight[0] ... weight[groups - 1] --> fprop, dgrad
    weight.grad or main_grad <--one buffer-- the views that the wgrad GEMM writes
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence

import torch
import transformer_engine_torch as tex
from torch.distributed.tensor import DTensor

from ..cpp_extensions import _device_splits
from ..cpu_offload import is_cpu_offload_enabled
from ..quantization import FP8GlobalStateManager
from ..quantized_tensor import QuantizedTensorStorage
from ..tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from ..tensor._packed_parameter import plain
from ..tensor.grouped_tensor import GroupedTensor
from ..triton.grouped_dbias_dscales import _is_deterministic_mode
from ..utils import get_device_compute_capability
from ._delayed_wgrad import Group

__all__ = [
    "convert_optimizer_state",
    "members",
    "pack",
    "report_unsupported",
    "takes_grouped_tensors",
    "to_layout_of",
]

_STRICT = "NVTE_GROUPED_LINEAR_STRICT"


# --- parameters -------------------------------------------------------------


def members(
    params: Sequence, packed: bool = True, quantized_compute: bool | None = None
) -> Sequence:
    """The parameters of the split path, one an expert.

    Parameters
    ----------
    params : sequence of torch.Tensor
        One parameter ``[groups, ...]`` where ``packed``, else one an expert.
    packed : bool
        Whether ``params`` holds the one parameter.
    quantized_compute : bool, optional
        For the operands of a GEMM: True gives them scales where cuBLAS wants
        them, False dequantizes. None gives the members themselves.

    Returns
    -------
    sequence of torch.Tensor
        Views of the parameter's memory, without autograd edges, or ``params``.
    """
    if not packed:
        return params
    (param,) = params
    if not isinstance(param, GroupedTensor):
        return param.detach().unbind()
    if quantized_compute is None or param.quantizer is None:
        return param.members
    if quantized_compute:
        return _with_aligned_scales(param)
    return [m.dequantize() if isinstance(m, QuantizedTensorStorage) else m for m in param.members]


def _with_aligned_scales(param: GroupedTensor) -> Sequence[torch.Tensor]:
    """The members, for per-tensor scaling with scales at 16-byte boundaries.

    The packed buffer holds one fp32 scale an expert, side by side; cuBLAS takes
    a pointer to each, and refuses those that are not aligned.
    """
    found = param.members
    if not isinstance(param.quantizer, Float8CurrentScalingQuantizer) or param.scale_inv is None:
        return found
    scales = torch.empty(len(found), 4, dtype=torch.float32, device=param.device)
    scales[:, 0].copy_(param.scale_inv)
    aligned = [type(member).make_like(member) for member in found]
    for member, scale in zip(aligned, scales):
        member._scale_inv = scale[:1]
    return aligned


def lead(params: Sequence) -> torch.Tensor:
    """The first expert's parameter, for its shape."""
    first = params[0]
    return first.members[0] if isinstance(first, GroupedTensor) else first


def drop_other_workspaces(module: torch.nn.Module, packed: bool) -> None:
    """Forget the quantized weights of the path that did not run: they go stale."""
    if module.single_grouped_weight:
        stale = [f"weight{i}" for i in range(module.num_gemms)] if packed else ["weight"]
        for key in stale:
            module._fp8_workspaces.pop(key, None)


_PACKABLE = (Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer)


def pack(weights: Sequence[torch.Tensor], quantizers: Sequence, quantized: bool) -> GroupedTensor:
    """One grouped tensor of the weights' values.

    Parameters
    ----------
    weights : sequence of torch.Tensor
        One ``[out, in]`` an expert.
    quantizers : sequence of Quantizer or None
        One an expert.
    quantized : bool
        Whether the weights are quantized tensors. Those whose quantizer has no
        packed layout (delayed scaling, Identity, Hybrid) keep their memory.

    Returns
    -------
    GroupedTensor
        ``[len(weights), out, in]``.
    """
    first, quantizer = weights[0], quantizers[0] if quantized else None
    if quantized and not isinstance(quantizer, _PACKABLE):
        return GroupedTensor.from_members([weight.detach() for weight in weights], quantizer)
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(
        num_tensors=len(weights),
        shapes=[tuple(first.shape)] * len(weights),
        quantizer=quantizer,
        dtype=first.dtype,
        device=first.device,
    )
    with torch.no_grad():
        for member, weight in zip(grouped.quantized_tensors, weights):
            if quantized:
                member.copy_from_storage(weight)
            else:
                member.copy_(weight)
    return grouped


def take_apart(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Give a layer that is initialized anew one parameter an expert; returns the packed ones."""
    taken = {}
    for stem in ("weight", "bias"):
        packed = module._parameters.get(stem)
        if packed is not None:
            taken[stem] = packed
            for i in range(packed.shape[0]):
                empty = torch.empty(packed.shape[1:], dtype=packed.dtype, device=packed.device)
                module.register_parameter(f"{stem}{i}", torch.nn.Parameter(empty))
            module.register_parameter(stem, None)
    return taken


def put_back(module: torch.nn.Module, taken: dict[str, torch.nn.Parameter]) -> None:
    """Keep the identity and the memory of packed parameters that got new values."""
    for stem, old in taken.items():
        new = module._parameters.get(stem)
        if new is None or old.device != new.device or not isinstance(old, GroupedTensor):
            continue
        if old.quantizer is None and new.quantizer is None:
            with torch.no_grad():
                old.copy_(new)
            module.register_parameter(stem, old)


def regroup(module: torch.nn.Module) -> torch.nn.Module:
    """Make plain packed parameters grouped again, on the same memory; returns ``module``.

    ``Module._apply`` (from the meta device) and ``load_state_dict(assign=True)``
    put plain parameters in the place of grouped ones.
    """
    for stem in ("weight", "bias"):
        param = module._parameters.get(stem)
        if param is None or isinstance(param, (GroupedTensor, DTensor)) or param.dim() < 2:
            continue
        grouped = torch.nn.Parameter(_grouped(param.detach()), requires_grad=param.requires_grad)
        grouped.grad = param.grad
        vars(grouped).update(vars(param))
        module.register_parameter(stem, grouped)
    return module


def _grouped(values: torch.Tensor) -> GroupedTensor:
    """``values [groups, ...]`` as a grouped tensor on the same memory."""
    return GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=values.shape[0],
        tensor_shape=tuple(values.shape[1:]),
        rowwise_data=values,
        dtype=values.dtype,
    )


def group_on_meta_device(module: torch.nn.Module) -> None:
    """Give an operation that is not initialized yet the parameters that it will have."""
    for stem, count in (
        ("weight", module.num_groups * module.single_grouped_weight),
        ("bias", module.num_groups * module.single_grouped_bias * module.use_bias),
    ):
        each = [module._parameters[f"{stem}{i}"] for i in range(count)]
        if each:
            module.register_parameter(
                stem, torch.nn.Parameter(_grouped(torch.stack(each).detach()))
            )
        for i in range(count):
            module.register_parameter(f"{stem}{i}", None)


# --- checkpoints ------------------------------------------------------------


def to_layout_of(module: torch.nn.Module, state_dict: dict, prefix: str) -> None:
    """Rename and repack a checkpoint's grouped parameters to the layout of ``module``.

    Parameters
    ----------
    state_dict : dict
        Changed in place; keys of the layout that the module lacks disappear.
    prefix : str
        Of the module's keys, with its dot.
    """
    for stem in ("weight", "bias"):
        count = sum(f"{stem}{i}" in module._parameters for i in range(len(module._parameters)))
        one, each = prefix + stem, [f"{prefix}{stem}{i}" for i in range(count)]
        if not count:
            continue
        if module._parameters.get(stem) is not None:
            parts = [state_dict.pop(key, None) for key in each]
            if one not in state_dict and all(part is not None for part in parts):
                state_dict[one] = _stack(parts)
        elif one in state_dict:
            # Experts that the module lacks keep a key: a strict load then names them.
            for i, part in enumerate(_unstack(state_dict.pop(one))):
                state_dict.setdefault(f"{one}{i}", part)


def show_memory(state_dict: dict, prefix: str, keep_vars: bool) -> None:
    """Put plain tensors on the parameters' memory into a state dict, for every way to save it."""
    for key in (f"{prefix}weight", f"{prefix}bias"):
        if key in state_dict and not keep_vars:
            state_dict[key] = plain(state_dict[key])


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_plain(part) for part in parts])


def _unstack(packed: torch.Tensor) -> Sequence[torch.Tensor]:
    return _plain(packed).unbind()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, (GroupedTensor, QuantizedTensorStorage)):
        tensor = tensor.dequantize()
    return tensor.detach()


def convert_optimizer_state(state: dict, source: Sequence[str], target: Sequence[str]) -> dict:
    """An optimizer's state dict for the other layout of grouped parameters.

    Parameters
    ----------
    state : dict
        ``optimizer.state_dict()``. Tensors of a parameter's shape are stacked or
        split; everything else (the step) is taken from the first expert.
    source, target : sequence of str
        Names of the parameters in the order in which the optimizers hold them:
        ``[name for name, _ in model.named_parameters()]``.

    Returns
    -------
    dict
        For ``load_state_dict`` of an optimizer of the ``target`` parameters.

    Raises
    ------
    ValueError
        Where a target parameter has no source, its experts are in different groups,
        or some of them have no state.
    """
    groups = state["param_groups"]
    home = {source[i]: number for number, group in enumerate(groups) for i in group["params"]}
    index = {name: i for i, name in enumerate(source)}
    members_of: list[list[int]] = [[] for _ in groups]
    out = {}
    for number, name in enumerate(target):
        stem = name.rstrip("0123456789")
        each = [f"{name}{i}" for i in range(len(source)) if f"{name}{i}" in index]
        if name in index:
            names, entry = [name], state["state"].get(index[name])
        elif stem in index and stem != name:
            names, entry = [stem], state["state"].get(index[stem])
            entry = entry and _each_tensor(entry, lambda v, i=int(name[len(stem) :]): v[i])
        elif each:
            names, entries = each, [state["state"].get(index[n]) for n in each]
            missing = [n for n, e in zip(each, entries) if not e]
            if missing and len(missing) < len(each):
                raise ValueError(f"Not all experts of {name} have a state; {missing} have none.")
            entry = entries[0] and {
                key: torch.stack([e[key] for e in entries]) if _has_shape(value) else value
                for key, value in entries[0].items()
            }
        else:
            raise ValueError(f"The optimizer state has no {name}, and neither its experts.")
        if len({home[n] for n in names}) > 1:
            raise ValueError(f"The experts of {name} are in different parameter groups.")
        members_of[home[names[0]]].append(number)
        if entry:
            out[number] = entry
    groups = [{**g, "params": numbers} for g, numbers in zip(groups, members_of)]
    for group in groups:
        if "param_names" in group:
            group["param_names"] = [target[i] for i in group["params"]]
    return {**state, "state": out, "param_groups": groups}


def _has_shape(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _each_tensor(entry: dict, function) -> dict:
    # An optimizer counts a parameter's steps in place: experts must not share the count.
    return {k: function(v) if _has_shape(v) else copy.deepcopy(v) for k, v in entry.items()}


# --- which path -------------------------------------------------------------


def takes_grouped_tensors(
    module: torch.nn.Module,
    m_splits: torch.Tensor,
    weights: Sequence[torch.Tensor],
    output_quantizers: Sequence,
    debug: bool,
) -> bool:
    """Whether a ``GroupedLinear`` runs the native grouped-tensor path in this forward.

    Parameters
    ----------
    m_splits : torch.Tensor
        ``[num_gemms]``, int64; only its device is asked for.
    weights : sequence of torch.Tensor
        One packed weight or one an expert.

    Raises
    ------
    RuntimeError
        Where ``use_grouped_tensor=True`` cannot be had and
        ``NVTE_GROUPED_LINEAR_STRICT=1``.
    """
    if not module.use_grouped_tensor:
        return False
    why = _why_split(module, m_splits, weights, output_quantizers, debug)
    if why is not None:
        report_fallback("GroupedLinear(use_grouped_tensor=True)", why)
    return why is None


def _why_split(module, m_splits, weights, output_quantizers, debug) -> str | None:
    """Why the native path cannot run, or None."""
    # pylint: disable=import-outside-toplevel
    from .grouped_linear import is_module_grouped_tensor_path_supported

    if m_splits.device.type != "cuda":
        return "m_splits is a list or a CPU tensor; it takes a CUDA int64 tensor"
    recipe = FP8GlobalStateManager.get_fp8_recipe() if module.fp8 else None
    if module.apply_bias and _is_deterministic_mode() and not (recipe and recipe.mxfp8()):
        return "its bias gradient kernel is not deterministic (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0)"
    if module.fp8_calibration:
        return "FP8 calibration is on"
    if debug:
        return "TE debug features are on"
    if is_cpu_offload_enabled():
        return "CPU offloading is on"
    if any(quantizer is not None for quantizer in output_quantizers):
        return "the output is quantized"
    if not are_grouped(module):
        return _PLAIN
    if module.single_grouped_weight:
        weight = weights[0]
        if not isinstance(weight, GroupedTensor) or weight.rowwise_data is None:
            return "the weights do not lie in one GroupedTensor buffer"
        if weight.quantizer is not None and not module.fp8:
            return "the weights are quantized and the compute is not"
    if is_module_grouped_tensor_path_supported(recipe, module.activation_dtype):
        return None
    why = _device_splits.why_not(recipe, module.activation_dtype, weights)
    return why and f"{_unsupported(recipe, module.activation_dtype)}, and {why}"


_PLAIN = "FSDP, a parametrization or an assignment put a plain tensor in place of a grouped one"


def are_grouped(module: torch.nn.Module) -> bool:
    """Whether the single parameters are what the native path takes; warns for an operation."""
    grouped = all(
        isinstance(getattr(module, stem, None), (GroupedTensor, type(None)))
        for stem in ("weight", "bias")
        if getattr(module, f"single_grouped_{stem}")
    )
    if not grouped and hasattr(module, "op_forward"):
        report_fallback("ops.GroupedLinear with single parameters", _PLAIN)
    return grouped


def report_unsupported(setting: str, recipe, dtype: torch.dtype) -> None:
    """:func:`report_fallback` where there is no kernel for ``recipe`` and ``dtype``."""
    report_fallback(setting, _unsupported(recipe, dtype))


def _unsupported(recipe, dtype: torch.dtype) -> str:
    """What the device, its libraries, the recipe and the data type are."""
    major, minor = get_device_compute_capability()
    compute = str(dtype).removeprefix("torch.")
    if recipe is not None:
        compute += f" with {type(recipe).__name__}"
    return (
        f"it has no kernel for {compute} on compute capability {major}.{minor} "
        f"with cuBLASLt {tex.get_cublasLt_version()}"
    )


_reported: set[tuple[str, str]] = set()


def report_fallback(setting: str, why: str) -> None:
    """Warn once that the split path serves where ``setting`` asks for the native one.

    Raises
    ------
    RuntimeError
        Instead, where ``NVTE_GROUPED_LINEAR_STRICT=1``.
    """
    text = f"{setting} asks for the native grouped-tensor path, which cannot run here: {why}."
    if int(os.getenv(_STRICT, "0")):
        raise RuntimeError(f"{text} Unset {_STRICT} to let the split path serve.")
    if (setting, why) not in _reported:
        _reported.add((setting, why))
        warnings.warn(
            f"{text} The split path serves, with the same numbers. {_STRICT}=1 makes this an error.",
            stacklevel=2,
        )


# --- gradients --------------------------------------------------------------


def check_main_grads(ctx, weights: list, main_grads: list) -> list:
    """``main_grad`` of a packed weight as ``[groups, out, in]``; others as they are.

    Raises
    ------
    RuntimeError
        Where its size or layout does not fit, before a kernel writes it.
    """
    if not ctx.single_grouped_weight:
        return main_grads
    return Group(weights, layout="packed", fused=True, dtype=ctx.activation_dtype).main_grads()


def gemm_outputs(ctx, wgrads: list) -> list:
    """What the split wgrad GEMM writes: one ``[out, in]`` an expert."""
    return list(wgrads[0].unbind()) if ctx.single_grouped_weight else wgrads


def finish_bias_grads(ctx, grads: list) -> list:
    """Bias gradients, ``[out]`` an expert or None, in the layout of the bias parameters."""
    if not ctx.single_grouped_bias:
        return grads
    return [None if grads[0] is None else torch.stack(grads)]
