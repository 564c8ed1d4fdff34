"""The front ends that make a graph, in order: the first that serves is taken, and why the others did not is told.

A further one is one more file with a `GraphMaker`, and its entry in `profiler.sample_spec.FRONT_ENDS`.

1. `torch.export` with a dynamic batch: one graph for every micro-batch size.
2. `torch.export` with static shapes: a graph for micro-batches of exactly as many samples as the sample has.
3. `torch.fx.symbolic_trace`, whose graph is then exported; modules of torch.nn and functions of the user's that
   cannot be exported are called as they are.
4. The children of an `nn.Sequential`: those that cannot be exported are called as they are.

Modules of `keep_together` that cannot be exported are called as they are in each of these.

Where the model branches on values, 1 and 2 are tried once more with the branches that the sample takes, see
`profiler.conditions`. And when nothing serves, 1 and 2 call those functions and modules as they are that stand in the
way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn

from profiler.conditions.answers import Answers, FromDecisions, FromRuns
from profiler.conditions.asking import Questions
from profiler.conditions.chance import Ways
from profiler.errors import NotTraceableError
from profiler.observe.named_functions import SEPARATOR
from profiler.observe.source_place import place_of_node
from profiler.observe.type_checkers import checkers_of, first_items_checked
from profiler.observe.untouched import untouched
from profiler.opaque.opaque_calls import NotCallableError, opaque_calls_of
from profiler.sample_spec import FRONT_ENDS, SampleSpec
from profiler.tracing import progress
from profiler.tracing.both_ways import both_ways
from profiler.tracing.calls_alike import empty_buffers_as_attributes
from profiler.tracing.export import Asking, OneBatchSizeError, TracedGraph, export_graph, mode_of, no_answers
from profiler.tracing.node_facts import NodeFacts, analyse
from profiler.tracing.progress import Part
from profiler.tracing.refusals import refuse_parameters_as_arrays
from profiler.tracing.sample_run import has_no_values, refuse_failing_call, sample_runs
from profiler.tracing.symbolic import CONSTANT, forward_by, leaf_modules, symbolic_module

Traced: TypeAlias = tuple[TracedGraph, Mapping[fx.Node, NodeFacts], tuple[str, ...]]
"""A graph, what is known of its nodes, and what is called as it is: paths of modules, and names of functions."""

GraphMaker: TypeAlias = Callable[[nn.Module, SampleSpec, bool, Asking], Traced]
"""The function of a front end: of a model, what it is called with, whether it trains, and what answers questions about
values; may not be able to."""

LARGEST_SHARE_CALLED = 99 / 100
"""Of the work, in a module that is called as it is without being asked for. No cut goes through it, so that other
stages would have next to nothing to do. [chosen]"""
_UNSCRIPTED = "plan and train with the module that was scripted"
MOST_MODULES_IN_THE_WAY = 8
"""Exports of one model in search of modules to call as they are; each takes seconds. [chosen]"""


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


def graph_of(
    model: nn.Module, spec: SampleSpec, *, training: bool = True, sample: Sequence[Tensor] | None = None
) -> Served:
    """Trace a model with the first front end that serves, or with the one that `spec` names.

    Args:
        model: any module.
        spec: what it is called with; of an earlier trace, with what was decided in that.
        training: trace it as it trains, else as `model.eval()` leaves it.
        sample: the sample's tensor leaves, whose values decide where the model branches on them.

    Raises:
        NotTraceableError: none serves; the message is that of the first that is not about the batch size alone.
        UserFunctionError: none serves, and the model itself fails on the sample.
    """
    refusals: dict[str, str] = {}
    first: NotTraceableError | None = None
    not_called: NotCallableError | None = None
    refuse_parameters_as_arrays(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise NotTraceableError(f"cannot trace the model: it is scripted (torch.jit); {_UNSCRIPTED}")
    checkers = checkers_of(model)
    askings = _Askings(model, spec, sample, training)
    ways: list[tuple[str, Way]] = [(front_end, _answered) for front_end in FRONT_ENDS]
    ways += [(name, _by_themselves) for name, front_end in FRONT_ENDS.items() if front_end.asks]
    for front_end, way in ways if spec.front_end is None else [(spec.front_end, _answered)]:
        try:
            with empty_buffers_as_attributes(model), first_items_checked(checkers):
                graph, facts, called = way(front_end, model, spec, training, askings)
        except NotTraceableError as problem:
            refusals.setdefault(front_end, str(problem).removeprefix("cannot trace the model: "))
            first = problem if first is None or isinstance(first, OneBatchSizeError) else first
            if not_called is None and isinstance(problem, NotCallableError):
                not_called = problem
        else:
            found = {
                "front_end": front_end,
                "called_as_is": called,
                "called_share": min(1.0, sum(_shares_called(facts))),
                "decisions": graph.decisions,
                "chances": graph.chances,
            }
            return Served(graph, facts, spec.model_copy(update=found), refusals)
    assert first is not None, "there are front ends"
    scripted = [path for path, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise NotTraceableError(
            f"cannot trace the model: module {scripted[0]!r} is scripted (torch.jit), and can neither be followed nor "
            f"be called as it is; {_UNSCRIPTED}"
        ) from first
    if sample is not None and training:
        refuse_failing_call(model, spec, sample, training)
    if askings.without_values and "on the values of a tensor" in str(first):
        more = "; of a real model and sample, the branch that these take is traced and checked in each micro-batch"
        raise NotTraceableError(str(first) + more, modules=first.modules) from first
    if not_called is not None and not_called.reason not in str(first):
        more = f"; and {not_called.reason.removeprefix('cannot trace the model: ')}"
        raise NotTraceableError(str(first) + more, modules=first.modules) from first
    raise first


def _shares_called(facts: Mapping[fx.Node, NodeFacts]) -> list[float]:
    """The share of the FLOPs that each call of a module has which is called as it is."""
    total = max(1, sum(fact.flops for fact in facts.values()))
    return [fact.flops / total for node, fact in facts.items() if opaque_calls_of(node)]


class _Askings:
    """What may answer questions about values, in the order in which it is tried.

    Args:
        model: to be traced.
        spec: of the sample.
        sample: its tensor leaves, or None.
        training: trace it as it trains.
    """

    def __init__(self, model: nn.Module, spec: SampleSpec, sample: Sequence[Tensor] | None, training: bool) -> None:
        self._model = model
        self._spec = spec
        self._sample = sample
        self._training = training

    def first(self) -> Asking:
        """An earlier trace's decisions; nothing, if there are none: few models ask."""
        if not self._spec.decisions and not self._spec.chances:
            return no_answers
        return self._asking(lambda: FromDecisions(self._spec.decisions), chances=bool(self._spec.chances))

    @property
    def without_values(self) -> bool:
        """Whether nobody knows what the sample's tensors hold, or the model's."""
        held = (*self._model.parameters(), *self._model.buffers(), *(self._sample or ()))
        return self._sample is None or any(map(has_no_values, held))

    @cached_property
    def further(self) -> tuple[Asking, ...]:
        """The sample's own values, if the model reads any, and chance where random numbers decide."""
        if self._spec.decisions or self._spec.chances:
            return ()
        if self._sample is None or self.without_values:
            return (self._asking(lambda: FromDecisions(()), chances=True),)
        runs = sample_runs(self._model, self._spec, self._sample, self._training)
        if not runs:
            return ()
        chance = self._asking(lambda: FromRuns(runs), chances=True)
        if not any(run.read for run in runs):
            return (chance,)
        return (
            self._asking(lambda: FromRuns(runs)),
            self._asking(lambda: FromRuns(runs), fix_numbers=True),
            chance,
        )

    @staticmethod
    def _asking(answers: Callable[[], Answers], *, fix_numbers: bool = False, chances: bool = False) -> Asking:
        def ask(model: nn.Module, ways: Ways | None = None) -> Questions:
            given = (ways or Ways()) if chances else None
            return Questions(model, answers(), fix_numbers=fix_numbers, ways=given)

        return ask


