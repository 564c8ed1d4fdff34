"""How much faster than 1F1B other schedules are, measured against predicted, with torch's own schedules beside them.

    OMP_NUM_THREADS=1 python -m pytest -m benchmark tests/benchmarks/test_schedule_gains.py -s

Two CPU workers with one thread each; M = 4 and 8; each schedule with the cuts that the planner finds for it. It and
1F1B train the same model in the same two processes and take turns of a few steps, since the speed of a machine drifts;
of more pipelines in one process each finds its memory in pieces and in no cache. Ratios of neighbouring turns count,
their median over turns and rounds; turns beside which others computed do not. Each round has
a profile of its own. The optimizer is left out on both sides. Torch's schedules run the same layers at the cuts of our
interleaved plan; where they do not run, or their gradients are not those of the plain model, the table says so.
"""

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import pandas
import pytest
import torch
import torch.distributed as dist
from gpt import next_token_loss
from task import BATCH_SIZE, CONFIG, make_model
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.utils import _pytree as pytree

from executor import Pipeline, launch
from planner import ExecutionError, Plan, plan_from_profile
from planner.plan.schedules import ScheduleName
from profiler import LayerSequence, profile, trace
from profiler.machine.allocator import keep_freed_memory
from profiler.machine.local import local_devices
from profiler.run.loss import loss_of
from profiler.tracing.sample import call_arguments, tensor_leaves
from tests.benchmarks.others_load import OthersLoad
from tests.benchmarks.stage_models import MODELS, Model
from tests.benchmarks.test_executor_speed import turn
from tests.benchmarks.torch_stages import torch_step

K = 2
MICRO_BATCHES = (4, 8)
OURS: Mapping[str, tuple[ScheduleName, int]] = {  # name -> schedule and chunks a rank
    "1f1b": ("1f1b", 1),
    "interleaved": ("interleaved", 2),
    "interleaved-lean": ("interleaved-lean", 2),
    "zb-h1": ("zb-h1", 1),
    "zb": ("zb", 1),
    "zb-v": ("zb-v", 2),
}
TORCH = {"torch interleaved": ScheduleInterleaved1F1B, "torch zero bubble": ScheduleInterleavedZeroBubble}
ROUNDS = int(os.environ.get("ROUNDS", "3"))
TURNS = int(os.environ.get("TURNS", "5"))
SECONDS_PER_TURN = 0.8
WORTH = 0.04  # a gain below is not held against its prediction
SHARE = 0.8
ALONE = 0.06  # cores that others may have used in a turn that counts; two ticks of the kernel's clock are 0.025
FEWEST = 3  # turns that count
RIGHT = 1e-5  # of a gradient's largest element
Key = tuple[str, int]  # name of the schedule, and M


@dataclass(frozen=True)
class Found:
    """What a rank has measured: by schedule and M the seconds of a step in each turn and the cores that others used
    meanwhile, and by parameter how far its gradient is off."""

    seconds: dict[Key, list[float]]
    others: dict[Key, list[float]]
    off: dict[Key, dict[str, float]]


def subject(name: str) -> tuple[Model, int]:
    """The model without dropout, whose numbers torch's schedules draw in another order, and its batch size."""
    torch.manual_seed(0)
    if name == "demo's GPT":
        ids = torch.randint(256, (BATCH_SIZE, CONFIG.context), generator=torch.Generator().manual_seed(0))
        made = Model(make_model(), ids, next_token_loss, ids)
    else:
        made = MODELS[name]()
    for module in made.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    return made, len(pytree.tree_leaves(made.sample)[0])


def contenders(model: Model, sequence: LayerSequence, plans: Mapping[Key, Plan]) -> dict[Key, Callable[[], object]]:
    """A step of each; torch's schedules at the cuts of the plan."""
    args, kwargs = call_arguments(model.sample)
    inputs = dict(zip(sequence.inputs, tensor_leaves(model.sample, sequence.sample), strict=True))
    steps: dict[Key, Callable[[], object]] = {}
    for key, plan in plans.items():
        if key[0] in TORCH:
            steps[key] = torch_step(TORCH[key[0]], sequence, plan, inputs, model.target, model.loss_fn)
            continue
        pipe = Pipeline(model.model, plan, loss_fn=model.loss_fn, compare_first_step=False)
        steps[key] = lambda pipe=pipe: pipe.step(*args, target=model.target, **kwargs)  # type: ignore[misc]
    return steps


def worker(_: Plan, name: str, plans: Mapping[Key, Plan]) -> Found:
    """The contenders in turns, in each of the processes."""
    keep_freed_memory()
    torch.set_num_threads(1)
    model, _size = subject(name)
    sequence = trace(model.model, model.sample)
    steps = contenders(model, sequence, plans)
    expected = {count: plain_gradients(model, count) for _, count in plans}
    off = {}
    for key, step in steps.items():
        model.model.zero_grad()
        step()
        off[key] = differences(model, expected[key[1]])
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    others: dict[Key, list[float]] = {key: [] for key in steps}
    for _turn in range(TURNS):
        for key, step in steps.items():
            dist.barrier()
            model.model.zero_grad()
            with OthersLoad() as load:
                begun_s = time.process_time()
                seconds[key].append(turn(step, SECONDS_PER_TURN))
                own_s = torch.tensor(time.process_time() - begun_s, dtype=torch.float64)
            dist.all_reduce(own_s)
            others[key].append(load.cores(own_s.item()))
    return Found(seconds, others, off)


