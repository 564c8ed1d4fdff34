"""The backward pass in two: gradients of the inputs now, those of the parameters later.

    whole     B   gradient of y  ->  gradient of x, and of w             y = operation(x, w)
    split     I   gradient of y  ->  gradient of x; y's gradient and x are kept
              W   from what was kept  ->  gradient of w

An operation is separable if it is one of `SEPARABLE` and the operand follows from parameters alone: a weight as it is,
transposed, cast, normalized. A layer's graph calls such an operation through `separated`, which runs it in an autograd
graph of its own, on detached operands. So torch's own formulas make both gradients, each once: I asks that graph for
the gradient of x, and W for that of w, with which it then goes back to the parameters in one walk of the engine. All
other saved values are freed by I as ever. As torch computes one gradient of an operation without the others by the same
kernels, and W adds up in the order in which I came to the operations, which is that of a whole backward pass, the
gradients are the same in every bit.

A parameter of which one use in a stage is not separable stays in I with all its uses: its sum has an order, too.

The idea of keeping weight gradients for later is that of zero bubble (Qi et al., arXiv 2401.10241, section 2), where
modules are rewritten by hand.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from profiler.torch_private import OpOverload, run_engine, schema_of, storage_of
from profiler.tracing.sequence import Layer

Function: TypeAlias = Callable[..., tuple[Any, ...]]
_aten = torch.ops.aten

SEPARABLE: Final = frozenset(
    {
        _aten.linear.default,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.matmul.default,
        _aten.bilinear.default,
        _aten.conv1d.default,
        _aten.conv1d.padding,
        _aten.conv2d.default,
        _aten.conv2d.padding,
        _aten.conv3d.default,
        _aten.conv3d.padding,
        _aten.conv_transpose1d.default,
        _aten.conv_transpose2d.input,
        _aten.conv_transpose3d.input,
        _aten.convolution.default,
        _aten.embedding.default,
        _aten.layer_norm.default,
        _aten.group_norm.default,
        _aten.rms_norm.default,
    }
)
"""Operations without side effects that return one new tensor, with much work for the gradients of their parameters."""


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
        weights: the leaves of that graph that stand for parameters.
        edges: where their gradients go on to the parameters.
        gradient: of the output.
    """

    output: GradientEdge
    weights: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]
    gradient: Tensor


def _add_gradients(entries: deque[_Entry | None]) -> None:
    """Gradients of the parameters that these operations lead to; each is freed as soon as it is done."""
    edges: list[GradientEdge] = []
    gradients: list[Tensor] = []
    while entries:
        entry = entries.popleft()
        assert entry is not None
        found = _gradients_of(entry.weights, entry.output, entry.gradient, keep_graph=False)
        for edge, gradient in zip(entry.edges, found, strict=True):
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
        ctx.weights, ctx.edges, ctx.store = weights, call.edges, call.store
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
        operation: one of `SEPARABLE`.
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


def is_separable(node: fx.Node) -> bool:
    """Whether an operation of a graph is one of `SEPARABLE`; gradients of an embedding may be sparse, those are not."""
    if node.target is _aten.embedding.default:
        sparse = dict(
            zip(("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"), node.args, strict=False)
        )
        return not {**sparse, **node.kwargs}.get("sparse", False)
    return node.target in SEPARABLE


def deferred_parameters(layers: Sequence[Layer], parameters: Mapping[tuple[int, str], Tensor]) -> frozenset[int]:
    """Numbers (`id`) of the parameters that have nothing but separable uses in these layers.

    Args:
        layers: of a stage.
        parameters: by (layer index, name), those of the layers.
    """
    able: dict[int, bool] = {}
    for layer in layers:
        read = [parameters[layer.index, name] for name in layer.parameters]
        for parameter, is_able in zip(read, deferrable(layer.function, len(read)), strict=True):
            able[id(parameter)] = able.get(id(parameter), parameter.requires_grad) and is_able
    return frozenset(number for number, is_able in able.items() if is_able)


