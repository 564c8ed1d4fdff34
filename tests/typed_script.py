"""A user's script, as strictly typed as one can be: what mypy says of it is part of `make lint`.

Lines that must not pass are marked so; mypy complains where such a line does pass.
"""

from pathlib import Path
from typing import assert_type

import pandas
import torch
from torch import Tensor, nn

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import Cluster, Plan, autoplan, plan_from_profile, what_if
from profiler import LayerSequence, Profile, profile, trace


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def train(plan: Plan, folder: Path) -> float:
    pipe = Pipeline(make_model(), plan, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for x, y in pipe.batches([(torch.ones(8, 8), torch.zeros(8, 2))]):
        loss = pipe.step(x, target=y, accumulate=1)
        assert_type(loss, Tensor)
        assert_type(pipe.clip_grad_norm_(1.0), Tensor)
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, pipe, optimizer)
    assert_type(load_checkpoint(folder, pipe, optimizer), int)
    assert_type(pipe.measured(), pandas.DataFrame)
    assert_type(plan.refined(pipe.measured(), stages=2).worth_it, bool)
    return pipe.evaluate(torch.ones(8, 8), target=torch.zeros(8, 2)).item()


def main() -> None:
    x, y = torch.ones(8, 8), torch.zeros(8, 2)
    plan = autoplan(make_model(), x, 2, loss_fn=nn.functional.mse_loss, target=y, schedule="1f1b", memory_limit=2**30)
    assert_type(plan, Plan)
    autoplan(make_model(), x, 2, schedules="1f1b")  # type: ignore[call-arg]
    autoplan(make_model(), x, 2, recompute="sometimes")  # type: ignore[arg-type]
    assert_type(launch(train, plan, [Path("checkpoints")])[0], object)  # type: ignore[assert-type]
    sequence = trace(make_model(), x)
    assert_type(sequence, LayerSequence)
    measured = profile(sequence, Cluster.of("4xA100-40GB"))
    assert_type(measured, Profile)
    again = plan_from_profile(measured, Cluster.of("4xA100-40GB"), batch_size=64, replicas="auto")
    assert_type(again.explain().sentences, tuple[str, ...])
    assert_type(what_if(measured, Cluster.of("4xA100-40GB"), {"stages": [1, 2]}, batch_size=64), pandas.DataFrame)
    assert_type(Plan.load("plan.json").compare(again), pandas.DataFrame)
