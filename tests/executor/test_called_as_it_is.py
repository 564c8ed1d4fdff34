"""Modules that are called as they are train as in a plain loop, also where their stage is recomputed."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from planner import Plan
from profiler import trace
from tests.executor.adversary import Case, Subject, by_hand, random_case, wrong
from tests.models.random_called import random_ways
from tests.models.random_models import random_recipe

WIDTH, BATCH, COUNT = 6, 8, 4


class Force(nn.Module):
    """The gradient of an energy by the positions, as force fields have it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            positions = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(positions).sum(), positions, create_graph=True)[0]


class Before(nn.Module):
    """It puts another tensor in the place of a buffer that its result was multiplied with."""

    before: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("before", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert float(x.detach().sum()) < 1e9
        result = x * self.scale * self.before
        self.before = x.detach().mean(0)
        return result


def around(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Tanh(), nn.Linear(WIDTH, 2))


def data(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=made), torch.randn(BATCH, 2, generator=made)


def trained(model: nn.Module, step: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Losses of three steps, and the state after them."""
    losses = []
    for number in range(3):
        losses.append(step(*data(number)).detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
    return [*losses, *(value.detach().clone() for value in model.state_dict().values())]


@pytest.mark.parametrize("kind", [Force, Before])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_as_a_plain_loop(kind: type[nn.Module], recompute: bool, schedule: str, plan_for: Callable[..., Plan]) -> None:
    """One raised an error where it was recomputed, the other in every backward pass."""
    plain = around(kind)

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = [
            functional.mse_loss(plain(one), other) for one, other in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True)
        ]
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss

    expected = trained(plain, step)
    model = around(kind)
    sequence = trace(model, data(0)[0][: BATCH // COUNT], keep_together=["1"])
    plan = plan_for(
        sequence, [len(sequence) // 2], batch_size=BATCH, micro_batches=COUNT, recompute=recompute, schedule=schedule
    )
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    found = trained(model, lambda x, y: pipe.step(x, target=y))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, check_dtype=False)


@settings(derandomize=True, deadline=None, max_examples=4)
@given(st.integers(0, 2**32))
def test_random_ones_train_as_they_would_alone(seed: int) -> None:
    chance = random.Random(seed)
    recipe, within = random_recipe(chance, chance.randint(3, 9)), random_ways(chance)
    if not _trains(Case(str(recipe), batch_size=4, micro_batches=2, within=within)):
        return
    subject = Subject(str(recipe), within)
    for _ in range(2):
        case = random_case(recipe, len(subject.sequence), chance, within=within)
        assert wrong(case, subject) == {}, case


def _trains(case: Case) -> bool:
    """Not all recipes do within another model, where their input has a gradient."""
    try:
        by_hand(case)
    except RuntimeError:
        return False
    return True


def test_what_the_loss_does_not_read_is_not_gone_back_through() -> None:
    """What a module returned was one node of the graph: where one value was read, all of it ran backward."""
    case = Case(
        "hyper 0 p0 p1 p2; attention 2; relu_ 2; view 4 24 | returns 5,3 | loss 5",
        batch_size=4,
        micro_batches=2,
        within="looks",
    )
    assert wrong(case, Subject(case.recipe, case.within)) == {}
