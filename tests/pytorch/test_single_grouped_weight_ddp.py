# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel trains single grouped parameters to the bits of separate ones.

Two processes: NCCL with a GPU each where there are two, else gloo (on the CPU
executor without a GPU).
"""

import os

import conftest
import pytest
import torch
import torch.multiprocessing
from grouped_cases import Case, build, call, inputs, packed, plain

# Case, microbatches a step, options of DDP.
VIEW = {"gradient_as_bucket_view": True}
CASES = {
    "copy": (Case(bias="single"), 1, {}),
    "view": (Case(bias="single"), 1, VIEW),
    "view-fp32": (Case(bias="single", dtype=torch.float32), 1, VIEW),
    "small-buckets": (Case(bias="single"), 1, {**VIEW, "bucket_cap_mb": 0.001}),
    "no-sync": (Case(bias="single"), 2, VIEW),
    "delayed": (Case(bias="single", delay=True), 1, VIEW),
    "delayed-no-sync": (Case(bias="single", delay=True), 2, VIEW),
    "ops": (Case(kind="ops", bias="single"), 1, VIEW),
}


class Model(torch.nn.Module):
    """Experts between two plain layers."""

    def __init__(self, case, device, single):
        super().__init__()
        torch.manual_seed(3)
        self.experts = build(case, device, single=single)
        width = self.experts.out_features
        self.last = torch.nn.Linear(width, 8, device=device, dtype=case.dtype)

    def forward(self, x):
        return self.last(call(self.experts, x))


def train(case, accumulation, options, rank, device, single):
    """Values after four steps of SGD; DDP copies rank 0's parameters first."""
    model = Model(case, device, single)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(rank + 1.0)
    ids = [device] if device.type == "cuda" and torch.cuda.device_count() > 1 else None
    ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    xs = iter(inputs(device, 16, case.dtype)[rank::2])
    for _ in range(4):
        optimizer.zero_grad()
        for micro in range(accumulation):
            ddp.require_backward_grad_sync = micro == accumulation - 1
            ddp(next(xs)).float().square().mean().backward()
            model.experts.backward_dw()
        optimizer.step()
    experts = {stem: packed(model.experts, stem, plain) for stem in ("weight", "bias")}
    return {n: v.detach().cpu() for n, v in {**experts, "last": model.last.weight}.items()}


def worker(rank, folder):
    """Train each case both ways and save the parameters."""
    os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"
    device, nccl = torch.device("cpu"), False
    if conftest.HAS_GPU:
        nccl = torch.cuda.device_count() > 1
        device = torch.device("cuda", rank if nccl else 0)
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if nccl else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    results = {
        name: {single: train(*case, rank, device, single) for single in (True, False)}
        for name, case in CASES.items()
    }
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results of both ranks."""
    folder = tmp_path_factory.mktemp("ddp")
    torch.multiprocessing.spawn(worker, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_b4_ddp(trained, case):
    """Bit for bit, on both ranks, which also agree with each other."""
    for results in trained:
        got, want = results[case][True], results[case][False]
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert torch.isfinite(value.float()).all()
            assert torch.equal(got[name], value), name
    for name, value in trained[0][case][True].items():
        assert torch.equal(value, trained[1][case][True][name])
