"""What the checks of conditions on values cost in a step: `make bench`."""

import time
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from profiler import trace
from tests.executor.conftest import _plan as plan_for

BLOCKS, M, TURNS, STEPS = 32, 8, 9, 10
MICROSECONDS_AT_MOST = 60  # of a processor, for `.any()` of a small tensor, and its comparison


class Block(nn.Module):
    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.linear, self.asks = nn.Linear(64, 64), asks

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and (x > 1e9).any():
            raise ValueError("too large")
        return torch.tanh(self.linear(x))


def step_seconds(pipe: Pipeline, x: Tensor, target: Tensor) -> float:
    """Of the processor, for one step."""
    start = time.process_time()
    for _ in range(STEPS):
        pipe.step(x, target=target)
    return (time.process_time() - start) / STEPS


@pytest.mark.benchmark
def test_the_cost_of_a_check() -> None:
    x, target = torch.randn(64, 64), torch.randn(64, 64)
    pipes = {}
    for asks in (False, True):
        model = nn.Sequential(*(Block(asks=asks) for _ in range(BLOCKS)))
        sequence = trace(model, x)
        assert len(sequence.sample.decisions) == (BLOCKS if asks else 0)
        pipes[asks] = Pipeline(model, plan_for(sequence, batch_size=64, micro_batches=M), loss_fn=functional.mse_loss)
        step_seconds(pipes[asks], x, target)
    turns = [{asks: step_seconds(pipe, x, target) for asks, pipe in pipes.items()} for _ in range(TURNS)]
    without, with_checks = (median(turn[asks] for turn in turns) for asks in (False, True))
    each_us = median(turn[True] - turn[False] for turn in turns) / (BLOCKS * M) * 1e6
    print(
        f"\nstep {without * 1e3:.2f} ms, with {BLOCKS} checks in each of {M} micro-batches {with_checks * 1e3:.2f} ms:"
    )
    print(f"{each_us:.1f} us each")
    assert each_us < MICROSECONDS_AT_MOST
