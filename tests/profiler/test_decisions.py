"""Branches on values: which answers a trace takes, which it cannot, and that it is the same without values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler import NotTraceableError, profile, trace
from profiler.conditions.check import Check, values_made_up
from profiler.errors import ExecutionError
from profiler.sample_spec import Decision, SampleSpec
from tests.coverage.fidelity import difference, eager, run
from tests.coverage.model_list import Case
from tests.models.branching import BODIES, Branching, branching

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Holding(nn.Module):
    """Another module between two layers, of which it is a small share."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 64)
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def test_a_trace_without_values_repeats_the_decisions() -> None:
    model, x, *_ = branching("loop")
    sequence = trace(model, (x * 1e3,))
    assert [decision.answer for decision in sequence.sample.decisions] == [True, False]
    written = SampleSpec.model_validate_json(sequence.sample.to_json())
    assert written == sequence.sample
    again = trace(model, written)
    assert again.fingerprint == sequence.fingerprint
    assert again.sample == sequence.sample


class Padded(nn.Module):
    """As torchaudio's Conformer masks what lies after the end of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = int(torch.max(lengths).item())
        outside = torch.arange(longest).expand(len(lengths), longest) >= lengths.unsqueeze(1)
        return self.linear(x).masked_fill(outside.unsqueeze(-1), 0.0)


def test_a_number_is_checked_by_one_name() -> None:
    """The trace of the sample and that of decisions named the check otherwise: the plan was one of another model."""
    model = Padded()
    sequence = trace(model, (torch.randn(4, 6, 4), torch.tensor([6, 3, 6, 2])))
    assert len(sequence.sample.decisions) == 1
    assert trace(model, sequence.sample).fingerprint == sequence.fingerprint


def test_a_change_further_up_in_the_file_does_not_matter() -> None:
    model, x, *_ = branching("truth")
    sequence = trace(model, x)
    moved = [d.model_copy(update={"line": d.line.replace(":", ":9", 1)}) for d in sequence.sample.decisions]
    again = trace(model, sequence.sample.model_copy(update={"decisions": tuple(moved)}))
    assert again.fingerprint == sequence.fingerprint


def test_conditions_on_numbers_leave_the_numbers_open() -> None:
    """A number that differs between the sample's halves may be compared all the same."""
    model, x, *_ = branching("several_items")
    sequence = trace(model, x)
    (decision,) = sequence.sample.decisions
    assert decision.answer is False
    assert "1 condition checked in each micro-batch (branching.py:" in repr(sequence)
    model, x, *_ = branching("number_as_an_extent")
    assert [d.answer for d in trace(model, x).sample.decisions] == [0]


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x[0, 0] > 0 else x


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        index = (x[:, 0] > 0).nonzero()[:, 0]
        return out.index_add(0, index, x[index])


@pytest.mark.parametrize("kind", [Halves, Chosen])
def test_what_no_check_can_keep_is_called_as_it_is(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    sequence = trace(Holding(kind()), X)
    assert sequence.sample.called_as_is == ("inner",)
    assert not sequence.sample.decisions
    assert 0 <= sequence.sample.called_share < 0.5
    assert "called as it is: inner (" in repr(sequence)


def test_the_models_own_forward_pass_is_refused() -> None:
    model = Halves()
    model.weight = nn.Parameter(torch.ones(4))
    with pytest.raises(NotTraceableError, match="it is False for the sample's 8 samples and True for 4 of them; "):
        trace(model, X)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if x[0, 0] > 0 else 1)


class MostOfIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubling()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_not_more_than_a_share_of_the_work_is_called_unasked() -> None:
    with pytest.raises(NotTraceableError, match="it is False for the sample's 8 samples and True for 4 of them; "):
        trace(MostOfIt(), X)
    assert trace(MostOfIt(), X, keep_together=["inner"]).sample.called_as_is == ("inner",)


def test_without_values_the_error_says_that_they_would_do() -> None:
    model = Branching(BODIES["truth"])
    with pytest.raises(NotTraceableError, match="of a real model and sample, the branch that these take"):
        trace(model, X.to("meta"))


