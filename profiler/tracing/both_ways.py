"""Both ways of branches that random numbers decide (layer drop), put together from traces that each take one way.

The usual way is the one that computes more. Other traces leave it at every other condition, so that what lies between
tells where the ways part and meet again:

    usual          a  [b0 b1]  c  [d0 d1]  e  [f0 f1]  g
    even others    a           c  [d0 d1]  e           g      ---->   a  either[b|]  c  either[d|]  e  either[f|]  g
    odd others     a  [b0 b1]  c           e  [f0 f1]  g

Where a later operation reads d1 in one trace and b1 in the other, the operation `either[d|]` returns one or the other.
The proof are more traces, along ways that were not used for it: everywhere the other one; at one condition only; at
half of them. What the model remembers of earlier conditions (how many layers it has left out, whether any) would show
there.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial

from torch import Tensor, fx, nn

from profiler.conditions.chance import EitherWay, Lot, Ways
from profiler.errors import NotTraceableError
from profiler.observe.counts import counted_apart
from profiler.observe.source_place import keep_together_advice, setting_advice
from profiler.tracing.export import TracedGraph
from profiler.tracing.meaning import digest_of, has_effect, is_source, meaning, operation_text, read_by, source_text
from profiler.tracing.node_text import RUN_IN, attribute, module_paths, symbolic_shape
from profiler.tracing.refusals import written_from_outside

MOST_TRIED_TOGETHER = 2
"""Conditions of which every combination is traced: none, both, the first and the second."""


class _Apart(Exception):  # noqa: N818 - caught and turned into an error of our tree
    """Why the ways cannot be put together."""


def both_ways(model: nn.Module, first: TracedGraph, traced: Callable[[Ways], TracedGraph]) -> TracedGraph:
    """The graph with both ways of each condition that random numbers decide; without such conditions it is `first`.

    Args:
        model: that was traced.
        first: a trace along some ways.
        traced: makes a trace along given ways.

    Raises:
        NotTraceableError: the ways do not meet again, or what one of them does depends on others.
    """
    lots = _lots(first)
    if not lots:
        return first
    try:
        return _put_together(first, traced)
    except _Apart as reason:
        place = _lot(lots[0]).place
        cure = setting_advice(model, place) or keep_together_advice(place.modules)
        raise NotTraceableError(
            f"cannot trace the model: in {place}: random numbers decide which way the forward pass takes, and the ways "
            f"cannot be put together: {reason}; {cure}",
            modules=place.modules,
        ) from reason


def _lots(graph: TracedGraph) -> list[fx.Node]:
    return [node for node in graph.module.graph.nodes if isinstance(node.target, Lot)]


def _lot(node: fx.Node) -> Lot:
    assert isinstance(node.target, Lot)
    return node.target


def _put_together(first: TracedGraph, traced: Callable[[Ways], TracedGraph]) -> TracedGraph:
    firsts = [_lot(node) for node in _lots(first)]  # the ways may be put together in this very graph
    found = [lot.decision for lot in firsts]
    count, places = len(found), frozenset((decision.module, decision.code) for decision in found)

    def along(answers: Sequence[bool]) -> _Trace:
        known = answers == [decision.answer for decision in found]
        trace = _Trace.of(first if known else traced(Ways(places, tuple(answers))))
        if len(trace.lots) != count:
            raise _Apart(f"one of them asks {len(trace.lots)} times, another {count} times")
        for lot, first_lot in zip(trace.lots, firsts, strict=True):
            counted = counted_apart(_lot(lot).counts, first_lot.counts)
            if counted and count > MOST_TRIED_TOGETHER:
                raise _Apart(f"{counted!r} counts which way was taken, and not every number of times can be tried")
        return trace

    no, yes = along([False] * count), along([True] * count)
    usual = len(yes.nodes) >= len(no.nodes)
    base, proof = (yes, no) if usual else (no, yes)
    parts: list[_Part] = []
    for odd in range(min(2, count)):
        other = proof if count == 1 else along([usual != (number % 2 == odd) for number in range(count)])
        parts.extend(_parts(base, other, range(odd, count, 2)))
    chances = tuple(dict.fromkeys(_lot(lot).decision.model_copy(update={"answer": usual}) for lot in base.lots))
    _merge(base, sorted(parts, key=lambda part: part.number), usual=usual)
    for ways in _proofs(count):
        trace = along([is_usual == usual for is_usual in ways]) if any(ways) else proof
        if meaning(base.graph, ways) != meaning(trace.graph):
            raise _Apart("together they do something else than one after the other")
    return replace(base.graph, chances=chances)


def _proofs(count: int) -> list[list[bool]]:
    """For each trace of the proof, whether each condition goes the usual way; none is used for anything else."""
    everywhere = [[False] * count]
    if count <= MOST_TRIED_TOGETHER:
        return everywhere
    others = {(0, 1), (count - 1, count), (0, count // 2), (0, count - 1)}  # the conditions from one to before another
    return everywhere + [[not first <= number < stop for number in range(count)] for first, stop in sorted(others)]


@dataclass(frozen=True)
class _Trace:
    """A trace, its operations, and what they do whatever their values are called."""

    graph: TracedGraph
    nodes: list[fx.Node]
    texts: list[str]
    lots: list[fx.Node]

    @classmethod
    def of(cls, graph: TracedGraph) -> _Trace:
        nodes = [node for node in graph.module.graph.nodes if node.op in ("call_function", "output")]
        texts = [operation_text(node, graph.module) for node in nodes]
        return cls(graph, nodes, texts, _lots(graph))


@dataclass
class _Part:
    """What a condition decides: nodes of the usual way, nodes of the other way, and the values that meet after them.

    Attributes:
        number: of the condition.
        usual: operations of the base.
        other: operations of the other trace.
        base_of: nodes of the other trace -> the same of the base.
        meeting: what later operations read on the usual way -> what they read on the other one: a node of `other`, or
            one of the base.
    """

    number: int
    usual: list[fx.Node]
    other: list[fx.Node]
    base_of: Mapping[fx.Node, fx.Node]
    meeting: dict[fx.Node, fx.Node] = field(default_factory=dict)


def _parts(base: _Trace, trace: _Trace, numbers: Sequence[int]) -> list[_Part]:
    """Where a trace differs from the base, one part for each of the conditions at which it goes the other way."""
    matcher = SequenceMatcher(None, base.texts, trace.texts, autojunk=False)
    asked = [base.nodes.index(base.lots[number]) for number in numbers]
    differing = [code[1:] for code in matcher.get_opcodes() if code[0] != "equal"]
    spans = _spans([span for span in differing if not _is_unused(base, span, differing)], asked)
    if len(spans) != len(numbers):
        raise _Apart(f"they part in {len(spans)} places, at {len(numbers)} conditions")
    inputs = [[node for node in each.graph.module.graph.nodes if node.op == "placeholder"] for each in (trace, base)]
    base_of: dict[fx.Node, fx.Node] = dict(zip(*inputs, strict=True))
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            base_of[trace.nodes[block.b + offset]] = base.nodes[block.a + offset]
    parts: list[_Part] = []
    for number, position, (low, high, other_low, other_high) in zip(numbers, asked, spans, strict=True):
        part = _Part(number, base.nodes[low:high], trace.nodes[other_low:other_high], base_of)
        if position >= low or any(node.op == "output" or node in base.lots for node in part.usual):
            raise _Apart("they part elsewhere than at the condition")
        for node in part.other:
            base_of.pop(node, None)
        parts.append(part)
    part_of = {node: part for part in parts for node in part.usual}
    for other, usual in ((other, usual) for other, usual in base_of.items() if usual.op != "placeholder"):
        for read, read_other in zip(read_by(usual), read_by(other), strict=True):
            _meet(part_of, base_of, read, read_other)
    return parts


_Span = tuple[int, int, int, int]  # positions in the base, then in the other trace


def _is_unused(base: _Trace, span: _Span, differing: Sequence[_Span]) -> bool:
    """Whether the other trace has left operations out that only what it does not do either would read."""
    low, high, other_low, other_high = span
    left_out = {node for first, stop, *_ in differing for node in base.nodes[first:stop]}
    own = base.nodes[low:high]
    return other_low == other_high and all(
        not has_effect(node) and all(user in left_out for user in node.users) for node in own
    )


def _spans(found: Sequence[_Span], asked: Sequence[int]) -> list[_Span]:
    """Where two traces differ, once for each condition.

    What lies between two of the differences after one condition may be alike by chance, so they are one.
    """
    if len(found) == len(asked):
        return list(found)
    joined: dict[int, _Span] = {}
    for low, high, other_low, other_high in found:
        before = bisect_left(asked, low)
        start = joined.get(before, (low, high, other_low, other_high))
        joined[before] = (start[0], high, start[2], other_high)
    return list(joined.values())


def _meet(
    part_of: Mapping[fx.Node, _Part], base_of: Mapping[fx.Node, fx.Node], read: fx.Node, read_other: fx.Node
) -> None:
    """Note that an operation on both ways reads one value on the usual way and another on the other way."""
    same = base_of.get(read_other, read_other)
    if read.op == "get_attr" or same is read:
        return
    part = part_of.get(read)
    if part is None:
        raise _Apart("they leave different values behind that neither has made")
    if part.meeting.setdefault(read, same) is not same:
        raise _Apart("one value of theirs stands for two of the other")


def _merge(base: _Trace, parts: Sequence[_Part], *, usual: bool) -> None:
    """Let an operation that goes either way take the place of each part, in the base's graph."""
    root = base.graph.module
    current: dict[fx.Node, fx.Node] = {}
    for part in parts:
        lot = base.lots[part.number]
        meeting = {
            read: current.get(other, other) if other not in set(part.other) else other
            for read, other in part.meeting.items()
        }
        if not all(_alike(read, other) for read, other in meeting.items()):
            raise _Apart("they leave values of different shapes or types")
        taken: dict[fx.Node, None] = {}
        regions = [
            _region(part.usual, list(meeting), lambda node: node, taken),
            _region(part.other, list(meeting.values()), partial(_in_base, part, current, root), taken),
        ]
        target = EitherWay(_lot(lot), len(lot.args), usual=usual)
        with root.graph.inserting_before(part.usual[0] if part.usual else lot.next):
            held = [root.graph.get_attr(_registered(root, made(taken))) for made in regions]
            both = root.graph.call_function(target, (*held, *lot.args, *taken))
            both.meta.update({key: lot.meta[key] for key in ("nn_module_stack", "stack_trace") if key in lot.meta})
            ways = [node for node in (*part.usual, *part.other) if node.op == "call_function"]
            both.meta[RUN_IN] = tuple(path for node in ways for path in module_paths(node))
            both.meta["val"] = tuple(read.meta["val"] for read in meeting)
            results = [_item(root.graph, both, i, read) for i, read in enumerate(meeting)]
        later = set(root.graph.nodes).difference(part.usual)
        for read, result in zip(meeting, results, strict=True):
            read.replace_all_uses_with(result, delete_user_cb=later.__contains__)
            current[read] = result
        for node in reversed(part.usual):
            if node.users:
                raise _Apart("a value of the usual way is read where the other one has none")
            root.graph.erase_node(node)
    for lot in base.lots:
        root.graph.erase_node(lot)
    root.graph.lint()
    root.recompile()


