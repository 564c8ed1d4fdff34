"""Plans with several chunks a rank: moved cuts against all cuts on small problems, and the gain over 1F1B.

python -m pytest -q -s -m benchmark tests/benchmarks/test_chunk_plans.py
"""

import random
from collections import Counter
from typing import Any

import pytest

from planner import Plan, plan_from_profile
from planner.solve import cut_climb
from profiler import Device, Profile
from profiler.device import Link
from profiler.errors import InfeasibleError
from tests.planner.made_up import build_profile, copied_of, copying

PROBLEMS = 600
ALL_CUTS = 10**6
MOST_OVER = 1.01
ROUGH = 1e-9


def device(memory_bytes: int = 10**9) -> Device:
    return Device(name="cpu", kind="a", memory_bytes=memory_bytes)


def profile_of(chance: random.Random, layers: int) -> Profile:
    """Unlike layers, or equal ones, with messages, parameters and what they keep."""
    equal = chance.random() < 0.3
    rows: list[list[Any]] = []
    for _ in range(layers):
        forward_s = 1.0 if equal else chance.uniform(0.2, 2)
        backward_s = forward_s * (2.0 if equal else chance.uniform(1, 3))
        output = chance.randint(1, 20)
        rows.append([forward_s, forward_s, backward_s, chance.randint(0, 40), chance.randint(0, 10), output, output])
    rows[-1][5:] = [0, 0]
    link = Link(latency_s=chance.choice([0.0, 0.05, 0.2]), bytes_per_s=chance.choice([1e9, 100.0]))
    return build_profile(
        {("a", size): [[value * size for value in row] for row in rows] for size in (1, 2)},
        links=(copying(link, copied_of(int(sum(row[5] for row in rows)))),),
        reserve_bytes=10,
        parameters=[(chance.randint(0, 60), True) for _ in range(layers)],
        readers=[(layer,) for layer in range(layers)],
        optimizer=(1e-3, 2.0),
    )


def planned(profile: Profile, ranks: int, memory_bytes: int, asked: Any) -> Plan | None:
    try:
        return plan_from_profile(profile, [device(memory_bytes)] * ranks, **asked)
    except InfeasibleError:
        return None


@pytest.mark.benchmark
@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-lean"])
def test_moved_cuts_against_all_cuts(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L of 4 to 8, 2 or 3 ranks, 2 or 3 chunks, M up to 8, with memory limits or without."""
    counts: Counter[str] = Counter()
    worst = 1.0
    for seed in range(PROBLEMS):
        chance = random.Random(seed)
        layers = chance.randint(4, 8)
        ranks, chunks = chance.choice([(r, v) for r in (2, 3) for v in (2, 3) if r * v <= layers])
        count = chance.randint(ranks, 8)
        profile = profile_of(chance, layers)
        asked = {
            "batch_size": count,
            "micro_batches": count,
            "micro_batches_per_stage": 1,
            "schedule": schedule,
            "chunks": chunks,
            "stages": ranks * chunks,
        }
        monkeypatch.setattr(cut_climb, "FEW_CUTS", ALL_CUTS)
        memory_bytes = 10**9
        share = chance.choice([None, None, 0.75, 0.9])
        if share is not None:
            roomy = plan_from_profile(profile, [device()] * ranks, **asked)  # type: ignore[arg-type]
            memory_bytes = int(share * max(memory.total for memory in roomy.device_memories))
        best = planned(profile, ranks, memory_bytes, asked)
        monkeypatch.setattr(cut_climb, "FEW_CUTS", 0)
        found = planned(profile, ranks, memory_bytes, asked)
        if best is None or found is None:
            assert best is None, f"problem {seed}: a plan was missed"
            counts["none fits"] += 1
            continue
        ratio = found.prediction.step_s / best.prediction.step_s
        counts["best" if ratio < 1 + ROUGH else "worse"] += 1
        worst = max(worst, ratio)
        assert found.prediction.lower_bound_s <= best.prediction.step_s * (1 + ROUGH), f"problem {seed}"
    print(f"\n{schedule}: {dict(counts)}, worst {worst:.4f} times the best")
    assert worst <= MOST_OVER


@pytest.mark.benchmark
def test_gain_over_1f1b() -> None:
    """64 equal layers on 4 devices: chunks of equal size, and the ones that are chosen."""
    row = (1.0, 1.0, 2.0, 10, 4, 8, 8)
    profile = build_profile({("a", 1): [row] * 64}, links=(Link(latency_s=0.0, bytes_per_s=1e12),))
    print("\n M  v     1f1b   equal chunks  gain   chosen chunks  gain    gap")
    for count in (4, 8, 16):
        asked: Any = {"batch_size": count, "micro_batches": count, "micro_batches_per_stage": 1}
        plain = plan_from_profile(profile, [device()] * 4, schedule="1f1b", stages=4, **asked).prediction.step_s
        for chunks in (2, 4):
            stages = 4 * chunks
            asked_too: Any = {**asked, "schedule": "interleaved", "chunks": chunks, "stages": stages}
            cuts = [f"blocks.{index * 64 // stages}" for index in range(1, stages)]
            equal = plan_from_profile(profile, [device()] * 4, cut_at=cuts, **asked_too).prediction.step_s
            chosen = plan_from_profile(profile, [device()] * 4, **asked_too).prediction
            assert equal == pytest.approx(3 * 64 * count / 4 + 3 * 3 * 64 / 4 / chunks)
            assert chosen.step_s <= equal
            print(
                f"{count:2} {chunks:2} {plain:8.1f} s {equal:10.1f} s {plain / equal:6.3f} {chosen.step_s:12.1f} s "
                f"{plain / chosen.step_s:6.3f} {chosen.gap:7.2%}"
            )
