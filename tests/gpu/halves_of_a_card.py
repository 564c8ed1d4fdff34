"""Two ranks with half of a card's multiprocessors each: gains of schedules over 1F1B, measured against predicted.

Run by `test_gains_on_a_card.py`, with CUDA's multi-process service and half of the multiprocessors for each process.

    python -m tests.gpu.halves_of_a_card "U-Net"
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from gpt import GPT, Config, next_token_loss

from executor import Pipeline, launch
from planner import Plan, plan_from_profile
from planner.plan.schedules import ScheduleName
from profiler import Cluster, Link, Profile, profile, trace
from profiler.tracing.sample import call_arguments
from tests.benchmarks.stage_models import Model
from tests.coverage.model_list import hugging_face
from tests.executor.conftest import _plan as plan_for
from tests.gpu.on_a_card import NAME, card, densenet, on_card, unet

SCHEDULES: Mapping[str, tuple[ScheduleName, int]] = {  # with chunks a rank
    "1f1b": ("1f1b", 1),
    "interleaved": ("interleaved", 2),
    "interleaved-lean": ("interleaved-lean", 2),
    "zb-h1": ("zb-h1", 1),
    "zb": ("zb", 1),
    "zb-v": ("zb-v", 2),
}
MICRO_BATCHES = (4, 8)
WORTH = 0.04  # gains predicted to be smaller do not count
TURNS, STEPS_A_TURN = 4, 2
PROBES = (2**16, 2**23)  # bytes
ROUNDS, ROUND_TRIPS = 12, 4


def _gpt(batch: int) -> Model:
    ids = torch.randint(256, (batch, 512))
    return Model(GPT(Config(256, 512, 1024, 16, 8)), ids, next_token_loss, ids)


def _t5(batch: int) -> Model:
    ids, labels = (torch.randint(3, 1000, (batch, length)) for length in (384, 256))
    sample = {"input_ids": ids, "labels": labels, "use_cache": False}
    case = hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        sample,
        vocab_size=1000,
        d_model=512,
        d_kv=64,
        d_ff=2048,
        num_layers=6,
        num_heads=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return Model(case.model.train(), case.sample)


@dataclass(frozen=True)
class Subject:
    """A model without dropout, whose passes take several times as long as its messages.

    Attributes:
        make: the model with a batch of that many samples.
        size: samples of a micro-batch.
    """

    make: Callable[[int], Model]
    size: int

    def of(self, micro_batches: int) -> Model:
        torch.manual_seed(0)
        return self.make(self.size * micro_batches)


SUBJECTS: Mapping[str, Subject] = {
    "GPT": Subject(_gpt, 4),
    "U-Net": Subject(unet, 8),
    "DenseNet": Subject(densenet, 16),
    "T5": Subject(_t5, 16),
}


def on_a_host_of_its_own() -> None:
    """To NCCL, which refuses two ranks of a host on one card."""
    os.environ["NCCL_HOSTID"] = f"host-{dist.get_rank()}"
    torch.cuda.set_device(torch.device(NAME))


def observed(_: Plan, name: str) -> tuple[list[float], Profile]:
    """Seconds of messages, and a profile of half of the card beside the other half's, with which it shares memory."""
    on_a_host_of_its_own()
    messages = seconds_of_messages()
    return messages, profiled(SUBJECTS[name])


def seconds_of_messages() -> list[float]:
    """One way, of each of `PROBES`."""
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


def seconds_of_steps(_: Plan, name: str, plans: Mapping[int, Mapping[str, Plan]]) -> dict[int, dict[str, list[float]]]:
    """Of each plan by M and schedule, in turns."""
    on_a_host_of_its_own()
    found = {}
    for micro_batches, schedules in plans.items():
        model = SUBJECTS[name].of(micro_batches)
        pipes = {
            schedule: Pipeline(model.model, plan, loss_fn=model.loss_fn, compare_first_step=False, replan=None)
            for schedule, plan in schedules.items()
        }
        found[micro_batches] = in_turns(model, pipes)
        for schedule, pipe in pipes.items():
            frame = pipe.measured()
            if not dist.get_rank():
                print(f"{schedule}\n{frame.to_string(float_format='{:.5f}'.format)}", flush=True)
    return found


