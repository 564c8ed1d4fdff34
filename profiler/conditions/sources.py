"""Which nodes of a graph some nodes follow from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx


def followed_from(nodes: Iterable[fx.Node], stop: Callable[[fx.Node], bool] = lambda node: False) -> set[fx.Node]:
    """All nodes that these follow from, themselves included.

    Args:
        nodes: that are asked about.
        stop: whether what a node follows from does not matter; the node itself is included.
    """
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend([] if stop(node) else node.all_input_nodes)
    return found
