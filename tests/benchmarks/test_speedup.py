"""The demo's model on two CPU workers against one, in one run; and the prediction against the measurement.

    make bench

One thread a worker. The bound of K = 2 stages and M = 8 micro-batches is K M / (M + K - 1) = 1.78.
"""

import time
from statistics import median

import pytest
import torch
from gpt import next_token_loss
from task import BATCH_SIZE, CONFIG, make_model

from executor import Pipeline, launch
from planner import Plan, plan_from_profile
from profiler import profile, trace
from profiler.local import local_devices

M = 8
ROUNDS = 3
STEPS = 6
WARM_UP_STEPS = 2
SPEEDUP_AT_LEAST = 1.6
PREDICTION_WITHIN = 0.15


def step_times(plan: Plan) -> list[float]:
    """Seconds of training steps, the optimizer included, on this rank."""
    pipe = Pipeline(make_model(), plan, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(pipe.parameters())
    ids = torch.randint(256, (BATCH_SIZE, CONFIG.context), generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(WARM_UP_STEPS + STEPS):
        begun = time.perf_counter()
        pipe.step(ids, target=ids)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun)
    return times[WARM_UP_STEPS:]


@pytest.mark.benchmark
def test_two_workers_against_one() -> None:
    cluster = local_devices(["cpu", "cpu"])
    ids = torch.zeros(BATCH_SIZE, CONFIG.context, dtype=torch.int64)
    measured = profile(
        trace(make_model(), ids), cluster, sample=ids, batch_size=BATCH_SIZE, loss_fn=next_token_loss, target=ids
    )
    plans = {
        stages: plan_from_profile(measured, cluster, batch_size=BATCH_SIZE, stages=stages, micro_batches=M)
        for stages in (1, 2)
    }
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(ROUNDS):  # in turns, so that a noisy neighbour of this machine meets both
        for stages, plan in plans.items():
            times[stages].extend(launch(step_times, plan)[0])
    one, two = median(times[1]), median(times[2])
    predicted = plans[2].prediction.step_s
    print(f"\n{plans[2]}\n")
    for stages, seconds in ((1, one), (2, two)):
        expected = plans[stages].prediction.step_s
        print(
            f"K = {stages}, M = {M}: {seconds:.3f} s per step, median of {len(times[stages])}; predicted {expected:.3f}"
        )
    print(f"speed-up {one / two:.2f} (bound {2 * M / (M + 1):.2f}), measured / predicted {two / predicted:.2f}")
    assert one / two >= SPEEDUP_AT_LEAST
    assert abs(two / predicted - 1) <= PREDICTION_WITHIN