Way: TypeAlias = Callable[[str, nn.Module, SampleSpec, bool, _Askings], Traced]


def _answered(front_end: str, model: nn.Module, spec: SampleSpec, training: bool, askings: _Askings) -> Traced:
    """Trace without answers to questions about values, and if that fails with those that there are."""
    last: NotTraceableError | None = None
    try:
        with untouched(model):
            return _made_by(front_end)(model, spec, training, askings.first())
    except NotTraceableError as problem:
        last = problem
    for ask in askings.further if FRONT_ENDS[front_end].asks else ():
        if not any(words in str(last) for words in _HELPED_BY_ANSWERS):
            break
        try:
            with untouched(model):
                return _made_by(front_end)(model, spec, training, ask)
        except NotTraceableError as problem:
            last = problem
    raise last


_HELPED_BY_ANSWERS = ("values of a tensor", "depends on data", "data-dependent", "random generator")  # in our messages


def _by_themselves(front_end: str, model: nn.Module, spec: SampleSpec, training: bool, askings: _Askings) -> Traced:
    """Export a model with those functions and modules called as they are that stand in the way, the smallest that do.

    Raises:
        NotTraceableError: something in none of them stands in the way, or too much of the work would be in them.
    """
    ask = askings.further[-1] if askings.further else askings.first()
    every = [path for path, _ in model.named_modules() if path]
    with untouched(model):
        traced = exported(model, spec, training, every, dynamic=FRONT_ENDS[front_end].any_size, functions=True, ask=ask)
    _, facts, called = traced
    share = max(_shares_called(facts), default=0.0)
    if share > LARGEST_SHARE_CALLED:
        raise NotTraceableError(
            f"cannot trace the model: {', '.join(called)} would have to be called as they are, one of them with "
            f"{share:.0%} of the work, and at most {LARGEST_SHARE_CALLED:.0%} may be in one; name them in "
            "keep_together to allow it"
        )
    return traced


