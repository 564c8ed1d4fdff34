"""Two ranks with half of a card's multiprocessors each: gains of schedules over 1F1B, measured against predicted.

Run by `test_gains_on_a_card.py`, with CUDA's multi-process service and half of the multiprocessors for each process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from statistics import median

import torch
import torch.distributed as dist
from gpt import GPT, Config, next_token_loss

from executor import Pipeline, launch
from planner import Plan, plan_from_profile
from planner.plan.schedules import ScheduleName
from profiler import Cluster, Link, Profile, profile, trace
from tests.benchmarks.stage_models import Model
from tests.gpu.on_a_card import NAME, card

SCHEDULES: Mapping[str, tuple[ScheduleName, int]] = {  # with chunks a rank
    "1f1b": ("1f1b", 1),
    "interleaved": ("interleaved", 2),
    "interleaved-lean": ("interleaved-lean", 2),
    "zb-h1": ("zb-h1", 1),
    "zb": ("zb", 1),
}
MICRO_BATCHES = (4, 8)
SIZE, LENGTH = 4, 512
TURNS, STEPS_A_TURN = 4, 3
PROBES = (2**16, 2**23)  # bytes
ROUNDS, ROUND_TRIPS = 12, 4


def subject(micro_batches: int) -> Model:
    """A GPT of 100 M parameters without dropout, whose passes take several times as long as its messages."""
    torch.manual_seed(0)
    ids = torch.randint(256, (SIZE * micro_batches, LENGTH))
    return Model(GPT(Config(256, LENGTH, 1024, 16, 8)), ids, next_token_loss, ids)


def on_a_host_of_its_own() -> None:
    """To NCCL, which refuses two ranks of a host on one card."""
    os.environ["NCCL_HOSTID"] = f"host-{dist.get_rank()}"
    torch.cuda.set_device(torch.device(NAME))


def seconds_of_messages(_: Plan) -> list[float]:
    """One way, of each of `PROBES`."""
    on_a_host_of_its_own()
    rank, found = dist.get_rank(), []
    for size in PROBES:
        message = torch.zeros(size, dtype=torch.uint8, device=NAME)
        took = []
        for _round in range(ROUNDS):
            dist.barrier()
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
            for _trip in range(ROUND_TRIPS):
                for sender in (0, 1):
                    (dist.send if sender == rank else dist.recv)(message, 1 - rank)
            torch.cuda.synchronize()
            took.append((time.perf_counter() - begun_s) / ROUND_TRIPS / 2)
        found.append(median(took[2:]))
    return found


def seconds_of_steps(_: Plan, plans: Mapping[str, Plan]) -> dict[str, list[float]]:
    """Of each plan, in turns."""
    on_a_host_of_its_own()
    model = subject(next(iter(plans.values())).M)
    pipes = {
        name: Pipeline(model.model, plan, loss_fn=model.loss_fn, compare_first_step=False, replan=None)
        for name, plan in plans.items()
    }
    found: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(1 + TURNS):
        for name, pipe in pipes.items():
            pipe.step(model.sample, target=model.target)
            torch.cuda.synchronize()
            dist.barrier()
            begun_s = time.perf_counter()
            for _step in range(STEPS_A_TURN):
                pipe.step(model.sample, target=model.target)
            torch.cuda.synchronize()
            if turn:
                found[name].append((time.perf_counter() - begun_s) / STEPS_A_TURN)
    for name, pipe in pipes.items():
        frame = pipe.measured()
        if not dist.get_rank():
            print(f"{name}\n{frame.to_string(float_format='{:.5f}'.format)}", flush=True)
    return found


def plans_of(found: Profile, link: Link, micro_batches: int) -> dict[str, Plan]:
    """With the best cuts for each schedule."""
    devices = Cluster(devices=(card(0.45),) * 2, link=link)
    return {
        name: plan_from_profile(
            found, devices, batch_size=SIZE * micro_batches, stages=2 * chunks, chunks=chunks, schedule=schedule,
            micro_batches=micro_batches, micro_batches_per_stage=1, recompute="never", time_limit_s=5.0,
        )
        for name, (schedule, chunks) in SCHEDULES.items()
    }  # fmt: skip


def of_step(plan: Plan) -> float:
    """Predicted seconds without the optimizer's."""
    return plan.prediction.step_s - plan.prediction.optimizer_s


def main() -> None:
    """Print a row for each schedule and M, and all as JSON in the last line."""
    model = subject(max(MICRO_BATCHES))
    sequence = trace(model.model, model.sample)
    found = profile(
        sequence, [card(0.45)], sample=model.sample, loss_fn=model.loss_fn, target=model.target,
        micro_batch_sizes=[SIZE], time_budget_s=5.0, progress=False, cache=False,
    )  # fmt: skip
    link = Link(latency_s=1e-4, bytes_per_s=3e9)
    small_s, large_s = launch(seconds_of_messages, plans_of(found, link, MICRO_BATCHES[0])["1f1b"])[0]
    rate = (PROBES[1] - PROBES[0]) / (large_s - small_s)
    link = Link(latency_s=max(small_s - PROBES[0] / rate, 1e-6), bytes_per_s=rate)
    print(f"messages: {link.latency_s * 1e6:.0f} us and {rate / 1e9:.2f} GB/s", flush=True)
    rows = []
    for micro_batches in MICRO_BATCHES:
        plans = plans_of(found, link, micro_batches)
        parts = launch(seconds_of_steps, plans["1f1b"], (plans,))
        steps = {name: [max(each) for each in zip(*(part[name] for part in parts), strict=True)] for name in plans}
        for name, plan in plans.items():
            gain = median(base / own for base, own in zip(steps["1f1b"], steps[name], strict=True)) - 1
            predicted = of_step(plans["1f1b"]) / of_step(plan) - 1
            rows.append({"M": micro_batches, "schedule": name, "predicted": predicted, "gain": gain})
            print(
                f"| {micro_batches} | {name} | {of_step(plan) * 1e3:.1f} ms | {median(steps[name]) * 1e3:.1f} ms "
                f"| {predicted:+.1%} | {gain:+.1%} |",
                flush=True,
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
