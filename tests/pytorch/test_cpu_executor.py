# SPDX-License-Identifier: Apache-2.0
"""The CPU executor computes each module's forward and backward, and refuses what it cannot."""

import subprocess
import sys
import types
from pathlib import Path

import conftest
import cpu_executor
import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch import ops

tex = sys.modules["transformer_engine_torch"]  # TE loads it, from inside the package

pytestmark = pytest.mark.skipif(
    conftest.HAS_GPU, reason="tests the CPU executor, which a machine with a GPU does not use"
)

ROWS, IN, FFN, OUT, SPLITS = 20, 32, 40, 24, [5, 0, 15]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QKV = {"q": 12, "k": 6, "v": 6}

# The same mathematics in fp64 comes first.


def halves(act):
    """A gated activation: ``act`` of the first half times the second half."""
    return lambda x: act(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def gelu(x):
    """The tanh approximation."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def sigmoid_times(x, slope=1.0):
    """``x * sigmoid(slope * x)``: SiLU, and with 1.702 the quick GELU."""
    return x / (1 + torch.exp(-slope * x))


def clamped_swiglu(x, limit=0.5, alpha=1.702, offset=1.0):
    """The activation of GPT OSS; the first half is clamped from above only."""
    left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return sigmoid_times(left.clamp(max=limit), alpha) * (right.clamp(-limit, limit) + offset)


ACTIVATIONS = {
    "gelu": gelu,
    "geglu": halves(gelu),
    "glu": halves(lambda x: 1 / (1 + torch.exp(-x))),
    "qgelu": lambda x: sigmoid_times(x, 1.702),
    "qgeglu": halves(lambda x: sigmoid_times(x, 1.702)),
    "relu": lambda x: x * (x > 0),
    "reglu": halves(lambda x: x * (x > 0)),
    "srelu": lambda x: x**2 * (x > 0),
    "sreglu": halves(lambda x: x**2 * (x > 0)),
    "silu": sigmoid_times,
    "swiglu": halves(sigmoid_times),
    "clamped_swiglu": clamped_swiglu,
}
# What stands between two grouped linears: the operation, and the activation that it scales.
MIDDLE = {
    "swiglu": (ops.ScaledSwiGLU(), ACTIVATIONS["swiglu"]),
    "interleaved": (
        ops.ScaledSwiGLU(glu_interleave_size=8),
        lambda x: halves(sigmoid_times)(x.view(ROWS, -1, 2, 8).transpose(1, 2).reshape(ROWS, -1)),
    ),
    "clamped": (ops.ScaledClampedQGeGLU(limit=0.5), clamped_swiglu),
    "srelu": (ops.ScaledSReLU(), ACTIVATIONS["srelu"]),
}


def norm(x, p, normalization="LayerNorm", zero_centered_gamma=False, **_):
    """LayerNorm or RMSNorm over the last dimension."""
    if normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return x * (p["layer_norm_weight"] + zero_centered_gamma) + p.get("layer_norm_bias", 0)


def affine(x, p, prefix=""):
    """``x W^T + b`` of one or of split parameters."""
    parts = [f"{n}_" for n in QKV] if "q_weight" in p else [prefix]
    out = x @ torch.cat([p[n + "weight"] for n in parts]).T
    return out + torch.cat([p[n + "bias"] for n in parts]) if parts[0] + "bias" in p else out


def grouped(x, p, scales):
    """One affine map a group, of discrete or single grouped parameters; scaled biases."""
    outs = []
    for i, (rows, scale) in enumerate(zip(x.split(SPLITS), scales.split(SPLITS))):
        weight, bias = (p[n][i] if n in p else p.get(f"{n}{i}", 0) for n in ("weight", "bias"))
        outs.append(rows @ weight.T + scale[:, None] * bias)
    return torch.cat(outs)


def reference(kind, p, x, scales, options):
    """The outputs of one module."""
    ones = torch.ones(ROWS)
    if kind == "Linear":
        return [affine(x, p)]
    if kind.endswith("GroupedLinear"):
        return [grouped(x, p, scales if options.get("scale_bias") else ones)]
    if kind == "ops.Sequential":
        first, last = ({n[2:]: v for n, v in p.items() if n[0] == i} for i in "02")
        middle = MIDDLE[options.get("middle", "swiglu")][1]
        return [grouped(middle(grouped(x, first, ones)) * scales[:, None], last, ones)]
    normed = norm(x, p, **options)
    act = ACTIVATIONS[options.get("activation", "gelu")]
    mlp = kind == "LayerNormMLP"
    out = affine(act(affine(normed, p, "fc1_")), p, "fc2_") if mlp else affine(normed, p)
    return [out, normed] if options.get("return_layernorm_output") else [out]


# The roundings to the module's dtype on the longest way to a result.
ROUNDINGS = {
    "Linear": 1, "GroupedLinear": 1, "ops.GroupedLinear": 1,
    "LayerNormLinear": 2, "LayerNormMLP": 6, "ops.Sequential": 5,
}  # fmt: skip
DELAY, NO_BIAS = {"delay_wgrad_compute": True}, {"bias": False}
FUSE, OPS_FUSE = {"fuse_wgrad_accumulation": True}, {"accumulate_into_main_grad": True}
RMS, ZERO = {"normalization": "RMSNorm"}, {"zero_centered_gamma": True}
RETURN_NORM, RETURN_BIAS = {"return_layernorm_output": True}, {"return_bias": True}
# TE's grouped-tensor path, which takes 16-bit types, and its single grouped parameters.
OPS_NATIVE, SINGLE = {"native": True}, {"single_grouped_weight": True}
NATIVE = OPS_NATIVE | {"use_grouped_tensor": True}
SINGLE_BIAS = SINGLE | {"single_grouped_bias": True}

CASES = {
    "linear-bf16": ("Linear", BF16, {}),
    "linear-bf16-delay-fuse": ("Linear", BF16, DELAY | FUSE),
    "linear-bf16-no-bias-delay": ("Linear", BF16, NO_BIAS | DELAY),
    "linear-fp16-split-delay": ("Linear", FP16, {"parameters_split": QKV} | DELAY),
    "linear-fp16-no-bias-fuse": ("Linear", FP16, NO_BIAS | FUSE),
    "linear-fp32-return-bias": ("Linear", FP32, RETURN_BIAS),
    "linear-fp32-no-bias-split": ("Linear", FP32, NO_BIAS | {"parameters_split": QKV}),
    "layernorm-linear-bf16-delay": ("LayerNormLinear", BF16, DELAY | ZERO),
    "layernorm-linear-bf16-no-bias-rms": ("LayerNormLinear", BF16, NO_BIAS | RMS),
    "layernorm-linear-fp16-rms-zero-fuse": ("LayerNormLinear", FP16, RMS | ZERO | FUSE),
    "layernorm-linear-fp16-no-bias-delay": ("LayerNormLinear", FP16, NO_BIAS | DELAY),
    "layernorm-linear-fp32-return-both": ("LayerNormLinear", FP32, RETURN_NORM | RETURN_BIAS),
    "layernorm-linear-fp32-rms-split": ("LayerNormLinear", FP32, RMS | {"parameters_split": QKV}),
    "layernorm-linear-fp32-no-bias-delay-fuse": ("LayerNormLinear", FP32, NO_BIAS | DELAY | FUSE),
    "layernorm-mlp-bf16": ("LayerNormMLP", BF16, {}),
    "layernorm-mlp-bf16-no-bias-delay": ("LayerNormMLP", BF16, NO_BIAS | DELAY | RMS),
    "layernorm-mlp-fp16-delay-fuse": ("LayerNormMLP", FP16, DELAY | FUSE | ZERO),
    "layernorm-mlp-fp16-no-bias": ("LayerNormMLP", FP16, NO_BIAS | {"activation": "swiglu"}),
    "layernorm-mlp-fp32-return-both": ("LayerNormMLP", FP32, RETURN_NORM | RETURN_BIAS),
    "layernorm-mlp-fp32-no-bias-rms-zero": ("LayerNormMLP", FP32, NO_BIAS | RMS | ZERO | FUSE),
    "grouped-bf16-delay": ("GroupedLinear", BF16, DELAY),
    "grouped-bf16-no-bias-fuse": ("GroupedLinear", BF16, NO_BIAS | FUSE),
    "grouped-fp16-delay-fuse": ("GroupedLinear", FP16, DELAY | FUSE),
    "grouped-fp16-no-bias": ("GroupedLinear", FP16, NO_BIAS | {"list": True}),
    "grouped-fp32-list": ("GroupedLinear", FP32, {"list": True}),
    "grouped-fp32-return-bias": ("GroupedLinear", FP32, RETURN_BIAS),
    "grouped-fp32-no-bias-delay": ("GroupedLinear", FP32, NO_BIAS | DELAY),
    "grouped-native-bf16-delay": ("GroupedLinear", BF16, NATIVE | DELAY),
    "grouped-native-fp16-no-bias-fuse": ("GroupedLinear", FP16, NATIVE | NO_BIAS | FUSE),
    "grouped-single-bf16-fuse": ("GroupedLinear", BF16, NATIVE | SINGLE | FUSE),
    "grouped-single-fp16-delay": ("GroupedLinear", FP16, NATIVE | SINGLE_BIAS | DELAY),
    "ops-grouped-bf16-delay": ("ops.GroupedLinear", BF16, DELAY),
    "ops-grouped-bf16-no-bias-fuse": ("ops.GroupedLinear", BF16, NO_BIAS | OPS_FUSE),
    "ops-grouped-fp16-scaled": ("ops.GroupedLinear", FP16, {"scale_bias": True}),
    "ops-grouped-fp16-no-bias": ("ops.GroupedLinear", FP16, NO_BIAS | DELAY | OPS_FUSE),
    "ops-grouped-fp32": ("ops.GroupedLinear", FP32, {}),
    "ops-grouped-fp32-no-bias-delay": ("ops.GroupedLinear", FP32, NO_BIAS | DELAY),
    "ops-grouped-native-bf16-scaled": ("ops.GroupedLinear", BF16, OPS_NATIVE | {"scale_bias": True}),
    "ops-grouped-native-fp16-no-bias-delay": ("ops.GroupedLinear", FP16, OPS_NATIVE | NO_BIAS | DELAY),
    "ops-grouped-single-bf16-fuse": ("ops.GroupedLinear", BF16, OPS_NATIVE | SINGLE_BIAS | OPS_FUSE),
    "ops-grouped-single-fp16-delay": ("ops.GroupedLinear", FP16, OPS_NATIVE | SINGLE | DELAY),
    "ops-mlp-bf16": ("ops.Sequential", BF16, {}),
    "ops-mlp-fp16-native-delay": ("ops.Sequential", FP16, OPS_NATIVE | DELAY),
    "ops-mlp-fp32-no-bias": ("ops.Sequential", FP32, NO_BIAS),
    "ops-mlp-fp32-interleaved": ("ops.Sequential", FP32, {"middle": "interleaved"}),
    "ops-mlp-fp32-clamped": ("ops.Sequential", FP32, {"middle": "clamped"}),
    "ops-mlp-fp32-srelu": ("ops.Sequential", FP32, {"middle": "srelu"}),
} | {
    f"activation-{name}": ("LayerNormMLP", FP32, {
        "activation": name,
        "activation_params": {"limit": 0.5} if name == "clamped_swiglu" else None,
    })
    for name in ACTIVATIONS
}  # fmt: skip


def build(kind, dtype, options):
    """The module, with seeded random parameters; it asks for a GPU and gets the CPU."""
    own = {k: v for k, v in options.items() if k not in ("native", "list", "middle")}
    own |= {"device": "cuda"}
    groups = len(SPLITS)
    if kind == "ops.Sequential":
        middle = options.get("middle", "swiglu")
        width = FFN if middle == "srelu" else 2 * FFN
        first = ops.GroupedLinear(groups, IN, width, dtype=dtype, **own)
        last = ops.GroupedLinear(groups, FFN, OUT, dtype=dtype, **own)
        module = ops.Sequential(first, MIDDLE[middle][0], last)
    elif kind == "ops.GroupedLinear":
        module = ops.GroupedLinear(groups, IN, OUT, dtype=dtype, **own)
    else:
        sizes = {"GroupedLinear": (groups, IN, OUT), "LayerNormMLP": (IN, FFN)}
        module = getattr(te, kind)(*sizes.get(kind, (IN, OUT)), params_dtype=dtype, **own)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in module.parameters():
            plain(param).copy_(0.3 * torch.randn(param.shape))
    return module


def plain(param):
    """The data of a parameter, also of a grouped one."""
    return getattr(param, "rowwise_data", param.data).view(param.shape)


def call(module, kind, x, scales, options):
    """The module's outputs, with a returned bias added."""
    splits = SPLITS if "list" in options else torch.tensor(SPLITS)
    if kind.endswith("GroupedLinear"):
        out = module(x, splits, *[scales] * options.get("scale_bias", False))
    elif kind == "ops.Sequential":
        out = module(x, splits, scales, splits)
    else:
        out = module(x)
    if not isinstance(out, tuple):
        return [out]
    out = list(out)
    if options.get("return_bias"):
        bias = out.pop(1)
        if isinstance(bias, list):
            bias = torch.cat([b.expand(n, -1) for b, n in zip(bias, SPLITS)])
        out[0] = out[0] + bias
    return out


@pytest.mark.filterwarnings("ignore:.*single_grouped_weight")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward_and_backward(case, monkeypatch):
    """Outputs and all gradients agree with fp64 as far as the roundings allow.

    A rounding changes a value by eps / 2 of its size at most, and a sum of such errors
    is no larger a part of the sum; the other half is room for cancellation. In fp32
    the sums round too: 40 terms give about sqrt(40) * eps / 2, or 3 eps more.
    """
    kind, dtype, options = case
    if options.get("native"):
        monkeypatch.setattr(tex, "get_cublasLt_version", lambda: 130600)
        monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    if "activation" in options:  # TE's own fusion of bias and GELU calls no entry point
        monkeypatch.setenv("NVTE_BIAS_GELU_NVFUSION", "0")
    module = build(kind, dtype, options)
    params = dict(module.named_parameters())
    fused = options.get("fuse_wgrad_accumulation") or options.get("accumulate_into_main_grad")
    fused = [n for n in params if fused and "weight" in n and "norm" not in n]
    for name in fused:
        params[name].main_grad = torch.full(params[name].shape, 0.5)
    x, scales = (t.to(dtype).requires_grad_() for t in (torch.randn(ROWS, IN), torch.rand(ROWS)))
    outs = call(module, kind, x, scales, options)
    weights = [torch.randn(o.shape).to(dtype) for o in outs]
    torch.autograd.backward(outs, weights)
    if options.get("delay_wgrad_compute"):
        for part in module.modules():
            getattr(part, "backward_dw", lambda: None)()

    exact = {n: plain(p).double().requires_grad_() for n, p in params.items()}
    wide_x, wide_scales = (t.detach().double().requires_grad_() for t in (x, scales))
    wants = reference(kind, exact, wide_x, wide_scales, options)
    torch.autograd.backward(wants, [w.double() for w in weights])

    pairs = {f"output {i}": pair for i, pair in enumerate(zip(outs, wants))}
    pairs["x"] = x.grad, wide_x.grad
    if wide_scales.grad is not None:
        pairs["scales"] = scales.grad, wide_scales.grad
    for name, param in params.items():
        got = param.main_grad - 0.5 if name in fused else param.grad
        pairs[name] = got, exact[name].grad
    for name, (got, want) in pairs.items():
        assert got is not None, f"{name} has no gradient"
        assert got.dtype == (FP32 if name in fused else dtype), name
        limit = ROUNDINGS[kind] * torch.finfo(dtype).eps * (4 if dtype is FP32 else 1)
        error = (got.double() - want).abs().max().item()
        assert error <= limit * want.abs().max().item(), f"{name}: {error:.1e}"


UNINITIALISED = {
    "empty": lambda: torch.empty(3, device="cuda"),
    "empty_like": lambda: torch.empty_like(torch.ones(3, dtype=BF16)),
    "empty_strided": lambda: torch.empty_strided((3, 2), (2, 1), dtype=FP16, device="cuda:0"),
    "new_empty": lambda: torch.ones(3).new_empty((2, 2)),
    "new_empty_strided": lambda: torch.ones(3).new_empty_strided((2, 2), (2, 1)),
}


@pytest.mark.parametrize("make", UNINITIALISED.values(), ids=UNINITIALISED.keys())
def test_uninitialised_memory_is_nan(make):
    """What nobody wrote is seen in results, and lies on the CPU."""
    out = make()
    assert out.device.type == "cpu" and out.isnan().all()


def test_rows_that_te_does_not_write_are_nan(monkeypatch):
    """TE's own buffers too: rows past the split sizes belong to no group."""
    monkeypatch.setattr(tex, "get_cublasLt_version", lambda: 130600)
    module = te.GroupedLinear(2, IN, OUT, params_dtype=BF16, use_grouped_tensor=True)
    x = torch.ones(ROWS, IN, dtype=BF16, requires_grad=True)
    out = module(x, torch.tensor([8, 4]))
    out[:12].sum().backward()
    for tensor in (out, x.grad):
        assert tensor[:12].isfinite().all() and tensor[12:].isnan().all()


def quantized(context):
    """A module's forward in the context."""
    with context:
        te.Linear(IN, OUT)(torch.ones(ROWS, IN))


REFUSED = {
    "quantize": lambda: tex.quantize(torch.ones(32, 32), None),
    "fused_attn_fwd": lambda: tex.fused_attn_fwd(),
    "zero_pad_kernel": lambda: te.triton.pad.pad_columnwise_scale_inv(torch.ones(3, 3)),
    "autocast": lambda: quantized(te.autocast()),
    "quantized_model_init": lambda: quantized(te.quantized_model_init()),
    "CUDAGraph": lambda: te.make_graphed_callables(te.Linear(IN, OUT), (torch.ones(ROWS, IN),)),
    "graph": lambda: torch.cuda.graph(None),
    "elapsed_time": lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_the_entry_point(name):
    """NotImplementedError says what is missing, and the next module runs as before."""
    with pytest.raises(NotImplementedError, match=f"{name}.*run this on a GPU"):
        REFUSED[name]()
    assert te.Linear(IN, OUT)(torch.ones(ROWS, IN)).isfinite().all()


def test_no_entry_point_is_left():
    """No module holds a compiled entry point that would reach for a GPU."""
    host = {"get_cudnn_version", "get_num_cublas_streams", "get_grouped_gemm_setup_workspace_size",
            "ubuf_built_with_mpi", "grouped_operand_layout"}  # fmt: skip
    modules = [m for n, m in sys.modules.items() if n.startswith("transformer_engine")]
    left = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, types.BuiltinFunctionType)
        and value.__module__ == "transformer_engine_torch"
    }
    assert left == {name for name in host if hasattr(tex, name)}


def test_second_install_does_nothing():
    """Neither torch nor the extension is wrapped twice."""
    places = (torch, "empty"), (torch.Tensor, "to"), (tex, "gelu"), (te.GroupedLinear, "forward")
    before = [getattr(*place) for place in places]
    cpu_executor.install()
    assert [getattr(*place) for place in places] == before


def test_install_refuses_a_machine_with_a_gpu():
    """There the tests must run on the GPU."""
    code = "import cpu_executor as e; e.torch.cuda.is_available = lambda: True; e.install()"
    folder = Path(cpu_executor.__file__).parent
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 1 and "RuntimeError: A GPU is there" in run.stderr
