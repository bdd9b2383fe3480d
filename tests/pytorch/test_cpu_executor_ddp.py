# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel with gloo trains modules that run on the CPU executor."""

import conftest
import pytest
import torch
import torch.multiprocessing

import transformer_engine.pytorch as te

pytestmark = pytest.mark.skipif(
    conftest.HAS_GPU, reason="tests the CPU executor, which a machine with a GPU does not use"
)

ROWS, SIZE = 20, 32
CASES = {
    "fp32-view": (torch.float32, True),
    "fp32-copy": (torch.float32, False),
    "bf16-view": (torch.bfloat16, True),
    "bf16-copy": (torch.bfloat16, False),
}


def train(prepare, batches, dtype):
    """Three steps of SGD. ``prepare(model)`` gives what runs forward and backward on a batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(te.Linear(SIZE, SIZE, params_dtype=dtype) for _ in range(2)))
    backward = prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        backward(batch.to(dtype))
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def batches_of(rank):
    """The rank's three batches."""
    return torch.randn(3, ROWS, SIZE, generator=torch.Generator().manual_seed(rank))


def worker(rank, folder):
    """Train with gloo, and save the parameters by case."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    results = {}
    for name, (dtype, view) in CASES.items():

        def prepare(model, view=view):
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
            return lambda batch: model(batch).square().sum().backward()

        results[name] = train(prepare, batches_of(rank), dtype)
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def averaging(model):
    """One process that computes both ranks' gradients and averages them itself."""

    def backward(both):
        params = list(model.parameters())
        first, second = (torch.autograd.grad(model(b).square().sum(), params) for b in both)
        for param, one, other in zip(params, first, second):
            param.grad = one / 2 + other / 2

    return backward


def test_two_processes_train_as_one(tmp_path):
    """Bit for bit the parameters of a single process, on both ranks."""
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name, (dtype, _) in CASES.items():
        want = train(averaging, torch.stack([batches_of(0), batches_of(1)], 1), dtype)
        for rank, results in enumerate(ranks):
            for got, expected in zip(results[name], want, strict=True):
                assert torch.equal(got, expected), f"{name}, rank {rank}"
