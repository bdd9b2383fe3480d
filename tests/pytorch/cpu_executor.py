# SPDX-License-Identifier: Apache-2.0
"""Run the real, built Transformer Engine on a machine without a GPU. For tests only.

:func:`install` answers torch's device queries as if one GPU of compute
capability 9.0 were there, keeps every tensor on the CPU, and replaces the
compute entry points of ``transformer_engine_torch`` with independent references
in plain torch: inputs are widened to fp32, accumulated there, and rounded once
to the output type. Memory that torch calls uninitialised comes back filled with
NaN, so a value that no kernel wrote is seen.

What this shows: which gradient goes where, how often, and when. What it does
not show: the CUDA kernels, streams, graphs, FP8. Entry points and Triton kernels
without a reference here raise NotImplementedError with their name, and so do FP8
and CUDA graphs; streams and events find that everything has run.

TE's grouped-tensor path, which single grouped parameters need, is off as with an
older cuBLAS. A test that wants it replaces ``get_cublasLt_version`` of
``transformer_engine_torch`` by one that answers 130600.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["install"]

_installed = False


def install() -> None:
    """Patch torch, import Transformer Engine and patch it. A second call does nothing.

    Raises
    ------
    RuntimeError
        When there is a GPU: tests then run on it.
    """
    global _installed  # pylint: disable=global-statement
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("A GPU is there: run the tests on it, without the CPU executor.")
    _answer_device_queries()
    _keep_tensors_on_cpu()
    # Triton and the JIT fusers compile for a GPU; TE then runs them as plain Python.
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.current_stream = lambda *_a: _Stream()
    import transformer_engine.pytorch  # noqa: F401  pylint: disable=import-outside-toplevel,unused-import

    _replace_entry_points(sys.modules["transformer_engine_torch"])
    _replace_triton_launches()
    _pretend_split_sizes_on_device()
    _installed = True


# --- torch ------------------------------------------------------------------


class _Stream:
    """Stands for the one stream: everything has run when it returns."""

    cuda_stream = 0
    stream_id = 0
    device = torch.device("cpu")

    def __init__(self, *_args, **_kwargs) -> None:
        pass

    def _nothing(self, *_args, **_kwargs) -> None:
        """Streams, events: there is nothing to wait for."""

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event=None):
        """An event that has happened."""
        return event or _Stream()

    def query(self) -> bool:
        """Done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is captured here."""
        return False

    def elapsed_time(self, _end) -> float:
        """Nothing is timed here."""
        raise NotImplementedError("torch.cuda.Event.elapsed_time: run this on a GPU.")


def _answer_device_queries() -> None:
    properties = types.SimpleNamespace(
        name="CPU executor", major=9, minor=0, multi_processor_count=132, total_memory=16 << 30
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "get_device_name": properties.name,
        "is_current_stream_capturing": False,
        "synchronize": None,
        "current_stream": _Stream(),
        "default_stream": _Stream(),
        "empty_cache": None,
        "is_bf16_supported": True,
        "set_device": None,
        "get_rng_state": torch.get_rng_state(),
        "set_rng_state": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_a, _answer=answer, **_k: _answer)
    torch.cuda.Stream = torch.cuda.Event = _Stream
    for name in ("device", "stream"):
        setattr(torch.cuda, name, lambda *_a, **_k: contextlib.nullcontext())
    for name in ("graph", "CUDAGraph", "make_graphed_callables", "graph_pool_handle"):
        setattr(torch.cuda, name, _missing(f"torch.cuda.{name}"))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *_a, **_k: None)
    torch.cuda.default_generators = (torch.default_generator,)
    # torch seeds the GPU's generators too when one seems to be there.
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda *_a, **_k: None
    torch.cuda._is_in_bad_fork = lambda: False  # pylint: disable=protected-access
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.Tensor.cuda = lambda self, *_a, **_k: self
    torch.Tensor.record_stream = lambda self, _stream: None


def _cpu(device):
    """The CPU for a CUDA device or index; other devices (meta) as they are."""
    if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
        return torch.device("cpu")
    return device


def _keep_tensors_on_cpu() -> None:
    def wrap(owner, name: str, fill: bool) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def factory(*args, **kwargs):
            if "device" in kwargs:
                kwargs["device"] = _cpu(kwargs["device"])
            out = original(*args, **kwargs)
            if fill and (out.is_floating_point() or out.is_complex()) and out.device.type != "meta":
                with torch.no_grad():
                    out.fill_(float("nan"))
            return out

        setattr(owner, name, factory)

    for name in ("empty", "empty_like", "empty_strided"):
        wrap(torch, name, True)
    for name in ("new_empty", "new_empty_strided"):
        wrap(torch.Tensor, name, True)
    for name in (
        "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "tensor", "arange",
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "linspace", "as_tensor",
        "eye",
    ):  # fmt: skip
        wrap(torch, name, False)
    for name in ("new_zeros", "new_ones", "new_full", "new_tensor"):
        wrap(torch.Tensor, name, False)
    to = torch.Tensor.to

    @functools.wraps(to)
    def to_cpu(self, *args, **kwargs):
        args = [
            _cpu(a) if isinstance(a, (str, torch.device)) and not isinstance(a, torch.dtype) else a
            for a in args
        ]
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    torch.Tensor.to = to_cpu


# --- GEMM -------------------------------------------------------------------


def _no_quantizer(name: str, *things) -> None:
    """References hold for plain tensors only."""
    for thing in things:
        if thing is not None and not isinstance(thing, torch.Tensor):
            raise NotImplementedError(
                f"{name} with {type(thing).__name__}: the CPU executor has no quantized references; "
                "run this on a GPU."
            )


def _product(a, transa: bool, b, transb: bool) -> torch.Tensor:
    """fp32 ``op(B) @ op(A)`` of the operands as 2-D matrices (the extension's order)."""
    a, b = (t.reshape(-1, t.shape[-1]).float() for t in (a, b))
    return (b.t() if transb else b) @ (a.t() if transa else a)


def _store(acc, out, dtype, accumulate: bool, beta: float = 1.0) -> torch.Tensor:
    """Round ``acc`` once: into ``out`` when given, on top of it when accumulating."""
    if out is None:
        return acc.to(dtype)
    acc = acc.view_as(out)
    out.copy_(out.float() * beta + acc if accumulate else acc)
    return out


def _members(group) -> list[torch.Tensor]:
    """The matrices of a list, or views of those in a grouped tensor's buffer."""
    if isinstance(group, (list, tuple)):
        _no_quantizer("grouped GEMM", *group)
        return list(group)
    _no_quantizer("grouped GEMM", group.quantizer)
    if group.last_dims is not None:
        raise NotImplementedError("grouped GEMM with varying columns: run this on a GPU.")
    height, columns = group.logical_shape
    rows = [height // group.num_tensors] * group.num_tensors
    if group.first_dims is not None:
        rows = group.first_dims.tolist()
    starts = [sum(rows[:i]) * columns for i in range(len(rows))]
    if group.tensor_offsets is not None:
        starts = group.tensor_offsets.tolist()
    data = group.rowwise_data.view(-1)
    return [data[s : s + r * columns].view(r, columns) for s, r in zip(starts, rows)]


def _groups(operand, splits) -> list[torch.Tensor]:
    """The groups of an operand that is a list or one packed tensor."""
    if not isinstance(operand, torch.Tensor):
        return list(operand)
    if operand.dim() == 3:
        return list(operand.unbind())
    rows = [*splits, len(operand) - sum(splits)]
    return list(operand.split(rows))[:-1]


class _References:
    """One method an entry point, with the entry point's name and argument order."""

    def __init__(self, tex) -> None:
        names = {"Float32": "float32", "Float16": "float16", "BFloat16": "bfloat16"}
        self._types = {getattr(tex.DType, f"k{k}"): getattr(torch, v) for k, v in names.items()}

    def _dtype(self, te_type, default=None) -> torch.dtype:
        return default if te_type is None else self._types[te_type]

    def generic_gemm(
        self, a, transa, b, transb, out, quantizer, out_dtype, bias, bias_type, gelu, gelu_in, grad,
        workspace, workspace_size, accumulate, use_split_accumulator, comm_overlap=None,
        comm_type=None, extra_output=None, bulk_overlap=False, alpha=1.0, beta=None,
    ):  # fmt: skip
        """``D = alpha * op(B) @ op(A) (+ beta * D)`` with bias, GELU, or the backward of one."""
        del bias_type, workspace, workspace_size, use_split_accumulator, comm_type, bulk_overlap
        _no_quantizer("generic_gemm", a, b, out, quantizer, comm_overlap)
        acc = _product(a, transa, b, transb) * alpha
        shape = acc.shape if transb else (*b.shape[:-1], acc.shape[-1])
        bias_grad = None
        if bias is not None and bias.numel() and not grad:
            acc = acc + bias.float()
        if gelu and grad:
            acc = _backward(_gelu, acc, gelu_in.reshape(acc.shape).float())
        if bias is not None and bias.numel() and grad:
            bias_grad = b.reshape(-1, b.shape[-1]).float().sum(dim=0).to(bias.dtype)
        dtype = self._dtype(out_dtype, a.dtype) if out is None else out.dtype
        if gelu and not grad:
            gelu_in = acc.to(dtype).view(shape)
            acc = _gelu(acc)
        result = _store(acc.view(shape), out, dtype, accumulate, 1.0 if beta is None else beta)
        return result, bias_grad, gelu_in if gelu else None, extra_output

    def te_general_grouped_gemm(
        self, a, transa, b, transb, out, out_dtype, m_splits, bias, bias_type, single_output,
        pre_gelu_out, grad, workspace, workspace_size, accumulate, use_split_accumulator,
        math_sm_count,
    ):  # fmt: skip
        """One GEMM a group; the bias list holds biases, or receives bias gradients.

        An operand is a list, or one tensor: ``[groups, ...]``, or rows that the splits cut.
        """
        del bias_type, workspace, workspace_size, use_split_accumulator, math_sm_count
        a, b = _groups(a, m_splits), _groups(b, m_splits)
        _no_quantizer("te_general_grouped_gemm", *a, *b)
        if any(t is not None and t.numel() for t in pre_gelu_out):
            raise NotImplementedError("te_general_grouped_gemm with GELU: run this on a GPU.")
        if single_output and not isinstance(out, torch.Tensor):
            out = out[0].view(-1, out[0].shape[-1])
        outs = [None] * len(a) if out is None else _groups(out, m_splits)
        results = []
        for i, (left, right) in enumerate(zip(a, b)):
            acc = _product(left, transa, right, transb)
            if bias[i].numel() and not grad:
                acc = acc + bias[i].float()
            if bias[i].numel() and grad:
                bias[i].copy_(right.reshape(-1, right.shape[-1]).float().sum(dim=0))
            results.append(_store(acc, outs[i], self._dtype(out_dtype), accumulate))
        return results if out is None else bias

    def te_general_grouped_gemm_for_grouped_tensor(
        self, a, transa, b, transb, out, bias, bias_scale, alpha, beta, workspace_setup, workspace,
        use_split_accumulator, math_sm_count,
    ):  # fmt: skip
        """One GEMM a group, of tensors that lie in one buffer; the split sizes are tensors."""
        del workspace_setup, workspace, use_split_accumulator, math_sm_count
        row = 0
        for i, (left, right, result) in enumerate(zip(_members(a), _members(b), _members(out))):
            acc = _product(left, transa, right, transb) * alpha[i % alpha.numel()]
            if bias is not None:
                scale = 1.0
                if bias_scale is not None:
                    scale = bias_scale[row : row + len(acc), None].float()
                acc = acc + _members(bias)[i].float() * scale
            row += len(acc)
            factor = float(beta[i % beta.numel()])
            _store(acc, result, result.dtype, factor != 0.0, factor)
        return out

    te_general_grouped_gemm_for_discrete_in = te_general_grouped_gemm_for_grouped_tensor
    te_general_grouped_gemm_for_discrete_out = te_general_grouped_gemm_for_grouped_tensor

    def splits_to_offsets_multi(
        self, split_sizes, device, *, strides, include_leading_zero, dtypes, bulk_allocate=False
    ):
        """``(split sizes, [their running sums times each stride])``."""
        del device, bulk_allocate
        split_sizes = split_sizes.as_subclass(torch.Tensor).long()
        sums = split_sizes.cumsum(0)
        outs = []
        for stride, zero, dtype in zip(strides, include_leading_zero, dtypes):
            outs.append((F.pad(sums, (1, 0)) if zero else sums).mul(stride).to(dtype))
        return split_sizes, outs

    def get_cublasLt_version(self):
        """One that has no grouped GEMM on this GPU; where it says 130400 or more TE uses it."""
        return 130000

    def bulk_allocate(self, shapes, dtypes, device=None, alignments=None):
        """Tensors of the shapes; the real one packs them into one buffer."""
        del device, alignments
        return [torch.empty(tuple(s), dtype=d) for s, d in zip(shapes, dtypes)]

    # --- normalisation: statistics in fp32, one a row -----------------------

    def layernorm_fwd(
        self, x, weight, bias, eps, out, quantizer, out_dtype, sm_margin, zero_centered
    ):
        """``(out, mean, rsigma)`` over the last dimension."""
        del sm_margin
        _no_quantizer("layernorm_fwd", x, quantizer)
        wide = x.float()
        mean = wide.mean(-1)
        rsigma = torch.rsqrt((wide - mean[..., None]).square().mean(-1) + eps)
        y = (wide - mean[..., None]) * rsigma[..., None] * _gamma(weight, zero_centered)
        if bias is not None:
            y = y + bias.float()
        return [_store(y, out, self._dtype(out_dtype, x.dtype), False), mean, rsigma]

    def layernorm_bwd(self, dz, x, mean, rsigma, weight, sm_margin, zero_centered):
        """``(dx, dgamma, dbeta)``."""
        del sm_margin
        wide = x.float()
        normed = (wide - mean.view(-1, 1)) * rsigma.view(-1, 1)
        scaled = dz.float() * _gamma(weight, zero_centered)
        dx = scaled - scaled.mean(-1, True) - normed * (scaled * normed).mean(-1, True)
        dgamma, dbeta = (dz.float() * normed).sum(0), dz.float().sum(0)
        return [
            (dx * rsigma.view(-1, 1)).to(x.dtype), dgamma.to(weight.dtype), dbeta.to(weight.dtype)
        ]  # fmt: skip

    def rmsnorm_fwd(self, x, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered):
        """``(out, None, rsigma)`` over the last dimension."""
        del sm_margin
        _no_quantizer("rmsnorm_fwd", x, quantizer)
        rsigma = torch.rsqrt(x.float().square().mean(-1) + eps)
        y = x.float() * rsigma[..., None] * _gamma(weight, zero_centered)
        return [_store(y, out, self._dtype(out_dtype, x.dtype), False), None, rsigma]

    def rmsnorm_bwd(self, dz, x, rsigma, weight, sm_margin, zero_centered):
        """``(dx, dgamma)``."""
        del sm_margin
        normed = x.float() * rsigma.view(-1, 1)
        scaled = dz.float() * _gamma(weight, zero_centered)
        dx = (scaled - normed * (scaled * normed).mean(-1, True)) * rsigma.view(-1, 1)
        return [dx.to(x.dtype), (dz.float() * normed).sum(0).to(weight.dtype)]


def _gamma(weight, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


# --- activations ------------------------------------------------------------


def _gelu(x):
    return F.gelu(x, approximate="tanh")


def _gated(act: Callable) -> Callable:
    """``act(first half) * second half`` along the last dimension."""

    def function(x):
        left, right = x.chunk(2, dim=-1)
        return act(left) * right

    return function


def _clamped_swiglu(x, limit=7.0, alpha=1.702, glu_linear_offset=1.0):
    left, right = x.chunk(2, dim=-1)
    left, right = left.clamp(max=limit), right.clamp(-limit, limit)
    return left * torch.sigmoid(alpha * left) * (right + glu_linear_offset)


_PLAIN = {
    "gelu": _gelu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": F.silu,
}
_GATED = {
    "glu": _gated(torch.sigmoid), "geglu": _gated(_gelu), "qgeglu": _gated(_PLAIN["qgelu"]),
    "reglu": _gated(torch.relu), "sreglu": _gated(_PLAIN["srelu"]), "swiglu": _gated(F.silu),
    "clamped_swiglu": _clamped_swiglu,
}  # fmt: skip
_SCALED = ("srelu", "swiglu", "clamped_swiglu")


def _backward(function: Callable, grad: torch.Tensor, x: torch.Tensor, *params, **named):
    """fp32 gradient of ``function`` at ``x``, by torch's autograd."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x, *params, **named), x, grad)[0]


def _interleaved(function: Callable) -> Callable:
    """A gated ``function`` of halves that alternate in blocks of the last argument, if not 0."""

    def call(x, *args):
        *params, block = args
        if block:
            x = x.unflatten(-1, (-1, 2, block)).transpose(-3, -2).flatten(-3)
        return function(x, *params)

    return call


def _activations() -> dict:
    """Entry points by name; parameters of an activation come after the quantizer."""
    table = {}

    def add(name: str, function: Callable) -> None:
        back = "_d".join(name.rsplit("_", 1)) if "_" in name else f"d{name}"

        def forward(x, quantizer, *params, **named):
            _no_quantizer(name, x, quantizer)
            return function(x.float(), *params, **named).to(x.dtype)

        def backward(grad, x, quantizer, *params, **named):
            _no_quantizer(back, grad, quantizer)
            return _backward(function, grad.float(), x.float(), *params, **named).to(grad.dtype)

        table[name], table[back] = forward, backward

    def add_scaled(name: str, function: Callable) -> None:
        back = "_d".join(name.rsplit("_", 1))

        def forward(x, scales, quantizer, *params):
            _no_quantizer(name, x, quantizer)
            out = function(x.float(), *params) * scales.float().view(*x.shape[:-1], 1)
            return out.to(x.dtype)

        def backward(grad, x, scales, quantizer, *args):
            _no_quantizer(back, grad, quantizer)
            *params, scale_grad = args
            grad, wide, scale = grad.float(), x.float(), scales.float().view(*x.shape[:-1], 1)
            dx = _backward(function, grad * scale, wide, *params).to(x.dtype)
            dscales = (grad * function(wide, *params)).sum(-1).view_as(scales).to(scales.dtype)
            return dx, dscales if scale_grad else None

        table[name], table[back] = forward, backward

    for name, function in (_PLAIN | _GATED).items():
        add(name, function)
    for name in _SCALED:
        function = _PLAIN.get(name) or _interleaved(_GATED[name])
        add_scaled(f"scaled_{name}", function)
    return table


# --- Triton -----------------------------------------------------------------


def _grouped_dbias_kernel(dy, dbias, offsets, scales, bias, dscales, _hidden, **constants) -> None:
    """Add each group's column sum of ``dy`` to ``dbias``, with the backward of per-row scales."""
    for group, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
        rows = dy[start:stop].float()
        if constants["HAS_SCALES"]:
            dscales[start:stop] += (rows * bias[group].float()).sum(1)
            rows = rows * scales[start:stop, None].float()
        dbias[group] += rows.sum(0)


def _grouped_bias_add_kernel(out, bias, offsets, scales, _width, **constants) -> None:
    """Add each group's bias, times a scale a row, to its rows of ``out``."""
    start = 0
    for group, stop in enumerate(offsets.tolist()):
        added = bias[group].float()
        if constants["HAS_SCALES"]:
            added = added * scales[start:stop, None]
        out[start:stop] = (out[start:stop].float() + added).to(out.dtype)
        start = stop


def _replace_triton_launches() -> None:
    # pylint: disable=import-outside-toplevel
    from triton.runtime.jit import KernelInterface

    def launch(kernel, _grid):
        while not hasattr(kernel, "__name__"):  # an autotuner
            kernel = kernel.fn
        known = {
            "_grouped_dbias_kernel": _grouped_dbias_kernel,
            "_grouped_bias_add_kernel": _grouped_bias_add_kernel,
        }
        return _without_grad(known.get(kernel.__name__, _missing(kernel.__name__)))

    KernelInterface.__getitem__ = launch


# --- the extension ----------------------------------------------------------


class _OnDevice(torch.Tensor):
    """Says that it lies on the GPU."""

    device = property(lambda self: torch.device("cuda", 0))


def _pretend_split_sizes_on_device() -> None:
    """``te.GroupedLinear``'s grouped-tensor path asks its split sizes where they lie."""
    module = sys.modules["transformer_engine.pytorch"].GroupedLinear
    forward = module.forward

    @functools.wraps(forward)
    def call(self, inp, m_splits, *args, **kwargs):
        if isinstance(m_splits, torch.Tensor):
            m_splits = m_splits.as_subclass(_OnDevice)
        return forward(self, inp, m_splits, *args, **kwargs)

    module.forward = call


# Host-only queries that the real extension answers without a GPU.
_HOST = {"get_cudnn_version", "get_num_cublas_streams", "ubuf_built_with_mpi",
         "get_grouped_gemm_setup_workspace_size", "grouped_operand_layout"}  # fmt: skip


def _missing(name: str) -> Callable:
    def function(*_args, **_kwargs):
        raise NotImplementedError(f"{name}: the CPU executor has no reference; run this on a GPU.")

    function.__name__ = name
    return function


def _unless_enabled(name: str, function: Callable, default: bool) -> Callable:
    """``function``, whose first argument ``enabled`` must be false."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        enabled = args[0] if args else kwargs.get("enabled", default)
        if enabled or kwargs.get("calibrating", False):
            _missing(name)()
        return function(*args, **kwargs)

    return call


def _without_grad(function: Callable) -> Callable:
    """Entry points compute on raw memory: autograd never sees them."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def _replace_entry_points(tex: types.ModuleType) -> None:
    references = _References(tex)
    own = {n: getattr(references, n) for n in vars(_References) if not n.startswith("_")}
    own |= _activations()
    replaced = {}
    for name in dir(tex):
        entry = getattr(tex, name)
        if name.startswith("_") or isinstance(entry, type) or not callable(entry) or name in _HOST:
            continue
        replaced[id(entry)] = _without_grad(own[name]) if name in own else _missing(name)
        replaced[id(entry)].native = entry  # it checks its operands without a GPU too
        setattr(tex, name, replaced[id(entry)])
    # Quantized compute is refused before it changes any state.
    quantization = sys.modules["transformer_engine.pytorch.quantization"]
    for name in ("quantized_model_init", "fp8_model_init"):
        init = getattr(quantization, name)
        replaced[id(init)] = _unless_enabled(name, init, True)
    manager = quantization.FP8GlobalStateManager
    manager.autocast_enter = _unless_enabled("autocast", manager.autocast_enter, False)
    # Some modules keep entry points in names and tables of their own.
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "transformer_engine":
            _replace_values(vars(module), replaced)


def _replace_values(table: dict, replaced: dict) -> None:
    """Exchange entry points in a dict, and in the dicts and tuples that it holds."""
    for key, value in list(table.items()):
        if isinstance(value, tuple):
            if any(id(item) in replaced for item in value):
                table[key] = tuple(replaced.get(id(item), item) for item in value)
        elif isinstance(value, dict) and key != "__builtins__":
            _replace_values(value, replaced)
        elif id(value) in replaced:
            table[key] = replaced[id(value)]
