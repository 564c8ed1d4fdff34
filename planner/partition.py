"""The best cuts for one M, exactly: a forward dynamic program over (stages so far, layers so far) with Pareto sets.

A label is a partial plan: its prefix quantities (see `planner.objective`) at a stage number and a layer position.
Label A dominates B at the same place when none of A's quantities is larger: no continuation makes B the better one.
Before labels are made, and for each of them, `Bounds` says what any continuation costs at least; what cannot beat the
best plan known (the incumbent) is dropped. Where there is no incumbent yet, a narrow first pass (a beam) finds one,
which is nearly always optimal; the wide pass proves it or finds better.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.bounds import Bounds, Choices
from planner.costs import Floats, Indices
from planner.objective import Prefix, StageTerms, complete, extend
from planner.pareto import best_of_each_place, undominated

BEAM_LABELS = 4
"""Labels kept at each place in the first pass."""
MOST_LABELS = 1000
"""Labels kept at each place in the second pass; what is dropped beyond that enters the bound, never silently."""
CHUNK_CANDIDATES = 1_000_000
"""Labels made at once, to bound memory: 9 numbers each."""

TIE = 1e-12
"""Relative difference of two step times that counts as none: rounding of sums in another order."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Cuts for one M.

    Attributes:
        cuts: the K + 1 layer positions 0, ..., L.
        objective_s: step time T of these cuts: exact for equal micro-batches, a lower bound for unequal ones.
        bound_s: no cuts have a smaller T.
    """

    cuts: tuple[int, ...]
    objective_s: float
    bound_s: float


def best_partition(
    choices: list[Choices], steady: int, *, exact_stages: bool, below_s: float = np.inf
) -> Partition | None:
    """The cuts with the smallest step time T.

    Args:
        choices: for each stage number what its device could run.
        steady: M - 1.
        exact_stages: whether all stage numbers are to be used; otherwise any number of the first ones.
        below_s: only a T below this is of interest.

    Returns:
        None when no cuts fit the memory with a T below `below_s`.
    """
    bounds = Bounds(choices, steady, exact_stages)
    if bounds.root_s >= below_s:
        return None
    best = _Found(None, below_s, np.inf)
    if not np.isfinite(below_s):
        best = _search(bounds, below_s, BEAM_LABELS)
    wide = _search(bounds, best.objective_s, MOST_LABELS)
    if wide.cuts is None and best.cuts is None and np.isfinite(wide.dropped_s):
        wide = _search(bounds, below_s, sys.maxsize)  # without an incumbent, what was dropped may be all there is
    best = best if wide.cuts is None else wide
    if best.cuts is None:
        return None
    return Partition(best.cuts, best.objective_s, min(best.objective_s, wide.dropped_s))


class _Found(NamedTuple):
    """What a search came to: the best cuts below its limit, and the smallest bound among dropped labels."""

    cuts: tuple[int, ...] | None
    objective_s: float
    dropped_s: float


class _Labels(NamedTuple):
    """Partial plans that end at one stage number.

    Attributes:
        prefix: their quantities.
        position: layers so far, ascending.
        parent: index of the label of the stage before.
        bound_s: what T of any completion is at least.
    """

    prefix: Prefix
    position: Indices
    parent: Indices
    bound_s: Floats

    def take(self, selection: Indices) -> _Labels:
        return _Labels(
            self.prefix.take(selection), self.position[selection], self.parent[selection], self.bound_s[selection]
        )


class _Ends(NamedTuple):
    """Complete plans, one entry each: label before the last stage, stop layer of the last stage, and T."""

    parent: Indices
    stop: Indices
    total_s: Floats


def _search(bounds: Bounds, below_s: float, width: int) -> _Found:
    """The best cuts with T below `below_s`, with at most `width` labels at each place."""
    start = np.zeros(1, dtype=np.intp)
    history = [_Labels(Prefix.empty(), start, start, np.array([bounds.root_s]))]
    best = _Found(None, below_s, np.inf)
    dropped_s = np.inf
    arcs = [bounds.promising(stage, below_s) for stage in range(bounds.stages)]
    turn_until = _last_early_turn(bounds, arcs)
    for stage in range(bounds.stages):
        made: list[_Labels] = []
        for parent, first, stop in _pairs(history[-1].position, *arcs[stage]):
            prefix, terms = history[-1].prefix.take(parent), _terms_at(bounds.choices[stage], first, stop)
            best = _finish(bounds, history, best, _Ends(parent, stop, complete(prefix, terms, bounds.steady)))
            grown = _grown(bounds, stage + 1, extend(prefix, terms, bounds.steady), stop, parent)
            made.append(grown.take(np.flatnonzero((grown.bound_s < best.objective_s) & (stop < bounds.last))))
        if stage + 1 == bounds.stages or not made:
            break
        labels = _concatenate(made)
        labels = labels.take(np.flatnonzero(labels.bound_s < best.objective_s))
        labels = labels.take(
            undominated(_comparable(bounds, stage + 1, labels, turn_until[stage + 1]), labels.position)
        )
        kept, lost = best_of_each_place(labels.bound_s, labels.position, width)
        dropped_s = min([dropped_s, *labels.bound_s[lost]])
        history.append(labels.take(kept))
    return best._replace(dropped_s=dropped_s)


def _pairs(position: Indices, first: Indices, stop: Indices) -> list[tuple[Indices, Indices, Indices]]:
    """Every (label, stage) with the stage starting where the label ends, in chunks.

    Args:
        position: where each label ends, ascending.
        first: first layers of the stages.
        stop: their stop layers.
    """
    begin = np.searchsorted(position, first, side="left")
    number = np.searchsorted(position, first, side="right") - begin
    chunk = np.cumsum(number) // CHUNK_CANDIDATES
    pairs = []
    for index in range(int(chunk[-1]) + 1 if len(chunk) else 0):
        stages = np.flatnonzero((chunk == index) & (number > 0))
        repeats = number[stages]
        offset = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        pairs.append(
            (
                np.repeat(begin[stages], repeats) + offset,
                np.repeat(first[stages], repeats),
                np.repeat(stop[stages], repeats),
            )
        )
    return pairs


def _terms_at(choice: Choices, first: Indices, stop: Indices) -> StageTerms:
    return StageTerms(*(values[first, stop] for values in choice.terms))


def _finish(bounds: Bounds, history: list[_Labels], best: _Found, last: _Ends) -> _Found:
    """The better of `best` and the plans that end here; on a tie the one with fewer stages and earlier cuts stays."""
    parent, stop, total_s = last
    done = np.flatnonzero((stop == bounds.last) & np.isfinite(bounds.after[0, len(history), stop]))
    if not len(done):
        return best
    winner = done[np.argmin(total_s[done])]
    if total_s[winner] >= best.objective_s * (1 - TIE):
        return best
    return best._replace(cuts=_cuts(history, int(parent[winner]), bounds.last), objective_s=float(total_s[winner]))


def _cuts(history: list[_Labels], label: int, last: int) -> tuple[int, ...]:
    """Positions of a plan's cuts, walking back from its last label."""
    cuts = [last]
    for labels in reversed(history):
        cuts.append(int(labels.position[label]))
        label = int(labels.parent[label])
    return tuple(reversed(cuts))


