"""Step times of unequal micro-batches, and the cheap bound of any plan, against the simulator and brute force."""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.kernel.bottleneck import least_bottleneck
from planner.kernel.two_sizes import NOTHING, Machine, both_phases, front_with, longest, rear_with
from planner.plan.actions import make_schedule
from planner.plan.simulator import Durations, simulate

SECONDS = st.floats(0, 10).map(lambda value: round(value, 3))
ROWS = st.lists(st.tuples(*[SECONDS] * 5), min_size=1, max_size=5)


def machines(large, small):
    """Stages and links of a pipeline in both phases; a row is (forward, recompute, backward, send, send back)."""
    forward, backward = [], []
    for stage, ((f, r, b, c, _), (g, s, d, e, _)) in enumerate(zip(large, small, strict=True)):
        forward += [Machine(f, f, g, g)] + [Machine(c, c, e, e)] * (stage < len(large) - 1)
        backward.append(Machine(b, b + r, d, d + s))
        if stage < len(large) - 1:
            back, small_back = large[stage + 1][4], small[stage + 1][4]
            backward.append(Machine(back, back, small_back, small_back))
    return forward, backward


@given(ROWS, st.integers(1, 5), st.integers(1, 5), st.data())
def test_two_sizes_take_what_the_simulator_says(large, n, m, data):
    """Where ranks wait for room for messages, as they may with small ones that take long, it is not less."""
    small = [data.draw(st.tuples(*[SECONDS] * 5)) for _ in large]
    tables = Durations(*(tuple((a,) * n + (b,) * m for a, b in zip(*pair, strict=True)) for pair in zip(
        zip(*large, strict=True), zip(*small, strict=True), strict=True)))  # fmt: skip
    schedule = make_schedule("gpipe", stages=len(large), micro_batches=n + m, recompute=(True,) * len(large))
    with mock.patch("planner.plan.simulator.room_between", lambda *_: n + m):
        expected_s = simulate(schedule, tables).makespan_s
    cut = data.draw(st.integers(0, 2 * len(large) - 1))
    phases = machines(large, small)
    found_s, ways = 0.0, []
    for row in (*phases, [both_phases(*pair) for pair in zip(*phases, strict=True)]):
        front, behind = NOTHING, NOTHING
        for machine in row[:cut]:
            front = front_with(front, machine, n - 1.0, m - 1.0)
        for machine in reversed(row[cut:]):
            behind = rear_with(behind, machine, n - 1.0, m - 1.0)
        ways.append(longest(front, behind))
    found_s = ways[0] + ways[1]
    assert found_s == pytest.approx(expected_s, rel=1e-9, abs=1e-9)
    assert found_s <= simulate(schedule, tables).makespan_s + 1e-9
    assert ways[2] <= found_s * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_smallest_bottleneck_is_that_of_the_best_cuts(layers, stages, gain):
    work = [own for own, _ in layers]
    sums = np.concatenate(([0.0], np.cumsum(work, dtype=np.float64)))
    links = np.array([0.0, *(link for _, link in layers)])
    links[-1] = 0.0

    def bottleneck(cuts):
        return max(
            max(sums[stop] - sums[first], links[stop]) - gain * (sums[-1] - sums[stop])
            for first, stop in itertools.pairwise(cuts)
        )

    best = min(
        bottleneck((0, *inner, len(work)))
        for count in range(min(stages, len(work)))
        for inner in itertools.combinations(range(1, len(work)), count)
    )
    assert least_bottleneck(sums, links, stages, gain) == pytest.approx(max(0.0, best), rel=1e-9, abs=1e-9)
