"""Interleaved and split schedules against every plan that there is, on small problems.

ROWS=rows.jsonl python -m pytest -q -s -m benchmark tests/benchmarks/test_exhaustive_schedules.py

The table is in exhaustive_schedules.md. Where the order is the schedule's, `exhaustive_plans` prices all plans. Where
each plan has its own, `exhaustive_orders` searches the orders of all plans for a faster one; problems whose orders are
too many for it are counted and drawn again, until as many are decided as are asked for.
"""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from planner import Plan, plan_from_profile
from planner.from_profile import make_problem
from planner.plan.schedules import SCHEDULES
from profiler import Device, Profile
from profiler.device import Link
from profiler.errors import InfeasibleError
from tests.benchmarks.exhaustive_orders import any_below
from tests.benchmarks.exhaustive_plans import Asked, least_s, step_s
from tests.benchmarks.kept_rows import kept
from tests.planner.made_up import build_profile, copied_of, copying

pytestmark = pytest.mark.benchmark
PROBLEMS = 500
PARTS = 4
MOST_LAYERS, MOST_DEVICES, MOST_CHUNKS, MOST_COUNT = 10, 4, 3, 8
MOST_OVER = 1.01
EQUAL = 1e-9
ROOMY = 10**9
NODES = 100_000
MOST_UNDECIDED = 0.25
"""Part of the problems that may be too many orders for the search [chosen]."""


def profile_of(chance: random.Random, layers: int, kinds: tuple[str, ...], *, copies: bool = True) -> Profile:
    """Unlike layers, or equal ones, with messages, parameters, what they keep and what waits for their gradients."""
    equal = chance.random() < 0.25
    rows = []
    for _ in range(layers):
        forward_s = 1.0 if equal else chance.uniform(0.2, 2)
        backward_s = forward_s * (2.0 if equal else chance.uniform(1, 3))
        output = chance.randint(1, 20)
        again_s = forward_s * chance.choice([1.0, 0.9])
        rows.append([forward_s, again_s, backward_s, chance.randint(0, 40), chance.randint(0, 10), output, output])
    rows[-1][5:] = [0, 0]
    speed = {kind: chance.uniform(0.5, 1.5) if number else 1.0 for number, kind in enumerate(kinds)}
    link = Link(latency_s=chance.choice([0.0, 0.05, 0.3]), bytes_per_s=chance.choice([1e9, 100.0, 20.0]))
    return build_profile(
        {
            (kind, size): [[*(v * speed[kind] * size for v in row[:3]), *(v * size for v in row[3:])] for row in rows]
            for kind in kinds
            for size in (1, 2)
        },
        links=(copying(link, copied_of(int(sum(row[5] for row in rows))) if copies else (0.0, 0.0)),),
        reserve_bytes=10,
        parameters=[(chance.randint(0, 60), chance.random() < 0.9) for _ in range(layers)],
        readers=[(layer,) for layer in range(layers)],
        optimizer=(1e-3, 2.0),
        weights=[(chance.uniform(0, 0.6), chance.uniform(0, 1.2)) for _ in range(layers)],
    )


def drawn(
    schedule: str, seed: int, *, small: bool, copies: bool = True
) -> tuple[Profile, list[Device], dict[str, Any]]:
    """A problem: profile, devices and settings; memory binds in half of them, on unlike devices in unlike ways.

    In three of five the ends of messages copy them, unless they must not.
    """
    chance = random.Random(seed)
    record = SCHEDULES[schedule]
    chunks = 1
    if record.most_chunks > 1:
        chunks = chance.randint(max(2, record.fewest_chunks), min(MOST_CHUNKS, record.most_chunks))
    fewest = 2 * chunks if chunks > 1 else 2
    layers = chance.randint(fewest, 7 if small else MOST_LAYERS)
    kinds = ("a", "b") if chance.random() < 0.4 else ("a",)
    profile = profile_of(chance, layers, kinds, copies=copies)
    number = chance.randint(2, 3 if small else MOST_DEVICES)
    devices = [Device(name="a", kind=chance.choice(kinds), memory_bytes=ROOMY) for _ in range(number)]
    count = chance.randint(2, 5 if small else MOST_COUNT)
    asked: dict[str, Any] = {
        "batch_size": chance.choice([count, 2 * count, count + chance.randint(0, count)]),
        "micro_batches_per_stage": 1,
        "recompute": chance.choice(["auto", "auto", "always", "never"]),
        "schedule": schedule,
        "chunks": chunks,
    }
    if SCHEDULES[schedule].made_for_plan or chance.random() < 0.7 or asked["batch_size"] > MOST_COUNT:
        asked["micro_batches"] = count
    if chance.random() < 0.5:
        roomy = plan_from_profile(profile, devices, **asked)
        most = max(memory.total for memory in roomy.device_memories)
        shares = [chance.choice([0.6, 0.75, 0.9, 0.97])] * number
        if chance.random() < 0.3:
            shares = [chance.choice([0.75, 0.9, 1.1]) for _ in devices]
        devices = [
            one.model_copy(update={"memory_bytes": int(share * most)})
            for one, share in zip(devices, shares, strict=True)
        ]
    return profile, devices, asked


