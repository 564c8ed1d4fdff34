"""The backward pass in two: gradients of the inputs now, those of the parameters later.

    whole     B   gradient of y  ->  gradient of x, and of w             y = operation(x, w)
    split     I   gradient of y  ->  gradient of x; y's gradient and x are kept
              W   from what was kept  ->  gradient of w

A layer's graph calls what can be split (`profiler.run.separable`) through `separated`, which runs it in an autograd
graph of its own, that begins at a leaf in place of x and at the parameters themselves. So torch's own formulas make
both gradients, each once: I asks each of these graphs for the gradient of x, and W, in one walk of the engine over all
of them, for those of the parameters. All other saved values are freed by I as ever. As torch computes one gradient of
an operation without the others by the same kernels, and the engine takes the latest operation first, which is the order
of a whole backward pass, the gradients are the same in every bit.

The idea of keeping weight gradients for later is that of zero bubble (Qi et al., arXiv 2401.10241, section 2), where
modules are rewritten by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from profiler.torch_private import run_engine, storage_of

_aten = torch.ops.aten

_WHOLE_AGAIN: Final = frozenset({_aten.group_norm.default})
"""W asks these for the gradient of their input as well, if that is not contiguous: on a CPU torch 2.13 ends the process
where an input in channels-last order needs none."""
_ADDED: Final = frozenset({_aten.addmm.default, _aten.baddbmm.default})
"""Operations whose first operand no gradient needs."""


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
        """W: adds to the parameters' `.grad`."""
        entries, self.entries = self.entries, []
        if not entries:
            return
        run_engine(
            tuple(entry.output for entry in entries),
            tuple(entry.gradient for entry in entries),
            keep_graph=False,
            create_graph=False,
            inputs=_leaves(entries),
            allow_unreachable=True,
            accumulate_grad=True,
        )

    def kept_bytes(self) -> int:
        """Bytes that live between I and W, of distinct storages, if operations were watched."""
        for entry in self.entries:
            self.note(entry.gradient)
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
        gradient: of the output.
        wanted: where the gradients of its weights go on: parameters, or the graphs of weights that are computed. After
            them what is asked for and not used.
    """

    output: GradientEdge
    gradient: Tensor
    wanted: tuple[Tensor | GradientEdge, ...]


def _leaves(entries: Sequence[_Entry]) -> tuple[Tensor, ...]:
    """What W makes gradients of: the leaves that all these operations lead to."""
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    waiting: list[Any] = []
    for wanted in (one for entry in entries for one in entry.wanted):
        if isinstance(wanted, Tensor):
            found[id(wanted)] = wanted
        elif wanted.node not in seen:
            seen.add(wanted.node)
            waiting.append(wanted.node)
    while waiting:
        node = waiting.pop()
        if not node.next_functions:
            found[id(node.variable)] = node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return tuple(found.values())


class _Call(NamedTuple):
    """One call of a separable operation: `inputs` are the positions of those of its `args` that are in I's graph."""

    operation: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Sequence[int]
    places: Sequence[int]
    store: DeferredWeights


class _Source(torch.autograd.Function):
    """Where the gradient of an operand ends in the operation's own graph, if a leaf would hold its memory until W."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("gradients are taken before they come here")


class _Separated(torch.autograd.Function):
    """The operation in a graph of its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call, *inputs: Tensor) -> Tensor:
        args: list[Any] = [*call.args]
        wanted: list[Tensor | GradientEdge] = []
        needs = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            for place, value, need in zip(call.inputs, inputs, needs, strict=True):
                if not need:
                    args[place] = value.detach()
                elif _is_saved(value, place, call.operation):
                    args[place] = value.detach().requires_grad_()
                    wanted.append(args[place])
                else:
                    # detached: its graph would hold what enters the stage, and the gradients of that, until W
                    args[place] = _Source.apply(anchor, value.detach())  # type: ignore[no-untyped-call]
                    wanted.append(get_gradient_edge(args[place]))
            with _noting(call.store):
                output = call.operation(*args, **call.kwargs)
        ctx.set_materialize_grads(False)  # none is not zero: optimizers tell them apart
        again = call.operation in _WHOLE_AGAIN and not inputs[0].is_contiguous()
        weights = [call.args[place] for place in call.places]
        ctx.weights = (
            *(weight if weight.is_leaf else get_gradient_edge(weight) for weight in weights),
            *((args[call.inputs[0]],) if again and needs[0] else ()),
        )
        ctx.wanted, ctx.store, ctx.output = tuple(wanted), call.store, get_gradient_edge(output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        found: Sequence[Tensor | None] = ()
        if ctx.wanted:
            found = run_engine(
                (ctx.output,),
                (gradient,),
                keep_graph=True,
                create_graph=False,
                inputs=ctx.wanted,
                allow_unreachable=True,
                accumulate_grad=False,
            )
        ctx.store.entries.append(_Entry(ctx.output, gradient, ctx.weights))
        rest = iter(found)
        return (None, None, *(next(rest) if need else None for need in ctx.needs_input_grad[2:]))


def _is_saved(value: Tensor, place: int, operation: Callable[..., Tensor]) -> bool:
    """Whether the operation saves this operand for the gradients of its weights, and not a copy of it."""
    if operation in _WHOLE_AGAIN:
        return True
    is_added = place == 0 and operation in _ADDED
    return value.is_contiguous() and not is_added and not torch.is_autocast_enabled(value.device.type)


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
    inputs = [place for place, value in enumerate(args) if isinstance(value, Tensor) and place not in places]
    call = _Call(operation, args, kwargs, inputs, places, _store)
    result: Tensor = _Separated.apply(_store.anchor, call, *[args[place] for place in inputs])  # type: ignore[no-untyped-call]
    return result
