"""The backward pass in two: gradients of the inputs now, those of the parameters later.

    whole     B   gradient of y  ->  gradient of x, and of w             y = operation(x, w)
    split     I   gradient of y  ->  gradient of x; y's gradient and x are kept
              W   from what was kept  ->  gradient of w

A layer's graph calls what can be split (`profiler.run.separable`) through `separated`, which runs it in an autograd
graph of its own, on detached operands. So torch's own formulas make both gradients, each once: I asks that graph for
the gradient of x, and W for that of w, with which it then goes back to the parameters in one walk of the engine. All
other saved values are freed by I as ever. As torch computes one gradient of an operation without the others by the same
kernels, and W adds up in the order in which I came to the operations, which is that of a whole backward pass, the
gradients are the same in every bit.

The idea of keeping weight gradients for later is that of zero bubble (Qi et al., arXiv 2401.10241, section 2), where
modules are rewritten by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from profiler.torch_private import run_engine, storage_of

_aten = torch.ops.aten

_WHOLE_AGAIN: Final = frozenset({_aten.group_norm.default})
"""W asks these for the gradient of their input as well, if that is not contiguous: on a CPU torch 2.13 ends the process
where an input in channels-last order needs none."""


@dataclass(slots=True)
class DeferredWeights:
    """What a forward pass leaves for W: filled by I, emptied by W.

    Attributes:
        anchor: makes autograd come to operations of which no input needs a gradient.
        entries: in the order in which I came to them.
        watching: whether what operations save is noted, for `kept_bytes`.
        elsewhere: storages that live longer anyway, which are not noted.
        saved: of each storage that they saved its bytes, if they are watched; weights that are computed are among them.
    """

    watching: bool = False
    elsewhere: frozenset[int] = frozenset()
    saved: dict[int, int] = field(default_factory=dict)
    anchor: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))
    entries: list[_Entry] = field(default_factory=list)

    def run(self) -> None:
        """W: adds to the parameters' `.grad`, of each as soon as its sum is complete."""
        entries: list[_Entry | None] = list(self.entries)
        self.entries = []
        for group in _sharing_parameters(entries):
            taken = deque(entries[position] for position in group)
            for position in group:
                entries[position] = None
            _add_gradients(taken)

    def kept_bytes(self) -> int:
        """Bytes that live between I and W, of distinct storages, if operations were watched."""
        for entry in self.entries:
            for value in (entry.gradient, *entry.weights):
                self.note(value)
        return sum(self.saved.values())

    def note(self, value: Tensor) -> Tensor:
        """Something that an operation saves."""
        if storage_of(value) not in self.elsewhere:
            self.saved[storage_of(value)] = _storage_bytes(value)
        return value


def _storage_bytes(value: Tensor) -> int:
    return value.untyped_storage().nbytes()


class _Entry(NamedTuple):
    """One operation between I and W.

    Attributes:
        output: where its gradient enters its own graph.
        wanted: the leaves of that graph that stand for parameters; after them what is asked for and not used.
        edges: where the parameters' gradients go on.
        gradient: of the output.
    """

    output: GradientEdge
    wanted: tuple[Tensor | GradientEdge, ...]
    edges: tuple[GradientEdge, ...]
    gradient: Tensor

    @property
    def weights(self) -> Iterator[Tensor]:
        """The leaves."""
        return (leaf for leaf in self.wanted if isinstance(leaf, Tensor))


def _add_gradients(entries: deque[_Entry | None]) -> None:
    """Gradients of the parameters that these operations lead to; each is freed as soon as it is done."""
    edges: list[GradientEdge] = []
    gradients: list[Tensor] = []
    while entries:
        entry = entries.popleft()
        assert entry is not None
        found = _gradients_of(entry.wanted, entry.output, entry.gradient, keep_graph=False)
        for edge, gradient in zip(entry.edges, found, strict=False):
            if gradient is not None:
                edges.append(edge)
                gradients.append(gradient)
    if edges:
        run_engine(
            tuple(edges),
            tuple(gradients),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def _sharing_parameters(entries: Sequence[_Entry | None]) -> list[list[int]]:
    """Positions of entries that lead to the same parameters together, for a sum has an order; all others apart.

    The gradients of one group exist at a time, so that W takes no more memory than a whole backward pass.
    """
    groups: dict[Any, list[int]] = {}  # by parameter's node
    ends = [_ends(entry.edges) if entry is not None else frozenset() for entry in entries]
    for position, own in enumerate(ends):
        known = {id(group): group for group in map(groups.get, own) if group is not None}
        joined = sorted(chain(*known.values())) if len(known) > 1 else next(iter(known.values()), [])
        joined.append(position)
        for other in joined if len(known) > 1 else (position,):
            groups.update(dict.fromkeys(ends[other], joined))
    return list({id(group): group for group in groups.values()}.values())


def _ends(edges: Sequence[GradientEdge]) -> frozenset[Any]:
    """The nodes at which autograd adds to parameters, of all that these edges lead to."""
    seen: set[Any] = {edge.node for edge in edges}
    waiting = list(seen)
    found = set()
    while waiting:
        node = waiting.pop()
        if not node.next_functions:
            found.add(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return frozenset(found)


class _Call(NamedTuple):
    """One call of a separable operation."""

    operation: Callable[..., Tensor]
    spread: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Any, ...]]
    kwargs: Mapping[str, Any]
    weights: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]
    store: DeferredWeights


