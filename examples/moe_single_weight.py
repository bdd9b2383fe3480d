#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a small mixture of experts twice and compare every weight, bit for bit.

Once with one parameter an expert, the usual way; once with one parameter for
all experts, weight gradients delayed and accumulated into fp32 main_grad::

    python examples/moe_single_weight.py --json curve.json --png curve.png
    python examples/moe_single_weight.py --executor tests/pytorch/cpu_executor.py --steps 20

The second form runs without a GPU. The exit code is 0 when all bits are equal.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
import warnings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"

import torch  # noqa: E402

EXPERTS, WIDTH, HIDDEN, TOKENS, MICROBATCHES = 8, 64, 256, 256, 2


class Experts(torch.nn.Module):
    """Each token goes to the expert that the router likes best; a residual layer."""

    def __init__(self, single: bool, device: str) -> None:
        super().__init__()
        import transformer_engine.pytorch as te  # pylint: disable=import-outside-toplevel

        options = {
            "params_dtype": torch.bfloat16,
            "device": device,
            "fuse_wgrad_accumulation": True,
            "delay_wgrad_compute": single,
            "single_grouped_weight": single,
            "single_grouped_bias": single,
        }
        self.router = torch.nn.Linear(WIDTH, EXPERTS, dtype=torch.bfloat16, device=device)
        self.up = te.GroupedLinear(EXPERTS, WIDTH, HIDDEN, **options)
        self.down = te.GroupedLinear(EXPERTS, HIDDEN, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are ``[tokens, WIDTH]``."""
        share, expert = self.router(x).float().softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        splits = torch.bincount(expert, minlength=EXPERTS)
        y = self.down(torch.nn.functional.gelu(self.up(x[order], splits)), splits)
        return x + y[order.argsort()] * share[:, None].to(x.dtype)

    def backward_dw(self) -> None:
        """The delayed weight gradients of one backward pass."""
        self.down.backward_dw()
        self.up.backward_dw()


class Masters:
    """fp32 copies of a model's parameters, and AdamW on them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.params = list(model.parameters())
        self.copies = [(p.detach() * 1).float().requires_grad_() for p in self.params]
        self.adam = torch.optim.AdamW(self.copies, lr=3e-3, foreach=False)
        for layer in (layer for experts in model for layer in (experts.up, experts.down)):
            # One buffer a layer, as frameworks have: the same kernel then serves both layouts.
            weights = [p for n, p in layer.named_parameters() if n.startswith("weight")]
            sizes = [weight.numel() for weight in weights]
            buffer = torch.zeros(sum(sizes), device=weights[0].device)
            for weight, part in zip(weights, buffer.split(sizes)):
                weight.main_grad = part.view(tuple(weight.shape))

    def step(self) -> None:
        """Step the copies with main_grad or .grad, then clear both."""
        for param, copy in zip(self.params, self.copies):
            grad = getattr(param, "main_grad", param.grad)
            copy.grad = grad.float().clone()
            grad.zero_()
        self.adam.step()
        with torch.no_grad():
            for param, copy in zip(self.params, self.copies):
                param.copy_(copy)


def batches(steps: int, device: str):
    """Tokens of eight kinds, each with a linear map of its own to learn."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    centers, maps = normal(EXPERTS, WIDTH), normal(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
    for _ in range(steps * MICROBATCHES):
        kind = torch.randint(EXPERTS, (TOKENS,), generator=generator)
        x = centers[kind] + 0.5 * normal(TOKENS, WIDTH)
        y = torch.einsum("ti,tio->to", x, maps[kind])
        yield x.to(device, torch.bfloat16), y.to(device)


def train(single: bool, steps: int, device: str) -> tuple[list[float], dict]:
    """Loss of each step, and the final parameters with the experts stacked."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Experts(single, device), Experts(single, device))
    masters = Masters(model)
    losses, data = [], batches(steps, device)
    for _ in range(steps):
        total = 0.0
        for _ in range(MICROBATCHES):
            x, y = next(data)
            loss = (model(x).float() - y).square().mean() / MICROBATCHES
            loss.backward()
            total += loss.item()
        for _ in range(MICROBATCHES if single else 0):
            for layer in reversed(model):
                layer.backward_dw()
        masters.step()
        losses.append(total)
    return losses, stacked(model)


def stacked(model: torch.nn.Module) -> dict:
    """Parameters by name; those of separate experts as one tensor."""
    found: dict[str, list] = {}
    for name, param in model.named_parameters():
        found.setdefault(name.rstrip("0123456789"), []).append(param.detach() * 1)
    return {n: ps[0] if len(ps) == 1 else torch.stack(ps) for n, ps in found.items()}


def plot(path: str, curves: dict[str, list[float]], title: str) -> None:
    """Both loss curves, one on top of the other."""
    try:
        from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
    except ImportError:
        print(f"matplotlib is not installed; {path} is not written")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ({"lw": 5, "alpha": 0.35}, {"lw": 1.2})):
        axes.plot(range(1, len(losses) + 1), losses, label=name, **style)
    axes.set(xlabel="step", ylabel="mean squared error", yscale="log", title=title)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    """Run both, compare, write the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--executor", help="cpu_executor.py, to run without a GPU")
    parser.add_argument("--json", help="write the loss curves here")
    parser.add_argument("--png", help="draw the loss curves here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = "cuda"
    if args.executor:
        spec = importlib.util.spec_from_file_location("cpu_executor", args.executor)
        executor = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(executor)
        executor.install()
        device = "cpu"
    elif not torch.cuda.is_available():
        print(
            "error: torch sees no GPU\n  next: --executor tests/pytorch/cpu_executor.py",
            file=sys.stderr,
        )
        return 2
    runs = {
        "separate weights, regular": train(False, args.steps, device),
        "single weights, delayed": train(True, args.steps, device),
    }
    (old_losses, old), (new_losses, new) = runs.values()
    differing = [name for name in old if not torch.equal(old[name], new[name])]
    equal = not differing and old_losses == new_losses and old.keys() == new.keys()
    for step in sorted({0, args.steps // 4, args.steps // 2, args.steps - 1}):
        print(f"step {step + 1:4d}  loss {old_losses[step]:.5f}  {new_losses[step]:.5f}")
    print(f"{len(old)} parameters: {'bit-equal' if equal else f'these differ: {differing}'}")
    curves = {name: losses for name, (losses, _) in runs.items()}
    name = "CPU executor" if args.executor else torch.cuda.get_device_name()
    if args.json:
        facts = {
            "what": "example-moe_single_weight",
            "date": datetime.date.today().isoformat(),
            "commit": os.environ.get("TE_WGRAD_COMMIT", "unknown"),
            "command": "python examples/moe_single_weight.py"
            + (f" --executor {args.executor}" if args.executor else ""),
            "device": name,
            "torch": torch.__version__,
            "steps": args.steps,
            "parameters": len(old),
            "equal": equal,
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**facts, "loss": curves}, file, indent=1)
            file.write("\n")
    if args.png:
        verdict = "all weights bit-equal" if equal else "weights differ"
        plot(args.png, curves, f"{EXPERTS} experts, {args.steps} steps, {name}: {verdict}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
