"""Segments of one stage against every choice that there is, each priced by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.kernel.segments import (
    INSIDE,
    KEPT,
    START,
    StageCosts,
    StageRoom,
    exact_segments,
    pattern_costs,
)
from planner.kernel.usual_segments import usual_segments
from planner.solve.segment_choices import segments_of

MUCH_WORK = 10**7
LAYERS = 6
NUMBERS = st.integers(0, 20).map(float)


def sums(values):
    return np.concatenate(([0.0], np.cumsum(values)))


@st.composite
def problems(draw):
    """Costs of a model, and a stage of it with room for some of what it would keep."""
    rows = {name: draw(st.lists(NUMBERS, min_size=LAYERS, max_size=LAYERS)) for name in ("many", "one", "brief", "s")}
    entering = np.array(draw(st.lists(NUMBERS, min_size=LAYERS + 1, max_size=LAYERS + 1)))
    turnaround = np.array(rows["s"]) * draw(st.sampled_from([1.0, 1.5]))
    held, one = sums(np.array(rows["many"]) * 4), sums(rows["one"])
    costs = StageCosts(held, entering, one, np.array(rows["brief"]), sums(rows["s"]), sums(turnaround))
    first = draw(st.integers(0, LAYERS - 1))
    stop = draw(st.integers(first + 1, LAYERS))
    available_bytes = float(draw(st.integers(0, 1 + int(held[stop] - held[first]))))
    most_s = draw(st.sampled_from([np.inf, np.inf, 30.0]))
    return costs, StageRoom(first, stop, draw(st.booleans()), available_bytes, most_s)


def every_pattern(length):
    for marks in itertools.product((KEPT, INSIDE, START), repeat=length):
        if all(mark != INSIDE or before != KEPT for before, mark in itertools.pairwise((KEPT, *marks))):
            yield np.array(marks, dtype=np.uint8)


def priced(costs, stage, pattern):
    """Bytes, e and x, straight from the definition."""
    first, stop = stage.first, stage.stop
    spans = [(segment.first, segment.stop) for segment in segments_of(pattern, first)]
    inside = {layer for span in spans for layer in range(*span)}
    held = sum(np.diff(costs.held_bytes)[layer] for layer in range(first, stop) if layer not in inside)
    edges = {edge for span in spans for edge in span if first < edge < stop}
    held += sum(costs.entering_bytes[edge] for edge in edges)
    peaks = [costs.transient_bytes[first:stop].max()]
    for begin, end in spans:
        until = stop if (begin, end) == spans[-1] else end  # layers after the last one go back while its values live
        kept = np.diff(costs.kept_one_bytes)[begin:end].sum()
        peaks.append(kept + costs.transient_bytes[begin:until].max())
    again = spans[:-1] if stage.last_free else spans
    recompute_s = sum(np.diff(costs.recompute_s)[begin:end].sum() for begin, end in again)
    turnaround_s = sum(np.diff(costs.turnaround_s)[begin:end].sum() for begin, end in spans[:-1])
    return held + max(peaks), recompute_s, turnaround_s


def fitting(costs, stage):
    """(e, x) of every choice that fits."""
    found = [priced(costs, stage, pattern) for pattern in every_pattern(stage.stop - stage.first)]
    return [
        (recompute_s, turnaround_s)
        for needed_bytes, recompute_s, turnaround_s in found
        if needed_bytes <= stage.available_bytes and recompute_s <= stage.most_recompute_s
    ]


def costs_of_found(costs, stage, found):
    return [pattern_costs(costs, stage.first, stage.stop, stage.last_free, pattern) for pattern in found.pattern]


@given(problems())
@settings(max_examples=50)
def test_exact_segments_are_all_that_are_worth_having(problem):
    costs, stage = problem
    every = fitting(costs, stage)
    best = sorted({one for one in every if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in every)})
    found = exact_segments(costs, stage, MUCH_WORK)
    assert found.exact
    assert list(zip(found.recompute_s, found.turnaround_s, strict=True)) == best
    for pattern, recompute_s, turnaround_s in zip(found.pattern, found.recompute_s, found.turnaround_s, strict=True):
        needed_bytes, *seconds = priced(costs, stage, pattern)
        assert needed_bytes <= stage.available_bytes
        assert seconds == [recompute_s, turnaround_s]


@given(problems())
@settings(max_examples=50)
def test_usual_segments_are_among_those_that_there_are(problem):
    costs, stage = problem
    every = fitting(costs, stage)
    found = usual_segments(costs, stage)
    assert not found.exact
    assert list(found.recompute_s) == sorted(found.recompute_s)
    for pattern, recompute_s, turnaround_s in zip(found.pattern, found.recompute_s, found.turnaround_s, strict=True):
        assert priced(costs, stage, pattern)[1:] == (recompute_s, turnaround_s)
        assert (recompute_s, turnaround_s) in every
    single = [
        priced(costs, stage, pattern)
        for pattern in every_pattern(stage.stop - stage.first)
        if len(segments_of(pattern, stage.first)) == 1
    ]
    fits = [one for one in single if one[0] <= stage.available_bytes and one[1:] in every]
    least_s = min((recompute_s for _, recompute_s, _ in fits), default=np.inf)
    assert min(found.recompute_s, default=np.inf) <= least_s  # no worse than the cheapest single segment


@given(problems())
@settings(max_examples=50)
def test_a_pattern_costs_what_its_segments_say(problem):
    costs, stage = problem
    for pattern in every_pattern(min(stage.stop - stage.first, 4)):
        part = stage._replace(stop=stage.first + len(pattern))
        found = pattern_costs(costs, part.first, part.stop, part.last_free, pattern)
        assert found == pytest.approx(priced(costs, part, pattern), rel=1e-12)


def test_work_that_does_not_suffice_is_said():
    values = np.arange(1.0, LAYERS + 1)
    costs = StageCosts(sums(values), np.zeros(LAYERS + 1), sums(values), values, sums(values), sums(values))
    stage = StageRoom(0, LAYERS, False, 1e9, np.inf)
    whole = exact_segments(costs, stage, MUCH_WORK)
    assert (list(whole.recompute_s), whole.exact) == ([0.0], True)
    short = exact_segments(costs, stage, whole.work - 1)
    assert (len(short.recompute_s), len(short.pattern), short.exact) == (0, 0, False)
    assert exact_segments(costs, stage, whole.work).exact