def _gradients_of(
    wanted: Sequence[Tensor | GradientEdge], output: GradientEdge, gradient: Tensor, *, keep_graph: bool
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` without what it checks in Python."""
    return run_engine(
        (output,),
        (gradient,),
        keep_graph=keep_graph,
        create_graph=False,
        inputs=tuple(wanted),
        allow_unreachable=True,
        accumulate_grad=False,
    )


class _Source(torch.autograd.Function):
    """Where an operand's gradient ends in the operation's own graph; a leaf would hold the operand's memory until W."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("gradients are taken before they come here")


class _Separated(torch.autograd.Function):
    """The operation in a graph of its own."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, call: _Call, *inputs: Tensor) -> Tensor:
        needs = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            leaves = [
                _Source.apply(call.store.anchor, value) if need else value.detach()  # type: ignore[no-untyped-call]
                for value, need in zip(inputs, needs, strict=True)
            ]
            weights = tuple(weight.detach().requires_grad_() for weight in call.weights)
            with _noting(call.store):
                output = call.operation(*call.spread(leaves, weights), **call.kwargs)
        ctx.set_materialize_grads(False)  # none is not zero: optimizers tell them apart
        ctx.wanted = [get_gradient_edge(leaf) for leaf, need in zip(leaves, needs, strict=True) if need]
        again = call.operation in _WHOLE_AGAIN and not inputs[0].is_contiguous()
        ctx.weights, ctx.edges, ctx.store = (*weights, *(ctx.wanted if again else ())), call.edges, call.store
        ctx.output = get_gradient_edge(output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        found: Sequence[Tensor | None] = ()
        if ctx.wanted:
            found = _gradients_of(ctx.wanted, ctx.output, gradient, keep_graph=True)
        ctx.store.entries.append(_Entry(ctx.output, ctx.weights, ctx.edges, gradient))
        rest = iter(found)
        return (None, None, *(next(rest) if need else None for need in ctx.needs_input_grad[2:]))


def _noting(store: DeferredWeights) -> AbstractContextManager[object]:
    """What operations inside save is noted, if the store watches."""
    if not store.watching:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(store.note, lambda value: value)


_store: DeferredWeights | None = None


@contextmanager
def deferring(store: DeferredWeights | None) -> Iterator[None]:
    """Forward passes inside leave the gradients of their separable weights to this store; with None nothing changes."""
    global _store  # noqa: PLW0603  # graphs call `separated` with nothing but their values
    before, _store = _store, store
    try:
        yield
    finally:
        _store = before


def separated(operation: Callable[..., Tensor], places: tuple[int, ...], *args: Any, **kwargs: Any) -> Tensor:
    """What the operation returns; while a store is there, its weights' gradients are left to that.

    Args:
        operation: one of `profiler.run.separable.SEPARABLE`.
        places: positions of weights among the arguments, those of parameters that are deferred.
        args: of the operation.
        kwargs: of the operation, without a tensor.
    """
    if _store is None or not torch.is_grad_enabled():
        return operation(*args, **kwargs)
    places = tuple(place for place in places if args[place].requires_grad)
    if not places:
        return operation(*args, **kwargs)
    # A node for each use, in the place of the whole operation's: the engine takes the latest first, so W adds up in the
    # same order. Those of one operation come in the order of its operands.
    weights = tuple([args[place].view_as(args[place]) for place in reversed(places)][::-1])
    inputs = [place for place, value in enumerate(args) if isinstance(value, Tensor) and place not in places]

    def spread(leaves: Sequence[Tensor], deferred: Sequence[Tensor]) -> tuple[Any, ...]:
        whole = list(args_without)
        for place, value in zip((*inputs, *places), (*leaves, *deferred), strict=True):
            whole[place] = value
        return tuple(whole)

    args_without = [None if isinstance(value, Tensor) else value for value in args]
    call = _Call(operation, spread, kwargs, weights, tuple(map(get_gradient_edge, weights)), _store)
    result: Tensor = _Separated.apply(_store.anchor, call, *(args[place] for place in inputs))  # type: ignore[no-untyped-call]
    return result
