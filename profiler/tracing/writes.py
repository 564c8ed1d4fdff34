"""Which operations write, as far as their schemas tell, and the one that does not tell."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from profiler.conditions.chance import EitherWay, Lot
from profiler.conditions.check import Check
from profiler.opaque.call import OpaqueCall
from profiler.torch_private import HigherOrderOperator, OpOverload, schema_of


def may_write(node: fx.Node) -> bool:
    """Whether running the node can change a tensor that existed before, as far as its schema tells, or end the step."""
    if isinstance(node.target, OpaqueCall | Check | EitherWay | Lot):
        return True
    if isinstance(node.target, OpOverload):
        return schema_of(node.target).is_mutable or moves_statistics(node)
    return isinstance(node.target, HigherOrderOperator)


def may_draw(node: fx.Node) -> bool:
    """Whether running the node can move a random generator of torch's."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def returns_what_it_writes(node: fx.Node) -> bool:
    """Whether the node's value is its first argument, which it has written in place, such as that of `add_`."""
    if not isinstance(node.target, OpOverload):
        return False
    schema = schema_of(node.target)
    ends = [*schema.arguments[:1], *schema.returns]
    return len(ends) == 2 and all(end.alias_info is not None and end.alias_info.is_write for end in ends)


def moves_statistics(node: fx.Node) -> bool:
    """Whether the node is a batch normalization that moves running statistics (its schema does not say so)."""
    if node.target is not torch.ops.aten.batch_norm.default:
        return False
    running_mean, training = node.args[3], node.args[5]
    return bool(training) and running_mean is not None


def statistics_arguments(node: fx.Node) -> list[fx.Node]:
    """The running means and variances that are to be moved by what the node finds."""
    if isinstance(node.target, OpaqueCall):
        moved = [node.args[i] for entry in node.target.statistics() for i in entry.buffers[:2]]
    else:
        moved = list(node.args[3:5]) if moves_statistics(node) else []
    return [argument for argument in moved if isinstance(argument, fx.Node)]


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that the node writes in place, by its schema."""
    if isinstance(node.target, OpaqueCall):
        return [item for i in node.target.written_positions() if isinstance(item := node.args[i], fx.Node)]
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return []
    written: list[fx.Node] = []
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        written.extend(item for item in pytree.tree_leaves(value) if isinstance(item, fx.Node))
    return written
