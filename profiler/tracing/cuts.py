"""Where a graph may be cut, and which of those positions are worth offering to the planner.

The body of a graph is its operations without the prelude, in order. Position p lies before body node p; what crosses
it are the values computed before and read at or after p. Positions that no rule forbids are candidates. The cheapest
delimit layers; dearer ones join only inside runs of nodes that would otherwise hold too much of the work. How much that
is follows from the number of stages: to balance 64 of them takes layers of a sixteenth of what serves 4.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import fx

from profiler.errors import NotTraceableError
from profiler.module_paths import within
from profiler.observe.source_place import place_of_node
from profiler.quantities import LEAST_STAGES
from profiler.tracing.export import module_stack
from profiler.tracing.node_facts import NodeFacts
from profiler.tracing.node_text import module_paths

# No layer holds more than the first part of an even stage's work while a position inside it is left: stages then
# balance to within an eighth. A run of nodes that holds less than the second part is not worth a layer where bytes are
# fewest (between blocks, of which there may be hundreds), nor one with less than the third inside a run that is split
# further.
LARGEST_PART = 1 / 8
SMALLEST_PART = 1 / 256
SMALLEST_INNER_PART = 1 / 32
MOST_OF_THE_WORK = 0.95
"""Share of one operation that explains by itself why a model is one layer [chosen]."""


@dataclass(frozen=True)
class Body:
    """The operations that layers are made of, and what is alive between them.

    Attributes:
        nodes: in execution order.
        facts: of every node of the graph.
        last_use: node -> position of its last reader; `len(nodes)` if the model returns it.
        alive: for each position 0..len(nodes) the nodes whose values cross it, in execution order.
    """

    nodes: tuple[fx.Node, ...]
    facts: Mapping[fx.Node, NodeFacts]
    last_use: Mapping[fx.Node, int]
    alive: tuple[tuple[fx.Node, ...], ...]

    @classmethod
    def of(cls, graph: fx.Graph, prelude: set[fx.Node], facts: Mapping[fx.Node, NodeFacts]) -> Body:
        """The body of a graph whose prelude is known."""
        nodes = tuple(node for node in graph.nodes if node.op == "call_function" and node not in prelude)
        index = {node: position for position, node in enumerate(nodes)}
        for node in graph.nodes:
            if node.op == "output":
                index[node] = len(nodes)
        last_use = {node: max((index[user] for user in node.users), default=index[node]) for node in nodes}
        alive: list[tuple[fx.Node, ...]] = [()]
        for position, node in enumerate(nodes):
            alive.append(tuple(value for value in (*alive[-1], node) if last_use[value] > position))
        return cls(nodes, facts, last_use, tuple(alive))


def allowed_positions(body: Body, keep_together: Sequence[str] = ()) -> list[int]:
    """Inner positions at which a cut is safe, ascending.

    Forbidden are positions that a value other than a tensor crosses; that two values crossing share a storage which
    is written later; that lie between a write to a model input and its last use; that part the users of a written
    buffer; and that lie inside a module to be kept together.

    Raises:
        NotTraceableError: the model writes a parameter in its forward pass.
    """
    forbidden = _between_users_of_written_sources(body) | _inside(body, keep_together)
    last_write: dict[int, int] = {}
    for position, node in enumerate(body.nodes):
        for storage in body.facts[node].writes:
            last_write[storage] = position
    allowed = []
    for position in range(1, len(body.nodes)):
        crossing = body.alive[position]
        if position in forbidden or not all(body.facts[value].is_tensor for value in crossing):
            continue
        storages = [body.facts[value].storage for value in crossing]
        written_later = [s for s in storages if s is not None and last_write.get(s, -1) >= position]
        if len(written_later) == len(set(written_later)):
            allowed.append(position)
    return allowed


def _between_users_of_written_sources(body: Body) -> set[int]:
    """Positions between the first and the last node that touches a buffer or input which something writes."""
    graph = body.nodes[0].graph
    written = frozenset().union(*(body.facts[node].writes for node in body.nodes))
    sources = {
        body.facts[node].storage: node
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr") and body.facts[node].storage in written
    }
    touching: dict[int | None, list[int]] = defaultdict(list)
    for position, node in enumerate(body.nodes):
        fact = body.facts[node]
        touched = {fact.storage, *fact.writes, *(body.facts[source].storage for source in node.all_input_nodes)}
        for storage in touched & sources.keys():
            touching[storage].append(position)
            if body.facts[sources[storage]].requires_grad and storage in fact.writes:
                raise NotTraceableError(
                    f"cannot trace the model: in {place_of_node(node)}: {node.target} writes the parameter "
                    f"{sources[storage].target!r} in the forward pass; update it outside the model, or register it as "
                    "a buffer"
                )
    return {position for used in touching.values() for position in range(used[0] + 1, used[-1] + 1)}


def _inside(body: Body, paths: Sequence[str]) -> set[int]:
    """Positions between the first and the last operation of each of these modules, and of modules in it."""
    known = [module_paths(node) for node in body.nodes] if paths else []
    positions: set[int] = set()
    for path in paths:
        own = [i for i, inside in enumerate(known) if any(within(each, path) for each in inside)]
        positions.update(range(own[0] + 1, own[-1] + 1) if own else ())
    return positions


def first_operations(body: Body, paths: Sequence[str]) -> dict[str, int]:
    """Positions of the first operation of each of these modules, or of modules in it.

    Those that are in no operation, or begin inside of one, are left out.
    """
    known = [module_paths(node) for node in body.nodes] if paths else []
    found = {}
    for path in paths:
        first = next((i for i, inside in enumerate(known) if any(within(each, path) for each in inside)), None)
        if first is not None and within(known[first][0], path):
            found[path] = first
    return found


def layer_starts(
    body: Body, keep_together: Sequence[str] = (), cut_at: Sequence[str] = (), *, stages: int = LEAST_STAGES
) -> list[int]:
    """Body positions at which layers start; the first is 0.

    A run of nodes that holds more than `LARGEST_PART` of a stage's work is cut at all positions inside it that the
    fewest bytes cross, and so on in each part. Which positions are chosen inside a run depends on that run alone, so
    equal blocks are cut alike. Layers for twice as many stages are parts of these: each plan stays possible.

    Args:
        body: what to cut.
        keep_together: paths of modules that no cut may part.
        cut_at: paths of modules before whose first operation a layer starts, where a cut is safe there.
        stages: K, of which an even one holds 1 / K of the work.
    """
    work = _Work(body)
    crossing = [sum(body.facts[value].value_bytes for value in alive) for alive in body.alive]
    allowed = allowed_positions(body, keep_together)
    starts, fine_for = [0], LEAST_STAGES
    while True:
        starts = _parted(work, crossing, allowed, starts, min(fine_for, stages))
        if fine_for >= stages:
            return sorted({*starts, *({*first_operations(body, cut_at).values()} & {*allowed})})
        fine_for *= 2


def why_one_layer(body: Body, keep_together: Sequence[str] = ()) -> str:
    """What keeps a model that is one layer from being cut, for people.

    Args:
        body: that has no position to cut it at.
        keep_together: paths of modules that no cut may part.
    """
    work, inner = _Work(body), set(range(1, len(body.nodes)))
    shares = [work.mean_share(place, place + 1) for place in range(len(body.nodes))]
    largest = max(range(len(shares)), key=shares.__getitem__)
    if shares[largest] >= MOST_OF_THE_WORK or not inner:
        node = body.nodes[largest]
        where = f" of module {path}" if (path := next(reversed(module_stack(node)), "")) else ""
        return (
            f"operation {node.target}{where} does {shares[largest]:.0%} of its work, and no operation can be cut (of "
            "recurrent modules, all num_layers are one)"
        )
    if inner <= _inside(body, keep_together):
        return f"keep_together holds {', '.join(keep_together)} together"
    if inner <= _between_users_of_written_sources(body):
        return "its first and its last operation touch a buffer or an input that it writes"
    if not allowed_positions(body, keep_together):
        return "a cut anywhere would part what is written in place, or send what is no tensor"
    return "where it could be cut, one side would have next to none of the work"


def _parted(
    work: _Work, crossing: Sequence[int], allowed: Sequence[int], starts: Sequence[int], stages: int
) -> list[int]:
    """The starts of layers, and those inside layers that are too large for so many stages."""
    bounds = list(pairwise((*starts, len(crossing) - 1)))
    pending = [(low, high, _inner(allowed, low, high)) for low, high in bounds]
    starts = list(starts)
    while pending:
        first, stop, inside = pending.pop()
        if stages * work.largest_share(first, stop) <= LARGEST_PART:
            continue
        whole = stop - first == len(crossing) - 1
        least = (SMALLEST_PART if whole else SMALLEST_INNER_PART) / stages
        for level in sorted({crossing[position] for position in inside}):
            chosen = _worthwhile(work, first, stop, [p for p in inside if crossing[p] == level], least)
            if chosen:
                starts.extend(chosen)
                for low, high in pairwise([first, *chosen, stop]):
                    pending.append((low, high, _inner(inside, low, high)))
                break
    return sorted(starts)


def _inner(positions: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Those of ascending positions that lie between two."""
    return positions[bisect_right(positions, low) : bisect_left(positions, high)]


