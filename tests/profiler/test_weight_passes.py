"""Passes for the weights' gradients are measured as often as their length asks for."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from profiler import trace
from profiler.run.inputs import micro_batch, real_runner
from profiler.run.layer_runner import LayerRunner
from profiler.run.parameter_pool import ParameterPool
from profiler.timing.weight_passes import ENOUGH_S, ROUNDS, WeightPass, as_stages, measured_weights

T = TypeVar("T")
CPU = torch.device("cpu")
LAPS = 5  # F, B; F, I and W


class Told:
    """A stopwatch on which the laps of each round, F, B, F, I and W, take the seconds that it is told."""

    def __init__(self, seconds: Callable[[int], list[float]]) -> None:
        self.rounds, self._laps, self._taken, self._seconds = 0, 0, 0, seconds

    def lap(self, call: Callable[[], T], key: object = None) -> T:
        self._laps += 1
        return call()

    def take(self) -> list[float]:
        found = self._seconds(self.rounds)[self._taken : self._laps]
        self._taken = self._laps
        if self._laps == LAPS:
            self._laps, self._taken, self.rounds = 0, 0, self.rounds + 1
        assert self._laps < LAPS
        return found

    def lost_share(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("layer_s", "rounds", "share", "more"),
    [
        (ENOUGH_S / 100, 1 + ROUNDS, 0.5, 0.0),  # the first warms up
        (0.0, 1 + ROUNDS, 0.5, 0.0),
        (ENOUGH_S / 2, 2, 0.5, 0.0),
        (ENOUGH_S, 1, 0.25, 0.25),  # the first one counts where it is the only one
    ],
)
def test_a_layer_that_takes_long_is_split_once(layer_s: float, rounds: int, share: float, more: float) -> None:
    watch = Told(lambda number: [1.0, 1.0, 1.0, 0.5, 0.5] if number else [1.0, 1.0, 1.0, 0.75, 0.5])
    found = measured_linear(watch, layer_s)
    assert watch.rounds == rounds
    assert (found.share, found.more) == pytest.approx((share, more))


@pytest.mark.parametrize("interrupted", range(1 + ROUNDS))
@pytest.mark.parametrize("lap", range(LAPS))
def test_one_pass_that_the_system_interrupts_counts_for_nothing(interrupted: int, lap: int) -> None:
    def seconds(number: int) -> list[float]:
        laps = [0.001, 0.001, 0.001, 0.0005, 0.0005]
        laps[lap] += (number == interrupted) * 10 * ENOUGH_S
        return laps

    found = measured_linear(Told(seconds), 0.002)
    assert (found.share, found.more) == pytest.approx((0.5, 0.0))


def test_layers_come_to_what_they_take_as_a_stage() -> None:
    """Of layers with 1 and 3 s of backward passes, the first of which W can halve; I of both is shorter by 1.2 s."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    runner = runner_of(model, x)
    layers = [WeightPass(0.5, 0.25, 8), WeightPass(0.1, 0.0, 8)]
    watch = Told(lambda number: [1.0, 2.0, 1.1, 1.3, 0.8] if number else [9.0] * LAPS)
    sequence = trace(model, x)
    found = as_stages(sequence, runner, 2, watch, [(0.01, 1.0), (0.01, 3.0)], layers, [range(2)])
    assert watch.rounds == 2
    assert [one.share for one in found] == pytest.approx([0.5 * 1.2 / 0.8, 0.1 * 1.2 / 0.8])
    assert sum(one.share * backward_s for one, backward_s in zip(found, (1.0, 3.0), strict=True)) == pytest.approx(1.2)
    assert found[0].more == pytest.approx(4 * 0.1)
    assert [one.kept_bytes for one in found] == [8, 8]


@pytest.mark.parametrize("interrupted", range(1 + ROUNDS))
@pytest.mark.parametrize("lap", range(LAPS))
def test_one_pass_of_a_stage_that_the_system_interrupts_counts_for_nothing(interrupted: int, lap: int) -> None:
    def seconds(number: int) -> list[float]:
        laps = [0.1, 0.2, 0.1, 0.1, 0.1]
        laps[lap] += (number == interrupted) * 10.0
        return laps

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    watch, alone = Told(seconds), [WeightPass(0.25, 0.0, 8)]
    (found,) = as_stages(trace(model, x), runner_of(model, x), 2, watch, [(0.1, 0.2)], alone, [range(1)])
    assert watch.rounds == 1 + ROUNDS
    assert (found.share, found.more) == pytest.approx((0.5, 0.0))


def test_layers_of_which_nothing_can_wait_are_run_no_more() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    watch = Told(lambda _: [])
    layers = [WeightPass(0.0, 0.0, 0)]
    assert as_stages(trace(model, x), runner_of(model, x), 2, watch, [(1.0, 1.0)], layers, [range(1)]) == layers
    assert watch.rounds == 0


def measured_linear(watch: Told, layer_s: float) -> WeightPass:
    """What a model of one layer leaves for W, by this watch."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    (found,) = measured_weights(trace(model, x), runner_of(model, x), 2, watch, [layer_s])
    return found


def runner_of(model: nn.Module, x: Tensor) -> LayerRunner:
    sequence = trace(model, x)
    return real_runner(
        sequence,
        ParameterPool(sequence, CPU),
        micro_batch(sequence, x, 2, CPU),
        loss_fn=None,
        target=None,
        has_loss=False,
        device=CPU,
    )
