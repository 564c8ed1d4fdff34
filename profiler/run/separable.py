"""Which operations of a layer can leave the gradients of their parameters for later, and a graph that does.

An operation is separable if it is one of `SEPARABLE` and the operand follows from parameters alone: a weight as it is,
transposed, cast, normalized. A parameter of which one use in a stage is not separable stays in I with all its uses: its
sum has an order, too. `profiler.run.split_backward` runs what is split.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from profiler.run.split_backward import separated
from profiler.torch_private import OpOverload, schema_of
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
    }
)
"""Operations without side effects that return one new tensor, with much work for the gradients of their parameters.

Each reads an operand once: of several gradients of one operand the engine adds each to what other uses have left, and
an operation in a graph of its own gives their sum. On a CPU a root mean square normalization is many operations, of
which two read its input.
"""


def is_separable(node: fx.Node) -> bool:
    """Whether an operation of a graph is one of `SEPARABLE`, without one value in two places.

    Gradients of an embedding may be sparse, those are not.
    """
    operands = [value for value in node.args if isinstance(value, fx.Node)]
    if len({*operands}) < len(operands):
        return False
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
    graph = graph_of(function)
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


def graph_of(function: Function) -> fx.Graph | None:
    """Of a layer's function; None if that is no compiled graph."""
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
