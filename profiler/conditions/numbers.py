"""What is computed of numbers that come from tensors, taken out of a graph as a function of these tensors.

item = aten.item(x); ge = item >= 3; check(ge)    ->    check(x), which computes both
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from profiler.conditions.sources import followed_from


def numbers_function(result: fx.Node) -> tuple[list[fx.Node], fx.GraphModule]:
    """The tensors that a number follows from, and a function from them to it and to the elements that it reads.

    Args:
        result: the node of the number.
    """
    taken: list[fx.Node] = []
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    needed = followed_from([result], stop=_is_outside)
    ordered = [node for node in result.graph.nodes if node in needed]
    for node in (node for node in ordered if _is_outside(node)):
        taken.append(node)
        copies[node] = graph.placeholder(node.name)
    for node in (node for node in ordered if not _is_outside(node)):
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    read = [copies[node] for node in ordered if node.target in _READING]
    graph.output((copies[result], *read))
    return taken, fx.GraphModule({}, graph)


_READING = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def reads_values(function: fx.GraphModule) -> bool:
    """Whether it reads elements of tensors, and not extents alone."""
    return any(node.target in _READING for node in function.graph.nodes)


def _is_outside(node: fx.Node) -> bool:
    return node.op != "call_function" or isinstance(node.meta.get("val"), Tensor) or node.target is operator.getitem
