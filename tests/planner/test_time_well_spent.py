"""Time that a search does not need makes no plan slower: what it does without a limit comes before bounds."""

import random
from typing import Any

import pytest

from planner import Plan, plan_from_profile
from planner.solve import deadline
from planner.solve.cut_bound import CutBound
from planner.solve.cut_climb import CutClimb
from profiler import Device
from tests.benchmarks.test_exhaustive_schedules import profile_of

ROUNDING = 1e-9


class Clock:
    """It goes on by a second with each linear program and all cuts that are tried, however fast the machine is."""

    now_s = 0.0

    def ticking(self, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.now_s += 1
            return function(*arguments)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(deadline, "_now_s", lambda: made.now_s)
    monkeypatch.setattr(CutBound, "_improved", made.ticking(CutBound._improved))
    monkeypatch.setattr(CutClimb, "_score", made.ticking(CutClimb._score))
    return made


@pytest.mark.parametrize("seed", [3, 22, 26, 81])
def test_a_limit_beyond_what_is_needed_makes_no_plan_slower(clock: Clock, seed: int) -> None:
    """Bounds had all that was left: a step was 3.5 % longer with four times the time that the search takes, in 81."""
    chance = random.Random(seed)
    schedule = chance.choice(["interleaved", "zb", "zb-v"])
    layers, ranks = chance.randint(12, 40), chance.randint(3, 6)
    profile = profile_of(chance, layers, ("a",))
    devices = [Device(name="a", kind="a", memory_bytes=10**9)] * ranks
    count = chance.choice([8, 12, 16, 24])

    def planned(**more: Any) -> Plan:
        asked: dict[str, Any] = {"micro_batches": count, "micro_batches_per_stage": 1, "recompute": "never", **more}
        chunks = 1 if schedule == "zb" else 2
        return plan_from_profile(profile, devices, batch_size=count, schedule=schedule, chunks=chunks, **asked)

    without = planned().prediction
    limited = planned(time_limit_s=2 * clock.now_s).prediction
    assert limited.step_s <= without.step_s * (1 + ROUNDING)
    assert limited.lower_bound_s <= limited.step_s
