"""Where the operations of a graph come from, and which tensors each computes from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from profiler.tracing.node_text import module_paths, operation_name, source_line


@dataclass(frozen=True, slots=True)
class Site:
    """Where an operation is in a model.

    Attributes:
        name: of its value.
        operation: what it does (`"aten.add.Tensor"`).
        module_paths: modules that it comes from, the innermost each; "" for the model itself.
        source: `file:line` in the user's code, or "".
        reads: names of the values, inputs, parameters, buffers and constants that it computes a tensor from; empty if
            it computes a number.
        moves: whether it is told the device of its value, or takes it from another (`x.to(y.device)`). Where the model
            is traced that is the same tensor, so what reads `x` later may read this value here.
    """

    name: str
    operation: str
    module_paths: tuple[str, ...]
    source: str
    reads: tuple[str, ...]
    moves: bool


def sites_of(graph: fx.Graph) -> tuple[Site, ...]:
    """One for each operation, in order."""
    return tuple(_site(node) for node in graph.nodes if node.op == "call_function")


def _site(node: fx.Node) -> Site:
    sources = node.all_input_nodes if _has_tensor(node.meta.get("val")) else []
    return Site(
        name=node.name,
        operation=operation_name(node),
        module_paths=tuple(dict.fromkeys(module_paths(node))),
        source=source_line(node),
        reads=tuple(str(each.target) if each.op == "get_attr" else each.name for each in sources),
        moves=node.target in _TO_ANOTHERS or _told_device(node),
    )


_TO_ANOTHERS = frozenset({torch.ops.aten.to.other, torch.ops.aten.type_as.default})


def _told_device(node: fx.Node) -> bool:
    return any(isinstance(argument, torch.device) for argument in (*node.args, *node.kwargs.values()))


def _has_tensor(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
