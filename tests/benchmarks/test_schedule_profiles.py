"""Public profiles by schedule: the best plans, their memory and bubble, beside equal and balanced cuts.

ROWS=rows.jsonl python -m pytest -q -s -m benchmark tests/benchmarks/test_schedule_profiles.py

The tables are in schedules.md. A run that was interrupted goes on where it stopped, from the rows in that file.
"""

import math
import time
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from planner import Plan, plan_from_profile
from planner.plan.units import bytes_text
from profiler import Profile
from profiler.device import Cluster, Device
from profiler.errors import InfeasibleError
from tests.benchmarks.kept_rows import kept
from tests.benchmarks.public_profiles import LINK, MODELS, Layer, load_layers, profile_of_layers

pytestmark = pytest.mark.benchmark
CROSSING = 2
DEVICE = Device(name="cuda", kind="profiled GPU", memory_bytes=2**53)
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {"chunks": "auto"},
    "zb-h1": {},
    "zb": {},
    "zb-v": {},
}
WEIGHTS = 0.5
"""Part of a backward pass that makes gradients of parameters, and of what is kept that it needs, where there are
parameters [chosen: the profiles do not say; of a product of matrices one of two is for the parameters]."""


def split_profile(layers: tuple[Layer, ...]) -> Profile:
    """The profile with a part of each backward pass that can wait."""
    profile = profile_of_layers(layers)
    shares = [WEIGHTS * bool(layer.parameter_bytes) for layer in layers]
    costs = tuple(
        cost.model_copy(
            update={
                "weight_s": cost.backward_s * shares[cost.layer],
                "weight_kept_bytes": int(cost.kept_bytes * shares[cost.layer]),
            }
        )
        for cost in profile.costs
    )
    return profile.model_copy(update={"costs": costs})


def planned(profile: Profile, ranks: int, count: int, schedule: str, **more: Any) -> Plan:
    asked: dict[str, Any] = {"micro_batches": count, "micro_batches_per_stage": 1, "recompute": "never", **more}
    cluster = Cluster(devices=(DEVICE,) * ranks, link=LINK)
    return plan_from_profile(profile, cluster, batch_size=count, schedule=schedule, **asked)


def equal_cuts(layers: tuple[Layer, ...], stages: int) -> list[int]:
    """As many layers in each stage."""
    return [round(number * len(layers) / stages) for number in range(1, stages)]


def balanced_cuts(layers: tuple[Layer, ...], stages: int) -> list[int]:
    """The slowest stage as fast as may be: the rule of PipeDream and, up to its estimate, GPipe; zero bubble's."""
    sums = np.cumsum([0.0, *(layer.forward_s + layer.backward_s for layer in layers)])
    count = len(layers)
    best = np.full((stages + 1, count + 1), np.inf)
    came = np.zeros((stages + 1, count + 1), dtype=int)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for stop in range(stage, count + 1):
            slowest = np.maximum(best[stage - 1, :stop], sums[stop] - sums[:stop])
            came[stage, stop] = int(np.argmin(slowest))
            best[stage, stop] = slowest[came[stage, stop]]
    cuts, stop = [], count
    for stage in range(stages, 1, -1):
        stop = int(came[stage, stop])
        cuts.append(stop)
    return cuts[::-1]


def with_cuts(profile: Profile, ranks: int, count: int, schedule: str, chunks: int, cuts: list[int]) -> float:
    """Seconds with these cuts; not a number where two of them are one."""
    if any(stop <= first for first, stop in pairwise([0, *cuts, len(profile.layers)])):
        return float("nan")
    more: dict[str, Any] = {"chunks": chunks} if chunks > 1 else {}
    try:
        return planned(
            profile, ranks, count, schedule, stages=ranks * chunks, cut_at=[str(cut) for cut in cuts], **more
        ).prediction.step_s
    except InfeasibleError:
        return float("nan")


def row_of(model: str, ranks: int, count: int, schedule: str) -> dict[str, float]:
    """What the table says of the best plan of one schedule, and of that schedule with cuts by rule."""
    layers = load_layers(model, CROSSING)
    profile = split_profile(layers)
    began_s = time.process_time()
    plan = planned(profile, ranks, count, schedule, **SCHEDULES[schedule])
    took_s = time.process_time() - began_s
    said = plan.prediction
    assert said.lower_bound_s <= said.step_s
    equal_s, balanced_s = (
        with_cuts(profile, ranks, count, schedule, plan.chunks, rule(layers, ranks * plan.chunks))
        for rule in (equal_cuts, balanced_cuts)
    )
    return {
        "ranks": plan.ranks,
        "chunks": plan.chunks,
        "step_s": said.step_s,
        "one_device_s": said.one_device_s,
        "gap": said.gap,
        "memory": max(one.total for one in plan.device_memories),
        "bubble": said.bubble,
        "equal": equal_s / said.step_s,
        "balanced": balanced_s / said.step_s,
        "took_s": took_s,
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("times", [2, 4, 8])
def test_best_plans_by_schedule(model: str, ranks: int, times: int) -> None:
    count, plain_s = times * ranks, math.nan
    for schedule in SCHEDULES:
        row = kept(f"{model} {ranks} {count} {schedule}", partial(row_of, model, ranks, count, schedule))
        plain_s = row["step_s"] if schedule == "1f1b" else plain_s
        # device seconds that are idle, of all devices there are, beside those of 1F1B
        idle, idle_plain = (ranks * step_s - row["one_device_s"] for step_s in (row["step_s"], plain_s))
        removed = f"{1 - idle / idle_plain:.0%}" if idle_plain > 0 else "-"
        print(
            f"\n| {model} | {ranks} | {count} | {schedule} | {row['ranks']} x {row['chunks']} | "
            f"{row['step_s'] * 1e3:.1f} | {row['gap']:.1%} | {bytes_text(int(row['memory']))} | {row['bubble']:.1%} | "
            f"{removed} | {row['equal']:.3f} | {row['balanced']:.3f} | {row['took_s']:.1f} |",
            end="",
            flush=True,
        )
        assert not any(row[rule] < 1 - 1e-6 for rule in ("equal", "balanced"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [4, 8])
def test_all_schedules_against_the_default(model: str, ranks: int) -> None:
    """What `schedule="auto"` costs and gains, with M of 4 times the devices."""
    layers = load_layers(model, CROSSING)
    profile, count = split_profile(layers), 4 * ranks
    found = []
    for more in ({}, {"schedule": "auto", "chunks": "auto"}):
        schedule = str(more.get("schedule", "gpipe"))
        asked = {name: value for name, value in more.items() if name != "schedule"}
        began_s = time.process_time()
        plan = planned(profile, ranks, count, schedule, **asked)
        found.append((plan, time.process_time() - began_s))
    (old, old_s), (new, new_s) = found
    print(
        f"\n| {model} | {ranks} | {count} | {old.prediction.step_s * 1e3:.1f} | {new.prediction.step_s * 1e3:.1f} | "
        f"{new.schedule}, v = {new.chunks} | {new.prediction.gap:.1%} | {old_s:.1f} | {new_s:.1f} |",
        end="",
        flush=True,
    )
    assert new.prediction.step_s <= old.prediction.step_s * (1 + 1e-9)