class Checked(nn.Module):
    """What follows from `torch._check` needs no decision, so the check itself must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        large = (x > 100).sum().item()
        torch._check(large < 3)
        return self.linear(x) if large < 3 else x


def test_what_the_model_asserts_is_checked() -> None:
    """`torch._check` was dropped from the graph, and with it the error for data that break it."""
    sequence = trace(Checked(), X)
    assert not sequence.sample.decisions
    run(sequence, Case(Checked(), X, functional.mse_loss, X))
    with pytest.raises(ExecutionError, match=r'test_decisions\.py:\d+ "large = .* is False \(of 32\) in'):
        run(sequence, Case(Checked(), X + 1000, functional.mse_loss, X))


class Writing(nn.Module):
    """Its run on the sample must leave it as it was."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) if x.abs().max() < 100 else x


def test_the_samples_run_changes_nothing() -> None:
    model = Writing()
    state = torch.random.get_rng_state()
    assert trace(model, X).sample.decisions
    assert model.count == 0
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_check_says_what_was_found() -> None:
    decision = Decision(module="a.b", line='model.py:7 "if x.item() > 3:"', answer=True)
    check = Check(decision, lambda x: (x.item() > 3, x.item()))
    check(torch.tensor(4))
    with pytest.raises(
        ExecutionError, match=r"module 'a\.b', model\.py:7 .*is False \(of 2\) in .* was True"
    ) as caught:
        check(torch.tensor(2))
    assert "keep_together=['a.b']" in str(caught.value)
    check(torch.tensor(2, device="meta"))
    with values_made_up():
        check(torch.tensor(2))


READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "one_hot": lambda y: functional.one_hot(y).sum(1),
    "arange": lambda y: torch.arange(int(y.max()) + 1)[: y.max()].expand(len(y), -1),
    "slice": lambda y: y[:, : y.max()],
    "contains": lambda y: y * 2 if 3 in y else y,
    "assert": lambda y: (torch._assert((y < 10).all(), "classes"), y)[1],
    "list": lambda y: y * (y >= 0).sum(1).tolist()[0],
    "extent": lambda y: y * 2 if (y >= 0).sum().item() == y.shape[0] * y.shape[1] else y,
}


class Reading(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(1, 2), READINGS[name]

    def forward(self, y: Tensor) -> Tensor:
        return self.linear(self.read(y).float().sum(1, keepdim=True))


@pytest.mark.parametrize("name", READINGS)
def test_what_reads_values_on_the_way_is_traced(name: str) -> None:
    y = torch.tensor([[0, 3, 1], [3, 2, 2], [1, 3, 0], [3, 1, 1]])
    model = Reading(name)
    sequence = trace(model, y)
    assert sequence.sample.decisions
    assert not sequence.sample.called_as_is
    of = Case(model, y, functional.cross_entropy, torch.tensor([0, 1, 1, 0]))
    assert difference(run(sequence, of), eager(sequence, of)) <= 1e-5
    other = Case(model, torch.tensor([[-1, 12, 1]] * 4), of.loss_fn, of.target)
    # What depends on inputs alone is computed before the layers: there one_hot itself says that a class is unknown.
    error, message = (RuntimeError, "Class values") if name == "one_hot" else (ExecutionError, r"decisions\.py:\d+ ")
    with pytest.raises(error, match=message):
        run(sequence, other)


def test_measuring_looks_at_values_and_lets_them_pass() -> None:
    """They are made up, so the sample's branch is not theirs."""
    model, x, *_ = branching("truth")
    sequence = trace(model, x * 1e4)
    assert [decision.answer for decision in sequence.sample.decisions] == [True]
    measured = profile(
        sequence,
        1,
        loss_fn=functional.cross_entropy,
        target=torch.zeros(8, dtype=torch.int64),
        batch_size=8,
        micro_batch_sizes=[2],
        time_budget_s=0.01,
        cache=False,
        links=False,
        progress=False,
    )
    assert measured.sample == sequence.sample
