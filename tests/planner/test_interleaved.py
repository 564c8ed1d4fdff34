"""Interleaved 1F1B: the order of ranks with several chunks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.run.rank_order import rank_lists
from planner.kernel.makespan import makespan_s
from planner.plan.actions import ActionKind, make_schedule, parse_schedule, schedule_text
from planner.plan.orders import group_sizes
from planner.plan.schedules import SCHEDULES, Ring, rank_orders
from planner.plan.simulator import Durations, simulate
from profiler.errors import ArgumentError

INTERLEAVED = [name for name, record in SCHEDULES.items() if record.most_chunks > 1 and not record.folds]
GOLDEN = """\
0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 4B5 4B6 4B7 \
0B4 0B5 0B6 0B7
1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3 5B4 5B5 5B6 5B7 \
1B4 1B5 1B6 1B7
2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3 6F6 6B4 6F7 6B5 6B6 6B7 \
2B4 2B5 2B6 2B7
3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 \
3B4 3B5 3B6 3B7"""
"""As in the lower half of figure 4 of arXiv 2104.04473: four devices, two chunks each, eight micro-batches."""


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Schedule, ranks, chunks and M, which need not be a multiple of the ranks."""
    return (
        draw(st.sampled_from(INTERLEAVED)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 17)),
    )


def computed(schedule):
    return "\n".join(" ".join(str(a) for a in actions if a.kind in ("F", "R", "B")) for actions in schedule)


def test_the_figure_of_the_paper():
    schedule = make_schedule("interleaved", stages=8, micro_batches=8, recompute=(False,) * 8, chunks=2)
    assert computed(schedule) == GOLDEN


@given(shapes(), st.data())
def test_every_pass_comes_once_and_the_lists_finish(shape, data):
    name, ranks, chunks, count = shape
    stages = ranks * chunks
    recompute = data.draw(st.lists(st.booleans(), min_size=stages, max_size=stages))
    schedule = make_schedule(name, stages=stages, micro_batches=count, recompute=recompute, chunks=chunks)
    assert len(schedule) == ranks
    assert parse_schedule(schedule_text(schedule)) == schedule
    passes = [(a.stage, a.kind, a.micro_batch) for actions in schedule for a in actions if a.kind in ("F", "B")]
    every = itertools.product(range(stages), (ActionKind.F, ActionKind.B), range(count))
    assert sorted(passes) == sorted(every)
    for rank, actions in enumerate(schedule):
        assert {action.stage % ranks for action in actions} == {rank}
        for stage in range(rank, stages, ranks):  # gradients are summed in the order of the micro-batches
            assert [a.micro_batch for a in actions if (a.stage, a.kind) == (stage, "B")] == [*range(count)]
    ones = ((1.0,) * count,) * stages
    simulate(schedule, Durations(ones, ones, ones, ones, ones))  # raises if they wait for each other
    # with no more messages under way than the executor allows, one process a rank, and all in one
    assert rank_lists(schedule, range(ranks), lambda action: 1.0) == schedule
    rank_lists(schedule, [0] * ranks, lambda action: 1.0)


@pytest.mark.parametrize("name", ["interleaved", "interleaved-lean"])
def test_ranks_do_not_wait_for_each_other_whatever_m_is(name):
    """With 5 ranks, 3 chunks and M = 14 those of the lean order did: 49 of these 450 orders, all of 5 ranks or more."""
    many = itertools.product((8, 11, 16), (2, 3), (1, 8, 9, 15, 17, 24, 33, 47))
    for ranks, chunks, count in itertools.chain(itertools.product(range(2, 8), (2, 3, 4), range(1, 26)), many):
        stages = ranks * chunks
        schedule = make_schedule(name, stages=stages, micro_batches=count, recompute=[False] * stages, chunks=chunks)
        assert rank_lists(schedule, range(ranks), lambda action: 1.0) == schedule


