"""Random numbers that code of the model's draws in its backward pass do not depend on the plan, as those of forward
passes do not: hooks, custom functions, torch's checkpoints, operations of somebody's and loss functions.

Gradients differed between K, and between recompute and none, without a word.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from planner.plan.plan import Plan
from profiler import trace
from profiler.errors import ArgumentError, ExecutionError, PlanError
from profiler.observe.drawn_from import drawn_from
from tests.executor.conftest import PlanFor
from tests.executor.hidden_trials import Training, batches, by_plan
from tests.models.hidden_backward import noise
from tests.models.hidden_state import BODIES, OUTSIDE, hiding

NAMES = sorted(name for name, body in BODIES.items() if body.__module__ == "tests.models.hidden_backward")


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def in_every_bit(found: Training, expected: Training) -> bool:
    pairs = list(zip(found.losses, expected.losses, strict=True))
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        pairs.extend((ours[name], theirs[name]) for name in ours)
    return all(torch.equal(one, other) for one, other in pairs)


def refused(names: Sequence[str]) -> bool:
    """Whether one stage is refused."""
    try:
        by_plan(names, batches(1), 1)
    except PlanError:
        return True
    return False


REFUSED = [name for name in NAMES if "of the system" in name or "of what it takes" in name]


def test_they_are_drawn_anew_in_each_step() -> None:
    found = by_plan(["a gradient rounded at random"], [batches(1)[0]] * 2, 2, rate=0.0)
    assert torch.equal(*found.losses)
    assert not torch.equal(*(step["layers.0.weight"] for step in found.gradients))


@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_can_draw_again_is_refused(name: str) -> None:
    assert refused([name])


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=2),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.integers(1, 3),
)
def test_gradients_do_not_depend_on_the_plan(names: list[str], recompute: list[bool], stages: int) -> None:
    try:
        expected = by_plan(names, batches(2), 1, recompute=[False])
    except PlanError:
        return
    assert in_every_bit(by_plan(names, batches(2), stages, recompute=recompute), expected)


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    output = output * torch.rand(())
    output.register_hook(noise)
    return functional.mse_loss(output, target)


def loss_of_pythons_numbers(output: Tensor, target: Tensor) -> Tensor:
    output = output * random.random()
    output.register_hook(lambda gradient: gradient * random.uniform(0.5, 2.0))
    return functional.mse_loss(output, target)


def loss_of_its_own_numbers(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output * OUTSIDE.chance.random(), target)


@pytest.mark.parametrize("loss_fn", [noisy_loss, loss_of_pythons_numbers, loss_of_its_own_numbers])
def test_a_loss_may_draw_too(loss_fn: Callable[..., Tensor]) -> None:
    names = ["a gradient rounded at random"]
    hiding(names)
    state = random.getstate()  # of a model that has just been made
    expected = by_plan(names, batches(2), 1, recompute=[False], loss_fn=loss_fn)
    assert in_every_bit(by_plan(names, batches(2), 2, recompute=[True, True], loss_fn=loss_fn), expected)
    assert random.getstate() == state


def loss_of_the_system(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output * random.SystemRandom().random(), target)


def test_a_loss_of_numbers_of_the_system_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"loss_fn names 'SystemRandom'.*draw from torch"):
        by_plan(["a gradient rounded at random"], batches(1), 1, loss_fn=loss_of_the_system)


def loss_by_a_computed_name(output: Tensor, target: Tensor) -> Tensor:
    package = __import__("ran" + "dom")
    output.register_hook(lambda gradient: gradient * package.uniform(0.5, 2.0))
    return functional.mse_loss(output, target)


def test_a_name_that_code_does_not_show_is_noticed_when_it_draws() -> None:
    assert not drawn_from(loss_by_a_computed_name).generators
    with pytest.raises(ExecutionError, match=r"draws from Python's or numpy's random generator by a name"):
        by_plan(["a gradient rounded at random"], batches(1), 1, loss_fn=loss_by_a_computed_name)


def shrink(held: Tensor) -> None:
    assert held.grad is not None
    held.grad.mul_(torch.rand(()))


def steps_with_hooks(plan: Plan, model: nn.Module, *, after: bool = False) -> list[dict[str, Tensor]]:
    """Gradients of two steps, to which hooks on all parameters add noise."""
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    for parameter in pipe.parameters():
        parameter.register_hook(noise)
        if after:
            parameter.register_post_accumulate_grad_hook(shrink)
    found = []
    for x, y in batches(2):
        pipe.step(x, target=y)
        found.append({name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None})
        for parameter in pipe.parameters():
            parameter.grad = None
    return found


def rows(*, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)]
    if tied:
        parts[2].weight = parts[0].weight
    return nn.Sequential(parts[0], nn.Tanh(), parts[1], nn.Dropout(0.2), parts[2])


@pytest.mark.parametrize("after", [False, True])
def test_hooks_on_parameters_may_draw(plan_for: PlanFor, *, after: bool) -> None:
    """What they drew went on from the last draw of a forward pass, whichever that was."""
    sequence = trace(rows(), batches(1)[0][0], progress=False)
    expected = steps_with_hooks(plan_for(sequence, batch_size=8, micro_batches=4), rows(), after=after)
    assert not torch.equal(expected[0]["0.bias"], expected[1]["0.bias"])
    for cuts, schedule in (([2], "gpipe"), ([1, 3], "gpipe" if after else "zb-h1")):  # what is added up has an order
        plan = plan_for(sequence, cuts, batch_size=8, micro_batches=4, schedule=schedule, recompute=schedule == "gpipe")
        for one, other in zip(steps_with_hooks(plan, rows(), after=after), expected, strict=True):
            for name, gradient in other.items():
                assert torch.allclose(one[name], gradient, rtol=1e-12, atol=0), name
                assert schedule != "gpipe" or torch.equal(one[name], gradient), name


def test_a_hook_that_nobody_would_call_is_refused(plan_for: PlanFor) -> None:
    """Of a tied parameter each layer has a tensor of its own, so its hooks were lost."""
    sequence = trace(rows(tied=True), batches(1)[0][0], progress=False)
    with pytest.raises(ArgumentError, match=r"parameter '\d.weight' has a hook .* between step\(\) and optimizer"):
        steps_with_hooks(plan_for(sequence, [2], batch_size=8, micro_batches=4), rows(tied=True))
