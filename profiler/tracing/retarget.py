"""Compiled layers for another device than the one they were traced on.

A traced graph holds the device of every tensor that it creates (`arange(..., device=cpu)`); a stage on another device
needs the same operations there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def function_on(
    function: Callable[..., tuple[Any, ...]], traced: torch.device, device: torch.device
) -> Callable[..., tuple[Any, ...]]:
    """The layer function with `device` in place of every device of the kind that it was traced on.

    Args:
        function: what `profiler.tracing.build_layer` compiled.
        traced: device of the model when it was traced.
        device: where the layer shall run.
    """
    module = getattr(function, "__self__", None)
    assert isinstance(module, fx.GraphModule), "layers are compiled graphs"
    return function if device == traced else _module_on(module, traced, device).forward


def _module_on(module: fx.GraphModule, traced: torch.device, device: torch.device) -> fx.GraphModule:
    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) and argument.type == traced.type else argument

    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    children: dict[str, Any] = {
        name: _module_on(child, traced, device) if isinstance(child, fx.GraphModule) else child
        for name, child in module.named_children()
    }
    return fx.GraphModule(children, graph, class_name=type(module).__name__)
