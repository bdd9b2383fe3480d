# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel trains delayed weights to the bits of regular ones.

Two processes: NCCL with a GPU each where there are two, else gloo (on the CPU
executor without a GPU). The number in a test's name is the contract's row.
"""

import conftest
import pytest
import torch
import torch.multiprocessing

import transformer_engine.pytorch as te

SIZE, ROWS = 32, 48
SPLITS = [16, 0, 32]
VIEW = {"gradient_as_bucket_view": True}
# Steps, microbatches a step, whether two layers share their parameters, options of DDP.
CASES = {
    "view-50-steps": (50, 1, True, VIEW),
    "copy": (8, 1, True, {"gradient_as_bucket_view": False}),
    "small-buckets": (8, 1, True, {**VIEW, "bucket_cap_mb": 0.001}),
    "no-sync": (8, 2, False, VIEW),
    "no-sync-delivered-late": (8, 2, False, VIEW),
}


class Model(torch.nn.Module):
    """Every module kind; tied, the first and the last have one weight and bias."""

    def __init__(self, delay, tied, device):
        super().__init__()
        options = {
            "params_dtype": torch.bfloat16, "delay_wgrad_compute": delay, "device": device
        }  # fmt: skip
        self.first = te.Linear(SIZE, SIZE, **options)
        self.norm = te.LayerNormLinear(SIZE, SIZE, **options)
        self.mlp = te.LayerNormMLP(SIZE, 2 * SIZE, **options)
        self.experts = te.GroupedLinear(len(SPLITS), SIZE, SIZE, **options)
        self.last = te.Linear(SIZE, SIZE, **options)
        if tied:
            self.last.weight, self.last.bias = self.first.weight, self.first.bias
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(self.experts(self.mlp(x), SPLITS))

    def backward_dw(self):
        """In the order of the backward pass."""
        for module in (self.last, self.experts, self.mlp, self.norm, self.first):
            module.backward_dw()


def train(name, delay, rank, device, steps, accumulation, tied, options):
    """Parameters after ``steps`` steps of SGD, ``accumulation`` microbatches each."""
    model = Model(delay, tied, device)
    ids = [device] if device.type == "cuda" and torch.cuda.device_count() > 1 else None
    ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank + 1)
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulation):
            x = torch.randn(ROWS, SIZE, generator=generator).to(torch.bfloat16).to(device)
            ddp.require_backward_grad_sync = micro == accumulation - 1
            ddp(x).float().square().mean().backward()
            if not name.endswith("late"):
                model.backward_dw()
        for _ in range(accumulation if name.endswith("late") else 0):
            model.backward_dw()
        optimizer.step()
    return [param.detach().cpu().clone() for param in model.parameters()]


def worker(rank, folder):
    """Train each case both ways and save the parameters."""
    device = torch.device("cpu")
    nccl = False
    if conftest.HAS_GPU:
        nccl = torch.cuda.device_count() > 1
        device = torch.device("cuda", rank if nccl else 0)
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if nccl else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    results = {
        name: {delay: train(name, delay, rank, device, *case) for delay in (True, False)}
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
def test_a3_ddp(trained, case):
    """Bit for bit, on both ranks, which also agree with each other."""
    for results in trained:
        for got, want in zip(results[case][True], results[case][False], strict=True):
            assert torch.isfinite(want.float()).all()
            assert torch.equal(got, want)
    for one, other in zip(trained[0][case][True], trained[1][case][True], strict=True):
        assert torch.equal(one, other)