def _grown(bounds: Bounds, stage: int, prefix: Prefix, stop: Indices, parent: Indices) -> _Labels:
    """The labels after `stage` stages."""
    bound_s, path_s = bounds.completed_s(stage, stop, prefix)
    prefix = prefix._replace(turned=np.maximum(prefix.turned, path_s))  # T is at least path_s: comparable, same T
    return _Labels(prefix, stop, parent, bound_s)


def _concatenate(parts: list[_Labels]) -> _Labels:
    """All labels, ordered by position, then by what they cost at least, then by parent."""
    prefix = Prefix(*(np.concatenate(columns) for columns in zip(*(part.prefix for part in parts), strict=True)))
    position, parent, bound_s = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("position", "parent", "bound_s")
    )
    order = np.lexsort((parent, bound_s, position))
    return _Labels(prefix, position, parent, bound_s).take(order)


def _last_early_turn(bounds: Bounds, arcs: list[tuple[Indices, Indices]]) -> list[int]:
    """For each stage number the last position from which a later stage may turn around early; -1 for none.

    A first recompute that is not longer than the least time to the end behind it never shows in T.
    """
    latest = [-1] * (bounds.stages + 1)
    for stage in reversed(range(bounds.stages)):
        first, stop = arcs[stage]
        exposed = bounds.choices[stage].terms.first_recompute[first, stop] > bounds.after[0, stage + 1, stop]
        latest[stage] = max([latest[stage + 1], *first[exposed & (stop < bounds.last)]])
    return latest


def _comparable(bounds: Bounds, stage: int, labels: _Labels, turn_until: int) -> Floats:
    """The quantities to compare labels by, shape (n, 5): raised to what any completion reaches anyway.

    The bottlenecks may only be raised where no later stage turns around early: there they enter T at the end alone.
    """
    _, forward, backward, _, optimizer = bounds.after[:, stage, labels.position]
    raise_it = labels.position > turn_until
    prefix = labels.prefix
    return np.stack(
        (
            prefix.through,
            np.where(raise_it, np.maximum(prefix.forward, forward), prefix.forward),
            np.where(raise_it, np.maximum(prefix.backward, backward), prefix.backward),
            prefix.turned,
            np.maximum(prefix.optimizer, optimizer),
        ),
        axis=1,
    )