@given(shapes())
def test_as_many_are_in_flight_as_the_record_says(shape):
    name, ranks, chunks, count = shape
    stages = ranks * chunks
    schedule = make_schedule(name, stages=stages, micro_batches=count, recompute=(False,) * stages, chunks=chunks)
    for stage in range(stages):
        steps = [
            {ActionKind.F: 1, ActionKind.B: -1}.get(action.kind, 0)
            for action in schedule[stage % ranks]
            if action.stage == stage
        ]
        most = max(itertools.accumulate(steps))
        assert SCHEDULES[name].most_in_flight(stages - stage, count, Ring(ranks, chunks)) == most


@given(shapes())
def test_with_one_chunk_it_is_1f1b(shape):
    name, ranks, _, count = shape
    assert rank_orders(name, ranks, count) == rank_orders("1f1b", ranks, count)
    for number in range(1, ranks + 1):
        assert SCHEDULES[name].most_in_flight(number, count) == SCHEDULES["1f1b"].most_in_flight(number, count)


@pytest.mark.parametrize("name", INTERLEAVED)
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 2), (4, 3), (8, 2), (8, 3), (16, 2)])
def test_equal_chunks_leave_a_bubble_by_the_formula(name, ranks, chunks, rounds):
    """Section 2.2: (p - 1) (t_f + t_b) / v."""
    stages, count = ranks * chunks, rounds * ranks
    seconds = np.zeros((5, stages, count))
    seconds[0], seconds[2] = 1 / chunks, 2 / chunks
    assert makespan_s(name, seconds, chunks) == pytest.approx(3 * count + (ranks - 1) * 3 / chunks)


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 20))
def test_the_lean_order_keeps_what_1f1b_keeps(ranks, chunks, rounds):
    """Of equal chunks; the published order has up to ranks - 1 chunks more under way."""
    count = rounds * ranks
    for rank in range(ranks):
        flying = most = 0
        for number in rank_orders("interleaved-lean", ranks, count, chunks)[rank]:
            flying += 1 if number < chunks * count else -1
            most = max(most, flying)
        assert most <= chunks * ranks


@given(shapes(), st.randoms(use_true_random=False))
def test_fast_makespan_equals_the_simulator(shape, random):
    name, ranks, chunks, count = shape
    stages = ranks * chunks
    recompute = tuple(random.random() < 0.5 for _ in range(stages))
    tables = np.array([[[random.random() for _ in range(count)] for _ in range(stages)] for _ in range(5)])
    tables[1] *= np.array(recompute)[:, None]
    durations = Durations(*(tuple(map(tuple, table.tolist())) for table in tables))
    schedule = make_schedule(name, stages=stages, micro_batches=count, recompute=recompute, chunks=chunks)
    timeline = simulate(schedule, durations)
    assert makespan_s(name, tables, chunks) == pytest.approx(timeline.makespan_s, rel=1e-12)
    assert len(timeline.idle_s) == ranks
    assert {lane for lane in timeline.lanes if "link" not in lane} == {
        f"{'rank' if chunks > 1 else 'stage'} {rank}" for rank in range(ranks)
    }


def test_group_sizes_are_at_least_one_for_each_rank_and_the_first_is_the_largest():
    for count, ranks in itertools.product(range(1, 40), range(1, 9)):
        sizes = group_sizes(count, ranks)
        assert sum(sizes) == count
        assert sizes == tuple(sorted(sizes, reverse=True))
        assert min(sizes) >= min(ranks, count)


def test_chunks_that_a_schedule_has_no_order_for_are_refused():
    with pytest.raises(ArgumentError, match=r"chunks is 2, and schedule '1f1b' has at most 1 a rank; several are for"):
        make_schedule("1f1b", stages=4, micro_batches=4, recompute=[False] * 4, chunks=2)
    with pytest.raises(ArgumentError, match="chunks is 0"):
        make_schedule("interleaved", stages=4, micro_batches=4, recompute=[False] * 4, chunks=0)
    with pytest.raises(ArgumentError, match="3 stages are not 2 chunks for each rank"):
        make_schedule("interleaved", stages=3, micro_batches=4, recompute=[False] * 3, chunks=2)


def test_an_action_in_the_line_of_another_rank_is_refused():
    assert len(parse_schedule("0F0 2F0\n1F0")) == 2
    with pytest.raises(ArgumentError, match="action 1F0 of stage 1 stands in line 0 of 2, which is for rank 0"):
        parse_schedule("0F0 1F0\n1F1")
