"""Ranks that make different calls are told at once what each of them does, before they wait for what never comes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.checkpoint import save_checkpoint
from executor.watch.agreement import CALL, Agreement
from planner import Plan
from profiler import ArgumentError, trace

X, Y = torch.ones(6, 4), torch.zeros(6, 4)
SAVE, BATCHES, STEP = ({CALL: name} for name in ("save_checkpoint", "batches", "step"))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def leaving_out(plan: Plan, odd: int, folder: Path) -> None:
    """One rank leaves out a checkpoint, and goes on to its next batch."""
    pipe = Pipeline(made(), plan, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for number, (x, y) in enumerate(pipe.batches([(X, Y)] * 4)):
        pipe.step(x, target=y)
        optimizer.step()
        if number != 2 or pipe.rank != odd:
            save_checkpoint(folder, pipe, optimizer)


@pytest.mark.parametrize("odd", [0, 2])
def test_a_checkpoint_that_one_of_three_leaves_out(odd: int, plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """They stood for ten minutes, until the library that carries messages gave up, and another rank was blamed."""
    plan = plan_for(trace(made(), X), [1, 2], batch_size=6, micro_batches=2)
    does = ["save_checkpoint"] * 3
    does[odd] = "batches"
    other = odd or 1
    said = (
        f"the ranks differ in the call: rank 0 has {does[0]}, rank {other} has {does[other]}; give every rank the same"
    )
    with pytest.raises(ArgumentError, match=said):
        launch(leaving_out, plan, (odd, tmp_path))


def clipping(plan: Plan) -> Tensor:
    pipe = Pipeline(made(), plan, loss_fn=functional.mse_loss)
    pipe.step(X, target=Y)
    return pipe.clip_grad_norm_(1.0 + pipe.rank)


def test_gradients_are_clipped_alike(plan_for: Callable[..., Plan]) -> None:
    """Each rank clipped by its own norm, without a word."""
    plan = plan_for(trace(made(), X), [1], batch_size=6, micro_batches=2)
    with pytest.raises(ArgumentError, match="the ranks differ in max_norm: rank 0 has 1, rank 1 has 2"):
        launch(clipping, plan)


def test_calls_that_are_settled_are_said_when_asked_for() -> None:
    ranks = [Agreement(rank, 3) for rank in range(3)]
    for agreement in ranks:
        agreement.enter(1, STEP)
        assert not agreement.enter(2, BATCHES, settled=True)
        assert agreement.to_say(2) is None, "in a loop of equal steps nothing is said"
    assert not ranks[0].enter(3, BATCHES, settled=True)
    for agreement in ranks[1:]:
        agreement.enter(3, SAVE)
        assert agreement.to_say(3) == SAVE
    assert not ranks[0].enter(4, STEP), "it has gone on to the next call"
    assert ranks[0].hear(1, 3, SAVE), "and says what it did"
    assert ranks[0].to_say(3) == BATCHES
    ranks[0].hear(2, 3, SAVE)
    cause = ranks[0].difference(3)
    assert cause is not None
    assert cause.text.startswith("the ranks differ in the call: rank 0 has batches, rank 1 has save_checkpoint")
