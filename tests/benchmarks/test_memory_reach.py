"""What is the largest model that trains in 1 GiB a worker? GPipe's table 1 in spirit, enforced by the system.

    OMP_NUM_THREADS=1 python -m pytest -m benchmark -o faulthandler_timeout=0 tests/benchmarks/test_memory_reach.py -s

Each process is in a control group of its own that may hold 1 GiB, the interpreter and torch included; one that takes
more is killed (for that the groups of Linux must be writable: run it as root, or it is skipped). A model trains if 3
steps with AdamW pass: as plain PyTorch, with K = 1, where only recompute and micro-batches help, and with K = 2 and 4,
each planned by `autoplan` from the model on meta tensors, for devices of the memory that a worker of 1 GiB is taken to
have. Sizes grow until there is no plan. The table is in memory_reach.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from gpt import GPT, Config, next_token_loss
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import InfeasibleError, Plan, PlanError, autoplan
from profiler.machine.cpu import for_tensors
from profiler.run.loss import LossFunction
from tests.benchmarks.kept_rows import kept
from tests.models.amoebanet import AmoebaNet

REPOSITORY = Path(__file__).parents[2]
GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 2**30
STEPS = 3
STAGES = (1, 2, 4)
PLAIN = "plain PyTorch"
MODELS = os.environ.get("MODELS", "GPT,AmoebaNet-D").split(",")
FOR_TENSORS_BYTES = for_tensors(LIMIT_BYTES, common_bytes=0)
"""What a device of so much memory is taken to have; what workers have in common is not charged to them here."""
FINENESS = 1.1
"""Sizes that differ by less are not told apart."""


def model_of(name: str, size: int) -> nn.Module:
    """A GPT of so many blocks, or an AmoebaNet-D of three times so many normal cells."""
    if name == "GPT":
        return GPT(Config(vocabulary=256, context=64, width=384, heads=6, blocks=size, dropout=0.0))
    return AmoebaNet(3 * size, 128, 10)


def data_of(name: str) -> tuple[Tensor, Tensor, LossFunction]:
    """A mini-batch and the loss."""
    torch.manual_seed(0)
    if name == "GPT":
        ids = torch.randint(256, (32, 64))
        return ids, ids, next_token_loss
    return torch.randn(32, 3, 64, 64), torch.randint(10, (32,)), functional.cross_entropy


def parameters_of(name: str, size: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_of(name, size).parameters())


def limited() -> Path:
    """This process may hold `LIMIT_BYTES` from now on; the group that says so."""
    torch.set_num_threads(1)
    group = GROUPS / f"reach-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    return group


def resident_bytes(group: Path | None = None) -> int:
    """Of this process; with a group, the most that was charged to it, which what it shares with its parent is not."""
    if group is not None:
        return int((group / "memory.max_usage_in_bytes").read_text())
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def train_plain(name: str, size: int) -> None:
    """Some steps without a pipeline; run in a process of its own."""
    limited()
    model = model_of(name, size)
    x, y, loss_fn = data_of(name)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def train(plan: Plan, name: str, size: int) -> tuple[float, int]:
    """Some steps of a worker: the last loss, and the most bytes that it held."""
    group = limited()
    with torch.device("meta"):
        model = model_of(name, size)
    x, y, loss_fn = data_of(name)
    pipe = Pipeline(model, plan, loss_fn=loss_fn, compare_first_step=False, replan=None)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = pipe.step(x, target=y)
        optimizer.step()
    return float(loss), resident_bytes(group)


def plan_of(name: str, size: int, stages: int) -> Plan:
    x, y, loss_fn = data_of(name)
    with torch.device("meta"):
        model = model_of(name, size)
    return autoplan(
        model, x, ["cpu"] * stages, batch_size=len(x), loss_fn=loss_fn, target=y, stages=stages,
        memory_limit=FOR_TENSORS_BYTES, time_budget_s=2.0, progress=False,
    )  # fmt: skip


def trains_plain(name: str, size: int) -> bool:
    program = f"from tests.benchmarks.test_memory_reach import train_plain; train_plain({name!r}, {size})"
    path = f"{REPOSITORY}:{REPOSITORY}/notebooks/demo"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return not done.returncode


def fits(name: str, size: int, stages: int) -> bool:
    try:
        plan_of(name, size, stages)
    except InfeasibleError:
        return False
    return True


def largest(possible: Callable[[int], bool], low: int = 0) -> int:
    """The largest size that is possible, to `FINENESS`; `low` is."""
    high = max(8, 2 * low)
    while possible(high):
        low, high = high, 2 * high
    while high - low > 1 and high > FINENESS * low:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def reach(name: str, stages: int, fewer: int) -> dict[str, Any]:
    """The row of a model and a number of workers; no stages: plain PyTorch. With fewer workers size `fewer` trains."""
    if not stages:
        size = largest(lambda one: kept(f"plain {name} {one}", partial(trains_plain, name, one)))
        return {"model": name, "with": PLAIN, "size": size, "parameters": parameters_of(name, size)}
    planned = largest(lambda one: kept(f"fits {name} {stages} {one}", partial(fits, name, one, stages)), low=fewer)
    size, said = planned, []
    while size > 0:
        plan = plan_of(name, size, stages)
        try:
            ranks = launch(train, plan, (name, size), timeout_s=240)
            break
        except PlanError as problem:
            said.append(f"{size}: {str(problem)[:200]}")
            size = min(size - 1, int(size * 0.95))
    return {
        "model": name, "with": f"K = {stages}", "size": size, "parameters": parameters_of(name, size),
        "planned": planned, "failed": said, "plan": f"{plan.schedule}, M = {plan.M}",
        "held, MiB": [round(bytes_ / 2**20) for _, bytes_ in ranks], "loss": ranks[-1][0],
    }  # fmt: skip


@pytest.mark.benchmark
@pytest.mark.skipif(not os.access(GROUPS, os.W_OK), reason="needs control groups that may be written")
def test_more_workers_train_larger_models() -> None:
    rows = []
    for name in MODELS:
        fewer = 0
        for stages in (0, *STAGES):
            rows.append(kept(f"reach {name} {stages}", partial(reach, name, stages, fewer)))
            fewer = rows[-1]["size"]
            print(rows[-1], flush=True)
    frame = pandas.DataFrame(rows)
    frame["times plain"] = frame["parameters"] / frame.groupby("model")["parameters"].transform("first")
    with pandas.option_context("display.width", 250, "display.max_columns", 30):
        print(f"\n{frame.to_string(index=False, float_format='{:.3g}'.format)}")
    for group in GROUPS.glob("reach-*"):
        group.rmdir()  # whose process is gone
    for _, of_model in frame.groupby("model"):
        assert of_model["parameters"].is_monotonic_increasing
    assert (frame["planned"].dropna() == frame.loc[frame["planned"].notna(), "size"]).all(), "what is planned trains"
