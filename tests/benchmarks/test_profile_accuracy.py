"""Do the layers of a stage add up to the stage?

    make bench

The sum over layers of the profile's times against the measured time of the same layers run as one stage, for stages of
the whole model, its halves and its quarters, forward and backward apart. Both are measured in turns in one process of
one thread, so that a slow moment of the machine meets both.
"""

import time
from collections import defaultdict
from itertools import pairwise
from statistics import median

import pytest
import torch
from gpt import GPT, Config, next_token_loss
from torch import Tensor

from profiler import LayerSequence, trace
from profiler.allocator import keep_freed_memory
from profiler.layer_runner import LayerRunner, Stage
from profiler.memory import layer_memory
from profiler.stage_function import Pass, leaves_of, roots_of, run_backward
from profiler.stand_ins import micro_batch, parameter_aliases, real_runner
from profiler.sweeps import LayerTiming, time_layers
from profiler.timing import collecting_no_garbage, computing_with

CPU = torch.device("cpu")
CONFIG = Config(vocabulary=256, context=128, width=256, blocks=5)
SIZES = (1, 2, 4)
TURNS = 15  # many short ones: the speed of a shared machine drifts within seconds
RUNS = 3  # of the stages in each turn; the first warms up
AIM = 0.05
WHOLE_WITHIN = 0.25  # generous: other work may run on the machine

Pair = tuple[float, float]


def _run(runner: LayerRunner, stages: list[Stage]) -> list[Pair]:
    """Seconds of the stages' forward and backward passes on one micro-batch."""
    values: dict[str, Tensor] = {}
    kept, forward, backward = [], [], []
    for stage in stages:
        leaves = leaves_of(values, stage.function.entering)
        begun = time.perf_counter()
        leaving = runner.run_stage(stage, leaves)
        kept.append(Pass(leaves, roots_of(leaving)))
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


def _turn(
    runners: dict[int, LayerRunner], sequence: LayerSequence, kept: dict[int, list[int]]
) -> dict[str, list[Pair]]:
    """Ratios (sum over layers / stage) of one turn by size and stage."""
    timings = time_layers(sequence, runners, kept, CPU, memory_bytes=2**40, budget_s=0.0)
    ratios = {}
    for size, runner in runners.items():
        for count in (1, 2, 4):
            bounds = [len(sequence) * part // count for part in range(count + 1)]
            stages = [runner.stage(first, stop) for first, stop in pairwise(bounds)]
            with collecting_no_garbage():
                runs = [_run(runner, stages) for _ in range(RUNS)][1:]
            for index, (first, stop) in enumerate(pairwise(bounds)):
                key = f"{size:2} samples, stage {index + 1} of {count}"
                ratios[key] = _ratios(timings[size][first:stop], [run[index] for run in runs])
    return ratios


def _ratios(layers: list[LayerTiming], runs: list[Pair]) -> list[Pair]:
    forward_s, backward_s = sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers)
    return [(forward_s / forward, backward_s / backward) for forward, backward in runs]


@pytest.mark.benchmark
def test_layers_add_up_to_their_stage() -> None:
    torch.manual_seed(0)
    ids = torch.randint(CONFIG.vocabulary, (max(SIZES), CONFIG.context))
    sequence = trace(GPT(CONFIG), ids)
    keep_freed_memory()
    ratios: dict[str, list[Pair]] = defaultdict(list)
    with computing_with(1):
        aliases = parameter_aliases(sequence, CPU)
        runners = {
            size: real_runner(
                sequence,
                aliases,
                micro_batch(sequence, ids, size, CPU),
                loss_fn=next_token_loss,
                target=ids[:size],
                has_loss=True,
                device=CPU,
            )
            for size in SIZES
        }
        kept = {size: [entry.kept_bytes for entry in layer_memory(sequence, runners[size])] for size in SIZES}
        for _ in range(TURNS):
            for key, pairs in _turn(runners, sequence, kept).items():
                ratios[key].extend(pairs)
    print("\nsum over layers / stage - 1   forward  backward")
    for key, pairs in ratios.items():
        forward, backward = (median(column) - 1 for column in zip(*pairs, strict=True))
        far = "" if max(abs(forward), abs(backward)) <= AIM else f"  beyond {AIM:.0%}"
        print(f"{key:28} {forward:+8.1%} {backward:+9.1%}{far}")
        if key.endswith("of 1"):
            assert max(abs(forward), abs(backward)) < WHOLE_WITHIN
