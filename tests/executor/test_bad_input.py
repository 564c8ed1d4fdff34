"""What one rank was given wrongly is the same error on every rank, before the first action."""

import os
import re
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch, pipeline
from planner import ArgumentError, Plan, PlanError
from profiler import trace
from tests.executor.conftest import shared_traces

RANKS = 3
STEPS = 100_000  # more than are made until a beat
X = torch.randn(8, 4)
Y = torch.zeros(8, 1)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


three = cache(Three)  # the model that all pipelines of a rank share, and its trace


WRONG = {
    "model": "ForeignPlanError: rank {odd} of 3 failed: the plan was made for a model with fingerprint",
    "plan": "ForeignPlanError: the ranks differ in the plan: rank 0 has",
    "seed": "ArgumentError: the ranks differ in the seed: rank 0 has",
    "fewer samples": "ArgumentError: the ranks differ in the batch: rank 0 has",
    "no samples": "ArgumentError: the ranks differ in the batch: rank 0 has",
    "dtype": "ArgumentError: the ranks differ in the batch: rank 0 has",
    "shape": "ArgumentError: the ranks differ in the batch: rank 0 has",
    "target": "ArgumentError: the ranks differ in the target: rank 0 has",
    "call": "ArgumentError: the ranks differ in the call: rank 0 has",
    "later": "ArgumentError: the ranks differ in the batch: rank 0 has",
    "samples": "ArgumentError: the ranks differ in the content of the batch: rank 0 has",
    "labels": "ArgumentError: the ranks differ in the content of the target: rank 0 has",
    "no data on rank 0": "ArgumentError: rank 0 was given no data for step; give rank 0 alone the data",
    "no inputs": "ArgumentError: rank {odd} was given a target without inputs for step; give rank 0 alone the data",
    "data on two of three": "ArgumentError: rank 1 was given a batch for step, and rank {odd} no data; give rank 0",
    "no data on rank 0 later": "ArgumentError: rank 0 was given no data for step; give rank 0 alone the data",
    "samples later": "ArgumentError: the ranks differ in the content of the batch or the target: rank {odd} was given",
    "no data later": "ArgumentError: rank {odd} was given no data for step, unlike for the calls of step before; give",
}
EMPTY = ("no data on rank 0", "no inputs", "data on two of three", "no data later", "no data on rank 0 later")


def outcome(plan: Plan, wrong: str, odd: bool) -> tuple[str, int, bool]:
    """What this rank's pipeline says, of how many micro-batches it has the loss, and whether a gradient came to be."""
    model: nn.Module = nn.Linear(4, 2) if odd and wrong == "model" else three()
    model.zero_grad()
    if odd and wrong == "plan":
        plan = plan.model_copy(update={"optimizer": "SGD"})
    given = {
        "fewer samples": X[:6],
        "no samples": X[:0],
        "dtype": X.double(),
        "shape": X[:, :3],
        "later": X[:6],
        "samples": X.flip(0),
    }
    x = given.get(wrong, X) if odd else X
    target = torch.zeros(len(x), 1)
    if odd and wrong in ("target", "labels"):
        target = Y[:5] if wrong == "target" else Y + 1
    losses = 0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal losses
        losses += 1
        return (output - target).square().mean()

    try:
        pipe = Pipeline(model, plan, loss_fn=loss_fn, seed=int(odd and wrong == "seed"))
        if "later" in wrong:
            pipe.step(X, target=Y)
            losses = 0
            model.zero_grad()
        for _ in range(STEPS if wrong == "samples later" else 0):
            pipe.step(X, target=Y + odd * torch.arange(8.0).reshape(8, 1) / 1e3)
            model.zero_grad()
        call = pipe.evaluate if odd and wrong == "call" else pipe.step
        if odd and wrong in EMPTY:
            call(target=target if wrong == "no inputs" else None)
        else:
            call(x, target=target)
    except PlanError as problem:
        error = f"{type(problem).__name__}: {problem}"
    if wrong == "samples later":  # a beat says so while they go on
        losses = 0
        model.zero_grad()
    return error, losses, any(parameter.grad is not None for parameter in model.parameters())


def outcomes(plan: Plan, port: int) -> dict[tuple[str, int], tuple[str, int, bool]]:
    """Each kind with another rank as the odd one; the ranks meet anew for each."""
    found = {}
    rank = dist.get_rank()
    pytest.MonkeyPatch().setattr(pipeline, "traced_as_planned", shared_traces())
    os.environ["MASTER_PORT"] = str(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
    for number, wrong in enumerate(WRONG):
        dist.destroy_process_group()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # as where torchrun starts processes again
        odd = number % RANKS
        found[wrong, odd] = outcome(plan, wrong, rank == odd)
    return found


def test_bad_input_of_one_rank_is_one_error_on_all_before_anything_runs(plan_for: Callable[..., Plan]) -> None:
    """Ranks told it in different words; a watching thread ended with a traceback when the group was gone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    parts = launch(outcomes, plan_for(trace(Three(), X), [1, 2], batch_size=8, micro_batches=4), (store.port,))
    for (wrong, odd), (error, losses, has_gradient) in parts[0].items():
        assert error.startswith(WRONG[wrong].format(odd=odd))
        assert not losses and not has_gradient
        for part in parts[1:]:
            assert part[wrong, odd] == (error, 0, False), (wrong, odd)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, "the model is a NoneType; pass a torch.nn.Module"),
        ({"plan": "plan.json"}, "the plan is a str; pass a Plan"),
        ({"loss_fn": 3}, "loss_fn is 3; pass a function, or leave it out"),
        ({"initialize": 3}, "initialize is 3; pass a function, or leave it out"),
        ({"check_finite": "no"}, "check_finite is 'no'; give True or False"),
        ({"compare_first_step": None}, "compare_first_step is None; give True or False"),
        ({"seed": 1.5}, "the seed is 1.5; pass a whole number"),
    ],
)
def test_what_a_pipeline_cannot_be_made_of_is_named(
    plan_for: Callable[..., Plan], given: dict[str, Any], said: str
) -> None:
    asked: dict[str, Any] = {"model": three(), "plan": plan_for(trace(three(), X[:4]), batch_size=8, micro_batches=2)}
    with pytest.raises(ArgumentError, match=re.escape(said)):
        Pipeline(**{**asked, **given})


def ends_within(plan: Plan, ending: type[BaseException]) -> None:
    """Raises in the loss function of the second step."""
    calls = count()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == plan.M:
            raise ending
        return functional.mse_loss(output[:, :1], target)

    pipe = Pipeline(three(), plan, loss_fn=loss_fn, compare_first_step=False)
    for _ in range(2):
        pipe.step(X, target=Y)


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_ends_a_program_has_a_place_too(plan_for: Callable[..., Plan], ending: type[BaseException]) -> None:
    plan = plan_for(trace(three(), X[:4]), [1], batch_size=8, micro_batches=2)
    place = rf"rank 1 of 2 failed: {ending.__name__}: ?; .*; at step 1, stage 1, micro-batch 0, action 1F0"
    with pytest.raises(PlanError, match=place):
        launch(ends_within, plan, (ending,))
