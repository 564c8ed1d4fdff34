"""From a run of graph nodes to a layer: a compiled pure function, with what it reads, returns and is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from profiler.conditions.sources import followed_from
from profiler.errors import NotTraceableError
from profiler.observe.draws import before_draw, has_foreign_backward, keyed_operation
from profiler.opaque.call import OpaqueCall
from profiler.tracing.batch_norm import BatchStatistics, use_scratch_buffers
from profiler.tracing.leaving_values import apart_from, in_traced_order, no_view
from profiler.tracing.node_facts import NodeFacts
from profiler.tracing.node_text import (
    arguments_text,
    attribute,
    digest,
    module_path,
    module_paths,
    node_text,
    operation_name,
    source_line,
    value_text,
)
from profiler.tracing.sequence import Layer
from profiler.tracing.writes import moves_statistics, statistics_arguments

Function = Callable[..., tuple[Any, ...]]


class Compiler:
    """Compiles graphs, those of the same operations to one function.

    Not for the time that compiling takes alone: code that runs many times stays in the processor's caches, where
    code of each layer's own is fetched anew where kernels are large, for 6 us a layer. [measured]
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Function] = {}

    def function(self, graph: fx.Graph, modules: Mapping[str, torch.nn.Module]) -> Function:
        """The graph as a function of its placeholders.

        Args:
            graph: to compile.
            modules: what its `get_attr` nodes name; graphs with modules are compiled each for itself.
        """
        if modules:
            return fx.GraphModule(dict(modules), graph).forward
        key = _operations_of(graph)
        if key not in self._known:
            self._known[key] = fx.GraphModule({}, graph).forward
        return self._known[key]


def _operations_of(graph: fx.Graph) -> tuple[Any, ...]:
    """What a graph without modules does, whatever its values are called."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    return tuple(
        (node.op, None if node.op == "placeholder" else node.target, arguments_text(node, numbers.__getitem__))
        for node in graph.nodes
    )


@dataclass
class _Draft:
    """A layer under construction: its own graph, and what its placeholders stand for."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parameters: list[fx.Node] = field(default_factory=list)
    buffers: list[fx.Node] = field(default_factory=list)
    values: list[fx.Node] = field(default_factory=list)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)


def build_layer(
    index: int,
    nodes: Sequence[fx.Node],
    leaving: Sequence[fx.Node],
    facts: Mapping[fx.Node, NodeFacts],
    root: fx.GraphModule,
    counters: set[str],
    compiler: Compiler,
    written_later: frozenset[int],
    earlier_draws: int,
) -> Layer:
    """Compile a run of nodes.

    Args:
        index: of the layer.
        nodes: its operations in order; a stage may have none in evaluation.
        leaving: those of its nodes whose values are alive after it.
        facts: of every node of the graph.
        root: where `get_attr` targets resolve.
        counters: names of batch counters that were taken out of the graph.
        compiler: of all layers of the model.
        written_later: storages that later layers write in place.
        earlier_draws: operations of earlier layers that draw random numbers.
    """
    draft = _Draft()
    _place_sources(draft, nodes, root)
    written = _write_copies(draft, nodes, facts)
    draws = _place_nodes(draft, nodes, facts)
    results = {node.name: _as_sent(draft, node, facts) for node in leaving}
    for node in leaving:
        if facts[node].storage in written_later:
            results[node.name] = draft.graph.call_function(no_view, (results[node.name],))
    results.update({_new_value(name): copy for name, copy in written})
    statistics = _statistics(draft, nodes, counters)
    for _, outputs in statistics:
        results.update(outputs)
    draft.graph.output(tuple(results.values()))
    touched = frozenset().union(*(facts[node].writes for node in nodes))
    return Layer(
        index=index,
        name=_layer_name(nodes),
        operations=tuple(operation_name(node) for node in nodes),
        module_paths=tuple(dict.fromkeys(path for node in nodes for path in module_paths(node) if path)),
        source=next((place for node in nodes if (place := source_line(node))), ""),
        parameters=tuple(str(node.target) for node in draft.parameters),
        buffers=tuple(str(node.target) for node in draft.buffers),
        values=tuple(node.name for node in draft.values),
        outputs=tuple(results),
        written_buffers=tuple((name, _new_value(name)) for name, _ in written),
        statistics=tuple(entry for entry, _ in statistics),
        in_place=frozenset(node.name for node in draft.values if facts[node].storage in touched),
        views=_views(draft, leaving, facts),
        draws=draws,
        earlier_draws=earlier_draws,
        flops=sum(facts[node].flops for node in nodes),
        signature=_signature(draft, nodes, leaving, facts, root),
        function=compiler.function(draft.graph, draft.modules),
    )


