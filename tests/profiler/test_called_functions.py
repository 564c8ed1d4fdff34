"""Functions that cannot be traced, called as they are: the smallest thing that stands in the way need not be a module.

Of 54 refused models of transformers 23 were refused for one function: a loss whose targets have the lengths that data
say (CTC), a matching of boxes by scipy (DETR), a mask that numpy draws (wav2vec 2.0 and its kin).
"""

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from executor import Pipeline
from planner import Plan
from profiler import ExecutionError, LayerSequence, NotTraceableError, trace
from profiler.observe.named_functions import function_named
from profiler.observe.random_states import python_and_numpy_states
from tests.coverage.fidelity import eager_difference, run, same_bits, some_cuts
from tests.coverage.model_list import Case
from tests.executor.conftest import _plan as plan_for

CLOSE = 1e-5
HERE = f"{__name__}:"


class Settings:
    """A configuration, as models hand theirs to functions."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.calls = 0


def chosen(
    scores: Tensor, labels: Tensor, settings: Settings, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss over as many elements as data say, matched outside of torch."""
    picked = scores[labels > 0]
    order = torch.tensor(np.argsort(picked.detach().numpy()), device=device)
    weights = torch.linspace(1, 2, len(picked), device=device)
    return settings.scale * (picked[order] * weights).sum() / len(labels), {"picked": picked.sum().detach()}


def drawn(shape: tuple[int, int], share: float) -> np.ndarray[Any, Any]:
    """A mask of numpy's."""
    count = int(share * shape[1] + np.random.rand(1).item())
    mask = np.zeros(shape, dtype=bool)
    for row in mask:
        row[np.random.choice(shape[1], count, replace=False)] = True
    return mask


def counted(x: Tensor, settings: Settings) -> Tensor:
    """Changes what it is given."""
    settings.calls += 1
    return x * int(x.detach().numpy().sum() < 1e9)


def written(x: Tensor, limit: float) -> Tensor:
    """Writes what it is given, if that is large."""
    if x.detach().abs().max().numpy() > limit:
        x.mul_(0.5)
    return x + 1


def halved(x: Tensor, module: nn.Module) -> Tensor:
    """Takes a module, so it cannot be called alone."""
    return module(x) if float(x.detach().sum().numpy()) > 1e9 else x / 2


FOREIGN = nn.Parameter(torch.ones(8))


def reading(x: Tensor) -> Tensor:
    """Computes with a parameter that nobody hands it."""
    return x * FOREIGN if float(x.detach().sum().numpy()) < 1e9 else x


class Reading(nn.Module):
    """The same as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return reading(x) if float(x.detach().sum().numpy()) < 1e9 else x


class Body(nn.Module):
    """Layers before and after a function that is called in the midst of the model's own forward pass."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.between = SimpleNamespace(call=between)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between.call(self, self.first(x)))


class OwnLoss(nn.Module):
    """Returns its loss, computed by a function that it comes by in one of several ways."""

    def __init__(self, loss: Callable[..., Any] = chosen) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.settings = Settings()
        self.losses = {"own": loss}

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        scores = self.body(x).squeeze(-1)
        loss, more = self.losses["own"](scores, labels, settings=self.settings, device=scores.device)
        return {"loss": loss, "more": more, "scores": scores}


def masked(model: nn.Module, x: Tensor) -> Tensor:
    mask = torch.tensor(drawn((x.shape[0], x.shape[1]), 0.3), device=x.device, dtype=torch.bool)
    return x.masked_fill(mask, 0.0)


def with_loss(loss: Callable[..., Any] = chosen) -> Case:
    torch.manual_seed(0)
    labels = torch.tensor([1, 0, 1, 1, 0, 1])
    return Case(OwnLoss(loss), (torch.randn(6, 6), labels), None, None)


def with_body(between: Callable[[nn.Module, Tensor], Tensor]) -> Case:
    torch.manual_seed(0)
    return Case(Body(between), torch.randn(6, 6), functional.cross_entropy, torch.randint(3, (6,)))


def checked(case: Case, function: str) -> LayerSequence:
    """The layers, whose only part that is called as it is is that function; they compute what the model does."""
    code = function_named(HERE + function).__code__  # type: ignore[union-attr]
    sequence = trace(case.model, case.sample)
    assert sequence.sample.called_as_is == (HERE + function,)
    assert function_named(HERE + function).__code__ is code, "the function is the user's again"  # type: ignore[union-attr]
    sample, target = pytree.tree_map_only(Tensor, lambda tensor: tensor[:1], (case.sample, case.target))
    for part in (case, Case(case.model, sample, case.loss_fn, target)):
        assert eager_difference(sequence, part) <= CLOSE
    whole = run(sequence, case, [])
    for cuts in some_cuts(sequence):
        assert same_bits(run(sequence, case, cuts), whole)
    return sequence


