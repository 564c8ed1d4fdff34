"""Bytes from fake tensors against the allocator's own record of real runs."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.cost.layer_costs import CostModel
from profiler import LayerSequence, profile, trace
from profiler.memory import by_size
from profiler.memory.by_size import agree
from profiler.memory.in_stage import LayerMemory, layer_memory
from profiler.observe.storage_watch import StorageWatch
from profiler.run.inputs import fake_runner, input_bytes, micro_batch, real_runner, resized
from profiler.run.parameter_pool import ParameterPool
from profiler.run.stage_function import KeptPass, StageFunction, leaves_of, roots_of, run_backward
from profiler.timing.repeats import computing_with
from tests.models.tracked import Allocator, allocations, run_stages

Traced = tuple[nn.Module, Any, LayerSequence]
CPU = torch.device("cpu")


class _Real:
    """Runs stages and says what the allocator saw."""

    def __init__(self, sequence: LayerSequence, sample: Any, size: int) -> None:
        self.sequence = sequence
        self.inputs = micro_batch(sequence, sample, size, CPU)
        self.aliases = ParameterPool(sequence, CPU)
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
        with allocations() as forward:
            results = stage.forward(leaves, self.inputs, self.sequence.buffers)
            kept = KeptPass(leaves, roots_of(results.values))
            results.values.clear()
        shapes = {name: self.values[stop][name].shape for name in kept.roots}
        with allocations() as backward:
            run_backward(kept, {name: torch.ones(shape) for name, shape in shapes.items()})
        held = sum(forward)
        return held, max(*accumulate(forward), held + max(accumulate(backward)))


def _memory(sequence: LayerSequence, sample: Any, size: int, *, fake: bool) -> list[LayerMemory]:
    inputs = micro_batch(sequence, sample, size, CPU)
    if fake:
        with fake_runner(sequence, inputs, loss_fn=None, target=None, has_loss=False, device=CPU) as runner:
            return layer_memory(sequence, runner)
    aliases = ParameterPool(sequence, CPU)
    runner = real_runner(sequence, aliases, inputs, loss_fn=None, target=None, has_loss=False, device=CPU)
    return layer_memory(sequence, runner)


@pytest.mark.parametrize("name", ["gpt", "cnn", "masked", "dropout"])
def test_kept_bytes_are_exact_and_the_peak_is_never_less(traced_case: Callable[[str], Traced], name: str) -> None:
    _, sample, sequence = traced_case(name)
    for size in (2, 5):
        memory = _memory(sequence, sample, size, fake=True)
        real = _Real(sequence, sample, size)
        kept, peak = real.run(0, len(sequence))
        assert sum(entry.kept_bytes for entry in memory) == kept
        assert kept + max(entry.transient_bytes for entry in memory) >= peak


@pytest.mark.parametrize("name", ["gpt", "cnn", "lstm", "masked", "dropout"])
def test_no_stage_needs_more_than_predicted(traced_case: Callable[[str], Traced], name: str) -> None:
    _, sample, sequence = traced_case(name)
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


@pytest.mark.parametrize(("name", "threads"), [("cnn", 1), ("lstm", 1), ("gpt", 1), ("cnn", 2)])
def test_what_kernels_allocate_is_measured(traced_case: Callable[[str], Traced], name: str, threads: int) -> None:
    """Never less than the allocator says, and close to it; a table that counts from above is far from it.

    Of as many threads as were profiled: each thread of a convolution has a buffer of its own.
    """
    _, sample, sequence = traced_case(name)
    settings: dict[str, Any] = {"batch_size": 32, "micro_batch_sizes": [8, 32], "time_budget_s": 0.0}
    measured = profile(sequence, 1, threads=threads, sample=sample, progress=False, cache=False, **settings)
    costs = CostModel(measured)
    (kind,) = {cost.device_kind for cost in measured.costs}
    for size in (20, 32):
        inputs = micro_batch(sequence, sample, size, CPU)
        for parts in (1, 3):
            bounds = [len(sequence) * part // parts for part in range(parts + 1)]
            with computing_with(threads):
                found = run_stages(sequence, bounds, inputs, None, None, has_loss=False, meter=Allocator)
            for (first, stop), (_, most) in zip(pairwise(bounds), found, strict=True):
                _, predicted = costs.stage(kind, size, first, stop)
                assert most <= predicted <= 1.1 * most + 2**14, (size, first, stop)


def test_kernels_are_watched_with_gradients_in_the_layout_that_a_stage_gives_them() -> None:
    """The backward pass of attention copies a gradient that comes in its result's layout, not one as it came back."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.enter(x).unflatten(-1, (4, 8)).transpose(1, 2).contiguous()
            attended = functional.scaled_dot_product_attention(heads, heads, heads)
            return self.leave(attended.transpose(1, 2).flatten(2))

    x = torch.randn(4, 64, 32)
    settings: dict[str, Any] = {"micro_batch_sizes": [4], "time_budget_s": 0.0, "progress": False, "cache": False}
    measured = profile(trace(Attention(), x), 1, sample=x, **settings)
    assert max(cost.in_stage.workspace_bytes for cost in measured.costs if cost.in_stage) > x.nbytes