def _alike(read: fx.Node, other: fx.Node) -> bool:
    values = read.meta.get("val"), other.meta.get("val")
    if not all(isinstance(value, Tensor) for value in values):
        return False
    texts = {f"{symbolic_shape(value)} {value.dtype} {value.device}" for value in values if isinstance(value, Tensor)}
    return len(texts) == 1


def _item(graph: fx.Graph, both: fx.Node, position: int, read: fx.Node) -> fx.Node:
    item = graph.call_function(operator.getitem, (both, position))
    item.meta.update(read.meta)
    return item


def _in_base(part: _Part, current: Mapping[fx.Node, fx.Node], root: fx.GraphModule, node: fx.Node) -> fx.Node:
    """What a node that the other way reads is in the base."""
    found = part.base_of.get(node, node)
    if found.graph is root.graph:
        return current.get(found, found)
    owner = node.graph.owning_module
    assert owner is not None, "the graph is a trace's"
    text = source_text(node, owner)
    own: fx.Node
    for own in root.graph.nodes:
        if is_source(own) and source_text(own, root) == text:
            return own
    held = attribute(owner, str(node.target))
    name = str(node.target) if isinstance(held, nn.Parameter) else "constant_" + digest_of([text])[:16]
    if not isinstance(held, nn.Parameter):
        root.register_buffer(name, held, persistent=False)
    elif held is not dict(root.named_parameters(remove_duplicate=False)).get(name):
        raise _Apart("the other way reads a parameter that the usual one does not have")
    with root.graph.inserting_before(next(iter(root.graph.nodes))):
        added: fx.Node = root.graph.get_attr(name)
    added.meta.update(node.meta)
    return added