def _place_nodes(draft: _Draft, nodes: Sequence[fx.Node], facts: Mapping[fx.Node, NodeFacts]) -> int:
    """Copy the operations into the layer's graph; returns how many of them draw random numbers."""
    draws = 0
    for node in nodes:
        if facts[node].draws_random:
            draft.graph.call_function(before_draw, (draws,))
            draws += 1
        draft.copies[node] = draft.graph.node_copy(node, lambda argument: draft.copies[argument])
        if has_foreign_backward(node.target):
            operation: Any = node.target
            draft.copies[node] = draft.graph.call_function(keyed_operation, (operation, draft.copies[node]))
        if facts[node].apart:
            others = [draft.copies[source] for source in facts[node].apart]
            draft.copies[node] = draft.graph.call_function(apart_from, (draft.copies[node], *others))
    return draws


def build_function(
    wanted: Sequence[fx.Node], available: Callable[[fx.Node], bool], root: fx.GraphModule
) -> tuple[tuple[str, ...], Function]:
    """Compile what computes `wanted` from sources alone.

    Returns:
        The names of the sources (inputs and buffers) that it reads, and the function from their values to a tuple.
    """
    needed = followed_from(wanted, stop=available)
    nodes = [node for node in root.graph.nodes if node in needed and not available(node)]
    draft = _Draft()
    _place_sources(draft, nodes, root, extra=[node for node in wanted if available(node)])
    for node in nodes:
        draft.copies[node] = draft.graph.node_copy(node, lambda argument: draft.copies[argument])
    draft.graph.output(tuple(draft.copies[node] for node in wanted))
    names = tuple(str(node.target) for node in (*draft.parameters, *draft.buffers)) + tuple(
        node.name for node in draft.values
    )
    return names, fx.GraphModule(draft.modules, draft.graph).forward


def _place_sources(
    draft: _Draft, nodes: Sequence[fx.Node], root: fx.GraphModule, extra: Iterable[fx.Node] = ()
) -> None:
    """One placeholder for each value from outside: parameters first, then buffers, then values."""
    inside = set(nodes)
    outside = dict.fromkeys((*extra, *(s for node in nodes for s in node.all_input_nodes if s not in inside)))
    for source in outside:
        held = attribute(root, str(source.target)) if source.op == "get_attr" else None
        if isinstance(held, torch.nn.Parameter):
            draft.parameters.append(source)
        elif isinstance(held, Tensor):
            draft.buffers.append(source)
        elif isinstance(held, torch.nn.Module):
            draft.modules[str(source.target)] = held
        else:
            draft.values.append(source)
    for source in (*draft.parameters, *draft.buffers, *draft.values):
        draft.copies[source] = draft.graph.placeholder(source.name)
    for source in outside:
        if str(source.target) in draft.modules:
            draft.copies[source] = draft.graph.get_attr(str(source.target))


def _write_copies(
    draft: _Draft, nodes: Sequence[fx.Node], facts: Mapping[fx.Node, NodeFacts]
) -> list[tuple[str, fx.Node]]:
    """Let the layer write a copy of each buffer that it writes; returns buffer names and the copies."""
    moved = frozenset(facts[source].storage for node in nodes for source in statistics_arguments(node))
    touched = frozenset().union(*(facts[node].writes for node in nodes)) - moved
    written = []
    for source in draft.buffers:
        if facts[source].storage in touched:
            copy = draft.graph.call_function(torch.clone, (draft.copies[source],))
            draft.copies[source] = copy
            written.append((str(source.target), copy))
    return written


def _as_sent(draft: _Draft, node: fx.Node, facts: Mapping[fx.Node, NodeFacts]) -> fx.Node:
    """The value as it leaves the layer: in memory as it would be after sending it, without gaps and in its order."""
    copy, order = draft.copies[node], facts[node].dim_order
    if not facts[node].is_tensor:
        return copy
    if order is None:
        return draft.graph.call_method("contiguous", (copy,))
    return draft.graph.call_function(in_traced_order, (copy, order))