def _worthwhile(work: _Work, first: int, stop: int, positions: Sequence[int], least: float) -> list[int]:
    """The positions without those that would leave a run with less than `least` of the work."""
    chosen = [first]
    for position in positions:
        if work.mean_share(chosen[-1], position) >= least and work.mean_share(position, stop) >= least:
            chosen.append(position)
    return chosen[1:]


class _Work:
    """Shares of a graph's work that a run of nodes holds, in FLOPs and in memory traffic.

    A device is bound by either, so a run is too large if one of the two is, and small only on average.
    """

    def __init__(self, body: Body) -> None:
        facts = [body.facts[node] for node in body.nodes]
        self._flops = list(accumulate((fact.flops for fact in facts), initial=0))
        self._bytes = list(accumulate((fact.written_bytes for fact in facts), initial=0))

    def _shares(self, first: int, stop: int) -> tuple[float, float]:
        return (
            (self._flops[stop] - self._flops[first]) / max(self._flops[-1], 1),
            (self._bytes[stop] - self._bytes[first]) / max(self._bytes[-1], 1),
        )

    def largest_share(self, first: int, stop: int) -> float:
        return max(self._shares(first, stop))

    def mean_share(self, first: int, stop: int) -> float:
        return sum(self._shares(first, stop)) / 2