def _region(
    nodes: Sequence[fx.Node],
    leaving: Sequence[fx.Node],
    outside: Callable[[fx.Node], fx.Node],
    taken: dict[fx.Node, None],
) -> Callable[[Mapping[fx.Node, None]], fx.GraphModule]:
    """Notes what a part takes, and returns what makes a graph of it once all that both take is known."""
    inside = set(nodes)
    sources = dict.fromkeys(
        source for node in (*nodes, *leaving) for source in ([node] if node not in inside else read_by(node))
    )
    modules: dict[fx.Node, nn.Module] = {}
    entering: dict[fx.Node, fx.Node] = {}
    for source in (source for source in sources if source not in inside):
        owner = source.graph.owning_module
        held = attribute(owner, str(source.target)) if source.op == "get_attr" and owner is not None else None
        if isinstance(held, nn.Module):
            modules[source] = held
        else:
            entering[source] = outside(source)
    taken.update(dict.fromkeys(entering.values()))

    def made(all_taken: Mapping[fx.Node, None]) -> fx.GraphModule:
        graph = fx.Graph()
        given = {node: graph.placeholder(f"taken_{i}") for i, node in enumerate(all_taken)}
        for node, placeholder in given.items():
            placeholder.meta["val"] = node.meta.get("val")
        copies = {source: given[node] for source, node in entering.items()}
        root = nn.Module()
        for i, (source, held) in enumerate(modules.items()):
            root.add_module(f"region_{i}", held)
            copies[source] = graph.get_attr(f"region_{i}")
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: copies[argument])
            copies[node] = graph.create_node(node.op, node.target, args, kwargs)
            copies[node].meta.update(node.meta)
        graph.output(tuple(copies[node] for node in leaving))
        region = fx.GraphModule(root, graph)
        if written_from_outside(region) is not None:
            raise _Apart("one of them writes a value in place that it has not made")
        return region

    return made


def _registered(root: fx.GraphModule, region: fx.GraphModule) -> str:
    """The name under which the root holds a region; equal ones are one."""
    name = "way_" + digest_of([_module_text(region)])[:16]
    if not hasattr(root, name):
        root.add_module(name, region)
    return name


def _module_text(region: fx.GraphModule) -> str:
    return "\n".join(module.code for module in region.modules() if isinstance(module, fx.GraphModule))
