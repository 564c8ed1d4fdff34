"""The operators that stand in a graph for calls while it is traced, and how the calls take their places.

An operator knows shapes only. The last of its arguments is the number of the call that it stands for:

    called_as_is([weight, x], [n], 3)    ->    called_as_is[blocks.3](weight, x, n)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

LIBRARY = torch.library.Library("gpipe_autoplan", "DEF")
LIBRARY.define("called_as_is(Tensor[] tensors, SymInt[] numbers, int site) -> Tensor[]")
LIBRARY.define("custom_function(Tensor[] tensors, SymInt[] numbers, int site) -> Tensor[]")


def replace_operator(
    root: fx.GraphModule, operator: Any, calls: Sequence[Callable[..., Any]], more: Callable[[int], Sequence[Any]]
) -> None:
    """Let calls take the place of an operator, in the graph and in its regions.

    Args:
        root: the graph.
        operator: that stands for the calls.
        calls: by their numbers; they take its tensors, its numbers, and what follows.
        more: further arguments of the call with a number.
    """
    for module in root.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        made = module.graph.find_nodes(op="call_function", target=operator)
        for node in made:
            tensors, numbers, site = node.args
            node.target = calls[site]
            node.args = (*tensors, *numbers, *more(site))
        if made:
            module.recompile()
