# SPDX-License-Identifier: Apache-2.0
"""Delayed weight gradients: ``delay_wgrad_compute=True`` changes when, never what.

The backward pass of a module has two halves. The main half runs in
``backward()`` and has no edge to the delayed parameters, so that nothing of
theirs changes and none of their hooks fires. It leaves a :class:`Contribution`
in the module's queue. The delayed half is an autograd node of its own:
``backward_dw()`` runs it, it runs the stored wgrad GEMMs and *returns* the
gradients, and autograd accumulates them as in the regular path::

    forward         X, W ------> [module] ------> Y          held: W, b
    backward()      dY --> [main half: dgrad GEMM] --> dX
                               |
                               v   Contribution(X, dY, wgrad GEMM, W, b)
                            queue: first in, first out
                               |
    backward_dw()              v
                          [delayed half: wgrad GEMM] --> AccumulateGrad --> W.grad
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor

from ..distributed_weight import is_distributed_weight
from ..quantization import FP8GlobalStateManager
from ..quantized_tensor import QuantizedTensorStorage
from ..tensor.grouped_tensor import GroupedTensor, GroupedTensorStorage
from ..utils import get_nvtx_range_context

__all__ = ["CapturedWgrads", "DelayedWgradMixin", "PendingWgrads", "apply_operations"]


# --- the queue --------------------------------------------------------------


class PendingWgrads:
    """First-in-first-out queue of contributions, with the names of ``queue.Queue``.

    Modules that hold an empty one can be deep-copied and pickled; the copy has
    an empty queue of its own.
    """

    def __init__(self) -> None:
        self._items: deque = deque()

    def put(self, item) -> None:
        """Append the newest."""
        self._items.append(item)

    def get(self):
        """Remove and return the oldest; IndexError when there is none."""
        return self._items.popleft()

    def oldest(self):
        """The oldest, left in place."""
        return self._items[0]

    def newest(self):
        """The newest, left in place."""
        return self._items[-1]

    def truncate(self, length: int) -> None:
        """Drop the newest until ``length`` are left."""
        while len(self._items) > length:
            self._items.pop()

    def qsize(self) -> int:
        """How many are pending."""
        return len(self._items)

    __len__ = qsize

    def empty(self) -> bool:
        """Whether none is pending."""
        return not self._items

    def __repr__(self) -> str:
        return f"PendingWgrads({len(self)} pending: {list(self._items)})"

    def __reduce__(self):
        if self._items:
            raise RuntimeError(
                f"{len(self)} delayed weight gradients are pending and cannot be copied or pickled. "
                "Call backward_dw() until pending_backward_dw is 0, then copy the module."
            )
        return (PendingWgrads, ())


# --- one contribution -------------------------------------------------------


def _data_tensors(thing) -> Iterator[torch.Tensor]:
    """Plain tensors inside lists and quantized or grouped tensors."""
    if isinstance(thing, (list, tuple)):
        for item in thing:
            yield from _data_tensors(item)
    elif isinstance(thing, QuantizedTensorStorage) or hasattr(thing, "get_data_tensors"):
        yield from _data_tensors(list(vars(thing).values()))
    elif isinstance(thing, torch.Tensor):
        yield thing


def _detached(thing):
    """Plain tensors without the autograd graph that made them, which they would keep alive."""
    if isinstance(thing, (list, tuple)):
        return [_detached(item) for item in thing]
    if isinstance(thing, GroupedTensorStorage) and thing.rowwise_data is not None:
        thing.rowwise_data = _detached(thing.rowwise_data)  # the path's own wrapper of X or dY
    return thing.detach() if type(thing) is torch.Tensor and thing.requires_grad else thing


class Piece:
    """One stored GEMM (grouped or not) and the parameters that it serves.

    Parameters
    ----------
    tensors : list
        Its operands: the input and the output gradient.
    gemm : callable
        ``gemm(x, dy, **late)`` of a dense module, or
        ``gemm(x, dy, outputs, **late)`` of a grouped one; ``late`` holds what
        is decided at delivery: ``accumulate`` and, dense, ``out`` and ``out_dtype``.
    group : Group
        The parameters.
    """

    def __init__(self, tensors: list, gemm: Callable, group: Group) -> None:
        self.tensors, self.gemm, self.group = _detached(tensors), gemm, group
        self.result: tuple | None = None

    def run(self) -> tuple[list, list]:
        """Weight gradients and bias gradients, None for each that there is none of.

        The result is kept until the contribution is delivered, so that a GEMM
        that added to ``main_grad`` is not repeated when a later one raised.
        """
        if self.result is None:
            run = self._run_dense if self.group.layout == "dense" else self._run_grouped
            self.result = run()
            self.tensors = self.gemm = None
        return self.result

    def _run_dense(self) -> tuple[list, list]:
        group = self.group
        late = {}
        if group.fused:
            (out,) = group.main_grads()
            late = {"out": out, "out_dtype": out.dtype, "accumulate": group.accumulates()}
        wgrad, bgrad, *_ = self.gemm(*self.tensors, **late)
        return [None if group.fused else wgrad], [bgrad]

    def _run_grouped(self) -> tuple[list, list]:
        group = self.group
        outputs = group.main_grads() if group.fused else group.new_wgrads()
        target = outputs
        if group.layout == "packed":
            count, *shape = group.weights[0].shape
            if type(self.tensors[1]) is torch.Tensor:
                target = outputs[0]
            elif isinstance(self.tensors[1], (list, tuple)):
                target = list(outputs[0].unbind())
            else:
                target = GroupedTensor.make_grouped_tensor_from_rowwise_data(
                    num_tensors=count,
                    tensor_shape=tuple(shape),
                    rowwise_data=outputs[0].view(-1),
                    dtype=outputs[0].dtype,
                )
        done = self.gemm(*self.tensors, target, accumulate=group.fused and group.accumulates())
        bgrads = done[1] if isinstance(done, tuple) and done[1] is not None else []
        if group.biases and group.biases[0].dim() == 2:  # one parameter [groups, out]
            if isinstance(bgrads, torch.Tensor):
                bgrads = [bgrads]
            elif bgrads and bgrads[0] is not None:
                bgrads = [torch.stack(list(bgrads))]
        bgrads = list(bgrads)
        return [None] * len(outputs) if group.fused else outputs, bgrads


class Group:
    """Parameters that one GEMM makes the gradients of.

    Parameters
    ----------
    weights, biases : sequence of torch.Tensor
        As the forward pass used them; need not be leaves.
    layout : str
        "dense" (one weight), "list" (one weight a group) or "packed" (one
        weight ``[groups, out, in]``).
    fused : bool
        Whether the GEMM writes ``main_grad``.
    dtype : torch.dtype
        Of the gradients where they are not fused.
    first_microbatch : bool, optional
        The forward's ``is_first_microbatch``; True overwrites ``main_grad``.
    bias_in_main : bool
        Whether the main half is expected to make the bias gradients, which
        then keep their edges.
    """

    def __init__(
        self, weights, biases=(), *, layout, fused, dtype, first_microbatch=None, bias_in_main=False
    ) -> None:
        self.weights, self.biases = list(weights), list(biases)
        self.layout, self.fused, self.dtype = layout, fused, dtype
        self.first_microbatch, self.bias_in_main = first_microbatch, bias_in_main
        # As in the forward: what was frozen then has no contribution.
        self.wanted = {id(t) for t in (*self.weights, *self.biases) if t.requires_grad}

    def held(self) -> list[torch.Tensor]:
        """Parameters that the main half must not have edges to."""
        return self.weights if self.bias_in_main else self.weights + self.biases

    def trained(self) -> list[torch.Tensor]:
        """Weights that were not frozen in the forward and are not now."""
        return [w for w in self.weights if id(w) in self.wanted and w.requires_grad]

    def main_grads(self) -> list[torch.Tensor]:
        """``main_grad`` of each weight, asked for now and checked before a kernel writes it.

        Raises
        ------
        RuntimeError
            Where there is none, or its size, layout or device does not fit.
        """
        found = []
        for number, weight in enumerate(self.weights):
            if hasattr(weight, "__fsdp_param__"):
                weight.main_grad = weight.get_main_grad()
            grad = getattr(weight, "main_grad", None)
            if grad is None and not weight.requires_grad:
                # The grouped GEMM writes something for a frozen expert; nobody reads it.
                grad = torch.empty(tuple(weight.shape), dtype=torch.float32, device=weight.device)
            if grad is None:
                raise RuntimeError(
                    "fuse_wgrad_accumulation (accumulate_into_main_grad) is on, but weight "
                    f"{number} has no main_grad. Set weight.main_grad to a buffer of shape "
                    f"{tuple(weight.shape)}, or turn the setting off."
                )
            if grad.numel() != math.prod(weight.shape) or not grad.is_contiguous():
                raise RuntimeError(
                    f"main_grad of weight {number} must be a contiguous view with the "
                    f"{math.prod(weight.shape)} elements of shape {tuple(weight.shape)}; it has shape "
                    f"{tuple(grad.shape)} and strides {grad.stride()}."
                )
            found.append(grad.view(tuple(weight.shape)))
        return found

    def accumulates(self) -> bool:
        """Whether the GEMM adds to ``main_grad``; decided now, as the weight says."""
        return not self.first_microbatch and not getattr(
            self.weights[0], "overwrite_main_grad", False
        )

    def new_wgrads(self) -> list[torch.Tensor]:
        """Memory for the gradients, one buffer for all."""
        lead = self.weights[0]
        shape = tuple(lead.shape) if self.layout == "packed" else (len(self.weights), *lead.shape)
        packed = torch.empty(shape, dtype=self.dtype, device=lead.device)
        return [packed] if self.layout == "packed" else [packed[i] for i in range(shape[0])]

    def mark_main_grads(self) -> list[torch.Tensor | None]:
        """Set ``grad_added_to_main_grad`` and make the dummy that stands in ``.grad``."""
        # pylint: disable=import-outside-toplevel
        from ..ops._common import get_dummy_wgrads_for_params

        return get_dummy_wgrads_for_params(self.trained())


class Contribution:
    """What one main backward left for ``backward_dw()``: GEMMs and ready gradients.

    Parameters
    ----------
    pieces : sequence of Piece
        The GEMMs.
    ready : sequence of (torch.Tensor, torch.Tensor)
        Parameters and gradients that the main half made although their edge
        was taken away.
    share : DdpShare, optional
        Under DistributedDataParallel: who delivers a tied parameter.
    """

    def __init__(
        self, pieces: Sequence[Piece], ready: Sequence[tuple] = (), share: DdpShare | None = None
    ) -> None:
        self.pieces, self.ready, self.share = list(pieces), list(ready), share
        self.stream = torch.cuda.current_stream()
        self.fused_groups: list[Group] = []

    def __repr__(self) -> str:
        shapes = [tuple(w.shape) for piece in self.pieces for w in piece.group.weights]
        return f"Contribution(weights {shapes})"

    def compute(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Run the GEMMs and return (parameter, gradient) pairs, once.

        Raises
        ------
        Exception
            What a GEMM raises; a second call goes on from there.
        """
        self._keep_memory()
        done = [(piece.group, *piece.run()) for piece in self.pieces]
        pairs = []
        for group, wgrads, bgrads in done:
            if group.fused:
                pairs += zip(group.trained(), group.mark_main_grads())
            else:
                pairs += ((w, g) for w, g in zip(group.weights, wgrads) if id(w) in group.wanted)
            made = ((b, g) for b, g in zip(group.biases, bgrads) if g is not None and g.numel())
            pairs += ((b, g) for b, g in made if id(b) in group.wanted)
        pairs += self.ready
        self.fused_groups = [group for group, *_ in done if group.fused]
        self.pieces, self.ready = [], []
        return _join_owed(pairs) if self.share is None else self.share.settle(pairs)

    def __iter__(self) -> Iterator:
        # WeightGradStore.pop unpacks an entry into operands and a function of them.
        yield [tensor for piece in self.pieces for tensor in piece.tensors]
        yield lambda *_: (*(grad for _, grad in self.compute()), None, None)

    def _keep_memory(self) -> None:
        """Memory made on another stream is not reused before this one has read it."""
        stream = torch.cuda.current_stream()
        if stream == self.stream or torch.cuda.is_current_stream_capturing():
            return
        for tensor in _data_tensors([[piece.tensors for piece in self.pieces], self.ready]):
            if tensor.is_cuda:
                tensor.record_stream(stream)


