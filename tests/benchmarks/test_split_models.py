"""The backward pass in two, of each model of the list: the same bits, how much of it can wait, and what that costs."""

import gc
import random
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import pytest
import torch
from torch import Tensor

from profiler import LayerSequence
from profiler.run.loss import loss_of, model_output
from profiler.run.separable import deferred_parameters
from profiler.run.split_backward import DeferredWeights
from profiler.run.stage_function import KeptPass, StageFunction, leaves_of, roots_of, run_backward
from profiler.tracing.sample import tensor_leaves
from tests.coverage.fidelity import ByNumber, Traced
from tests.coverage.model_list import MODELS, Case, Entry

ROUNDS = 5


class Stages:
    """A traced model in stages, of which the backward pass is split or not.

    Args:
        traced: the model.
        cuts: layers at which stages start, without the first.
        splits: whether gradients of parameters wait for a pass of their own.
    """

    def __init__(self, sequence: LayerSequence, case: Case, cuts: Sequence[int], *, splits: bool) -> None:
        self._sequence, self._case, self._splits = sequence, case, splits
        self.copies = {
            (layer.index, name): parameter.detach().requires_grad_(parameter.requires_grad)
            for layer in sequence.layers
            for name in layer.parameters
            for parameter in [sequence.parameters[name]]
        }
        self.deferred: frozenset[int] = frozenset()
        self._stages = []
        for first, stop in pairwise([0, *cuts, len(sequence)]):
            deferred = deferred_parameters(sequence.layers[first:stop], self.copies) if splits else frozenset()
            self.deferred |= deferred
            self._stages.append(StageFunction(sequence, first, stop, self.copies, deferred=deferred))
        self._inputs = dict(zip(sequence.inputs, tensor_leaves(case.sample, sequence.sample), strict=True))

    def step(self) -> tuple[float, float, float]:
        """Adds a micro-batch's gradients to those of `copies`; seconds of this thread in F, in B or I, and in W."""
        start = time.thread_time()
        values: Mapping[str, Tensor] = {}
        passes, stores = [], []
        for stage in self._stages:
            leaves = leaves_of(values, stage.entering)
            stores.append(DeferredWeights() if self._splits else None)
            values = stage.forward(
                leaves, self._inputs, self._sequence.buffers, seed=ByNumber(), store=stores[-1]
            ).values
            passes.append(KeptPass(leaves, roots_of(values)))
        ends = {name: value.detach().requires_grad_(value.requires_grad) for name, value in values.items()}
        loss_of(model_output(self._sequence, ends), self._case.target, self._case.loss_fn).backward()
        gradients: Mapping[str, Tensor | None] = {name: end.grad for name, end in ends.items()}
        forward = time.thread_time()
        for passed in reversed(passes):
            gradients = run_backward(passed, {name: g for name, g in gradients.items() if g is not None})
        inputs = time.thread_time()
        for store in reversed(stores):
            if store is not None:
                store.run()
                assert store.entries == []
        return forward - start, inputs - forward, time.thread_time() - inputs


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@pytest.mark.benchmark
@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_split_gradients_of_the_list(entry: Entry) -> None:
    torch.set_num_threads(1)
    case = entry.build()
    sequence = Traced.of(case).sequence
    chance = random.Random(0)
    cuts = sorted(chance.sample(range(1, len(sequence)), min(2, len(sequence) - 1)))
    for places in ((), tuple(cuts)):
        whole, split = (Stages(sequence, case, places, splits=splits) for splits in (False, True))
        for _ in range(2):  # the second adds to what is there
            whole.step()
            split.step()
        for key, copy in whole.copies.items():
            assert _same(copy.grad, split.copies[key].grad), (places, key)
    whole, split = (Stages(sequence, case, (), splits=splits) for splits in (False, True))
    seconds: list[list[tuple[float, float, float]]] = [[], []]
    gc.disable()
    for _ in range(ROUNDS):
        seconds[0].append(whole.step())
        seconds[1].append(split.step())
    gc.enable()
    forward, backward, _ = (median(column) for column in zip(*seconds[0], strict=True))
    split_forward, inputs, weights = (median(column) for column in zip(*seconds[1], strict=True))
    deferred = sum(copy.numel() for copy in split.copies.values() if id(copy) in split.deferred)
    elements = sum(copy.numel() for copy in split.copies.values() if copy.requires_grad)
    overhead = (split_forward + inputs + weights) / (forward + backward)
    print(
        f"| {entry.name} | {deferred / elements:.1%} | {weights / (inputs + weights):.0%} "
        f"| {(inputs + weights) / backward:.2f} | {overhead:.2f} |",
        flush=True,
    )
    assert deferred > 0