def deferrable(function: Function, parameters: int) -> tuple[bool, ...]:
    """Which of a layer's parameters have nothing but separable uses in it.

    Args:
        function: of the layer, a compiled graph.
        parameters: how many of its placeholders, the first ones, stand for parameters.
    """
    graph = _graph_of(function)
    if graph is None:
        return (False,) * parameters
    placeholders = [node for node in graph.nodes if node.op == "placeholder"][:parameters]
    able = list(placeholders)
    while True:  # two that are combined before they are used go together
        side = _weight_side(able)
        left = [node for node in able if _all_separable(node, side)]
        if len(left) == len(able):
            return tuple(node in able for node in placeholders)
        able = left


def split_function(function: Function, deferred: tuple[bool, ...]) -> Function:
    """The layer's function with separable operations of the deferred parameters called through `separated`.

    Args:
        function: of the layer.
        deferred: for each of the parameters whether it is; only such as `deferrable` names.
    """
    module = getattr(function, "__self__", None)
    if not any(deferred) or not isinstance(module, fx.GraphModule):
        return function
    known = _split.setdefault(module, {})
    if deferred not in known:  # equal layers go on sharing their code
        known[deferred] = _with_separated(module, deferred)
    return known[deferred].forward


_split: WeakKeyDictionary[fx.GraphModule, dict[tuple[bool, ...], fx.GraphModule]] = WeakKeyDictionary()


def _with_separated(module: fx.GraphModule, deferred: tuple[bool, ...]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"][: len(deferred)]
    side = _weight_side([node for node, is_deferred in zip(placeholders, deferred, strict=True) if is_deferred])
    for node in module.graph.nodes:
        places = tuple(place for place, value in enumerate(node.args) if isinstance(value, fx.Node) and value in side)
        if is_separable(node) and places:
            copies[node].args = (node.target, places, *copies[node].args)
            copies[node].target = separated
    return fx.GraphModule(dict(module.named_children()), graph, class_name=type(module).__name__)


def _graph_of(function: Function) -> fx.Graph | None:
    module = getattr(function, "__self__", None)
    return module.graph if isinstance(module, fx.GraphModule) else None


def _weight_side(sources: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """What follows from these parameters alone, without side effects, as one tensor."""
    found = set(sources)
    waiting = list(sources)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and _is_pure(user) and all(node in found for node in user.all_input_nodes):
                found.add(user)
                waiting.append(user)
    return frozenset(found)


def _all_separable(parameter: fx.Node, side: frozenset[fx.Node]) -> bool:
    """Whether a parameter, as it is or within `side`, is used as a plain operand of separable operations alone."""
    seen = {parameter}
    waiting = [parameter]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in side:
                if user not in seen:
                    seen.add(user)
                    waiting.append(user)
            elif not is_separable(user) or not _is_plain_operand(node, user):
                return False
    return True


def _is_plain_operand(node: fx.Node, user: fx.Node) -> bool:
    """Whether the operation takes the value by position and in no list, and nothing by keyword that is computed."""
    nested: list[fx.Node] = []
    fx.node.map_arg([value for value in user.args if not isinstance(value, fx.Node)], nested.append)
    named: list[fx.Node] = []
    fx.node.map_arg(user.kwargs, named.append)
    return node not in nested and not named


def _is_pure(node: fx.Node) -> bool:
    """Whether the node changes nothing, draws nothing, and returns tensors, which nobody writes."""
    target = node.target
    if target is operator.getitem:
        return not any(_writes(user, node) for user in node.users)
    if node.op != "call_function" or not isinstance(target, OpOverload) or is_separable(node):
        return False
    schema = schema_of(target)
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if any(str(returned.type) != "Tensor" for returned in schema.returns):
        return False
    return not any(_writes(user, node) for user in node.users)


def _writes(user: fx.Node, node: fx.Node) -> bool:
    """Whether the operation writes that argument in place."""
    target = user.target
    if not isinstance(target, OpOverload):
        return user.op == "call_method" or not callable(target) or getattr(target, "__name__", "").endswith("_")
    return any(
        value is node and argument.alias_info is not None and argument.alias_info.is_write
        for value, argument in zip(user.args, schema_of(target).arguments, strict=False)
    )