def _views(
    draft: _Draft, leaving: Iterable[fx.Node], facts: Mapping[fx.Node, NodeFacts]
) -> tuple[tuple[str, str], ...]:
    """Pairs of a value that leaves and one that was read, in the same memory.

    Also where `_as_sent` copies the first: for a micro-batch of one sample there may be no gap to copy for.
    """
    return tuple(
        (node.name, source.name)
        for node in leaving
        for source in draft.values
        if facts[node].storage is not None and facts[node].storage == facts[source].storage
    )


_Moments = dict[str, fx.Node]  # values that leave a layer, by name


def _statistics(draft: _Draft, nodes: Sequence[fx.Node], counters: set[str]) -> list[tuple[BatchStatistics, _Moments]]:
    """Let the layer return what running statistics follow from, in the order of the operations."""
    found: list[tuple[BatchStatistics, _Moments]] = []
    for node in nodes:
        if moves_statistics(node):
            found.append(_return_statistics(draft, node, counters))
        elif isinstance(node.target, OpaqueCall):
            found += _called_statistics(draft, node)
    return found


def _return_statistics(draft: _Draft, node: fx.Node, counters: set[str]) -> tuple[BatchStatistics, _Moments]:
    running_mean, running_var, momentum = node.args[3], node.args[4], node.args[6]
    assert isinstance(running_mean, fx.Node)
    assert isinstance(running_var, fx.Node)
    if not isinstance(momentum, float):
        raise NotTraceableError(
            f"cannot trace the model: batch normalization {module_path(node)!r} has no fixed momentum; set it to a "
            "number (the default is 0.1)"
        )
    mean, variance, count = use_scratch_buffers(draft.graph, draft.copies[node])
    counter = str(running_mean.target).removesuffix("running_mean") + "num_batches_tracked"
    entry = BatchStatistics(
        running_mean=str(running_mean.target),
        running_var=str(running_var.target),
        num_batches_tracked=counter if counter in counters else None,
        momentum=momentum,
        mean=f"{node.name}.mean",
        variance=f"{node.name}.variance",
        count=f"{node.name}.count",
    )
    return entry, {entry.mean: mean, entry.variance: variance, entry.count: count}


def _called_statistics(draft: _Draft, node: fx.Node) -> list[tuple[BatchStatistics, _Moments]]:
    """Those of a module that is called as it is: they follow its outputs."""
    found = []
    for number, moved in enumerate(node.target.statistics()):  # type: ignore[union-attr]
        mean, variance, counter = (str(getattr(node.args[i], "target", "")) for i in moved.buffers)
        names = [f"{node.name}.{number}.{moment}" for moment in ("mean", "variance", "count")]
        with draft.graph.inserting_after(draft.copies[node]):
            moments = [draft.graph.call_function(getitem, (draft.copies[node], moved.first + i)) for i in range(3)]
        entry = BatchStatistics(mean, variance, counter, moved.momentum, *names)
        found.append((entry, dict(zip(names, moments, strict=True))))
    return found


def _new_value(buffer: str) -> str:
    return f"{buffer}.new"


def _layer_name(nodes: Sequence[fx.Node]) -> str:
    """Module path of the first and the last operation; operations outside any submodule by their own name."""
    names = [module_path(node) or operation_name(node).removeprefix("aten.").split(".")[0] for node in nodes]
    return " .. ".join(dict.fromkeys((*names[:1], *names[-1:])))


def _signature(
    draft: _Draft,
    nodes: Sequence[fx.Node],
    leaving: Sequence[fx.Node],
    facts: Mapping[fx.Node, NodeFacts],
    root: fx.GraphModule,
) -> str:
    """Hash of operations, constants, of which values leave the layer, and of shapes, dtypes and gradients it reads."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for source in (*draft.parameters, *draft.buffers, *draft.values):
        numbers[source] = f"%{len(numbers)}"
        held = attribute(root, str(source.target)) if source.op == "get_attr" else source.meta.get("val")
        lines.append(f"{value_text(held)} {facts[source].requires_grad}")
    for node in nodes:
        numbers[node] = f"%{len(numbers)}"
        lines.append(node_text(node, lambda argument: numbers.get(argument, str(argument.target))))
    lines.append(f"leaving {[numbers[node] for node in leaving]}")
    return digest(lines)
