"""Batch normalizations in a module that is called as it is move running statistics as traced ones do."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor import Pipeline
from profiler import NotTraceableError, trace
from profiler.errors import ExecutionError
from tests.executor.conftest import _plan as plan_for

SIZE, MICRO_BATCHES, FEATURES = 12, 4, 8


class Traced(nn.Module):
    """Two normalizations, or one that is used twice."""

    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.first = nn.BatchNorm1d(FEATURES)
        self.second = self.first if twice else nn.BatchNorm1d(FEATURES, momentum=0.3)

    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.linear(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Called(Traced):
    """The same in a forward pass that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        assert [float(value) for value in x[:, 0].detach()]
        return self.body(x)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.entry, self.inner, self.last = nn.Linear(FEATURES, FEATURES), inner, nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(self.entry(x))))


def around(kind: type[Traced], *, twice: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Around(kind(twice=twice))


def trained(model: nn.Module, stages: int, recompute: bool) -> tuple[Sequence[str], Tensor, dict[str, Tensor]]:
    """What is called as it is, and the losses and the state of three steps."""
    made = torch.Generator().manual_seed(5)
    data = [(torch.randn(SIZE, FEATURES, generator=made), torch.randn(SIZE, 3, generator=made)) for _ in range(3)]
    sequence = trace(model, data[0][0][: SIZE // MICRO_BATCHES].clone())
    cuts = [round(len(sequence) * (stage + 1) / stages) for stage in range(stages - 1)]
    plan = plan_for(sequence, cuts, batch_size=SIZE, micro_batches=MICRO_BATCHES, recompute=recompute)
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        losses.append(pipe.step(x, target=y))
        optimizer.step()
        optimizer.zero_grad()
    return sequence.sample.called_as_is, torch.stack(losses), dict(pipe.state_dict())


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(("stages", "recompute"), [(1, False), (3, True)])
def test_as_traced_ones(twice: bool, stages: int, recompute: bool) -> None:
    """Once per mini-batch, by the statistics of all its micro-batches, also where a stage is recomputed."""
    called, losses, state = trained(around(Called, twice=twice), stages, recompute)
    traced, expected_losses, expected = trained(around(Traced, twice=twice), 1, False)
    assert (list(called), list(traced)) == (["inner"], [])
    assert torch.equal(losses, expected_losses)
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert state["inner.first.num_batches_tracked"] == (6 if twice else 3)


class Sometimes(Called):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.abs().max()) < 100 else self.linear(x)


def test_one_that_runs_in_some_micro_batches_ends_the_step() -> None:
    model = around(Sometimes)
    x = torch.randn(SIZE, FEATURES, generator=torch.Generator().manual_seed(5))
    sequence = trace(model, x[:3].clone())
    pipe = Pipeline(
        model, plan_for(sequence, batch_size=SIZE, micro_batches=MICRO_BATCHES), loss_fn=functional.mse_loss
    )
    pipe.step(x, target=torch.zeros(SIZE, 3))
    with pytest.raises(ExecutionError, match=r"calls its batch normalizations \[\], and called \['first', 'second'\]"):
        pipe.step(x * 1000, target=torch.zeros(SIZE, 3))


class WithoutMomentum(Called):
    def __init__(self, *, twice: bool = False) -> None:
        super().__init__(twice=twice)
        self.first.momentum = None


class TracedWithoutMomentum(Traced):
    def __init__(self, *, twice: bool = False) -> None:
        super().__init__(twice=twice)
        self.first.momentum = None


class Instances(Called):
    def __init__(self, *, twice: bool = False) -> None:
        super().__init__(twice=twice)
        self.first = nn.InstanceNorm1d(1, track_running_stats=True)  # type: ignore[assignment]

    def body(self, x: Tensor) -> Tensor:
        return self.first(self.linear(x).unsqueeze(1)).squeeze(1)


class Checkpointed(Called):
    def forward(self, x: Tensor) -> Tensor:
        assert [float(value) for value in x[:, 0].detach()]
        result: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return result


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithoutMomentum, "its first normalization moves running statistics in a way of its own"),
        (TracedWithoutMomentum, r"in module 'inner\.first', .*: batch normalization without a momentum; set it"),
        (Instances, "its first normalization moves running statistics in a way of its own"),
        (Checkpointed, "its first normalization would move running statistics once more in the backward pass"),
    ],
)
def test_what_is_refused(kind: type[Traced], message: str) -> None:
    with pytest.raises(NotTraceableError, match=message):
        trace(around(kind), torch.randn(3, FEATURES))
