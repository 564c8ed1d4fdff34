"""A profile's costs are written by hand, for speed: byte for byte as pydantic and json would."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.cost_text import costs_text
from profiler.record import InStage, LayerCost, Profile, Workspace
from profiler.value import Value
from tests.planner.made_up import build_profile

NUMBERS = st.integers(0, 2**40)
PAIRS = st.lists(st.tuples(st.integers(0, 9), NUMBERS), max_size=3).map(tuple)
LEAVES = st.lists(st.tuples(st.just(0), st.just(1), st.just(2), NUMBERS), max_size=2).map(tuple)


def of(lists: Any, leaves: Any, number: int, workspaces: int) -> InStage:
    known: dict[str, Any] = {"forward_bytes": number, "backward_bytes": 7, "last_backward_bytes": 0}
    kept = (Workspace(steps=1, samples=2, entering=3, width=7, size_bytes=number, is_kept=True),) * workspaces
    lists = {"carried_bytes": lists, "made_bytes": lists[:1], "leaf_bytes": leaves, "workspaces": kept}
    return InStage.model_construct(**known, **lists)


@given(entries=st.lists(st.builds(of, PAIRS, LEAVES, NUMBERS, st.integers(0, 2)), min_size=1, max_size=3))
@settings(max_examples=40)
def test_the_same_bytes(entries: list[InStage]) -> None:
    profile = build_profile({("a", 1): [(0.25, 1e-7, 2.0, 3, 4, 5, 6)] * len(entries)})
    costs = tuple(
        LayerCost.model_construct(**{**dict(cost), "in_stage": entry})
        for cost, entry in zip(profile.costs, entries, strict=True)
    )
    whole = Profile.model_construct(**{**dict(profile), "costs": costs})
    assert costs_text(costs) in Value.to_json(whole)
    assert whole.to_json() == Value.to_json(whole)
