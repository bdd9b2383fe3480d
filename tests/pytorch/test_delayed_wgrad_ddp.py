# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel trains delayed weights to the bits of regular ones.

Two processes: NCCL with a GPU each where there are two, else gloo (on the CPU
executor without a GPU). The number in a test's name is the contract's row.
"""

import dataclasses

import conftest
import pytest
import torch
import torch.multiprocessing

import transformer_engine.pytorch as te

SIZE, ROWS = 32, 48
SPLITS = [16, 0, 32]
VIEW = {"gradient_as_bucket_view": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training run, twice: regular and delayed.

    ``late``: all microbatches' halves after the last backward. ``inside``: the halves run in hooks
    of the backward pass. ``kept``: another forward each step, which never gets a backward.
    """

    options: dict = dataclasses.field(default_factory=lambda: VIEW)
    steps: int = 8
    microbatches: int = 1
    tied: bool = True
    split_twice: bool = False
    late: bool = False
    inside: bool = False
    kept: bool = False


CASES = {
    "view-50-steps": Case(steps=50),
    "copy": Case({"gradient_as_bucket_view": False}),
    "small-buckets": Case({**VIEW, "bucket_cap_mb": 0.001}),
    "no-sync": Case(microbatches=2, tied=False),
    "no-sync-delivered-late": Case(microbatches=2, tied=False, late=True),
    "inside-the-backward": Case(inside=True),
    "forward-without-backward": Case(kept=True),
    "forward-without-backward-inside": Case(kept=True, inside=True),
    "split-parameters-twice": Case(split_twice=True),
    "split-parameters-twice-inside": Case(split_twice=True, inside=True),
}


class Model(torch.nn.Module):
    """Every module kind; tied, the first and the last have one weight and bias."""

    def __init__(self, case, delay, device):
        super().__init__()
        options = {
            "params_dtype": torch.bfloat16, "delay_wgrad_compute": delay, "device": device
        }  # fmt: skip
        self.first = te.Linear(SIZE, SIZE, **options)
        self.norm = te.LayerNormLinear(SIZE, SIZE, **options)
        self.mlp = te.LayerNormMLP(SIZE, 2 * SIZE, **options)
        self.experts = te.GroupedLinear(len(SPLITS), SIZE, SIZE, **options)
        if case.split_twice:
            parts = {"query_": SIZE // 2, "key_": SIZE // 2}
            self.first = self.last = te.Linear(SIZE, SIZE, parameters_split=parts, **options)
        else:
            self.last = te.Linear(SIZE, SIZE, **options)
            if case.tied:
                self.last.weight, self.last.bias = self.first.weight, self.first.bias
        self.inside = case.inside
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)

    def after(self, module, x):
        """``x``, whose gradient comes when the module that read it has run its main half."""
        if self.inside and x.requires_grad:
            x.register_hook(lambda _: module.backward_dw())
        return x

    def forward(self, x):
        x = self.first(self.after(self.first, x.requires_grad_()))
        x = self.mlp(self.after(self.mlp, self.norm(self.after(self.norm, x))))
        x = self.experts(self.after(self.experts, x), SPLITS)
        return self.last(self.after(self.last, x))

    def backward_dw(self):
        """In the order of the backward pass."""
        for module in (self.last, self.experts, self.mlp, self.norm, self.first):
            module.backward_dw()


def train(case, delay, rank, device):
    """Parameters after SGD."""
    model = Model(case, delay, device)
    ids = [device] if device.type == "cuda" and torch.cuda.device_count() > 1 else None
    ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, **case.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank + 1)
    for _ in range(case.steps):
        optimizer.zero_grad()
        for micro in range(case.microbatches):
            x = torch.randn(ROWS, SIZE, generator=generator).to(torch.bfloat16).to(device)
            ddp.require_backward_grad_sync = micro == case.microbatches - 1
            kept = ddp(x.flip(0)) if case.kept else None
            ddp(x).float().square().mean().backward()
            if not case.late and not case.inside:
                model.backward_dw()
            del kept
        for _ in range(case.microbatches if case.late else 0):
            model.backward_dw()
        assert all(getattr(m, "pending_backward_dw", 0) == 0 for m in model.children())
        optimizer.step()
    return [param.detach().cpu().clone() for param in model.parameters()]


class HalfDelayed(torch.nn.Module):
    """A delayed layer and a plain user of its weight."""

    def __init__(self, device):
        super().__init__()
        self.layer = te.Linear(SIZE, SIZE, delay_wgrad_compute=True, bias=False, device=device)

    def forward(self, x):
        return torch.nn.functional.linear(self.layer(x), self.layer.weight)


def error_of_a_plain_user(device):
    """What DDP with a delayed and a plain user of one weight raises."""
    ids = [device] if device.type == "cuda" and torch.cuda.device_count() > 1 else None
    ddp = torch.nn.parallel.DistributedDataParallel(HalfDelayed(device), device_ids=ids)
    try:
        ddp(torch.randn(ROWS, SIZE, device=device)).sum().backward()
        ddp.module.layer.backward_dw()
    except RuntimeError as error:
        return str(error)
    return ""


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
        name: {delay: train(case, delay, rank, device) for delay in (True, False)}
        for name, case in CASES.items()
    }
    results["plain user"] = error_of_a_plain_user(device)
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


def test_a14_ddp_with_a_plain_user_of_the_weight(trained):
    """DDP would reduce the weight's gradient before the delayed part is there."""
    for results in trained:
        assert "where another user of the weight does not delay" in results["plain user"]
        assert "Set delay_wgrad_compute to the same value" in results["plain user"]
