"""Running statistics of many batch normalizations are moved together as they would be one by one."""

import gc
from collections.abc import Callable, Sequence
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from executor import Pipeline
from executor.state.buffers import _move_statistics
from profiler import trace
from profiler.moments import Moments
from profiler.tracing.batch_norm import BatchStatistics
from tests.executor.conftest import _plan as plan_of

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


class Codebook(nn.Module):
    """Writes a buffer in each forward pass."""

    held: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("held", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.no_grad():
            self.held.mul_(0.9).add_(x.detach().mean(0))
        return x + self.held.mean()


def tensors_after_steps(block: Callable[[], nn.Module], micro_batches: int, recompute: bool) -> int:
    """How many tensors live that did not before."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(5)))
    x = torch.randn(2 * micro_batches, 4)
    plan = plan_of(
        trace(model, x, progress=False), [4], batch_size=len(x), micro_batches=micro_batches, recompute=recompute
    )
    gc.collect()
    before = {id(held) for held in gc.get_objects() if isinstance(held, Tensor)}
    pipe = Pipeline(model, plan, loss_fn=nn.functional.mse_loss, compare_first_step=False)
    for _ in range(2):
        pipe.step(x, target=x)
    gc.collect()
    return sum(id(held) not in before for held in gc.get_objects() if isinstance(held, Tensor))


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of strange objects that are asked for their class
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("block", [norm, Codebook])
def test_what_a_stage_holds_of_buffers_does_not_grow_with_micro_batches(
    block: Callable[[], nn.Module], recompute: bool
) -> None:
    """A row for each micro-batch was kept until the next step: a quarter of a GiB of an AmoebaNet-D, holes included."""
    assert tensors_after_steps(block, 32, recompute) - tensors_after_steps(block, 4, recompute) < 2 * 28
