"""What the search and the bounds count of a step's time is what the report says and the simulator finds."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cost.time_ledger import END_ROWS, MESSAGE_ROWS, PASS_ROWS, EndRow, MessageRow, Pass, PassRow
from planner.from_profile import make_problem
from planner.keywords import SettingKeywords
from planner.solve.balancer import balance
from planner.solve.build_plan import make_plan
from planner.solve.work_bound import work_bound_s
from tests.planner.conftest import WHOLE
from tests.planner.made_up import build_profile

MORE_S = 4.0


def seconds_of_a_step(profile, devices, **asked):
    """By the simulator, after what search and bounds say of the same plan was held against it."""
    settings_: SettingKeywords = {"micro_batches": 3, "micro_batches_per_stage": 1, **asked}  # type: ignore[typeddict-item]
    problem = make_problem(profile, devices, batch_size=15, optimizer=None, settings=settings_)
    found = balance(problem)
    assert found is not None
    step_s = make_plan(problem, found).prediction.step_s
    assert found.step_s == pytest.approx(step_s, rel=1e-12)
    # with equal micro-batches GPipe's objective is the step time, so that what the search counts is the bound
    if asked.get("schedule") == "1f1b":
        assert found.lower_bound_s <= step_s * (1 + 1e-12)
    else:
        assert found.lower_bound_s == pytest.approx(step_s, rel=1e-9)
    assert work_bound_s(problem, found.candidate) <= step_s * (1 + 1e-9)
    return step_s, work_bound_s(problem, found.candidate)


@given(st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_search_bounds_and_simulator_count_the_same_seconds(profiles, device, data):
    profile = data.draw(profiles())
    devices = [device(data.draw(st.sampled_from(("a", "b")))) for _ in range(3)]
    schedule, recompute = data.draw(st.sampled_from(WHOLE)), data.draw(st.sampled_from(["always", "never"]))
    seconds_of_a_step(profile, devices, schedule=schedule, recompute=recompute)


@pytest.mark.parametrize(
    ("rows", "row", "in_work"),
    [
        ("PASS_ROWS", PassRow("more", Pass.FORWARD, lambda layers: 0 * layers.forward_s + MORE_S), True),
        ("PASS_ROWS", PassRow("more", Pass.BACKWARD, lambda layers: layers.kept_bytes + MORE_S), True),
        ("PASS_ROWS", PassRow("more", Pass.RECOMPUTE, lambda layers: 0 * layers.forward_s + MORE_S), False),
        ("MESSAGE_ROWS", MessageRow("more", lambda link, size_bytes: MORE_S), False),
        ("MESSAGE_ROWS", MessageRow("more for each byte", lambda link, size_bytes: size_bytes), False),
        ("END_ROWS", EndRow("more", "optimizer_s", lambda at: (MORE_S, 0.0)), False),
        ("END_ROWS", EndRow("more for each byte", "all_reduce_s", lambda at: (0.0, MORE_S)), False),
    ],
    ids=lambda value: f"{value.name} {getattr(value, 'of', '')}" if hasattr(value, "name") else str(value),
)
@pytest.mark.parametrize("schedule", WHOLE)
def test_a_row_more_is_counted_everywhere(rows, row, in_work, schedule, device, monkeypatch):
    """One row makes a term: the plan's seconds have it, the search's, and the bound of the work where it is work."""
    table = [[1.0, 1.0, 2.0, 3, 1, 2, 2], [2.0, 2.0, 1.0, 2, 1, 4, 4], [1.0, 1.0, 1.0, 1, 1, 0, 0]]
    profile = build_profile({("a", 5): table}, parameters=[(4, True)], readers=[(0,), (0,), (0,)])
    asked = {"schedule": schedule, "stages": 2, "recompute": "always"}
    before_s, bound_s = seconds_of_a_step(profile, [device("a")] * 2, **asked)
    known = {"PASS_ROWS": PASS_ROWS, "MESSAGE_ROWS": MESSAGE_ROWS, "END_ROWS": END_ROWS}
    monkeypatch.setattr(f"planner.cost.time_ledger.{rows}", (*known[rows], row))
    after_s, new_bound_s = seconds_of_a_step(profile, [device("a")] * 2, **asked)
    assert after_s > before_s
    if in_work:
        assert new_bound_s > bound_s + MORE_S


def test_every_pass_has_a_row():
    assert {row.of for row in PASS_ROWS} == set(Pass)