def plain_gradients(model: Model, micro_batches: int) -> dict[str, Tensor]:
    """Of the model as it is, micro-batch by micro-batch."""
    model.model.zero_grad()
    size = len(pytree.tree_leaves(model.sample)[0])
    for part in torch.arange(size).tensor_split(micro_batches):
        rows = partial(torch.index_select, dim=0, index=part)
        sample, target = pytree.tree_map_only(Tensor, rows, (model.sample, model.target))
        args, kwargs = call_arguments(sample)
        (loss_of(model.model(*args, **kwargs), target, model.loss_fn) * (len(part) / size)).backward()
    return {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}


def differences(model: Model, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Of the gradients of this process, relative to the largest element of the expected one."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    found = {}
    for name, parameter in model.model.named_parameters():
        if parameter.grad is not None:
            scale = max(float(expected[name].abs().max()), 1e-4 * largest)
            found[name] = float((parameter.grad - expected[name]).abs().max()) / scale
    return found


def measured_once(name: str) -> Iterator[dict[str, Any]]:
    """A row for each schedule and M, of one profile."""
    model, batch_size = subject(name)
    cluster = local_devices(["cpu"] * K)
    sequence = trace(model.model, model.sample)
    begun_s = all_processes_s()
    with OthersLoad() as load:
        found = profile(
            sequence, cluster, sample=model.sample, batch_size=batch_size, loss_fn=model.loss_fn, target=model.target,
            cache=False, progress=False,
        )  # fmt: skip
    print(f"\nothers used {load.cores(all_processes_s() - begun_s):.2f} cores during the profile", flush=True)
    plans = {
        (kind, count): plan_from_profile(
            found, cluster, batch_size=batch_size, stages=K * chunks, chunks=chunks, schedule=schedule,
            micro_batches=count, micro_batches_per_stage=1,
        )
        for kind, (schedule, chunks) in OURS.items()
        for count in MICRO_BATCHES
    }  # fmt: skip
    torchs = {(kind, count): plans["interleaved", count] for kind in TORCH for count in MICRO_BATCHES}
    for key, plan in {**plans, **torchs}.items():
        first = "1f1b", key[1]
        if key == first:
            continue
        row: dict[str, Any] = {"model": name, "M": key[1], "schedule": key[0], "says": "", "wrong": ""}
        if key in plans:
            row |= {"predicted": of_step(plans[first]) / of_step(plan), "predicted_s": of_step(plan)}
        try:
            parts: list[Found] = launch(worker, plans[first], (name, {first: plans[first], key: plan}))
        except ExecutionError as problem:
            if key in plans:
                raise
            yield row | {"says": " ".join(str(problem).split())[:200]}
            continue
        yield row | measured_by(parts, first, key)


def measured_by(parts: list[Found], first: Key, key: Key) -> dict[str, Any]:
    """What the processes found, of the turns beside which nobody else computed."""
    before, after = (step_seconds(parts, one) for one in (first, key))
    busy = [max(turns) for turns in zip(*(part.others[one] for part in parts for one in (first, key)), strict=True)]
    kept = [pair for *pair, cores in zip(before, after, busy, strict=True) if cores <= ALONE]
    nothing = float("nan")
    return {
        "1f1b_s": median(base_s for base_s, _ in kept) if kept else nothing,
        "seconds": median(own_s for _, own_s in kept) if kept else nothing,
        "gain": median(base_s / own_s for base_s, own_s in kept) if kept else nothing,
        "turns": len(kept),
        "off": max(by for part in parts for by in part.off[key].values()),
        "wrong": ", ".join(sorted({name for part in parts for name, by in part.off[key].items() if by > RIGHT})),
    }


def all_processes_s() -> float:
    """Processor seconds of this process and of those of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def step_seconds(parts: list[Found], key: Key) -> list[float]:
    """Of each turn, those of the slowest process."""
    return [max(turns) for turns in zip(*(part.seconds[key] for part in parts), strict=True)]


def of_step(plan: Plan) -> float:
    """Predicted seconds of a step without the optimizer."""
    return plan.prediction.step_s - plan.prediction.optimizer_s


@pytest.mark.benchmark
@pytest.mark.parametrize("name", ["demo's GPT", "T5", "DenseNet", "U-Net"])
def test_gains_over_1f1b_are_as_predicted(name: str) -> None:
    frame = pandas.DataFrame([row for _ in range(ROUNDS) for row in measured_once(name)])
    by = frame.groupby(["model", "M", "schedule"], sort=False)
    table = by[["1f1b_s", "seconds", "predicted_s", "gain", "predicted", "off"]].median().join(by["turns"].sum())
    with pandas.option_context("display.width", 200):
        print(f"\n{table.to_string(float_format='{:.4g}'.format)}", flush=True)
    for said in sorted(set(frame["says"]) - {""}):
        print(f"does not run: {said}", flush=True)
    ran = frame[frame["off"].notna()]
    for kind, names in sorted(set(zip(ran["schedule"], ran["wrong"], strict=True))):
        print(f"{kind}: wrong gradients of {names}" if names else f"{kind}: every gradient is right", flush=True)
    assert (table.drop(index=list(TORCH), level="schedule")["off"] <= RIGHT).all()
    worth = table[table["predicted"] >= 1 + WORTH]
    assert (worth["turns"] >= FEWEST).all(), "others computed on this machine meanwhile"
    assert (worth["gain"] - 1 >= SHARE * (worth["predicted"] - 1)).all()
