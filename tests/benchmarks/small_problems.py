"""Small problems of every kind, drawn at random, and their plans against the best of all plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.from_profile import plan_from_profile
from profiler.device import Device, Link
from profiler.errors import InfeasibleError
from profiler.record import Profile
from tests.benchmarks.exhaustive import best_of_all
from tests.planner.made_up import build_profile, copied_of, copying

CLOSE = 1e-9
MOST_LAYERS, MOST_DEVICES, MOST_MICRO_BATCHES = 9, 4, 8
SIZES = (1, 4, 16)


@dataclass(frozen=True)
class Compared:
    """One problem.

    Attributes:
        plans: how many were walked through.
        fits: whether one of them fits.
        gap: what the planner says of its plan.
    """

    plans: int
    fits: bool
    gap: float = 0.0


def compared(seed: int, schedule: str) -> Compared:
    """The plan of problem `seed` is the best of all plans, or there is none.

    With a gap it may be slower by that much at most, and the best plan is not below the lower bound.

    Limits are between the bytes of a stage that recomputes all and those of one that keeps all, so that they bind.
    """
    random = np.random.default_rng([seed, len(schedule)])
    profile, devices = _problem(random)
    batch = int(random.integers(2, 17))
    mode = str(random.choice(["auto", "auto", "auto", "always", "never"]))
    per_stage = int(random.choice([1, 1, 2]))
    most = min(batch, MOST_MICRO_BATCHES)
    fixed = int(random.integers(-(-batch // SIZES[-1]), most + 1)) if random.random() < 0.5 or batch > most else None
    counts: Sequence[int] = range(1, most + 1) if fixed is None else [fixed]
    asked: dict[str, Any] = {"schedule": schedule, "recompute": mode, "micro_batches_per_stage": per_stage}
    best = best_of_all(profile, devices, batch, [count for count in counts if count >= per_stage], **asked)
    label = f"seed {seed}, {schedule}, batch {batch}, M {fixed}, {mode}, {per_stage} for each stage"
    if fixed is not None and fixed < per_stage:
        return Compared(best.plans, False)
    try:
        plan = plan_from_profile(profile, devices, batch_size=batch, micro_batches=fixed, **asked)
    except InfeasibleError:
        assert best.step_s is None, label
        return Compared(best.plans, False)
    assert best.step_s is not None, label
    step_s, lower_s, gap = plan.prediction.step_s, plan.prediction.lower_bound_s, plan.prediction.gap
    assert step_s >= best.step_s * (1 - CLOSE), (label, step_s, best.step_s)
    assert lower_s <= best.step_s * (1 + CLOSE), (label, lower_s, best.step_s)
    assert gap > 0 or step_s <= best.step_s * (1 + CLOSE), (label, step_s, best.step_s)
    assert all(stage.memory.total <= stage.device.memory_bytes for stage in plan.stages), label
    return Compared(best.plans, True, gap)


def _problem(random: Any) -> tuple[Profile, list[Device]]:
    layers = max(int(number) for number in random.integers(1, MOST_LAYERS + 1, 2))
    kinds = ["a", "b"][: int(random.integers(1, 3))]
    rows = {}
    for kind in kinds:
        seconds = random.integers(1, 20, (layers, 3)) / 16
        size_bytes = random.integers(0, 40, (layers, 4))
        size_bytes[:, 3] = np.minimum(size_bytes[:, 2], size_bytes[:, 3])
        size_bytes[-1, 2:] = 0
        fixed = random.integers(0, 10) / 16
        for size in SIZES:
            rows[kind, size] = np.hstack((fixed + seconds * size, size_bytes * size)).tolist()
    count = int(random.integers(1, 5))
    profile = build_profile(
        rows,
        parameters=[(int(random.integers(0, 100)), bool(random.random() < 0.8)) for _ in range(count)],
        readers=[
            sorted({int(name) for name in random.integers(0, count, int(random.integers(0, 3)))}) for _ in range(layers)
        ],
        buffers=random.integers(0, 5, layers).tolist(),
        optimizer=(float(random.choice([0, 1 / 64])), float(random.choice([0, 1, 2]))),
        links=(
            copying(
                Link(latency_s=int(random.integers(0, 8)) / 16, bytes_per_s=float(random.choice([8, 64, 1024]))),
                copied_of(int(size_bytes.sum())),
            ),
        ),
        input_bytes=int(random.integers(0, 4)),
        reserve_bytes=int(random.integers(0, 10)),
    )
    number = max(int(number) for number in random.integers(1, MOST_DEVICES + 1, 2))
    kept = [cost.kept_bytes + cost.output_bytes for cost in profile.costs if cost.micro_batch_size == 1]
    whole = float(np.sum(kept)) / len(kinds) * 8
    roomy = [int(whole * share) + 300 for share in random.uniform(0.05, 1.2, number)]
    alike = bool(random.random() < 0.4)
    return profile, [
        Device(name="cpu", kind=str(random.choice(kinds)), memory_bytes=roomy[0 if alike else index])
        for index in range(number)
    ]
