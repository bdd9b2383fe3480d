# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of all groups in one launch: ``out[g] (+)= grad_output[g].T @ inp[g]``.

The kernels lie in a library of their own (``csrc/wgrad_kernels``), which needs CUDA alone; this
module loads it with ctypes. Splits stay on the device: a call neither synchronizes nor copies, so
a CUDA graph can capture it and its replays follow changed splits.

``NVTE_GROUPED_WGRAD_KERNEL=0`` turns the kernels off; ``NVTE_GROUPED_WGRAD_LIBRARY`` names the
library where it is not in the package.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

__all__ = ["grouped_wgrad", "grouped_wgrad_reference", "is_available", "why_not"]

LIBRARY_NAME = "libte_grouped_wgrad.so"
INTERFACE_VERSION = 1
MAX_GROUPS = 4096
_INPUT_TYPES = {torch.bfloat16: 0, torch.float16: 1}
_SPLIT_TYPES = (torch.int32, torch.int64)


def _library_paths() -> list[Path]:
    """Where the library may lie, in order."""
    named = os.environ.get("NVTE_GROUPED_WGRAD_LIBRARY")
    if named:
        return [Path(named)]
    package = Path(__file__).resolve().parent.parent
    return [package / LIBRARY_NAME, package / "pytorch" / LIBRARY_NAME]


@functools.lru_cache(maxsize=1)
def _load():
    """Load the library: it, or why there is none."""
    paths = [path for path in _library_paths() if path.is_file()]
    if not paths:
        return None, f"{LIBRARY_NAME} was not built (looked at {_library_paths()[0]})"
    try:
        library = ctypes.CDLL(str(paths[0]))
        version = library.te_grouped_wgrad_version()
    except (OSError, AttributeError) as error:
        return None, f"{paths[0]} could not be loaded: {error}"
    if version != INTERFACE_VERSION:
        return None, f"{paths[0]} has interface {version}, {INTERFACE_VERSION} is needed"
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.te_grouped_wgrad_error.restype = ctypes.c_char_p
    library.te_grouped_wgrad_workspace_bytes.restype = ctypes.c_size_t
    library.te_grouped_wgrad.restype = integer
    library.te_grouped_wgrad.argtypes = [
        pointer, pointer, pointer, pointer,  # grad_output, inp, out, splits
        integer, integer, integer, integer, integer,  # types, accumulate, groups
        ctypes.c_longlong, integer, integer,  # rows, widths
        pointer, integer, integer, integer, pointer,  # workspace, device, budget, flags, stream
    ]  # fmt: skip
    return library, ""


@functools.lru_cache(maxsize=None)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.lru_cache(maxsize=None)
def _workspace_bytes(groups: int) -> int:
    return _load()[0].te_grouped_wgrad_workspace_bytes(groups)


def enabled() -> bool:
    """Whether the environment lets the kernels be used."""
    return os.getenv("NVTE_GROUPED_WGRAD_KERNEL", "1") != "0"


def is_available(device: torch.device | int | None = None) -> bool:
    """Whether the kernels run on this device: wanted, built, and the GPU new enough."""
    if not enabled() or _load()[0] is None or not torch.cuda.is_available():
        return False
    index = device if isinstance(device, int) else getattr(device, "index", None)
    return _capability(torch.cuda.current_device() if index is None else index) >= (8, 0)