def _made_by(front_end: str) -> GraphMaker:
    found = FRONT_ENDS[front_end]
    function: GraphMaker = getattr(import_module(found.module), found.function)
    return function


def export(model: nn.Module, spec: SampleSpec, training: bool, ask: Asking) -> Traced:
    """Front end 1."""
    return exported(model, spec, training, spec.keep_together, ask=ask)


def static_export(model: nn.Module, spec: SampleSpec, training: bool, ask: Asking) -> Traced:
    """Front end 2."""
    return exported(model, spec, training, spec.keep_together, dynamic=False, ask=ask)


def symbolic_trace(model: nn.Module, spec: SampleSpec, training: bool, ask: Asking) -> Traced:
    """Front end 3; it takes no answers."""
    with mode_of(model, training):
        graph = symbolic_module(model, spec)
        with forward_by(graph, model):
            return exported(model, spec, training, leaf_modules(graph))


def children(model: nn.Module, spec: SampleSpec, training: bool, ask: Asking) -> Traced:
    """Front end 4; it takes no answers."""
    if not isinstance(model, nn.Sequential) or not _is_plain(model):
        raise NotTraceableError("the model is no nn.Sequential")
    return exported(model, spec, training, _children(model))


def exported(
    model: nn.Module,
    spec: SampleSpec,
    training: bool,
    optional: Sequence[str],
    *,
    dynamic: bool = True,
    functions: bool = False,
    ask: Asking = no_answers,
) -> Traced:
    """Export a model; those of the `optional` modules, and the functions, that stand in the way are called as they are.

    A function that cannot be called so is traced as before, and the one around it is tried.
    """
    called = list(spec.called_as_is)
    in_vain: set[str] = set()
    why: dict[str, str] = {}  # path -> why it cannot be traced
    for left in reversed(range(MOST_MODULES_IN_THE_WAY)):
        try:
            graph = _exported(model, spec, training, dynamic, called, ask)
            facts = analyse(graph, spec)
            _refuse_written_constants(model, graph, facts)
            progress.done(Part.FACTS)
            return graph, facts, _really_called(model, graph, called)
        except NotTraceableError as problem:
            if isinstance(problem, NotCallableError) and SEPARATOR in problem.path and functions:
                in_vain.add(problem.path)
                called = [path for path in called if path != problem.path]
            names = [name for name in reversed(problem.functions) if functions and name not in (*called, *in_vain)]
            more = names[:1] or _in_the_way(model, problem.modules, optional, called)
            if not more or not left:
                if isinstance(problem, NotCallableError) and problem.path in why:
                    raise problem.not_traced_for(why[problem.path]) from problem
                raise
            called += more
            why.update(dict.fromkeys(more, str(problem)))
    raise AssertionError("the last export is told")