def in_turns(model: Model, pipes: Mapping[str, Pipeline]) -> dict[str, list[float]]:
    """Seconds of a step of each."""
    args, kwargs = call_arguments(model.sample)
    found: dict[str, list[float]] = {name: [] for name in pipes}
    for turn in range(1 + TURNS):
        for name, pipe in pipes.items():
            pipe.step(*args, target=model.target, **kwargs)
            torch.cuda.synchronize()
            dist.barrier()
            begun_s = time.perf_counter()
            for _step in range(STEPS_A_TURN):
                pipe.step(*args, target=model.target, **kwargs)
            torch.cuda.synchronize()
            if turn:
                found[name].append((time.perf_counter() - begun_s) / STEPS_A_TURN)
    return found


def plans_of(found: Profile, link: Link, size: int, micro_batches: int) -> dict[str, Plan]:
    """With the best cuts for each schedule."""
    devices = Cluster(devices=(card(0.45),) * 2, link=link)
    return {
        name: plan_from_profile(
            found, devices, batch_size=size * micro_batches, stages=2 * chunks, chunks=chunks, schedule=schedule,
            micro_batches=micro_batches, micro_batches_per_stage=1, recompute="never", time_limit_s=2.0,
        )
        for name, (schedule, chunks) in SCHEDULES.items()
    }  # fmt: skip


def profiled(subject: Subject) -> Profile:
    """Of this process's half of the card."""
    model = subject.of(max(MICRO_BATCHES))
    return profile(
        trace(model.model, model.sample), [card(0.45)], sample=model.sample, loss_fn=model.loss_fn, target=model.target,
        micro_batch_sizes=[subject.size], time_budget_s=5.0, progress=False, cache=False,
    )  # fmt: skip


def link_of(messages: Sequence[float]) -> Link:
    """As messages of two ranks take."""
    small_s, large_s = messages
    rate = (PROBES[1] - PROBES[0]) / (large_s - small_s)
    link = Link(latency_s=max(small_s - PROBES[0] / rate, 1e-6), bytes_per_s=rate)
    print(f"messages: {link.latency_s * 1e6:.0f} us and {rate / 1e9:.2f} GB/s", flush=True)
    return link


def two_stages(subject: Subject) -> Plan:
    """Any, for ranks to begin with."""
    model = subject.of(MICRO_BATCHES[0])
    sequence = trace(model.model, model.sample)
    cuts = [len(sequence) // 2]
    return on_card(plan_for(sequence, cuts, batch_size=subject.size * MICRO_BATCHES[0], micro_batches=MICRO_BATCHES[0]))


def of_step(plan: Plan) -> float:
    """Predicted seconds without the optimizer's."""
    return plan.prediction.step_s - plan.prediction.optimizer_s


def main(names: Sequence[str]) -> None:
    """Print a row for each model, schedule and M, and all as JSON in the last line."""
    rows = []
    for name in names:
        subject = SUBJECTS[name]
        begun_s = time.perf_counter()
        messages, found = launch(observed, two_stages(subject), (name,), timeout_s=60.0)[0]
        link = link_of(messages)
        profiled_s = time.perf_counter() - begun_s
        plans = {micro_batches: plans_of(found, link, subject.size, micro_batches) for micro_batches in MICRO_BATCHES}
        planned_s = time.perf_counter() - begun_s
        parts = launch(seconds_of_steps, plans[MICRO_BATCHES[0]]["1f1b"], (name, plans))
        took_s = time.perf_counter() - begun_s
        print(f"{name}: profiled after {profiled_s:.0f} s, planned after {planned_s:.0f}, run after {took_s:.0f}")
        for micro_batches, schedules in plans.items():
            steps = {
                schedule: [max(pair) for pair in zip(*(part[micro_batches][schedule] for part in parts), strict=True)]
                for schedule in schedules
            }
            for schedule, plan in schedules.items():
                gain = median(base / own for base, own in zip(steps["1f1b"], steps[schedule], strict=True)) - 1
                predicted = of_step(schedules["1f1b"]) / of_step(plan) - 1
                share = f"{gain / predicted:.0%}" if predicted >= WORTH else "-"
                rows.append(
                    {"model": name, "M": micro_batches, "schedule": schedule, "predicted": predicted, "gain": gain}
                )
                print(
                    f"| {name} | {micro_batches} | {schedule} | {of_step(plan) * 1e3:.1f} ms "
                    f"| {median(steps[schedule]) * 1e3:.1f} ms | {predicted:+.1%} | {gain:+.1%} | {share} |",
                    flush=True,
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:] or list(SUBJECTS))