def _refuse(grad_output, inp, splits, out) -> None:
    """Raise TypeError or ValueError that names the operand the kernels cannot take."""
    operands = (("grad_output", grad_output, 2), ("inp", inp, 2), ("splits", splits, 1))
    for name, tensor, dimensions in (*operands, ("out", out, 3)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        shape = tuple(tensor.shape)
        if len(shape) != dimensions:
            raise ValueError(f"{name} must have {dimensions} dimensions, not shape {shape}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, not shape {shape} with strides {tensor.stride()}"
            )
    dtype = grad_output.dtype
    if dtype not in _INPUT_TYPES:
        raise TypeError(f"grad_output must be bfloat16 or float16, not {dtype}")
    if inp.dtype != dtype:
        raise TypeError(f"inp must be {dtype} as grad_output is, not {inp.dtype}")
    if out.dtype not in (torch.float32, dtype):
        raise TypeError(f"out must be float32 or {dtype}, not {out.dtype}")
    if splits.dtype not in _SPLIT_TYPES:
        raise TypeError(f"splits must be int32 or int64, not {splits.dtype}")
    rows, out_features = grad_output.shape
    in_features = inp.shape[1]
    if inp.shape[0] != rows:
        raise ValueError(f"inp has {inp.shape[0]} rows, grad_output has {rows}")
    shape = (splits.shape[0], out_features, in_features)
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, not {tuple(out.shape)}")
    if shape[0] > MAX_GROUPS:
        raise ValueError(f"splits has {shape[0]} groups, at most {MAX_GROUPS} are supported")
    for name, width in (("grad_output", out_features), ("inp", in_features)):
        if width == 0 or width % 8 != 0:
            raise ValueError(f"{name} must have a multiple of 8 columns, not {width}")
    for name, tensor in (("inp", inp), ("splits", splits), ("out", out)):
        if tensor.device != grad_output.device:
            raise ValueError(
                f"{name} is on {tensor.device}, grad_output is on {grad_output.device}"
            )
    for name, tensor in (("grad_output", grad_output), ("inp", inp), ("out", out)):
        if tensor.data_ptr() % 16 != 0:
            raise ValueError(f"{name} must start at a multiple of 16 bytes")


def check(
    grad_output: torch.Tensor, inp: torch.Tensor, splits: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise TypeError or ValueError, naming the operand, where the kernels cannot be used."""
    try:
        # Whether all is well, in one expression: this is on the way of every call.
        (rows, out_features), (rows_too, in_features) = grad_output.shape, inp.shape
        (groups,), dtype, device = splits.shape, grad_output.dtype, grad_output.device
        if (
            rows == rows_too
            and out.shape == (groups, out_features, in_features)
            and 0 < out_features
            and 0 < in_features
            and (out_features | in_features) % 8 == 0
            and groups <= MAX_GROUPS
            and dtype in _INPUT_TYPES
            and inp.dtype is dtype
            and (out.dtype is torch.float32 or out.dtype is dtype)
            and splits.dtype in _SPLIT_TYPES
            and inp.device == device
            and splits.device == device
            and out.device == device
            and grad_output.is_contiguous()
            and inp.is_contiguous()
            and splits.is_contiguous()
            and out.is_contiguous()
            and (grad_output.data_ptr() | inp.data_ptr() | out.data_ptr()) % 16 == 0
        ):
            return
    except (AttributeError, TypeError, ValueError):
        pass
    _refuse(grad_output, inp, splits, out)
    raise AssertionError("grouped wgrad: check and _refuse disagree")


def why_not(
    grad_output: torch.Tensor, inp: torch.Tensor, splits: torch.Tensor, out: torch.Tensor
) -> str:
    """Why the kernels cannot take this call; empty where they can."""
    if not enabled():
        return "NVTE_GROUPED_WGRAD_KERNEL=0"
    if _load()[0] is None:
        return _load()[1]
    try:
        check(grad_output, inp, splits, out)
    except (TypeError, ValueError) as error:
        return str(error)
    if grad_output.device.type != "cuda":
        return f"grad_output is on {grad_output.device}, the kernels need a GPU"
    if _capability(grad_output.device.index) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return ""


def grouped_wgrad(
    grad_output: torch.Tensor,
    inp: torch.Tensor,
    splits: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
    sm_budget: int = 0,
    flags: int = -1,
) -> torch.Tensor:
    """Write ``grad_output[g].T @ inp[g]`` into ``out[g]``, or add it, for every group.

    Parameters
    ----------
    grad_output : torch.Tensor
        ``[rows, out_features]``, bfloat16 or float16; group after group.
    inp : torch.Tensor
        ``[rows, in_features]``, the same type and order.
    splits : torch.Tensor
        ``[groups]``, int32 or int64 on the GPU: the rows of each group. Rows after the last group
        are ignored, whatever they hold. Splits are not checked (that would need the host):
        negative ones count as none, and rows past the last one are cut off.
    out : torch.Tensor
        ``[groups, out_features, in_features]``, float32 or the inputs' type. Sums are formed in
        float32 and rounded once.
    accumulate : bool
        Add to ``out``. A group without rows is then left alone; otherwise it becomes zero.
    sm_budget : int
        At most so many multiprocessors are used; 0 is all of them.
    flags : int
        Variants of the kernel, for measurements; -1 is the one to use.

    The result does not depend on timing: runs are equal bit for bit. Accumulation into float32
    takes numbers below 2**-126 as zero.
    """
    check(grad_output, inp, splits, out)
    device = grad_output.device
    if device.type != "cuda":
        raise ValueError(f"grad_output is on {device}, the kernels need a GPU")
    library, problem = _load()
    if library is None:
        raise RuntimeError(problem)
    rows, out_features = grad_output.shape
    groups, _, in_features = out.shape
    workspace = torch.empty(_workspace_bytes(groups), dtype=torch.uint8, device=device)
    status = library.te_grouped_wgrad(
        grad_output.data_ptr(), inp.data_ptr(), out.data_ptr(), splits.data_ptr(),
        splits.dtype == torch.int64, _INPUT_TYPES[grad_output.dtype], out.dtype == torch.float32,
        accumulate, groups, rows, out_features, in_features, workspace.data_ptr(),
        device.index, sm_budget, flags, torch._C._cuda_getCurrentRawStream(device.index),
    )  # fmt: skip
    if status != 0:
        raise RuntimeError(library.te_grouped_wgrad_error().decode())
    return out


def grouped_wgrad_reference(
    grad_output: torch.Tensor,
    inp: torch.Tensor,
    splits: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Compute the same as :func:`grouped_wgrad` in plain torch, on any device, in ``dtype``.

    Returns a new tensor of that type; ``out`` is read where ``accumulate`` says so.
    """
    result = torch.zeros(out.shape, dtype=dtype, device=out.device)
    if accumulate:
        result += out
    start = 0
    for group, split in enumerate(splits.tolist()):
        stop = min(start + max(split, 0), grad_output.shape[0])
        if stop > start:
            result[group] += grad_output[start:stop].to(dtype).t() @ inp[start:stop].to(dtype)
        start = stop
    return result
