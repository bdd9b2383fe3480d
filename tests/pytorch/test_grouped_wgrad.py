# SPDX-License-Identifier: Apache-2.0
"""The grouped weight gradient: its reference and checks anywhere, its kernels on a GPU.

Float32 results are compared with float64 ones of the same inputs to a relative Frobenius error of
1e-5: products of two 16-bit numbers are exact in float32, and sums of some thousand of them lose
a few of its 24 bits. Results of the inputs' type are rounded once: half a unit in the last place.
"""

import dataclasses
import random

import pytest
import torch
from conftest import HAS_GPU

from transformer_engine.pytorch import grouped_wgrad as gw


@dataclasses.dataclass(frozen=True)
class Case:
    """Widths, rows of each group, and rows after the last group; ``why`` it is here."""

    out_features: int
    in_features: int
    splits: tuple
    slack: int = 0
    why: str = ""


CASES = {
    "one_tile": Case(128, 256, (64,), why="one tile, one step, nothing masked"),
    "smallest": Case(8, 8, (3,), why="narrower than a box in both directions"),
    "even": Case(256, 512, (256, 256), why="whole tiles and steps"),
    "widths_of_8": Case(264, 520, (128, 72), why="tiles that reach past both edges"),
    "tails": Case(136, 264, (1, 15, 16, 17, 31, 33, 63, 65), why="every kind of last step"),
    "empty_groups": Case(128, 256, (0, 70, 0, 0, 5, 0), why="none, first, last, in between"),
    "all_empty": Case(128, 128, (0, 0, 0), 16, why="no rows at all, but a buffer"),
    "no_rows": Case(64, 64, (0, 0), why="operands without rows"),
    "slack": Case(384, 264, (10, 20, 0, 33), 100, why="NaN after the last group"),
    "skewed": Case(256, 256, (1500, 3, 0, 40, 1, 200, 7, 9), why="draws from both ends"),
    "long": Case(128, 256, (5000,), why="many turns of the ring of stages"),
    "many_groups": Case(64, 64, tuple(i % 5 for i in range(300)), why="more groups than threads"),
    "many_tiles": Case(1024, 2048, (64,) * 24, why="several tiles a cluster, reused buffers"),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
needs_library = pytest.mark.skipif(
    not (HAS_GPU and gw.is_available()), reason="needs a GPU and the kernels' library"
)


def operands(case, dtype=torch.bfloat16, device="cpu", split_dtype=torch.int64, seed=3):
    """Seeded operands; the rows after the last group are NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = sum(case.splits) + case.slack
    made = [
        torch.randn(rows, width, generator=generator, device=device).to(dtype)
        for width in (case.out_features, case.in_features)
    ]
    for tensor in made:
        tensor[sum(case.splits) :] = float("nan")
    return (*made, torch.tensor(case.splits, dtype=split_dtype, device=device))


def output(case, dtype, accumulate, device="cpu", seed=4):
    """Numbers to add to, or NaN to overwrite."""
    shape = (len(case.splits), case.out_features, case.in_features)
    if not accumulate:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def error(result, reference):
    """Relative Frobenius error; NaN stays NaN."""
    return ((result.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


# --- anywhere ---------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@every_case
def test_reference(case, accumulate):
    """The reference is one outer product a row, summed."""
    if case.out_features * case.in_features * len(case.splits) > 1 << 21:
        pytest.skip("too large for sums row by row")
    grad_output, inp, splits = operands(case)
    out = output(case, torch.float32, accumulate)
    expected = out.double() if accumulate else torch.zeros(out.shape, dtype=torch.float64)
    row = 0
    for group, split in enumerate(case.splits):
        for _ in range(split):
            expected[group].addr_(grad_output[row].double(), inp[row].double())
            row += 1
    result = gw.grouped_wgrad_reference(grad_output, inp, splits, out, accumulate=accumulate)
    assert result.dtype == torch.float64
    assert error(result, expected) < 1e-12


def random_case(seed):
    """Seeded widths and splits: empty groups, tails, one heavy group among light ones."""
    shuffler = random.Random(seed)
    groups = shuffler.randint(1, 12)
    counts = [shuffler.choice([0, 1, 16, 50, 64, 100, 257]) for _ in range(groups)]
    if seed % 3 == 0:
        counts[shuffler.randrange(groups)] = shuffler.randint(600, 1500)
    widths = [8 * shuffler.randint(1, 80) for _ in range(2)]
    return Case(*widths, tuple(counts), shuffler.randint(0, 70))


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
def test_reference_random_splits(accumulate):
    """Fuzz: the reference is one product over all rows, those of other groups masked out."""
    for seed in range(20):
        case = random_case(seed)
        grad_output, inp, splits = operands(case, seed=seed)
        out = output(case, torch.float32, accumulate)
        rows = sum(case.splits)
        owner = torch.repeat_interleave(torch.arange(len(case.splits)), splits)
        mine = (owner == torch.arange(len(case.splits))[:, None]).double()
        masked = mine[:, None, :] * grad_output[:rows].double().t()
        expected = masked @ inp[:rows].double() + (out.double() if accumulate else 0)
        result = gw.grouped_wgrad_reference(grad_output, inp, splits, out, accumulate=accumulate)
        assert error(result, expected) < 1e-12, case


@pytest.mark.parametrize("counts, same_as", [((-5, 10**9), (0, 512)), ((300, 300), (300, 212))])
def test_reference_splits_out_of_range(counts, same_as):
    """Splits that make no sense: negative ones are none, those past the last row are cut."""
    grad_output, inp, _ = operands(CASES["even"])
    out = output(CASES["even"], torch.float32, False)
    results = [
        gw.grouped_wgrad_reference(grad_output, inp, torch.tensor(splits), out)
        for splits in (counts, same_as)
    ]
    assert torch.equal(*results)


def strided(tensor):
    """The same numbers with a gap after each row."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 8)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


# What to do to (grad_output, inp, splits, out), the exception, and words of its message.
REFUSED = {
    "grad_output_type": (lambda d, x, s, o: (d.float(), x, s, o), TypeError, "grad_output must be"),
    "grad_output_strided": (
        lambda d, x, s, o: (strided(d), x, s, o),
        ValueError,
        "grad_output must be contiguous",
    ),
    "inp_type": (lambda d, x, s, o: (d, x.half(), s, o), TypeError, "inp must be"),
    "inp_transposed": (
        lambda d, x, s, o: (d, x.t().contiguous().t(), s, o),
        ValueError,
        "inp must be contiguous",
    ),
    "inp_rows": (lambda d, x, s, o: (d, x[1:], s, o), ValueError, "inp has"),
    "splits_list": (lambda d, x, s, o: (d, x, s.tolist(), o), TypeError, "splits must be a tensor"),
    "splits_type": (lambda d, x, s, o: (d, x, s.float(), o), TypeError, "splits must be int32"),
    "out_strided": (
        lambda d, x, s, o: (d, x, s, strided(o)),
        ValueError,
        "out must be contiguous",
    ),
    "out_groups": (lambda d, x, s, o: (d, x, s, o[1:]), ValueError, "out must have shape"),
    "out_type": (lambda d, x, s, o: (d, x, s, o.double()), TypeError, "out must be float32"),
    "out_dimensions": (lambda d, x, s, o: (d, x, s, o[0]), ValueError, "out must have 3"),
    "out_device": (lambda d, x, s, o: (d, x, s, o.to("meta")), ValueError, "out is on meta"),
    "width": (
        lambda d, x, s, o: (d[:, :12].contiguous(), x, s, o[:, :12].contiguous()),
        ValueError,
        "grad_output must have a multiple of 8 columns",
    ),
    "alignment": (
        lambda d, x, s, o: (d, x, s, torch.empty(o.numel() + 1)[1:].view(o.shape)),
        ValueError,
        "out must start at a multiple of 16 bytes",
    ),
}


@pytest.mark.parametrize("change, kind, words", REFUSED.values(), ids=REFUSED.keys())
def test_refused(change, kind, words):
    """Operands that the kernels would misread are refused by name."""
    case = CASES["even"]
    good = (*operands(case), output(case, torch.float32, True))
    gw.check(*good)
    with pytest.raises(kind, match=words):
        gw.grouped_wgrad(*change(*good))
    assert gw.why_not(*change(*good))


def test_switch(monkeypatch):
    """The environment variable turns the kernels off."""
    monkeypatch.setenv("NVTE_GROUPED_WGRAD_KERNEL", "0")
    case = CASES["even"]
    assert not gw.is_available()
    good = (*operands(case), output(case, torch.float32, True))
    assert gw.why_not(*good) == "NVTE_GROUPED_WGRAD_KERNEL=0"


# --- on a GPU ---------------------------------------------------------------

PORTABLE = 1 << 16  # the kernel for other GPUs, wanted by flag
KERNELS = {"default": -1, "portable": PORTABLE}
every_kernel = pytest.mark.parametrize("flags", KERNELS.values(), ids=KERNELS.keys())


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("out_type", ["fp32", "same"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_kernel
@every_case
@needs_library
def test_against_reference(case, flags, dtype, out_type, accumulate):
    """Every case, type and way to write; three runs are equal bit for bit."""
    out_dtype = torch.float32 if out_type == "fp32" else dtype
    split_dtype = torch.int32 if accumulate else torch.int64
    grad_output, inp, splits = operands(case, dtype, "cuda", split_dtype)
    out = output(case, out_dtype, accumulate, "cuda")
    reference = gw.grouped_wgrad_reference(grad_output, inp, splits, out, accumulate=accumulate)
    runs = []
    for _ in range(3):
        runs.append(out.clone())
        gw.grouped_wgrad(grad_output, inp, splits, runs[-1], accumulate=accumulate, flags=flags)
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    limit = 1e-5 if out_dtype == torch.float32 else torch.finfo(dtype).eps
    assert error(runs[0], reference) <= limit
    for group, split in enumerate(case.splits):
        if split == 0:
            kept = out[group] if accumulate else torch.zeros_like(out[group])
            assert torch.equal(runs[0][group], kept)


@needs_library
def test_graph_follows_splits():
    """A captured call replays with the splits of the time, and equals the eager one."""
    case = CASES["skewed"]
    grad_output, inp, splits = operands(case, device="cuda")
    grad_output, inp = grad_output.nan_to_num(), inp.nan_to_num()
    out = output(case, torch.float32, True, "cuda")
    kept = out.clone()
    gw.grouped_wgrad(grad_output, inp, splits, out, accumulate=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gw.grouped_wgrad(grad_output, inp, splits, out, accumulate=True)
    shuffler = random.Random(1)
    for _ in range(4):
        counts = list(case.splits)
        shuffler.shuffle(counts)
        splits.copy_(torch.tensor(counts))
        out.copy_(kept)
        graph.replay()
        eager = kept.clone()
        gw.grouped_wgrad(grad_output, inp, splits, eager, accumulate=True)
        assert torch.equal(out, eager)


@pytest.mark.parametrize("out_type", ["fp32", "same"])
@every_kernel
@needs_library
def test_random_splits(flags, out_type):
    """Fuzz: random widths, groups and splits against the reference."""
    for seed in range(30):
        case, accumulate = random_case(seed), seed % 2 == 0
        dtype = torch.float16 if seed % 4 == 1 else torch.bfloat16
        grad_output, inp, splits = operands(case, dtype, "cuda", seed=seed)
        out = output(case, torch.float32 if out_type == "fp32" else dtype, accumulate, "cuda")
        reference = gw.grouped_wgrad_reference(grad_output, inp, splits, out, accumulate=accumulate)
        gw.grouped_wgrad(grad_output, inp, splits, out, accumulate=accumulate, flags=flags)
        limit = 1e-5 if out_type == "fp32" else torch.finfo(dtype).eps
        assert error(out, reference) < limit, case


@needs_library
@pytest.mark.parametrize("sm_budget", [1, 2, 33, 64])
def test_budget(sm_budget):
    """Fewer multiprocessors, the same bits."""
    case = CASES["many_tiles"]
    grad_output, inp, splits = operands(case, device="cuda")
    out = output(case, torch.float32, True, "cuda")
    some = out.clone()
    gw.grouped_wgrad(grad_output, inp, splits, out, accumulate=True)
    gw.grouped_wgrad(grad_output, inp, splits, some, accumulate=True, sm_budget=sm_budget)
    assert torch.equal(out, some)


@needs_library
def test_splits_out_of_range():
    """Splits that make no sense cost right results, not memory outside the operands."""
    case = CASES["even"]
    grad_output, inp, _ = operands(case, device="cuda")
    out = output(case, torch.float32, False, "cuda")
    splits = torch.tensor([-5, 10**9], device="cuda")
    gw.grouped_wgrad(grad_output, inp, splits, out)
    sane = torch.tensor([0, grad_output.shape[0]], device="cuda")
    assert error(out, gw.grouped_wgrad_reference(grad_output, inp, sane, out)) < 1e-5
