"""The front ends that make a graph, in order: the first that serves is taken, and why the others did not is told.

A further one is one more file with a `GraphMaker`, and its entry in `profiler.sample_spec.FRONT_ENDS`.

1. `torch.export` with a dynamic batch: one graph for every micro-batch size.
2. `torch.export` with static shapes: a graph for micro-batches of exactly as many samples as the sample has.
3. `torch.fx.symbolic_trace`, whose graph is then exported; modules of torch.nn and functions of the user's that
   cannot be exported are called as they are.
4. The children of an `nn.Sequential`: those that cannot be exported are called as they are.

Modules of `keep_together` that cannot be exported are called as they are in each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias

from torch import fx, nn

from profiler.errors import NotTraceableError
from profiler.observe.untouched import untouched
from profiler.sample_spec import FRONT_ENDS, FrontEnd, SampleSpec
from profiler.tracing.export import OneBatchSizeError, TracedGraph, export_graph, mode_of
from profiler.tracing.node_facts import NodeFacts, analyse
from profiler.tracing.symbolic import CONSTANT, leaf_modules, symbolic_module

Traced: TypeAlias = tuple[TracedGraph, Mapping[fx.Node, NodeFacts], tuple[str, ...]]
"""A graph, what is known of its nodes, and the paths of modules that are called as they are."""

GraphMaker: TypeAlias = Callable[[nn.Module, SampleSpec, bool], Traced]
"""The function of a front end: of a model, what it is called with, and whether it trains; may not be able to."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the first front end that served yields.

    Attributes:
        graph: of the model.
        facts: of every node of the graph.
        spec: what it was traced with, the front end and the modules that are called as they are included.
        refusals: front end -> why it did not serve, in the order in which they were tried.
    """

    graph: TracedGraph
    facts: Mapping[fx.Node, NodeFacts]
    spec: SampleSpec
    refusals: Mapping[str, str]


def graph_of(model: nn.Module, spec: SampleSpec, *, training: bool = True) -> Served:
    """Trace a model with the first front end that serves, or with the one that `spec` names.

    Args:
        model: any module.
        spec: what it is called with.
        training: trace it as it trains, else as `model.eval()` leaves it.

    Raises:
        NotTraceableError: none serves; the message is that of the first that is not about the batch size alone.
    """
    refusals: dict[str, str] = {}
    first: NotTraceableError | None = None
    for front_end in FRONT_ENDS if spec.front_end is None else (spec.front_end,):
        try:
            with untouched(model):
                graph, facts, called = _made_by(FRONT_ENDS[front_end])(model, spec, training)
        except NotTraceableError as problem:
            refusals[front_end] = str(problem).removeprefix("cannot trace the model: ")
            first = problem if first is None or isinstance(first, OneBatchSizeError) else first
        else:
            served = spec.model_copy(update={"front_end": front_end, "called_as_is": called})
            return Served(graph, facts, served, refusals)
    assert first is not None, "there are front ends"
    raise first


def _made_by(front_end: FrontEnd) -> GraphMaker:
    function: GraphMaker = getattr(import_module(front_end.module), front_end.function)
    return function


def export(model: nn.Module, spec: SampleSpec, training: bool) -> Traced:
    """Front end 1."""
    return exported(model, spec, training, spec.keep_together)


def static_export(model: nn.Module, spec: SampleSpec, training: bool) -> Traced:
    """Front end 2."""
    return exported(model, spec, training, spec.keep_together, dynamic=False)


def symbolic_trace(model: nn.Module, spec: SampleSpec, training: bool) -> Traced:
    """Front end 3."""
    with mode_of(model, training):
        module = symbolic_module(model, spec)
        traced = exported(module, spec, training, leaf_modules(module))
    _refuse_written_constants(*traced[:2])
    return traced


def children(model: nn.Module, spec: SampleSpec, training: bool) -> Traced:
    """Front end 4."""
    if not isinstance(model, nn.Sequential) or not _is_plain(model):
        raise NotTraceableError("the model is no nn.Sequential")
    return exported(model, spec, training, _children(model))


def exported(
    model: nn.Module, spec: SampleSpec, training: bool, optional: Sequence[str], *, dynamic: bool = True
) -> Traced:
    """Export a model; those of the `optional` modules that stand in the way are called as they are."""
    called = list(spec.called_as_is)
    while True:
        try:
            graph = export_graph(model, spec, training=training, dynamic=dynamic, called_as_is=called)
            return graph, analyse(graph, spec), tuple(called)
        except NotTraceableError as problem:
            more = _in_the_way(model, problem.modules, optional, called)
            if not more:
                raise
            called += more


def _in_the_way(
    model: nn.Module, modules: Sequence[str], optional: Sequence[str], called: Sequence[str]
) -> Sequence[str]:
    """The innermost optional module in which it went wrong, with its like: others of its class would fail next."""
    known = dict(model.named_modules(remove_duplicate=False))
    left = {id(known[path]): path for path in optional if path not in called and path in known}
    for path in reversed(modules):
        if id(known.get(path)) in left:
            return [other for other in left.values() if type(known[other]) is type(known[path])]
    return []


def _children(model: nn.Sequential, prefix: str = "") -> tuple[str, ...]:
    """Paths of the children of a sequential module, and of those of sequential children."""
    paths: list[str] = []
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential) and _is_plain(child):
            paths.extend(_children(child, f"{prefix}{name}."))
        else:
            paths.append(prefix + name)
    return tuple(paths)


def _is_plain(module: nn.Sequential) -> bool:
    return type(module).forward is nn.Sequential.forward


def _refuse_written_constants(graph: TracedGraph, facts: Mapping[fx.Node, NodeFacts]) -> None:
    written = frozenset().union(*(fact.writes for fact in facts.values()))
    for node, fact in facts.items():
        if node.op == "get_attr" and str(node.target).startswith(CONSTANT) and fact.storage in written:
            raise NotTraceableError("the forward pass writes a tensor that symbolic_trace would make only once")