def planned(profile: Profile, devices: list[Device], asked: dict[str, Any]) -> Plan | None:
    try:
        return plan_from_profile(profile, devices, **asked)
    except InfeasibleError:
        return None


def oracle_of(profile: Profile, devices: list[Device], asked: dict[str, Any]) -> Asked:
    settings: Any = {name: value for name, value in asked.items() if name != "batch_size"}
    problem = make_problem(profile, devices, batch_size=asked["batch_size"], optimizer=None, settings=settings)
    batch = asked["batch_size"]
    counts = (asked["micro_batches"],) if "micro_batches" in asked else tuple(range(-(-batch // 2), batch + 1))
    return Asked(
        profile, tuple(devices), asked["schedule"], asked["chunks"], batch, counts, asked["recompute"], problem
    )


def problems(schedule: str, part: int = 0, parts: int = 1) -> Iterator[tuple[int, Any]]:
    """One after the other; each fifth may be as large as they get."""
    for seed in itertools.count(part, parts):
        yield seed, drawn(schedule, seed, small=seed % 5 > 0)


def check_priced(oracle: Asked, plan: Plan) -> None:
    """The plan's step, by the longest path through its lists; and what it needs lies within the limits."""
    assert step_s(oracle, plan) == pytest.approx(plan.prediction.step_s, rel=EQUAL)
    for rank, memory in enumerate(plan.device_memories):
        assert memory.total <= plan.stages[rank].device.memory_bytes


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-lean", "zb-h1"])
def test_of_all_plans_none_is_faster(schedule: str) -> None:
    rows = []
    for seed, drawn_problem in problems(schedule):
        rows.append(kept(f"{schedule} {seed}", partial(against_all_plans, seed, drawn_problem)))
        if sum(row["decided"] for row in rows) == PROBLEMS:
            break
    report(schedule, rows)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("schedule", ["zb", "zb-v"])
def test_no_order_of_any_plan_is_faster(schedule: str, part: int) -> None:
    rows = []
    for seed, drawn_problem in problems(schedule, part, PARTS):
        rows.append(kept(f"{schedule} {seed}", partial(against_all_orders, seed, drawn_problem)))
        if sum(row["decided"] for row in rows) == PROBLEMS // PARTS:
            break
    report(schedule, rows)
    assert sum(row["ended"] == "undecided" for row in rows) <= MOST_UNDECIDED * len(rows)


def against_all_plans(seed: int, drawn_problem: Any) -> dict[str, Any]:
    """How one problem ended, where the order is the schedule's."""
    profile, devices, asked = drawn_problem
    oracle = oracle_of(profile, devices, asked)
    best_s = least_s(oracle)
    began_s = time.process_time()
    plan = planned(profile, devices, asked)
    plan_s = time.process_time() - began_s
    assert (plan is None) == (best_s == np.inf), f"problem {seed}: {plan}, and the best takes {best_s} s"
    if plan is None:
        return {"ended": "none fits", "decided": False, "plan_s": plan_s}
    check_priced(oracle, plan)
    said = plan.prediction
    assert said.lower_bound_s <= best_s * (1 + EQUAL), f"problem {seed}: the bound is above the best"
    assert best_s <= said.step_s * (1 + EQUAL), f"problem {seed}: not all plans were tried"
    over = said.step_s / best_s
    assert over <= MOST_OVER, f"problem {seed}: {over - 1:.2%} over the best"
    ended = "the best" if over <= 1 + EQUAL else "within 1 %"
    return {"ended": ended, "decided": True, "plan_s": plan_s, "over": over - 1, "gap": said.gap}


def against_all_orders(seed: int, drawn_problem: Any) -> dict[str, Any]:
    """How one problem ended, where each plan has its own order."""
    profile, devices, asked = drawn_problem
    oracle = oracle_of(profile, devices, asked)
    began_s = time.process_time()
    plan = planned(profile, devices, asked)
    plan_s = time.process_time() - began_s
    limit_s = np.inf
    if plan is not None:
        check_priced(oracle, plan)
        limit_s = max(plan.prediction.step_s / MOST_OVER, plan.prediction.lower_bound_s)
    below = any_below(oracle.problem, limit_s, most_nodes=NODES)
    assert not below.faster, f"problem {seed}: more than 1 % over the best, or the bound is above it"
    if below.undecided or plan is None:
        return {"ended": "undecided" if below.undecided else "none fits", "decided": False, "plan_s": plan_s}
    gap = plan.prediction.gap
    return {"ended": "at the bound" if gap < EQUAL else "within 1 %", "decided": True, "plan_s": plan_s, "gap": gap}


def report(schedule: str, rows: list[dict[str, Any]]) -> None:
    """One row of the table."""
    said = ", ".join(f"{number} {name}" for name, number in Counter(row["ended"] for row in rows).most_common())
    overs = [row["over"] for row in rows if "over" in row]
    over = f"{max(overs):.2%}" if overs else "under 1 %"
    gaps = sorted(row["gap"] for row in rows if row["decided"])
    middle, most, plan_s = gaps[len(gaps) // 2], gaps[-1], sum(row["plan_s"] for row in rows)
    print(f"\n| {schedule} | {len(gaps)} | {said} | {over} | {middle:.2%} | {most:.1%} | {plan_s:.0f} s |")
