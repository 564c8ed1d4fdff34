"""The peak memory of each rank against the plan's prediction.

    pytest tests/benchmarks/test_peak_memory.py -m benchmark -s

A GPT whose activations outweigh its parameters, planned by a real profile, trained by two processes under every
schedule, with chunks, with and without recompute; and a U-Net in four, its long skips relayed and sent past the stages
between. Tensors' bytes at the worst moment of a step, and the slots that messages to other ranks lie in; the state of
the optimizer left out on both sides.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas
import pytest
import torch
from gpt import GPT, Config, next_token_loss
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import Plan, plan_from_profile
from profiler import Profile, profile, trace
from profiler.machine.local import local_devices
from profiler.run.loss import LossFunction
from tests.models.unet import UNet

CONFIG = Config(context=128, width=192, heads=4, blocks=6)
BATCH_SIZE, M = 16, 8
WITHIN = 0.05
OVER = 0.01  # measured: GPipe's last rank 0.5 % over, before slots were counted for what they are
AT_LEAST_IN_BFLOAT16 = 0.9
AT_LEAST_RECOMPUTED = 0.88  # in a V


@dataclass(frozen=True)
class Task:
    """A model and a mini-batch."""

    model: nn.Module
    x: Tensor
    target: Tensor
    loss_fn: LossFunction

    def profiled(self, devices: int, precision: str | None = None) -> Profile:
        cluster = local_devices(["cpu"] * devices)
        sequence = trace(self.model, self.x, precision=precision)
        return profile(
            sequence, cluster, sample=self.x, batch_size=BATCH_SIZE, loss_fn=self.loss_fn, target=self.target
        )


def gpt() -> Task:
    torch.manual_seed(0)
    ids = torch.randint(256, (BATCH_SIZE, CONFIG.context), generator=torch.Generator().manual_seed(0))
    return Task(GPT(CONFIG), ids, ids, next_token_loss)


def unet() -> Task:
    torch.manual_seed(0)
    images = torch.randn(BATCH_SIZE, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return Task(UNet(depth=3, channels=16), images, images[:, 0].gt(0).long(), functional.cross_entropy)


def peaks(plan: Plan, task: Task) -> pandas.DataFrame:
    pipe = Pipeline(task.model, plan, loss_fn=task.loss_fn)
    pipe.step(task.x, target=task.target)
    with pipe.watch_memory():
        pipe.step(task.x, target=task.target)
    frame = pipe.measured()
    return frame[frame["what"] == "peak_bytes"]


def table_of(task: Task, found: Profile, stages: int, chosen: list[dict[str, Any]]) -> pandas.DataFrame:
    frames = []
    cluster = local_devices(["cpu"] * stages)
    for settings in chosen:
        plan = plan_from_profile(
            found, cluster, batch_size=BATCH_SIZE, optimizer="AdamW", stages=stages * settings.get("chunks", 1),
            micro_batches=M, micro_batches_per_stage=1, **settings
        )  # fmt: skip
        frames.append(launch(peaks, plan, (task,))[0].assign(**settings))
    table = pandas.concat(frames).set_index([*chosen[0], "stage"])[["predicted", "measured", "ratio"]]
    print(f"\npeak bytes of each rank, K = {stages}, M = {M}\n{table.to_string(float_format='{:.3f}'.format)}")
    return table


@pytest.mark.benchmark
def test_each_rank_peaks_where_the_plan_says() -> None:
    """With whole and with split backward passes, and in an order of its own."""
    task = gpt()
    schedules = ("gpipe", "1f1b", "zb-h1", "zb")
    chosen = [{"schedule": s, "recompute": r} for s, r in product(schedules, ("never", "always"))]
    table = table_of(task, task.profiled(2), 2, chosen)
    assert (table["ratio"] <= 1 + OVER).all()
    assert (table["ratio"] >= 1 - WITHIN).all()


@pytest.mark.benchmark
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-grads"])
def test_main_gradients_and_cast_parameters_peak_where_the_plan_says(precision: str) -> None:
    """Master weights are the optimizer's, and left out with its state.

    What is predicted too high is mostly room for short messages, which seldom wait all at once.
    """
    task = gpt()
    chosen = [{"schedule": s, "recompute": r} for s, r in product(("gpipe", "1f1b"), ("never", "always"))]
    table = table_of(task, task.profiled(2, precision), 2, chosen)
    assert (table["ratio"] <= 1).all()
    assert (table["ratio"] >= AT_LEAST_IN_BFLOAT16).all()


@pytest.mark.benchmark
def test_ranks_with_chunks_never_peak_above_the_plan() -> None:
    """Nor far below it, where recompute leaves little but messages at each of its boundaries."""
    task = gpt()
    ways = (("interleaved", 2), ("interleaved", 3), ("interleaved-lean", 2))
    chosen = [
        {"schedule": schedule, "chunks": chunks, "recompute": again}
        for (schedule, chunks), again in product(ways, ("never", "always"))
    ]
    table = table_of(task, task.profiled(2), 2, chosen)
    assert (table["ratio"] <= 1).all()
    assert (table["ratio"] >= 1 - WITHIN).all()


@pytest.mark.benchmark
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_chunks_in_a_v_peak_where_the_plan_says(ranks: int) -> None:
    """Nothing is under way at the turn; both chunks have micro-batches that wait for the gradients of parameters.

    A forward pass that keeps nothing, since its chunk is recomputed, counts as its backward pass: up to 11 % too much
    where it comes when most of them wait.
    """
    task = gpt()
    chosen = [{"schedule": "zb-v", "chunks": 2, "recompute": again} for again in ("never", "always")]
    ratio = table_of(task, task.profiled(ranks), ranks, chosen)["ratio"]
    assert (ratio <= 1).all()
    assert (ratio.xs("never", level="recompute") >= 1 - WITHIN).all()
    assert (ratio >= AT_LEAST_RECOMPUTED).all()


@pytest.mark.benchmark
def test_stages_hold_nothing_of_what_goes_past_them() -> None:
    task = unet()
    chosen = [{"schedule": s, "skips": how} for s, how in product(("gpipe", "1f1b"), ("relayed", "direct"))]
    table = table_of(task, task.profiled(4), 4, chosen)
    assert (table["measured"] <= table["predicted"]).all()
    rows = table.reset_index()
    inner = rows[rows["stage"].isin([1, 2])].groupby(["schedule", "skips"])["measured"].sum().unstack("skips")
    shares = inner["direct"] / inner["relayed"]
    print(f"what stages 1 and 2 hold, of what they hold with skips relayed\n{shares.to_string()}")
    assert (shares < 1).all()
