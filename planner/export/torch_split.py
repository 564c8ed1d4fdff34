"""Stages whose backward pass torch's engine can split: where each parameter's gradient has one place to wait at.

The engine walks the graph of autograd from what a stage takes to what it returns. At each node of that way to which a
parameter leads as well, I leaves the gradient for W:

    received ---> linear ---> tanh ---> linear ---> results
                    ^                     ^
                  weight 0              weight 1

A parameter that meets the way at two nodes (tied weights in one stage) ends the step with an error, since the second W
goes through what the first has freed; where nothing that is received takes a gradient (a frozen front) there is no way,
and no parameter gets any gradient, without a word.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import fx

from planner.export.stage_module import crossing
from planner.plan.stage import Stage
from profiler.run.separable import graph_of
from profiler.tracing.leaving_values import apart_from
from profiler.tracing.sequence import Layer, LayerSequence

_STOPS = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default})
"""Operations past which no gradient goes."""


class _Origin(NamedTuple):
    """What a value comes from.

    Attributes:
        received: whether from what the stage takes, so that it is on the way.
        parameters: of a value that is not, the trainable ones that lead to it.
    """

    received: bool
    parameters: frozenset[str]


_NOTHING = _Origin(received=False, parameters=frozenset())


def splits(sequence: LayerSequence, stage: Stage) -> bool:
    """Whether torch's engine finds the gradients of a stage's parameters in W; the first stage it does not split.

    Args:
        sequence: the layers.
        stage: which of them.
    """
    first, stop = stage.first_layer, stage.stop_layer
    origins = {
        value.name: _Origin(received=True, parameters=frozenset())
        for value in sequence.boundaries[first]
        if value.requires_grad
    }
    if first == 0:
        return True
    if not origins:
        return False
    trainable = {
        name
        for layer in sequence.layers[first:stop]
        for name in layer.parameters
        if sequence.parameters[name].requires_grad
    }
    meetings: dict[str, set[object]] = defaultdict(set)
    for layer in sequence.layers[first:stop]:
        if not _walk(layer, origins, trainable, meetings):
            return False
    for name in crossing(sequence, stop):  # results are one node together
        for parameter in origins.get(name, _NOTHING).parameters:
            meetings[parameter].add("results")
    return all(len(meetings[name]) == 1 for name in trainable)


def _walk(layer: Layer, origins: dict[str, _Origin], trainable: set[str], meetings: dict[str, set[object]]) -> bool:
    """Follow a layer's operations; False if it has no graph, or writes into what is not on the way."""
    graph = graph_of(layer.function)
    if graph is None or not all(origins.get(name, _NOTHING).received for name in layer.in_place):
        return False
    of_parameters = [_Origin(received=False, parameters=frozenset({name} & trainable)) for name in layer.parameters]
    of_values = [origins.get(name, _NOTHING) for name in layer.values]
    given = iter([*of_parameters, *(_NOTHING for _ in layer.buffers), *of_values])
    found: dict[fx.Node, _Origin] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node.op == "output":
            results = node.args[0]
            for name, result in zip(layer.outputs, results, strict=True):
                origins[name] = found.get(result, _NOTHING)
        else:
            read = node.all_input_nodes[:1] if node.target is apart_from else node.all_input_nodes
            found[node] = _origin((layer.index, node), [found[one] for one in read], meetings)
    return True


def _origin(place: tuple[int, fx.Node], operands: list[_Origin], meetings: dict[str, set[object]]) -> _Origin:
    """Of an operation's result; notes where parameters meet what was received. Equal layers share their nodes."""
    node = place[1]
    value = node.meta.get("val")
    if node.target in _STOPS or (isinstance(value, torch.Tensor) and not _takes_gradients(value)):
        return _NOTHING
    parameters = frozenset(name for operand in operands for name in operand.parameters)
    if not any(operand.received for operand in operands):
        return _Origin(received=False, parameters=parameters)
    for name in parameters:
        meetings[name].add(place)
    return _Origin(received=True, parameters=frozenset())


def _takes_gradients(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
