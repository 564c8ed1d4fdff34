"""Passes for the weights' gradients are measured as often as their length asks for."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import nn

from profiler import trace
from profiler.run.inputs import micro_batch, real_runner
from profiler.run.parameter_pool import ParameterPool
from profiler.timing.weight_passes import ENOUGH_S, ROUNDS, measured_weights

T = TypeVar("T")
CPU = torch.device("cpu")
LAPS = 5  # F, B; F, I and W


class Told:
    """A stopwatch on which the laps of each round, F, B, F, I and W, take the seconds that it is told."""

    def __init__(self, seconds: Callable[[int], list[float]]) -> None:
        self.rounds, self._laps, self._seconds = 0, 0, seconds

    def lap(self, call: Callable[[], T]) -> T:
        self._laps += 1
        return call()

    def take(self) -> list[float]:
        assert self._laps == LAPS
        self._laps, self.rounds = 0, self.rounds + 1
        return self._seconds(self.rounds - 1)

    def lost_share(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("first_s", "later_s", "rounds", "share", "more"),
    [
        (ENOUGH_S / 100, ENOUGH_S / 100, 1 + ROUNDS, 0.5, 0.0),  # the first warms up
        (ENOUGH_S / 2, ENOUGH_S, 2, 0.5, 0.0),
        (2 * ENOUGH_S, ENOUGH_S, 1, 0.25, 0.25),  # the first one counts where it is the only one
    ],
)
def test_a_layer_that_takes_long_is_split_once(
    first_s: float, later_s: float, rounds: int, share: float, more: float
) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    sequence = trace(model, x)
    runner = real_runner(
        sequence,
        ParameterPool(sequence, CPU),
        micro_batch(sequence, x, 2, CPU),
        loss_fn=None,
        target=None,
        has_loss=False,
        device=CPU,
    )

    def seconds(number: int) -> list[float]:
        lap_s = (later_s if number else first_s) / LAPS
        whole, inputs, weights = (1.0, 0.5, 0.5) if number else (1.0, 0.75, 0.5)
        return [lap_s, lap_s * whole, lap_s, lap_s * inputs, lap_s * weights]

    watch = Told(seconds)
    (found,) = measured_weights(sequence, runner, 2, watch)
    assert watch.rounds == rounds
    assert (found.share, found.more) == pytest.approx((share, more))
