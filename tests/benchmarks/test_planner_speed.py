"""How long planning takes, by L, K and what is asked; beside two published ways to balance. One thread.

The table is in planner_speed.md. Times are those of the processor (`time.process_time`), after a first plan that
compiles or loads the compiled search.
"""

import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from torchgpipe.balance import blockpartition

from planner.from_profile import make_problem, plan_from_profile
from planner.keywords import SettingKeywords
from planner.solve.balance import Balance
from planner.solve.balancer import balance
from profiler.device import Device, Link
from profiler.record import LayerCost, LayerInfo, OptimizerCost, ParameterInfo, Profile
from profiler.sample_spec import SampleSpec

pytestmark = pytest.mark.benchmark
ROOMY = 2**53
SIZES = (1, 16, 256)
MOST_GAP = 0.05


def random_profile(layers: int) -> Profile:
    """Uneven layers: times from 1 to 3, bytes kept from 1 to 4."""
    random = np.random.default_rng(layers)
    seconds, kept, crossing = (
        random.uniform(0.5, 1.5, layers),
        random.uniform(0.5, 2, layers),
        random.uniform(1, 3, layers),
    )
    return Profile(
        fingerprint="random",
        sample=SampleSpec(batch_size=1, tree="", leaves=()),
        parameters=tuple(
            ParameterInfo(name=f"{layer}", elements=250_000, size_bytes=10**6, trainable=True)
            for layer in range(layers)
        ),
        layers=tuple(
            LayerInfo(
                index=layer,
                name=f"{layer}",
                signature=f"{layer}",
                parameters=(f"{layer}",),
                buffers_bytes=0,
                module_paths=(f"{layer}",),
            )
            for layer in range(layers)
        ),
        costs=tuple(
            LayerCost(
                layer=layer,
                micro_batch_size=size,
                device_kind="a",
                forward_s=1e-4 * (0.2 + seconds[layer] * size),
                recompute_s=1e-4 * (0.2 + seconds[layer] * size),
                backward_s=1e-4 * (0.3 + 2 * seconds[layer] * size),
                spread=0.0,
                kept_bytes=int(1e6 * kept[layer] * size),
                transient_bytes=int(1e6 * size),
                output_bytes=int(1e5 * crossing[layer] * size),
                output_gradient_bytes=int(1e5 * crossing[layer] * size),
            )
            for size in SIZES
            for layer in range(layers)
        ),
        optimizers=(OptimizerCost(name="AdamW", device_kind="a", seconds_per_byte=1e-10, state_bytes_per_byte=2.0),),
        links=(Link(latency_s=1e-5, bytes_per_s=1e10),),
        input_bytes=0,
    )


def planned(layers: int, stages: int, batch: int, limit: int = ROOMY, **settings: object) -> tuple[float, Balance]:
    """Seconds of planning, and the plan."""
    devices = [Device(name="a", kind="a", memory_bytes=limit)] * stages
    profile = random_profile(layers)
    start_s = time.process_time()
    keywords: SettingKeywords = settings  # type: ignore[assignment]
    problem = make_problem(profile, devices, batch_size=batch, optimizer=None, settings=keywords)
    found = balance(problem)
    assert found is not None
    return time.process_time() - start_s, found


def pipedream(costs: list[float], stages: int) -> float:
    """The slowest stage of the best cuts, by PipeDream's dynamic program in O(L^2 K) (arXiv 1806.03377, section
    3.1)."""
    sums = np.concatenate(([0.0], np.cumsum(costs)))
    best = sums.copy()
    for _ in range(stages - 1):
        best = np.array(
            [min(max(best[first], sums[stop] - sums[first]) for first in range(stop + 1)) for stop in range(len(sums))]
        )
    return float(best[-1])


def seconds_of(work: Callable[..., object], *arguments: object) -> float:
    """Seconds that it takes."""
    start_s = time.process_time()
    work(*arguments)
    return time.process_time() - start_s


@pytest.mark.parametrize("chunks", [2, 3, 4, "auto"])
def test_plans_with_chunks(chunks: int | Literal["auto"]) -> None:
    """L = 400 on 8 devices, all M, a limit: under 10 s and with a gap under 5 %."""
    devices = [Device(name="a", kind="a", memory_bytes=6 * 10**9)] * 8
    plan_from_profile(random_profile(24), devices[:2], batch_size=16, schedule="interleaved", chunks=2)
    profile = random_profile(400)
    start_s = time.process_time()
    plan = plan_from_profile(profile, devices, batch_size=1024, schedule="interleaved", chunks=chunks)
    took_s, said = time.process_time() - start_s, plan.prediction
    print(f"\n| {chunks} | {took_s:.1f} | {plan.chunks} | {plan.M} | {said.step_s:.3f} | {said.gap:.1%} |")
    assert said.gap < MOST_GAP


def test_planner_speed() -> None:
    tight = 6 * 10**9
    planned(12, 2, 16, schedule="auto")
    planned(12, 2, 16, 60_000_000)
    planned(200, 2, 64, 10**9, micro_batches=16)  # stages too long to be solved exactly
    rows = [
        ("L = 400, K = 8, all M, limit, recompute", 2, planned(400, 8, 1024, tight)),
        ("L = 400, K = 8, all M", 2, planned(400, 8, 1024)),
        ("L = 1,000, K = 64, M = 256", 10, planned(1000, 64, 256, micro_batches=256)),
        ("L = 1,000, K = 64, all M", 10, planned(1000, 64, 1024)),
        ("L = 1,000, K = 64, all M, 1F1B", 10, planned(1000, 64, 1024, schedule="1f1b")),
        ("L = 2,133, K = 8, M = 32", 5, planned(2133, 8, 1024, micro_batches=32)),
        ("L = 400, K = 8, M = 64, 1F1B", 0, planned(400, 8, 1024, micro_batches=64, schedule="1f1b")),
        ("L = 400, K = 8, all M, GPipe or 1F1B", 0, planned(400, 8, 1024, schedule="auto")),
    ]
    print("\n| problem | asked | s | K | M | gap |\n|---|---|---|---|---|---|")
    for name, most_s, (seconds, found) in rows:
        gap = found.step_s / found.lower_bound_s - 1
        print(
            f"| {name} | {most_s or '-'} | {seconds:.2f} | {len(found.stages)} | "
            f"{found.candidate.split.count} | {gap:.2%} |"
        )
    print("\n| L | K | ours, M = 4K, s | block partition, s | PipeDream's O(L^2 K), s |\n|---|---|---|---|---|")
    for layers in (50, 100, 200, 400):
        for stages in (4, 8, 16):
            seconds, _ = planned(layers, stages, 4 * stages, micro_batches=4 * stages)
            costs = [float(cost.forward_s + cost.backward_s) for cost in random_profile(layers).costs[:layers]]
            whole = [int(1e7 * cost) for cost in costs]
            block = f"{seconds_of(blockpartition.solve, whole, stages):.3f}" if layers <= 200 else "-"
            dream = f"{seconds_of(pipedream, costs, stages):.3f}" if layers <= 400 else "-"
            print(f"| {layers} | {stages} | {seconds:.3f} | {block} | {dream} |")
