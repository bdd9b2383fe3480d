# SPDX-License-Identifier: Apache-2.0
"""Delayed weight gradients under the distributed wrappers that Megatron brings.

Each stand-in does what the wrapper is known to do with parameters, hooks and
``main_grad``; the collectives are left out. The number in a test's name is the
contract's row.
"""

import functools

import pytest
import torch
from delayed_kinds import (
    KINDS,
    assert_same,
    backward,
    fill,
    inputs,
    late_names,
    loss_of,
    make,
    run,
    tie,
    weight_names,
)
from test_delayed_wgrad import accumulator

every_kind = pytest.mark.parametrize("kind", KINDS)
both_fusions = pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])


class MegatronDDP:
    """Adds each gradient to an fp32 main_grad as soon as its hook runs, and clears ``.grad``."""

    def __init__(self, modules):
        self.ready, self.keep = [], []
        self.params = {}
        for number, module in enumerate(modules):
            for name, param in module.named_parameters():
                self.params.setdefault(param, f"{number}.{name}")
        for param in self.params:
            param.main_grad = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
            param.grad_added_to_main_grad = False
            if not getattr(param, "skip_backward_post_hook", False):
                node = accumulator(param)
                node.register_hook(functools.partial(self.hook, param))
                self.keep.append(node)
        for module in modules:
            for param in module.parameters():
                if getattr(param, "skip_backward_post_hook", False):
                    module.register_wgrad_accumulation_and_reduce_hooks(
                        functools.partial(self.hook, param)
                    )

    def hook(self, param, *_):
        """What runs when a parameter's gradient is final."""
        # With overlapped reduction a missing gradient is an error.
        assert param.grad is not None, self.params[param]
        if not param.grad_added_to_main_grad:
            param.main_grad.add_(param.grad)
        param.grad = None
        self.ready.append(self.params[param])

    def start(self):
        """A new step."""
        for param in self.params:
            param.main_grad.zero_()
            param.grad_added_to_main_grad = False
        self.ready.clear()

    def main_grads(self):
        """Copies by name."""
        return {name: param.main_grad.clone() for param, name in self.params.items()}


class MegatronFSDP1(MegatronDDP):
    """Resets the flag in each hook, and zeroes a buffer whose flag is not set."""

    def hook(self, param, *_):
        """Overwrites the buffer unless the GEMM wrote it."""
        if not param.grad_added_to_main_grad:
            param.main_grad.zero_()
            if param.grad is not None:
                param.main_grad.add_(param.grad)
        param.grad = None
        param.grad_added_to_main_grad = False
        self.ready.append(self.params[param])


class MegatronFSDP2(MegatronDDP):
    """Makes main_grad when it is asked for; wants no ``.grad`` before the hook."""

    def __init__(self, modules):
        super().__init__(modules)
        self.asked = []
        for param in self.params:
            setattr(param, "__fsdp_param__", True)
            param.get_main_grad = functools.partial(self.buffer, param)
            param.overwrite_main_grad = True

    def buffer(self, param):
        """The buffer, poisoned: the GEMM overwrites all of it."""
        self.asked.append(self.params[param])
        param.main_grad.fill_(float("nan"))
        return param.main_grad

    def hook(self, param, *_):
        """Takes the buffer, or the gradient where nothing wrote it."""
        if not param.grad_added_to_main_grad:
            param.main_grad.copy_(param.grad)
        param.grad = None
        param.grad_added_to_main_grad = False
        self.ready.append(self.params[param])


def scenario(kind, fuse, delay, device, wrapper, steps):
    """main_grad by name, and the order in which parameters got ready."""
    module = make(kind, device, delay=delay, fuse=fuse)
    ddp = wrapper([module])
    results, order = [], []
    batches = iter(inputs(device, sum(steps)))
    for microbatches in steps:
        ddp.start()
        for _ in range(microbatches):
            backward(kind, module, next(batches))
            if delay:
                late = late_names(kind, module)
                assert all(getattr(module, name).grad is None for name in late)
                assert not set(ddp.ready) & {f"0.{name}" for name in weight_names(kind, module)}
                module.backward_dw()
            order.append(sorted(ddp.ready))
            ddp.ready.clear()
        results.append(ddp.main_grads())
    return results, order


@both_fusions
@every_kind
def test_a11_megatron_ddp(kind, fuse, device):
    """Two steps of three microbatches: the fp32 sums and one hook a parameter and microbatch."""
    got, got_order = scenario(kind, fuse, True, device, MegatronDDP, (3, 3))
    want, want_order = scenario(kind, fuse, False, device, MegatronDDP, (3, 3))
    for one, two in zip(got, want, strict=True):
        assert_same(one, two)
    assert got_order == want_order


@every_kind
def test_a11_megatron_ddp_tied_and_fused(kind, device):
    """Two modules add to one main_grad; the owner of each hook hears of its own delivery."""

    def tied(delay):
        first, second = (make(kind, device, delay=delay, fuse=True, seed=s) for s in (1, 2))
        tie(kind, first, second)
        fill(first)
        ddp = MegatronDDP([first, second])
        ddp.start()
        hidden = run(kind, first, inputs(device)[0]) * 0.125
        loss_of(run(kind, second, hidden)).backward()
        if delay:
            second.backward_dw()
            first.backward_dw()
        return {f"0.{n}": getattr(first, n).main_grad for n in weight_names(kind, first)}

    assert_same(tied(True), tied(False))


@both_fusions
@every_kind
def test_a11_megatron_fsdp1(kind, fuse, device):
    """One microbatch a step; a buffer whose flag is not set would be zeroed."""
    got, got_order = scenario(kind, fuse, True, device, MegatronFSDP1, (1, 1))
    want, want_order = scenario(kind, fuse, False, device, MegatronFSDP1, (1, 1))
    for one, two in zip(got, want, strict=True):
        assert_same(one, two)
    assert got_order == want_order


@both_fusions
@every_kind
def test_a11_megatron_fsdp2(kind, fuse, device):
    """Lazily made buffers, overwritten; no gradient before backward_dw."""
    got, got_order = scenario(kind, fuse, True, device, MegatronFSDP2, (1, 1))
    want, want_order = scenario(kind, fuse, False, device, MegatronFSDP2, (1, 1))
    for one, two in zip(got, want, strict=True):
        assert_same(one, two)
    assert got_order == want_order
