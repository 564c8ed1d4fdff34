"""The largest of some keys, against sorting them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.kernel.heap import order_heap, sift_down
from planner.kernel.labels import empty_set, insert_label, insert_plan, no_plans

NUMBERS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=40)


@given(NUMBERS, NUMBERS)
def test_the_largest_is_replaced_again_and_again(keys: list[float], others: list[float]) -> None:
    found, expected = np.array(keys), sorted(keys)
    heap = np.zeros(len(keys), dtype=np.int64)
    order_heap(heap, found)
    for other in others:
        assert found[heap[0]] == expected[-1]
        if other < expected[-1]:
            found[heap[0]] = other
            sift_down(heap, found, 0)
            expected = sorted([*expected[:-1], other])
        assert sorted(found) == expected
        assert sorted(heap) == list(range(len(keys)))


@given(NUMBERS, st.integers(1, 12))
def test_so_many_plans_and_labels_with_the_least_are_kept(objectives: list[float], room: int) -> None:
    """And what falls off is never less than what is left; both say the same of the same numbers."""
    best, pareto = no_plans(room), empty_set(room, 1)
    over: dict[str, list[float]] = {"plans": [], "labels": []}
    for number, objective_s in enumerate(objectives):
        over["plans"].append(insert_plan(best, objective_s, number, 0, 0))
        one = np.array([objective_s])
        over["labels"].append(insert_label(pareto, one, one, objective_s, number, 0, 0))
    kept = sorted(objectives)[:room]
    rest = sorted(objectives)[room:]
    for size, values, links, fell in (
        (best.size, best.objective_s, best.links, over["plans"]),
        (pareto.size, pareto.bound_s, pareto.links, over["labels"]),
    ):
        assert size[0] == len(kept)
        assert sorted(values[: size[0]]) == kept
        assert [objectives[parent] for parent in links[: size[0], 0]] == list(values[: size[0]])
        assert sorted(one for one in fell if one < np.inf) == rest