def _exported(
    model: nn.Module, spec: SampleSpec, training: bool, dynamic: bool, called: Sequence[str], ask: Asking
) -> TracedGraph:
    """The graph of an export, or of several that together have both ways of what random numbers decide."""

    def along(ways: Ways | None) -> TracedGraph:
        def ask_along(model: nn.Module, ways: Ways | None = ways) -> Questions:
            return ask(model, ways)

        return export_graph(model, spec, training=training, dynamic=dynamic, called_as_is=called, ask=ask_along)

    return both_ways(model, along(None), along)


def _really_called(model: nn.Module, graph: TracedGraph, paths: Sequence[str]) -> tuple[str, ...]:
    """Those of the modules that the graph calls: not one inside another."""
    calls = [call for node in graph.module.graph.nodes for call in opaque_calls_of(node)]
    made = {_identity(model, call.path) for call in calls}
    return tuple(path for path in paths if _identity(model, path) in made)


def _identity(model: nn.Module, path: str) -> str | int:
    """Alike of paths of one module; of a function its name."""
    return path if SEPARATOR in path else id(model.get_submodule(path))


def _in_the_way(
    model: nn.Module, modules: Sequence[str], optional: Sequence[str], called: Sequence[str]
) -> Sequence[str]:
    """The innermost optional module in which it went wrong, with its like: others of its class would fail next."""
    known = dict(model.named_modules(remove_duplicate=False))
    left = {id(known[path]): path for path in optional if path not in called and path in known}
    for path in reversed(modules):
        if id(known.get(path)) in left:
            kind = type(known[path])
            general = kind.__module__.startswith("torch.nn.")  # says nothing of what else fails
            return [path] if general else [other for other in left.values() if type(known[other]) is kind]
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


def _refuse_written_constants(model: nn.Module, graph: TracedGraph, facts: Mapping[fx.Node, NodeFacts]) -> None:
    """Refuse writes to tensors that are no buffers: nobody would carry what is written to the next micro-batch."""
    written = frozenset().union(*(fact.writes for fact in facts.values()))
    held = {name for name, _ in model.named_buffers(remove_duplicate=False) if not name.startswith(CONSTANT)}
    held |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for node, fact in facts.items():
        if node.op == "get_attr" and str(node.target) not in held and fact.storage in written:
            writer = next(other for other, fact_of in facts.items() if fact.storage in fact_of.writes)
            place = place_of_node(writer)
            raise NotTraceableError(
                f"cannot trace the model: in {place}: the forward pass writes {str(node.target)!r}, a tensor that is "
                "no buffer, so that no micro-batch would find what the last one wrote; make it a buffer "
                "(self.register_buffer)",
                modules=place.modules,
                functions=place.functions,
            )
