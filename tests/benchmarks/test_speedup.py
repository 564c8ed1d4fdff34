"""The demo's model on two CPU workers against one, step by step in turns; and the prediction against the measurement.

    make bench

One thread a worker. The bound of K = 2 stages and M = 8 micro-batches is K M / (M + K - 1) = 1.78. The speed of a
shared machine drifts by 15 % within a minute, so the two pipelines live side by side and take turns every few steps:
the speed-up is the median of the ratios of neighbouring turns. For the same reason the prediction is compared in
several rounds, each with a profile of its own, and the median counts.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from gpt import next_token_loss
from task import BATCH_SIZE, CONFIG, make_model

from executor import Pipeline, launch
from planner import Plan, plan_from_profile
from profiler import profile, trace
from profiler.machine.local import local_devices

M = 8
ROUNDS = 3
TURNS = 6
STEPS_PER_TURN = 4  # the first warms the caches up again and does not count
SPEEDUP_AT_LEAST = 1.6
PREDICTION_WITHIN = 0.15
PATIENCE_S = 120.0
POLL_S = 0.05  # who waits for its turn must not take a core from who has it


def steps_in_turns(plan: Plan, folder: Path) -> list[float]:
    """Median seconds of a training step in each turn, the optimizer included; K = 1 begins, K = 2 follows."""
    pipe = Pipeline(make_model(), plan, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(pipe.parameters())
    ids = torch.randint(256, (BATCH_SIZE, CONFIG.context), generator=torch.Generator().manual_seed(0))
    turns = []
    for turn in range(1 + TURNS):
        wait_for(folder / (f"K1-{turn}" if plan.K == 2 else f"K2-{turn - 1}"), unless=turn == 0 and plan.K == 1)
        times = []
        for _ in range(STEPS_PER_TURN):
            begun = time.perf_counter()
            pipe.step(ids, target=ids)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begun)
        if plan.K == 2:
            dist.barrier()
        if pipe.rank == 0:
            (folder / f"K{plan.K}-{turn}").touch()
        turns.append(median(times[1:]))
    return turns[1:]


def wait_for(turn: Path, *, unless: bool) -> None:
    """Sleep until it is this pipeline's turn."""
    end = time.monotonic() + PATIENCE_S
    while not unless and not turn.exists():
        assert time.monotonic() < end, f"{turn.name} did not come"
        time.sleep(POLL_S)


@pytest.mark.benchmark
def test_two_workers_against_one(tmp_path: Path) -> None:
    cluster = local_devices(["cpu", "cpu"])
    ids = torch.zeros(BATCH_SIZE, CONFIG.context, dtype=torch.int64)
    sequence = trace(make_model(), ids)
    ratios, errors = [], []
    for number in range(ROUNDS):
        measured = profile(sequence, cluster, sample=ids, batch_size=BATCH_SIZE, loss_fn=next_token_loss, target=ids)
        one, two = (
            plan_from_profile(
                measured, cluster, batch_size=BATCH_SIZE, stages=stages, micro_batches=M, schedule="gpipe"
            )
            for stages in (1, 2)
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(launch, steps_in_turns, plan, args=(folder,)) for plan in (one, two)]
            times_one, times_two = (future.result()[0] for future in running)
        ratios += [alone / both for alone, both in zip(times_one, times_two, strict=True)]
        errors.append(median(times_two) / two.prediction.step_s)
        print(f"\n{two}\n" if number == 0 else "")
        for plan, times in ((one, times_one), (two, times_two)):
            print(
                f"round {number}: K = {plan.K}, M = {M}: {median(times):.3f} s per step, median of {len(times)} turns; "
                f"predicted {plan.prediction.step_s:.3f}"
            )
    speedup = median(ratios)
    print(
        f"speed-up {speedup:.2f}, median of {len(ratios)} turns (bound {2 * M / (M + 1):.2f}); measured / predicted "
        f"{median(errors):.2f}, median of {', '.join(f'{error:.2f}' for error in sorted(errors))}"
    )
    assert speedup >= SPEEDUP_AT_LEAST
    assert abs(median(errors) - 1) <= PREDICTION_WITHIN
