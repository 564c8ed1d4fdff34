"""Running statistics of many batch normalizations are moved together as they would be one by one."""

from collections.abc import Sequence
from functools import reduce

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor.state.buffers import _move_statistics
from profiler.moments import Moments
from profiler.tracing.batch_norm import BatchStatistics

CHANNELS = 3
modules = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.1, 0.5, 1.0])), min_size=1, max_size=6)
sizes = st.lists(st.integers(2, 9), min_size=1, max_size=4)


def entry(module: int, momentum: float) -> BatchStatistics:
    counter = f"{module}.num_batches_tracked" if module else None
    return BatchStatistics(f"{module}.running_mean", f"{module}.running_var", counter, momentum, "", "", "")


def zeros() -> dict[str, Tensor]:
    found = {
        f"{module}.{what}": torch.zeros(CHANNELS) for module in range(4) for what in ("running_mean", "running_var")
    }
    return found | {f"{module}.num_batches_tracked": torch.tensor(0) for module in range(1, 4)}


def one_by_one(values: Sequence[Sequence[Tensor]], entries: Sequence[BatchStatistics]) -> dict[str, Tensor]:
    """By torch's own mean and variance over all values."""
    buffers = zeros()
    for position, one in enumerate(entries):
        whole = torch.cat([of_batch[position] for of_batch in values])
        buffers[one.running_mean].lerp_(whole.mean(0), one.momentum)
        buffers[one.running_var].lerp_(whole.var(0), one.momentum)
        if one.num_batches_tracked:
            buffers[one.num_batches_tracked] += 1
    return buffers


@given(modules, sizes, st.integers(0, 2**16))
def test_together_as_one_by_one(calls: list[tuple[int, float]], counts: list[int], seed: int) -> None:
    """Modules may be called several times, with other momenta; micro-batches may be unlike."""
    torch.manual_seed(seed)
    entries = [entry(*call) for call in calls]
    values = [[torch.randn(count, CHANNELS) + 1 for _ in entries] for count in counts]
    seen = [
        Moments.of([held.mean(0) for held in row], [held.var(0) for held in row], [float(len(held)) for held in row])
        for row in values
    ]
    buffers = zeros()
    _move_statistics(buffers, entries, reduce(Moments.then, seen))
    torch.testing.assert_close(buffers, one_by_one(values, entries))
