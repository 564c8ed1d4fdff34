"""Whatever happens in a worker, the caller gets results or one error, and no process is left."""

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor import Pipeline, launch
from planner import ArgumentError, ExecutionError, ForeignPlanError, Plan
from profiler import trace

X = torch.randn(8, 4)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def make_plan(plan_for: Callable[..., Plan], stages: int = 2) -> Plan:
    sequence = trace(Fragile(), X)
    return plan_for(sequence, list(range(1, stages)), batch_size=8, micro_batches=8)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def test_results_come_in_rank_order(plan_for: Callable[..., Plan]) -> None:
    def place(plan: Plan, offset: int) -> tuple[int, int, int]:  # a closure: it travels by value
        return dist.get_rank() + offset, dist.get_world_size(), torch.get_num_threads()

    assert launch(place, make_plan(plan_for), (10,)) == [(10, 2, 1), (11, 2, 1)]


def test_an_exception_in_the_loss_names_stage_micro_batch_and_cause(plan_for: Callable[..., Plan]) -> None:
    def bad_loss(output: Tensor, target: Tensor) -> Tensor:
        if target.sum() == 5:
            raise RuntimeError("the label is 5")
        return mean(output, target)

    def train(plan: Plan) -> None:
        pipe = Pipeline(Fragile(), plan, loss_fn=bad_loss)
        pipe.step(X, target=torch.arange(8.0).reshape(8, 1))

    with pytest.raises(ExecutionError, match=r"rank 1 of 2.*stage 1, micro-batch 5, action 1F5.*the label is 5"):
        launch(train, make_plan(plan_for))


def test_a_killed_worker_ends_all(plan_for: Callable[..., Plan]) -> None:
    def train(plan: Plan) -> None:
        pipe = Pipeline(Fragile(), plan, loss_fn=mean)
        for step in range(3):
            if step == 1 and pipe.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            pipe.step(X, target=torch.zeros(8, 1))

    with pytest.raises(
        ExecutionError, match=r"rank 0 of 2 failed: step 1, outside of.*: its process was killed by SIGKILL"
    ):
        launch(train, make_plan(plan_for))


def test_a_plan_for_another_number_of_processes_is_refused(plan_for: Callable[..., Plan]) -> None:
    three = make_plan(plan_for, stages=3)

    def train(plan: Plan) -> None:
        Pipeline(Fragile(), three, loss_fn=mean)

    with pytest.raises(ForeignPlanError, match="the plan has 3 stages, but 2 processes run"):
        launch(train, make_plan(plan_for))


def test_a_swapped_argument_is_refused(plan_for: Callable[..., Plan]) -> None:
    with pytest.raises(ArgumentError, match="call launch"):
        launch(make_plan(plan_for), print)  # type: ignore[arg-type]