class _DelayedHalf(torch.autograd.Function):
    """The wgrad half of a module's backward, as a node of its own."""

    @staticmethod
    def forward(ctx, grads: list, *targets: torch.Tensor) -> torch.Tensor:
        # pylint: disable=missing-function-docstring
        ctx.grads = grads
        # Only its edge matters; no kernel reads or writes it.
        return torch.empty((), device=targets[0].device)

    @staticmethod
    def backward(ctx, _grad: torch.Tensor) -> tuple:
        # pylint: disable=missing-function-docstring
        grads = (None, *ctx.grads)
        # A gradient that nothing else refers to is moved into .grad, not copied.
        ctx.grads.clear()
        return grads


def accumulate(pairs: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Give gradients to autograd, as a backward pass does; empties ``pairs``.

    Autograd adds to an existing ``.grad`` in place, splits what the parameters
    were concatenated from, and runs every hook once.

    Parameters
    ----------
    pairs : list of (torch.Tensor, torch.Tensor or None)
        Parameters (or what was computed from them) and their gradients.
    """
    wanted = [(t, g) for t, g in pairs if t.requires_grad]
    pairs.clear()
    if not wanted:
        return
    targets, grads = [t for t, _ in wanted], [g for _, g in wanted]
    wanted.clear()
    with torch.enable_grad():
        half = _DelayedHalf.apply(grads, *targets)
    # The engine's device thread has nothing to overlap here; handing over to it costs more than
    # the work. Inside a backward the thread is the engine's already.
    inside = torch._C._current_graph_task_id() != -1
    if inside:
        _engine_run(half, targets)
    else:
        with torch.autograd.set_multithreading_enabled(False):
            _engine_run(half, targets)


def _engine_run(half: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    # torch.autograd.backward without its checks of shapes and types: 40 us a call.
    # What a weight was computed from may be needed again by its next contribution.
    keep = any(target.grad_fn is not None for target in targets)
    _engine_run_backward(
        (half,), (half.detach(),), keep, False, (), allow_unreachable=True, accumulate_grad=True
    )


class CapturedWgrads:
    """``backward_dw()`` under CUDA-graph capture: runs the GEMMs, delivers at each replay.

    Parameters
    ----------
    module : DelayedWgradMixin
        Has pending contributions; they leave its queue.
    only_oldest : bool
        Take one contribution, not all that are pending.
    """

    def __init__(self, module: torch.nn.Module, *, only_oldest: bool = False) -> None:
        self.module = module
        self.runs = []
        store = module.wgrad_store.context
        for _ in range(min(1, len(store)) if only_oldest else len(store)):
            contribution = store.oldest()
            fused = set()
            pairs = contribution.compute()
            for group in contribution.fused_groups:
                fused |= {id(weight) for weight in group.weights}
            store.get()
            pairs = [(t, g) for t, g in pairs if id(t) not in fused]
            self.runs.append((pairs, contribution.fused_groups))

    def deliver(self) -> None:
        """Accumulate what the last replay computed, then run the module's hooks.

        The graph's own memory is never put into ``.grad``: autograd copies a
        gradient that something else refers to.
        """
        for pairs, fused_groups in self.runs:
            dummies = [pair for g in fused_groups for pair in zip(g.trained(), g.mark_main_grads())]
            accumulate(pairs + dummies)
            self.module._trigger_wgrad_accumulation_and_reduce_hooks()


class _Owed:
    """What several passes owe to parameters that DDP takes once an iteration.

    One for each parameter, or for parameters that one weight was computed from. It
    waits for all passes, then autograd gets everything in one run.
    """

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.passes: weakref.WeakSet = weakref.WeakSet()  # a pass may be forgotten
        self.pairs: dict[int, list] = {}

    @staticmethod
    def of(target: torch.Tensor) -> _Owed | None:
        """The one that ``target`` waits for."""
        for leaf in _leaves(target):
            if (found := leaf.__dict__.get("_delayed_wgrad_owed")) is not None:
                return found
        return None

    def include(self, target: torch.Tensor, owner: DdpShare) -> None:
        """Wait for a pass's gradient of ``target`` and of all that it was computed from."""
        self.passes.add(owner)
        for leaf in _leaves(target):
            other = leaf.__dict__.get("_delayed_wgrad_owed")
            if other is None:
                self._take([leaf])
            elif other is not self:
                self._take(other.leaves)
                for one in other.passes:
                    one.owed = [self if owed is other else owed for owed in one.owed]
                    self.passes.add(one)
                self.pairs.update(other.pairs)

    def _take(self, leaves: list) -> None:
        self.leaves += leaves
        for leaf in leaves:
            leaf._delayed_wgrad_owed = self

    def add(self, target: torch.Tensor, grad: torch.Tensor | None) -> None:
        """One contribution; those to the same tensor are summed as the engine would."""
        pair = self.pairs.setdefault(id(target), [target, None])
        if pair[1] is None:
            pair[1] = grad
        elif grad is not None:
            pair[1] = pair[1] + grad.to(pair[1].dtype)

    def finished(self) -> list:
        """Everything, when no pass is waited for; else nothing."""
        if self.passes:
            return []
        for leaf in self.leaves:
            leaf.__dict__.pop("_delayed_wgrad_owed", None)
        pairs, self.pairs, self.leaves = list(map(tuple, self.pairs.values())), {}, []
        return pairs


def _leaves(target: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that ``target`` was computed from, or itself."""
    if target.grad_fn is None:
        return [target]
    found, seen, todo = [], set(), [target.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [next_node for next_node, _ in node.next_functions]
    return found


class DdpShare:
    """One pass under DistributedDataParallel, which takes each parameter once an iteration.

    The regular path sums what several modules contribute to a tied parameter
    before DDP hears of it. Here a parameter knows from the forward on which passes
    owe it a contribution, and the last of them delivers all. A pass that has not
    run its backward when the iteration's backward ends is not waited for.

    Parameters
    ----------
    ddp : torch.nn.parallel.DistributedDataParallel
        Synchronizes in this iteration.
    params : sequence of torch.Tensor
        The delayed parameters of the pass.
    """

    def __init__(self, ddp: torch.nn.Module, params: Sequence[torch.Tensor]) -> None:
        self.committed = False
        self.owed: list[_Owed] = []
        for param in params:
            if param.requires_grad:
                owed = _Owed.of(param) or _Owed()
                owed.include(param, self)
                self.owed.append(owed)
                _guard(ddp, owed.leaves)

    def commit(self) -> None:
        """The main half has run."""
        self.committed = True
        # The halves may be delivered before the backward ends.
        ended = functools.partial(_backward_ended, list(self.owed))
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def settle(self, pairs: list) -> list:
        """Keep back what is not the last contribution; deliver everything with the last."""
        owed, self.owed = self.owed, []
        settled = _join_owed(pairs)
        for one in owed:
            one.passes.discard(self)
        for one in owed:
            settled += one.finished()
        return settled


def _backward_ended(owed: Sequence[_Owed]) -> None:
    """Do not wait for passes whose backward did not come; deliver what waited for them alone."""
    pairs = []
    for one in owed:
        for late in [p for p in one.passes if not p.committed]:
            one.passes.discard(late)
        pairs += one.finished()
    accumulate(pairs)


def _guard(ddp: torch.nn.Module, leaves: Sequence[torch.Tensor]) -> None:
    """Make a gradient of another user of these parameters an error, not an early reduction."""
    guarded = ddp.__dict__.setdefault("_delayed_wgrad_guarded", set())
    for leaf in leaves:
        if id(leaf) not in guarded:
            guarded.add(id(leaf))
            # DDP keeps the node, and so this, alive.
            node = torch.autograd.graph.get_gradient_edge(leaf).node
            node.register_prehook(functools.partial(_refuse_early, weakref.ref(leaf)))


def _refuse_early(leaf: weakref.ref, grads: tuple) -> None:
    param = leaf()
    if param is not None and grads[0] is not None and "_delayed_wgrad_owed" in param.__dict__:
        _refuse(
            "DistributedDataParallel where another user of the weight does not delay",
            f"it would reduce the parameter of shape {tuple(param.shape)} before backward_dw() adds "
            "to it",
            "Set delay_wgrad_compute to the same value for all users of this parameter; users that "
            "have no such setting need False.",
        )


def _join_owed(pairs: list) -> list:
    """Add gradients to what DDP still waits for, those made under ``no_sync`` too; the others."""
    rest = []
    for param, grad in pairs:
        owed = _Owed.of(param)
        if owed is None:
            rest.append((param, grad))
        else:
            owed.add(param, grad)
    pairs.clear()
    return rest


# --- the main half ----------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _without_edges(function: type) -> type:
    """An autograd function like ``function`` whose held arguments have no edges."""

    def forward(ctx, main: MainHalf, _anchor, *args):
        ctx.delayed_main_half = main
        return function.forward(ctx, *main.put_back(args))

    def backward(ctx, *grad_outputs):
        main = ctx.delayed_main_half
        begun = main.begin()
        try:
            grads = main.take_out(function.backward(ctx, *grad_outputs))
        except BaseException:
            main.discard(begun)
            raise
        main.commit(begun)
        return (None, None, *grads)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(function.__name__, (function,), members)


class MainHalf:
    """One forward and its backward, with the delayed parameters held back from autograd.

    Modules hand it to their autograd function in place of ``WeightGradStore``.

    Parameters
    ----------
    store : PendingWgrads
        Where contributions go.
    groups : dict of str to Group
        The delayed parameters by the name that ``put`` is called with.
    """

    def __init__(self, store: PendingWgrads, groups: dict[str, Group]) -> None:
        self.store, self.groups = store, groups
        self.held: dict[int, torch.Tensor] = {}
        self.pieces: list[Piece] = []
        self.ready: list[tuple] = []
        ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        self.ddp = ddp if ddp is not None and ddp.require_backward_grad_sync else None
        held = [t for group in groups.values() for t in group.held()]
        self.share = None if self.ddp is None else DdpShare(self.ddp, held)

    # The two names that the backward code of the modules calls.

    def delay_wgrad_compute(self) -> bool:
        """True: this pass delays."""
        return True

    def put(self, tensors: list, gemm: Callable, name: str = "") -> None:
        """Keep a GEMM for later; grouped callers' output list is made at delivery."""
        self.pieces.append(Piece(list(tensors[:2]), gemm, self.groups[name]))

    def apply(self, function: type, *args):
        """``function.apply(*args)`` without edges to the parameters of the groups."""
        self.held = self._find_held(args)
        args = [None if i in self.held else a for i, a in enumerate(args)]
        anchor = None
        if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            # Nothing else asks for a gradient, but the main half must run.
            anchor = torch.empty(0, device=self.held[min(self.held)].device, requires_grad=True)
        return _without_edges(function).apply(self, anchor, *args)

    def _find_held(self, args: tuple) -> dict[int, torch.Tensor]:
        hold = {id(t) for group in self.groups.values() for t in group.held()}
        return {i: a for i, a in enumerate(args) if id(a) in hold}

    def bind(self, function: type) -> Callable:
        """``apply`` for one function, called as ``function.apply`` is."""
        return functools.partial(self.apply, function)

    def put_back(self, args: tuple) -> list:
        """The arguments as the caller gave them."""
        return [self.held.get(i, a) for i, a in enumerate(args)]

    # Around a backward: what it put is queued, or nothing when it raises.

    def begin(self):
        """Start a backward; what it returns goes to ``commit`` or ``discard``."""
        self.pieces, self.ready = [], []

    def commit(self, _begun) -> None:
        """Queue what the backward left."""
        if self.pieces or self.ready:
            if self.share is not None:
                self.share.commit()
            self.store.put(Contribution(self.pieces, self.ready, self.share))
            self.pieces, self.ready, self.share = [], [], None

    def discard(self, _begun) -> None:
        """Forget it."""
        self.pieces, self.ready = [], []

    def take_out(self, grads: tuple) -> list:
        """Blank the held arguments' gradients; keep the biases' that were made already."""
        grads = list(grads)
        for index, tensor in self.held.items():
            if grads[index] is not None:
                if any(tensor is b for g in self.groups.values() for b in g.biases):
                    self.ready.append((tensor, grads[index]))
                grads[index] = None
        return grads


class OperationsMainHalf(MainHalf):
    """The same for a fused pipeline of operations, whose operations queue by themselves."""

    def __init__(self, operations: Sequence[DelayedWgradMixin], slots: Sequence[range]) -> None:
        self.operation_groups = [op.delayed_group(None) for op in operations]
        groups = {str(i): group for i, group in enumerate(self.operation_groups)}
        super().__init__(PendingWgrads(), groups)
        self.slots = slots
        self.stores = [op.wgrad_store.context for op in operations]
        if self.ddp is not None:
            self.share = [DdpShare(self.ddp, group.held()) for group in groups.values()]

    def _find_held(self, args: tuple) -> dict[int, torch.Tensor]:
        # By place: an operation without the delay may have the same weight.
        found = {}
        for group, slots in zip(self.operation_groups, self.slots):
            hold = {id(t) for t in group.held()}
            found.update({i: args[i] for i in slots if id(args[i]) in hold})
        return found

    def begin(self) -> list[int]:
        """How much was queued before."""
        return [len(store) for store in self.stores]

    def commit(self, begun: list[int]) -> None:
        """The operations have queued by themselves."""
        shares = self.share or [None] * len(self.stores)
        for store, length, share, group in zip(self.stores, begun, shares, self.operation_groups):
            if len(store) > length:
                newest = store.newest()
                newest.share = share
                if share is not None:
                    share.commit()
                # The weights of the forward, which may have been exchanged since.
                for piece in newest.pieces:
                    group.dtype, piece.group = piece.group.dtype, group
        self.share = None

    def discard(self, begun: list[int]) -> None:
        """Take back what they queued."""
        for store, length in zip(self.stores, begun):
            store.truncate(length)


def apply_operations(function: type, operations: Sequence, *args):
    """``function.apply(*args)`` of an operation fuser, its delayed weights held back."""
    if any(isinstance(op, DelayedWgradMixin) and op.need_backward_dw() for op in operations):
        return _apply_delayed_operations(function, operations, *args)
    return function.apply(*args)


@torch.compiler.disable
def _apply_delayed_operations(function: type, operations: Sequence, *args):
    # Outside of what torch.compile traces, as modules are: it would split the halves itself.
    delayed, slots = [], []
    place = 4  # input, fuser, keyword arguments and a flag come before the parameters
    for op, count in zip(operations, args[1]._basic_op_num_params):
        if isinstance(op, DelayedWgradMixin) and op.delays_weights():
            delayed.append(op)
            slots.append(range(place, place + count))
        place += count
    if not delayed:
        return function.apply(*args)
    return OperationsMainHalf(delayed, slots).apply(function, *args)


# --- what cannot be right ---------------------------------------------------


_USERBUFFERS = (
    "ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_ag"
)  # fmt: skip


DEBUG_REFUSED = (
    "delay_wgrad_compute=True does not work with debug mode (nvdlfw_inspect): its features look at "
    "the weight gradient in the main backward. Set delay_wgrad_compute=False for this module, or "
    "leave debug mode off."
)


def _refuse(what: str, why: str, instead: str) -> None:
    raise RuntimeError(f"delay_wgrad_compute=True does not work with {what}: {why}. {instead}")


_OFF = "Set delay_wgrad_compute=False for this module."


def _check_weights(weights: Sequence[torch.Tensor]) -> None:
    if any(isinstance(w, DTensor) for w in weights):
        _refuse_fsdp2()
    if any(is_distributed_weight(w) for w in weights):
        _refuse("distributed weights", "they reduce their gradients in the main backward", _OFF)


def _refuse_fsdp2() -> None:
    _refuse(
        "FSDP2 (DTensor weights)", "gradients are reduced before backward_dw() makes them", _OFF
    )


def check_supported(owner: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
    """Refuse what would give wrong gradients, before anything is changed.

    Raises
    ------
    RuntimeError
        Naming the setting and the way out.
    """
    if torch.compiler.is_compiling():
        _refuse("torch.compile", "the compiled backward cannot be split in two", _OFF)
    # Parameters are looked at once; what was computed from them says nothing about them.
    checked = [type(weights[0]), *(id(weight) for weight in weights)]
    if weights[0].grad_fn is not None or owner.__dict__.get("_delayed_wgrad_checked") != checked:
        _check_weights([*weights, *owner.parameters(recurse=False)])
        owner.__dict__["_delayed_wgrad_checked"] = checked
    if getattr(owner, "is_fsdp2", False):
        _refuse_fsdp2()
    for name in _USERBUFFERS:
        if getattr(owner, name, False):
            _refuse(
                f"Userbuffers overlap ({name}=True)",
                "its buffers are used again before backward_dw() reads them",
                f"Set {name}=False or delay_wgrad_compute=False.",
            )
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is not None:
        for name in ("find_unused_parameters", "static_graph"):
            if getattr(ddp, name, False):
                _refuse(
                    f"DistributedDataParallel({name}=True)",
                    "it takes the delayed parameters for finished in the main backward",
                    f"Set {name}=False, or delay_wgrad_compute=False.",
                )


def any_requires_grad(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether at least one of them is trained."""
    return any(tensor.requires_grad for tensor in tensors)


# --- what modules inherit ---------------------------------------------------


class DelayedWgradMixin:
    """``backward_dw()`` and what belongs to it, for modules and operations.

    Uses of the class it is mixed into: ``wgrad_store``, ``need_backward_dw()``
    and ``_trigger_wgrad_accumulation_and_reduce_hooks()``.
    """

    @property
    def pending_backward_dw(self) -> int:
        """How many ``backward_dw()`` calls there is work for (read only)."""
        store = getattr(self, "wgrad_store", None)
        return 0 if store is None or store.context is None else len(store.context)

    def backward_dw(self) -> None:
        """Compute the oldest pending weight gradients and accumulate them.

        One call answers one ``backward()`` of this module, oldest first. With
        nothing pending it does nothing. When a GEMM raises, the contribution
        stays pending and the call can be repeated.
        """
        if not self.need_backward_dw() or not self.pending_backward_dw:
            return
        with get_nvtx_range_context(f"_{type(self).__name__}_wgrad"):
            with torch.no_grad():
                pairs = self._compute_oldest_wgrads()
            accumulate(pairs)
            self._trigger_wgrad_accumulation_and_reduce_hooks()

    def _compute_oldest_wgrads(self) -> list:
        """Run the oldest contribution's GEMMs; it leaves the queue once they have run."""
        oldest = self.wgrad_store.context.oldest()
        known = isinstance(oldest, Contribution)
        pairs = oldest.compute() if known else self._compute_foreign_wgrads(*oldest)
        self.wgrad_store.context.get()
        return pairs

    def _compute_foreign_wgrads(self, tensors: list, gemm: Callable) -> list:
        """Run what code outside this module gave to ``wgrad_store.put`` (fused MLA does).

        ``gemm(*tensors)`` returns the weight gradient ``[out, in]``, written to
        ``main_grad`` already where that is fused, and the bias gradient or None.
        """
        from ._common import noop_cat  # pylint: disable=import-outside-toplevel

        wgrad, bgrad, *_ = gemm(*tensors)
        pairs = []
        with torch.enable_grad():
            if not self.fuse_wgrad_accumulation:
                pairs.append((noop_cat(self._get_weight_tensors()), wgrad))
            if self.use_bias and bgrad is not None and bgrad.numel():
                pairs.append((noop_cat([getattr(self, name) for name in self.bias_names]), bgrad))
        return pairs

    def delayed_main_half(self, groups: dict[str, Group]) -> MainHalf | None:
        """Start a forward whose weight gradients come later.

        Returns None where there is nothing to delay: the pass is then the regular one.
        """
        if not self.need_backward_dw() or not torch.is_grad_enabled():
            return None
        groups = {name: g for name, g in groups.items() if any_requires_grad(g.weights)}
        if not groups:
            return None
        check_supported(self, [w for g in groups.values() for w in g.weights])
        return MainHalf(self.wgrad_store.context, groups)

    def dense_main_half(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        first_microbatch: bool | None,
    ) -> MainHalf | None:
        """The same for one GEMM: ``weight`` is ``[out, in]``, ``bias`` is ``[out]`` or None."""
        if not self.need_backward_dw():
            return None
        return self.delayed_main_half({"": self.dense_group(weight, bias, first_microbatch)})

    def mlp_main_half(self, fc1: tuple, fc2: tuple, first_microbatch: bool | None):
        """The same for two GEMMs: ``(weight, bias)`` each, delivered together."""
        if not self.need_backward_dw():
            return None
        groups = {
            "fc2": self.dense_group(*fc2, first_microbatch),
            "fc1": self.dense_group(*fc1, first_microbatch),
        }
        return self.delayed_main_half(groups)

    def dense_group(self, weight, bias, first_microbatch) -> Group:
        """One GEMM's parameters; with quantized compute the main half makes the bias gradient."""
        return Group(
            [weight],
            [] if bias is None else [bias],
            layout="dense",
            fused=self.fuse_wgrad_accumulation,
            dtype=self.activation_dtype,
            first_microbatch=first_microbatch,
            bias_in_main=self.bias_in_main_half(),
        )

    def grouped_main_half(self, weights, biases, first_microbatch, native):
        """The same for a grouped GEMM: one or ``num_gemms`` weights and biases.

        The native grouped-tensor path reduces dY itself.
        """
        if not self.need_backward_dw():
            return None
        group = Group(
            weights,
            biases if self.apply_bias else [],
            layout="packed" if self.single_grouped_weight else "list",
            fused=self.fuse_wgrad_accumulation,
            dtype=self.activation_dtype,
            first_microbatch=first_microbatch,
            bias_in_main=native or self.bias_in_main_half(),
        )
        return self.delayed_main_half({"": group})

    def bias_in_main_half(self) -> bool:
        """Whether quantizing dY makes the bias gradient, not the wgrad GEMM."""
        return self.fp8 and FP8GlobalStateManager.get_fp8_recipe().backward_override is None

    def register_parameter(self, name: str, param: torch.nn.Parameter | None, **kwargs) -> None:
        """Register, and mark a parameter whose gradient comes late."""
        super().register_parameter(name, param, **kwargs)
        self.mark_delayed_parameter(name, param)

    def mark_delayed_parameter(self, name: str, param: torch.Tensor | None) -> None:
        """Set ``skip_backward_post_hook`` on a parameter whose gradient comes late.

        At registration, so that it holds for parameters that are made anew
        (meta device) or attached later. Norm parameters are not delayed.
        """
        store = self.__dict__.get("wgrad_store")
        if param is not None and store is not None and store.delay_wgrad_compute():
            operation = hasattr(self, "op_forward")
            if name.startswith("weight") if operation else not name.startswith("layer_norm"):
                param.skip_backward_post_hook = True

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        # Copying a parameter drops its attributes.
        for name, param in self._parameters.items():
            self.mark_delayed_parameter(name, param)

    # For operations (``transformer_engine.pytorch.ops``).

    def delays_weights(self) -> bool:
        """Whether this operation's weight gradients come later."""
        if not self.need_backward_dw():
            return False
        weights = self._get_weight_tensors()
        if not any_requires_grad(weights):
            return False
        check_supported(self, weights)
        return True

    def delayed_group(self, dtype: torch.dtype | None) -> Group:
        """The operation's weights; gradients have ``dtype`` where they are not fused."""
        return Group(
            self._get_weight_tensors(),
            layout="packed" if self.single_grouped_weight else "list",
            fused=self._accumulate_into_main_grad,
            dtype=dtype,
        )

    def put_delayed_wgrad(self, ctx, x, dy, gemm: Callable) -> bool:
        """Queue ``gemm(x, dy, outputs, accumulate=...)``; False where nothing is delayed."""
        if not ctx.weight_requires_grad or not self.need_backward_dw():
            return False
        piece = Piece([x, dy], gemm, self.delayed_group(ctx.dtype))
        self.wgrad_store.context.put(Contribution([piece]))
        return True
