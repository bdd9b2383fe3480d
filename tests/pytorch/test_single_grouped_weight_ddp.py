# SPDX-License-Identifier: Apache-2.0
"""Distributed training of single grouped parameters, to the bits of separate ones.

Two processes: NCCL with a GPU each where there are two, else gloo (on the CPU
executor without a GPU).
"""

import os

import conftest
import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.optim
import torch.multiprocessing
from grouped_cases import Case, assert_same, build, call, inputs, packed, plain

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


def collective(name):
    """Reduces or broadcasts each parameter's memory."""

    def use(layer, _device):
        function = getattr(torch.distributed, name)
        with torch.no_grad():
            for param in layer.parameters():
                function(param, *([0] if name == "broadcast" else []))
                function(param.data, *([0] if name == "broadcast" else []))
        return {}

    return use


def gathered(layer, _device):
    """Every rank's values."""
    outs = [[torch.empty_like(param) for _ in range(2)] for param in layer.parameters()]
    for out, param in zip(outs, layer.parameters()):
        torch.distributed.all_gather(out, param.detach())
    return {f"rank {i}": sum(o[i].double().sum() for o in outs).cpu() for i in range(2)}


def sharded_optimizer(layer, device):
    """Each rank steps some of the parameters and broadcasts them."""
    for param in layer.parameters():
        torch.distributed.broadcast(param.data, 0)
    optimizer = torch.distributed.optim.ZeroRedundancyOptimizer(
        layer.parameters(), torch.optim.SGD, lr=0.1, foreach=False
    )
    for x in inputs(device, 2):
        optimizer.zero_grad()
        call(layer, x).float().square().mean().backward()
        optimizer.step()
    return {}


def sharded_parameters(layer, device):
    """FSDP2; values and gradients of all shards. The biases are parameters of their own."""
    for param in layer.parameters():
        torch.distributed.broadcast(param.data, 0)
    mesh = torch.distributed.init_device_mesh(device.type, (2,))
    torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False)
    for x in inputs(device, 2):
        optimizer.zero_grad()
        call(layer, x).float().square().mean().backward()
        grads = {n: p.grad.full_tensor().cpu() for n, p in layer.named_parameters()}
        optimizer.step()
    for name, param in list(layer.named_parameters()):
        setattr(layer, name, torch.nn.Parameter(param.full_tensor()))
    stems = ("weight", "bias")
    return {f"{s} grad": _stacked([g for n, g in grads.items() if n.startswith(s)]) for s in stems}


def _stacked(found):
    return found[0] if len(found) == 1 else torch.stack(found)


USES = {
    "broadcast": collective("broadcast"),
    "all_reduce": collective("all_reduce"),
    "all_gather": gathered,
    "zero": sharded_optimizer,
    "fsdp2": sharded_parameters,
}


def use(name, kind, rank, device, single):
    """What a use gives, and the values after it; the ranks begin with different ones."""
    layer = build(Case(kind=kind, bias="single"), device, single=single)
    with torch.no_grad():
        for param in layer.parameters():
            param.mul_(rank + 1.0)
    seen = USES[name](layer, device)
    seen |= {stem: packed(layer, stem, plain).detach().cpu() for stem in ("weight", "bias")}
    return seen


def worker(rank, folder):
    """Train each case both ways and save the parameters."""
    os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"
    os.environ["NVTE_GROUPED_WGRAD_KERNEL"] = "0"  # cuBLAS runs in both layouts
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
    for name in USES if nccl or not conftest.HAS_GPU else ():
        for kind in ("module", "ops"):
            results[name, kind] = {
                single: use(name, kind, rank, device, single) for single in (True, False)
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
        assert_same(results[case][True], results[case][False])
    assert_same(trained[0][case][True], trained[1][case][True])


@pytest.mark.parametrize("kind", ["module", "ops"])
@pytest.mark.parametrize("name", USES)
def test_b5_distributed(trained, name, kind):
    """Collectives reach the parameter's memory; sharded optimizers and FSDP2 train it."""
    if (name, kind) not in trained[0]:
        pytest.skip("gloo has not all collectives for CUDA tensors; needs two GPUs")
    for results in trained:
        assert_same(results[name, kind][True], results[name, kind][False])
    if name != "all_gather":
        assert_same(trained[0][name, kind][True], trained[1][name, kind][True])
