"""Where to cut a model as it evaluates, so that the stages that train it can run it.

In evaluation a model does other operations than in training: dropout is gone, and what was computed for it; stochastic
depth drops no branch. What stays is which parameters and buffers an operation reads, and of these each stage holds
those that it trains with:

    training     embedding  add  dropout | linear  relu  dropout | linear
    evaluation   embedding  add          | linear  relu          | linear

So every operation goes to a stage that holds what it reads; where that leaves a choice, the fewest bytes are sent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from profiler.tracing.cuts import Body, allowed_positions


def stage_starts(body: Body, held: Sequence[Collection[str]], named: Collection[str]) -> list[int] | None:
    """Body positions at which the stages begin.

    Args:
        body: of the model as it evaluates, N operations.
        held: for each of K stages the names of the parameters and buffers that it holds.
        named: names that count; whatever else operations read every stage has.

    Returns:
        K ascending positions, the first 0; as few stages as possible have no operations. None if no K runs of
        operations read what the stages hold.
    """
    crossing = [sum(body.facts[value].value_bytes for value in alive) for alive in body.alive]
    cuts = [0, *allowed_positions(body), len(body.nodes)]
    reads = [_names_read(node).intersection(named) for node in body.nodes]
    cheapest = {0: _Begun((0, 0), 0, None)}
    for names in held:
        own = frozenset(names)
        strange = list(accumulate((not read <= own for read in reads), initial=0))  # operations before a position
        following: dict[int, _Begun] = {}
        for start, begun in cheapest.items():
            idle, sent_bytes = begun.cost
            for stop in cuts[bisect_left(cuts, start) :]:
                if strange[stop] > strange[start]:
                    break
                cost = idle + (stop == start), sent_bytes + crossing[stop]
                if stop not in following or cost < following[stop].cost:
                    following[stop] = _Begun(cost, stop, begun)
        cheapest = following
    end = cheapest.get(len(body.nodes))
    return None if end is None else end.starts_before()


class _Begun(NamedTuple):
    """The cheapest way to have a stage begin at a position: how many before have nothing to do, and bytes sent."""

    cost: tuple[int, int]
    start: int
    before: _Begun | None

    def starts_before(self) -> list[int]:
        """Where the stages before begin, in order."""
        starts = []
        begun = self.before
        while begun is not None:
            starts.append(begun.start)
            begun = begun.before
        return starts[::-1]


def _names_read(node: fx.Node) -> frozenset[str]:
    """Names of the parameters and buffers that an operation reads."""
    return frozenset(str(source.target) for source in node.all_input_nodes if source.op == "get_attr")