@pytest.mark.parametrize("name", ["gpt", "cnn", "masked", "keywords", "dropout"])
def test_fake_and_real_tensors_agree(traced_case: Callable[[str], Traced], name: str) -> None:
    _, sample, sequence = traced_case(name)
    assert agree(_memory(sequence, sample, 3, fake=True), _memory(sequence, sample, 3, fake=False))


def test_memory_grows_with_the_micro_batch(traced_case: Callable[[str], Traced]) -> None:
    _, ids, sequence = traced_case("gpt")
    small, large = (_memory(sequence, ids, size, fake=True) for size in (2, 4))
    assert [entry.kept_bytes for entry in large] == [2 * entry.kept_bytes for entry in small]


@pytest.mark.parametrize("fake_is_slower", [True, False])
def test_sizes_are_run_by_what_is_sooner(
    traced_case: Callable[[str], Traced], monkeypatch: pytest.MonkeyPatch, *, fake_is_slower: bool
) -> None:
    """On a clock that only runs of one kind move; both ways have the same result."""
    _, sample, sequence = traced_case("gpt")
    clock, runs = [0.0], {"_fake": 0, "_real": 0}

    def ticking(name: str, seconds: float) -> Callable[..., Any]:
        run = getattr(by_size, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            clock[0] += seconds
            runs[name] += 1
            return run(*arguments, **named)

        return timed

    monkeypatch.setattr(by_size, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(by_size, "_fake", ticking("_fake", 1.0))
    monkeypatch.setattr(by_size, "_real", ticking("_real", 0.125 if fake_is_slower else 0.5))
    sizes = [1, 2, 4]
    costs = profile(sequence, sample=sample, micro_batch_sizes=sizes, links=False, progress=False, cache=False).costs
    assert runs == ({"_fake": 1, "_real": 3} if fake_is_slower else {"_fake": 3, "_real": 1})
    memory = _memory(sequence, sample, 4, fake=not fake_is_slower)
    assert [c.kept_bytes for c in costs if c.micro_batch_size == 4] == [entry.kept_bytes for entry in memory]


def test_samples_are_cut_and_repeated(traced_case: Callable[[str], Traced]) -> None:
    assert resized(torch.tensor([[1, 2, 3]]), 1, 5).tolist() == [[1, 2, 3, 1, 2]]
    assert resized(torch.tensor([1, 2, 3]), 0, 2).tolist() == [1, 2]
    _, ids, sequence = traced_case("gpt")
    (found,) = micro_batch(sequence, ids, 6, CPU).values()
    assert torch.equal(found, torch.cat([ids, ids[:2]]))
    (made_up,) = micro_batch(sequence, None, 6, CPU).values()
    assert made_up.shape == (6, 12)


def test_a_sample_that_is_cut_or_repeated_keeps_its_memory_layout() -> None:
    """The executor splits the batch, so micro-batches have its layout, and kernels keep other bytes for another one."""
    images = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    assert resized(images, 0, 2).stride() == images.split(2)[0].stride()
    repeated = resized(images, 0, 6)
    assert repeated.stride() == images.stride()
    assert torch.equal(repeated, torch.cat([images, images[:2]]))
    time_major = torch.randn(7, 4, 5).transpose(0, 1)
    assert resized(time_major, 0, 2).stride() == time_major.split(2)[0].stride()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 2))
    sequence = trace(model, images)
    (with_meta,) = micro_batch(sequence, images.to("meta"), 3, CPU).values()
    assert with_meta.is_contiguous(memory_format=torch.channels_last)
    memory = _memory(sequence, images, 3, fake=True)
    assert sum(entry.kept_bytes for entry in memory) == _Real(sequence, images, 3).run(0, len(sequence))[0]


def test_a_sample_that_the_model_writes_stays_as_it_is() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.add_(1))

    x = torch.zeros(4, 3)
    profile(trace(Writing(), x), 1, sample=x, micro_batch_sizes=[2, 4], time_budget_s=0.0, progress=False)
    assert not x.any()


def test_input_bytes_of_one_sample(traced_case: Callable[[str], Traced]) -> None:
    spec = traced_case("masked")[2].sample
    assert input_bytes(spec, None) == 5 * 6 * 4 + 5 * 8
    assert input_bytes(spec, {"label": torch.zeros(4, dtype=torch.int32)}) == 5 * 6 * 4 + 5 * 8 + 4


def test_a_tensor_set_onto_memory_that_is_there_takes_none() -> None:
    """cuDNN's LSTMs look so whether weights lie together: each layer was counted all memory that its weights lie in."""
    held = torch.zeros(1000)
    with StorageWatch() as watch:
        whole = torch.empty(0).set_(held.untyped_storage())
        part = torch.empty(0).set_(held.untyped_storage(), 10, (20,), (1,))
        assert watch.peak_bytes == 0
        made = torch.zeros(20)
    assert watch.live_bytes == made.nbytes
    assert [watch.bytes_of(tensor) for tensor in (whole, part, made)] == [None, None, made.nbytes]
