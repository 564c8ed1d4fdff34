"""Do the layers of a stage add up to the stage?

    make bench

Unlike models are cut into 2 and 4 stages of about equally many layers. For each stage the sum over its layers of the
profiler's times stands against the measured time of the same layers run as one stage, forward and backward apart, at a
micro-batch size that was measured and at one on the line between two that were. Both are measured in turns in one
process of one thread, so that a slow moment of the machine meets both; errors are medians over turns.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import pytest
import torch
from torch import Tensor

from profiler import LayerSequence, trace
from profiler.left_out_sizes import Refusals
from profiler.machine.allocator import keep_freed_memory
from profiler.memory.in_stage import layer_memory
from profiler.run.inputs import micro_batch, real_runner, resized_target
from profiler.run.layer_runner import LayerRunner, Uncut
from profiler.run.parameter_pool import ParameterPool
from profiler.run.stage_function import KeptPass, leaves_of, roots_of, run_backward
from profiler.timing.repeats import collecting_no_garbage, computing_with
from profiler.timing.sweeps import LayerTiming, TimedLayers, time_layers
from tests.benchmarks.stage_models import MODELS, build

CPU = torch.device("cpu")
MEASURED = (2, 4, 8)
RUN = (3, 8)
BUDGET_S = 60.0  # of turns, for each model
FEWEST_TURNS = 5
RUNS = 3  # of the stages in each turn; the first warms up
MEAN_WITHIN = 0.05
WORST_WITHIN = 0.12

Pair = tuple[float, float]  # forward, backward


@dataclass(frozen=True)
class Stages:
    """A model cut into stages, and micro-batches to run through them."""

    sequence: LayerSequence
    runners: dict[int, LayerRunner]
    pool: ParameterPool
    kept: dict[int, list[int]]

    def turn(self) -> Iterator[tuple[tuple[int, str], Pair, Pair]]:
        """Key, predicted and measured seconds of each run of a stage."""
        measured = {size: self.runners[size] for size in MEASURED}
        layers = TimedLayers(self.sequence, self.pool, measured, self.kept, CPU, memory_bytes=2**40)
        timings = time_layers(layers, Refusals(), budget_s=0.0)
        for size in RUN:
            for count in (2, 4):
                bounds = [len(self.sequence) * part // count for part in range(count + 1)]
                stages = [self.runners[size].uncut(first, stop) for first, stop in pairwise(bounds)]
                with collecting_no_garbage():
                    runs = [_run(self.runners[size], stages) for _ in range(RUNS)][1:]
                for index, (first, stop) in enumerate(pairwise(bounds)):
                    predicted = _predicted(timings, size, first, stop)
                    for run in runs:
                        yield (size, f"{index + 1} of {count}"), predicted, run[index]


def _predicted(timings: dict[int, list[LayerTiming]], size: int, first: int, stop: int) -> Pair:
    """The planner's line between the measured sizes."""
    low, high = max(one for one in timings if one <= size), min(one for one in timings if one >= size)
    share = (size - low) / (high - low) if high > low else 0.0
    sums = [_sum(timings[one][first:stop]) for one in (low, high)]
    forward_s, backward_s = ((1 - share) * below + share * above for below, above in zip(*sums, strict=True))
    return forward_s, backward_s


def _sum(layers: Sequence[LayerTiming]) -> Pair:
    return sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers)


def _run(runner: LayerRunner, stages: list[Uncut]) -> list[Pair]:
    """Seconds of the stages' forward and backward passes on one micro-batch."""
    values: dict[str, Tensor] = {}
    kept, forward, backward = [], [], []
    for stage in stages:
        leaves = leaves_of(values, stage.function.entering)
        begun = time.perf_counter()
        leaving = runner.run_uncut(stage, leaves)
        kept.append(KeptPass(leaves, roots_of(leaving)))
        forward.append(time.perf_counter() - begun)
        values = {name: value.detach() for name, value in leaving.items()}
        del leaving
    gradients: dict[str, Tensor] = {name: torch.ones_like(value) for name, value in values.items()}
    for passed in reversed(kept):
        begun = time.perf_counter()
        found = run_backward(passed, gradients)
        backward.append(time.perf_counter() - begun)
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
    return list(zip(forward, reversed(backward), strict=True))


def _stages(name: str) -> Stages:
    model = build(name)
    sequence = trace(model.model, model.sample)
    pool = ParameterPool(sequence, CPU)
    runners = {
        size: real_runner(
            sequence,
            pool,
            micro_batch(sequence, model.sample, size, CPU),
            loss_fn=model.loss_fn,
            target=resized_target(model.target, size, CPU),
            has_loss=True,
            device=CPU,
        )
        for size in sorted({*MEASURED, *RUN})
    }
    kept = {
        size: [entry.kept_bytes for entry in layer_memory(sequence, runners[size], share=True)] for size in MEASURED
    }
    return Stages(sequence, runners, pool, kept)


@pytest.mark.benchmark
@pytest.mark.parametrize("name", MODELS)
def test_layers_add_up_to_their_stage(name: str) -> None:
    keep_freed_memory()
    seconds: dict[tuple[int, str], list[Pair]] = defaultdict(list)
    ratios: dict[tuple[int, str], list[Pair]] = defaultdict(list)
    with computing_with(1):
        stages = _stages(name)
        for runner in stages.runners.values():
            runner.run_prelude()
        begun, turns = time.perf_counter(), 0
        while turns < FEWEST_TURNS or time.perf_counter() - begun < BUDGET_S:
            turns += 1
            for key, predicted, measured in stages.turn():
                seconds[key].append(measured)
                ratios[key].append((predicted[0] / measured[0], predicted[1] / measured[1]))
    print(f"\n{turns} turns\n| model | samples | stage | forward | predicted | backward | predicted |")
    print("|---|---:|---|---:|---:|---:|---:|")
    errors = []
    for (size, stage), pairs in ratios.items():
        took = [1e3 * median(column) for column in zip(*seconds[size, stage], strict=True)]
        found = [median(column) - 1 for column in zip(*pairs, strict=True)]
        errors += found
        print(
            f"| {name} | {size} | {stage} | {took[0]:.1f} ms | {found[0]:+.1%} | {took[1]:.1f} ms | {found[1]:+.1%} |"
        )
    mean, worst = fmean(map(abs, errors)), max(map(abs, errors))
    print(f"\n{name}: mean error {mean:.1%}, worst {worst:.1%} of {len(errors)}")
    assert mean <= MEAN_WITHIN
    assert worst <= WORST_WITHIN
