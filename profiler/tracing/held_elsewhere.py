"""Parameters and buffers that the forward pass reads from somewhere else than their module.

Some models keep them in a dict or in a helper object as well (`self.weights = {"w": self.w}`). Export knows them in
their modules only, and takes what it finds elsewhere for a constant, which no optimizer would move.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn

from profiler.observe.storage_watch import is_strided
from profiler.torch_private import storage_of


def name_held_elsewhere(root: fx.GraphModule, model: nn.Module) -> None:
    """Let nodes that read a constant on the memory of a parameter or buffer read that one.

    Args:
        root: the graph, with the model's own parameters and buffers under their names.
        model: that was exported.
    """
    named = [*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]
    by_memory = {_memory(held): name for name, held in reversed(named) if _has_memory(held)}  # the first of its names
    known = {name for name, _ in named}
    for node in root.graph.find_nodes(op="get_attr"):
        held = attrgetter(str(node.target))(root)
        if isinstance(held, Tensor) and str(node.target) not in known and _has_memory(held):
            node.target = by_memory.get(_memory(held), node.target)


def _has_memory(held: Tensor) -> bool:
    """Whether it lies in memory of its own: one without elements has none, and a sparse one is several tensors."""
    return is_strided(held) and bool(held.numel())


def _memory(held: Tensor) -> tuple[Any, ...]:
    return storage_of(held), str(held.storage_offset()), str(held.shape), str(held.stride()), held.dtype  # or symbols
