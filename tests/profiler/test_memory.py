"""Bytes from fake tensors against the allocator's own record of real runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from profiler import LayerSequence, trace
from profiler.memory import LayerMemory, layer_memory
from profiler.memory_by_size import agree
from profiler.stage_function import Pass, StageFunction, leaves_of, roots_of, run_backward
from profiler.stand_ins import fake_runner, input_bytes, micro_batch, parameter_aliases, real_runner, resized

Case = tuple[nn.Module, Any]
CPU = torch.device("cpu")


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """Bytes taken (positive) and given back (negative) inside, in order."""
    record: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as kineto:
        yield record
    events = [event for event in kineto.profiler.kineto_results.events() if event.name() == "[memory]"]
    record.extend(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))


class _Real:
    """Runs stages and says what the allocator saw."""

    def __init__(self, sequence: LayerSequence, sample: Any, size: int) -> None:
        self.sequence = sequence
        self.inputs = micro_batch(sequence, sample, size, CPU)
        self.aliases = parameter_aliases(sequence, CPU)
        self.values: list[dict[str, Tensor]] = [{}]
        for index in range(len(sequence)):
            stage = StageFunction(sequence, index, index + 1, self.aliases)
            leaves = leaves_of(self.values[-1], stage.entering)
            values = stage.forward(leaves, self.inputs, sequence.buffers).values
            self.values.append({name: value.detach() for name, value in values.items()})

    def run(self, first: int, stop: int) -> tuple[int, int]:
        """Bytes kept between forward and backward pass, and the largest bytes at any moment of the two."""
        self._pass(first, stop)  # what is allocated once and for all is not the micro-batch's
        return self._pass(first, stop)

    def _pass(self, first: int, stop: int) -> tuple[int, int]:
        stage = StageFunction(self.sequence, first, stop, self.aliases)
        leaves = leaves_of(self.values[first], stage.entering)
        with _allocations() as forward:
            results = stage.forward(leaves, self.inputs, self.sequence.buffers)
            kept = Pass(leaves, roots_of(results.values))
            results.values.clear()
        shapes = {name: self.values[stop][name].shape for name in kept.roots}
        with _allocations() as backward:
            run_backward(kept, {name: torch.ones(shape) for name, shape in shapes.items()})
        held = sum(forward)
        return held, max(*accumulate(forward), held + max(accumulate(backward)))


def _memory(sequence: LayerSequence, sample: Any, size: int, *, fake: bool) -> list[LayerMemory]:
    inputs = micro_batch(sequence, sample, size, CPU)
    if fake:
        with fake_runner(sequence, inputs, loss_fn=None, target=None, has_loss=False, device=CPU) as runner:
            return layer_memory(sequence, runner)
    aliases = parameter_aliases(sequence, CPU)
    runner = real_runner(sequence, aliases, inputs, loss_fn=None, target=None, has_loss=False, device=CPU)
    return layer_memory(sequence, runner)


@pytest.mark.parametrize("name", ["gpt", "cnn", "masked", "dropout"])
def test_kept_bytes_are_exact_and_the_peak_is_never_less(make_case: Callable[[str], Case], name: str) -> None:
    model, sample = make_case(name)
    sequence = trace(model, sample)
    for size in (2, 5):
        memory = _memory(sequence, sample, size, fake=True)
        real = _Real(sequence, sample, size)
        kept, peak = real.run(0, len(sequence))
        assert sum(entry.kept_bytes for entry in memory) == kept
        assert kept + max(entry.transient_bytes for entry in memory) >= peak


@pytest.mark.parametrize("name", ["gpt", "cnn", "lstm", "masked", "dropout"])
def test_no_stage_needs_more_than_predicted(make_case: Callable[[str], Case], name: str) -> None:
    model, sample = make_case(name)
    sequence = trace(model, sample)
    memory = _memory(sequence, sample, 3, fake=name != "lstm")
    real = _Real(sequence, sample, 3)
    stops = {1, len(sequence) // 2, len(sequence)}
    ranges = [(0, stop) for stop in stops] + [(len(sequence) // 2, len(sequence))]
    ranges += [(index, index + 1) for index in range(0, len(sequence), 3)]
    for first, stop in ranges:
        kept, peak = real.run(first, stop)
        predicted = sum(entry.kept_bytes for entry in memory[first:stop])
        assert predicted >= kept, (first, stop)
        assert predicted + max(entry.transient_bytes for entry in memory[first:stop]) >= peak, (first, stop)


@pytest.mark.parametrize("name", ["gpt", "cnn", "masked", "keywords", "dropout"])
def test_fake_and_real_tensors_agree(make_case: Callable[[str], Case], name: str) -> None:
    model, sample = make_case(name)
    sequence = trace(model, sample)
    assert agree(_memory(sequence, sample, 3, fake=True), _memory(sequence, sample, 3, fake=False))


def test_memory_grows_with_the_micro_batch(make_case: Callable[[str], Case]) -> None:
    model, ids = make_case("gpt")
    sequence = trace(model, ids)
    small, large = (_memory(sequence, ids, size, fake=True) for size in (2, 4))
    assert [entry.kept_bytes for entry in large] == [2 * entry.kept_bytes for entry in small]


def test_samples_are_cut_and_repeated(make_case: Callable[[str], Case]) -> None:
    assert resized(torch.tensor([[1, 2, 3]]), 1, 5).tolist() == [[1, 2, 3, 1, 2]]
    assert resized(torch.tensor([1, 2, 3]), 0, 2).tolist() == [1, 2]
    model, ids = make_case("gpt")
    sequence = trace(model, ids)
    (found,) = micro_batch(sequence, ids, 6, CPU).values()
    assert torch.equal(found, torch.cat([ids, ids[:2]]))
    (made_up,) = micro_batch(sequence, None, 6, CPU).values()
    assert made_up.shape == (6, 12)


def test_input_bytes_of_one_sample(make_case: Callable[[str], Case]) -> None:
    model, sample = make_case("masked")
    spec = trace(model, sample).sample
    assert input_bytes(spec, None) == 5 * 6 * 4 + 5 * 8
    assert input_bytes(spec, {"label": torch.zeros(4, dtype=torch.int32)}) == 5 * 6 * 4 + 5 * 8 + 4