WAYS: list[Callable[..., Any]] = [
    chosen,
    functools.partial(chosen),
    lambda *args, default=chosen, **kwargs: default(*args, **kwargs),
]


@pytest.mark.parametrize("loss", WAYS, ids=["name", "partial", "default"])
def test_a_loss_of_as_many_elements_as_data_say(loss: Callable[..., Any]) -> None:
    sequence = checked(with_loss(loss), "chosen")
    assert "chosen" in sequence.sample.means


def test_numbers_that_a_function_draws_are_the_same_wherever_it_runs() -> None:
    case = with_body(masked)
    sequence = checked(case, "drawn")
    x, y = case.sample, case.target
    found = []
    for cuts, recompute in (([], False), ([len(sequence) // 2], False), ([1, len(sequence) - 1], True)):
        plan = plan_for(sequence, cuts, batch_size=6, micro_batches=3, recompute=recompute)
        pipe = Pipeline(case.model, plan, loss_fn=case.loss_fn, seed=7)
        before = python_and_numpy_states()
        losses = [pipe.step(x, target=y) for _ in range(2)]
        assert python_and_numpy_states() == before, "the caller's numbers are not used up"
        found.append((losses, [p.grad.clone() for p in case.model.parameters() if p.grad is not None]))
        case.model.zero_grad()
    assert found[0][0][0] != found[0][0][1], "each step draws others"
    for losses, gradients in found[1:]:
        assert losses == found[0][0]
        assert all(map(torch.equal, gradients, found[0][1]))


def test_it_costs_what_a_rehearsal_has_seen() -> None:
    """A call that takes numbers alone has no tensor to tell that nothing can be computed."""
    case = with_body(masked)
    sequence = trace(case.model, case.sample)
    called = [layer for layer in sequence.layers if any("called_as_is" in name for name in layer.operations)]
    assert [layer.draws for layer in called] == [1]
    assert called[0].flops < sum(layer.flops for layer in sequence.layers)


def test_what_changes_an_argument_is_refused() -> None:
    settings = Settings()
    with pytest.raises(NotTraceableError, match="numpy"):
        trace(with_body(lambda model, x: counted(x, settings)).model, torch.randn(6, 6))


def test_what_comes_to_write_an_argument_ends_the_step() -> None:
    case = with_body(lambda model, x: written(x, 100.0))
    plan = plan_for(trace(case.model, case.sample), [], batch_size=6, micro_batches=3)
    pipe = Pipeline(case.model, plan, loss_fn=case.loss_fn, compare_first_step=False)
    pipe.step(case.sample, target=case.target)
    with torch.no_grad():
        case.model.get_parameter("first.2.weight").mul_(1e4)
    with pytest.raises(ExecutionError, match=r"function '.*:written'.* writes one of its arguments"):
        pipe.step(case.sample, target=case.target)


def test_a_function_that_takes_a_module_is_not_called_alone() -> None:
    with pytest.raises(NotTraceableError):
        trace(with_body(lambda model, x: halved(x, model.get_submodule("first"))).model, torch.randn(6, 6))


def test_a_parameter_that_is_not_handed_over_is_refused() -> None:
    """In a layer of its own the call would use the parameter that its process happens to have, and never train it."""
    inside = Reading()
    for between in (lambda model, x: reading(x), lambda model, x: model.get_submodule("inside")(x)):
        case = with_body(between)
        case.model.register_parameter("foreign", FOREIGN)
        case.model.add_module("inside", inside)
        with pytest.raises(NotTraceableError, match="numpy"):
            trace(case.model, case.sample)
    with pytest.raises(
        NotTraceableError, match=r"module .inside. .* reads '(foreign|a parameter)', which is not its own"
    ):
        trace(case.model, case.sample, keep_together=["inside"])


def test_a_plan_names_functions_that_are_there_and_loads_none(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_loss()
    plan = plan_for(trace(case.model, case.sample), [], batch_size=6, micro_batches=3)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Pipeline(case.model, Plan.load(path)).step(*case.sample) == Pipeline(case.model, plan).step(*case.sample)
    (tmp_path / "stranger.py").write_text("raise SystemExit('loaded')")
    monkeypatch.syspath_prepend(str(tmp_path))
    path.write_text(path.read_text().replace(HERE + "chosen", "stranger:chosen"))
    with pytest.raises(NotTraceableError, match=r"function 'stranger:chosen' was called as it is.*is not there now"):
        Pipeline(case.model, Plan.load(path))
    assert "stranger" not in sys.modules
