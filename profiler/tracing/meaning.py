"""What a traced graph computes, as text: the same for graphs whose values have other names or another order."""

from __future__ import annotations

import hashlib
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from profiler.conditions.chance import EitherWay, Lot
from profiler.torch_private import HigherOrderOperator
from profiler.tracing.export import TracedGraph
from profiler.tracing.harmless_changes import tensor_digest
from profiler.tracing.node_text import attribute, node_text, value_text
from profiler.tracing.writes import may_draw, may_write


def read_by(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order."""
    return [leaf for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(leaf, fx.Node)]


def operation_text(node: fx.Node, root: fx.GraphModule) -> str:
    """An operation without the names of what it reads of other operations."""
    return node_text(node, lambda argument: source_text(argument, root) if argument.op == "get_attr" else "%")


def is_source(node: fx.Node) -> bool:
    """Whether it is an input, a parameter, a buffer, a constant or a region."""
    return node.op in ("placeholder", "get_attr")


def source_text(node: fx.Node, root: fx.GraphModule) -> str:
    """A parameter or a buffer by its name, a constant of the trace by its value."""
    if node.op == "placeholder":
        return f"input {node.name}"
    held = attribute(root, str(node.target))
    named = isinstance(held, nn.Parameter) or "lifted_tensor" not in str(node.target)
    if isinstance(held, Tensor):
        return str(node.target) if named else f"{value_text(held)} {tensor_digest(held)}"
    return "\n".join(_lines(held)) if isinstance(held, fx.GraphModule) else value_text(held)


def _lines(region: fx.GraphModule) -> Iterator[str]:
    """A region of a graph, whatever its values are called."""
    numbers: dict[fx.Node, str] = {}
    for node in region.graph.nodes:
        numbers[node] = f"%{len(numbers)}" if node.op != "get_attr" else source_text(node, region)
        yield "value" if node.op == "placeholder" else node_text(node, numbers.__getitem__)


def has_effect(node: fx.Node) -> bool:
    """Whether it does something other than to make a value; regions were looked at already."""
    return isinstance(node.target, Lot) or (may_write(node) and not isinstance(node.target, HigherOrderOperator))


def meaning(graph: TracedGraph, usual: Sequence[bool] = ()) -> tuple[str, ...]:
    """What a graph computes, as text: its output, what it writes or checks, and the conditions left to chance.

    Args:
        graph: a trace, or one with both ways.
        usual: where there are both, for each condition whether to take the usual one.
    """
    root = graph.module
    known: dict[fx.Node, str] = {}
    effects: list[str] = []
    conditions: list[str] = []
    drawn: dict[str, int] = defaultdict(int)
    left = iter(usual)

    def walk(nodes: Iterator[fx.Node], inner: fx.GraphModule) -> tuple[str, ...]:
        for node in nodes:
            if node in known:
                continue
            if is_source(node):
                known[node] = source_text(node, inner)
                continue
            read = tuple(known[each] for each in read_by(node))
            if node.op == "output":
                return (node_text(node, lambda _: "%"), *read)
            if isinstance(node.target, Lot):
                conditions.append(digest_of(read))
                continue
            if isinstance(node.target, EitherWay):
                conditions.append(digest_of(read[2 : 2 + node.target.conditions]))
                region = attribute(inner, str(node.args[0 if next(left) else 1].target))  # type: ignore[union-attr]
                known.update(_entering(region, read[2 + node.target.conditions :]))
                known[node] = "\n".join(walk(iter(region.graph.nodes), region)[1:])
                for inside in region.graph.nodes:
                    known.pop(inside, None)
                continue
            text = node_text(node, lambda _: "%")
            if node.target is operator.getitem and isinstance(node.args[0].target, EitherWay):  # type: ignore[union-attr]
                known[node] = read[0].split("\n")[node.args[1]]  # type: ignore[index]
                continue
            if may_draw(node):
                drawn[text] += 1
                text += f" {drawn[text]}"
            known[node] = digest_of((text, *read))
            if has_effect(node):
                effects.append(known[node])
        raise AssertionError("a graph ends with its output")

    output = walk(iter(root.graph.nodes), root)
    return (*output, "effects", *sorted(effects), "conditions", *conditions)


def _entering(region: fx.GraphModule, values: Sequence[str]) -> dict[fx.Node, str]:
    placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
    return dict(zip(placeholders, values, strict=True))


def digest_of(texts: Sequence[str]) -> str:
    """The SHA-256 of texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
