"""Experts that the samples of some replicas, or of all, leave out: replicas train them as a plain loop does."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import Plan
from profiler import LayerSequence, trace

WIDTH, BATCH, STEPS = 4, 8, 4
# What tells a gradient that is missing from one of zeros: decay of weights, and counts of steps.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, weight_decay=0.1),
}


class Row(nn.Module):
    """Looks up the bin that the row's last value falls into, with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = nn.Embedding(3, WIDTH, sparse=True)

    def forward(self, row: Tensor) -> Tensor:
        return row * self.bins(torch.bucketize(row.detach()[-1:], torch.tensor([-0.3, 0.3]).double()))[0]


class Experts(nn.Module):
    """Which expert takes a row, its first value decides; it cannot be traced."""

    def __init__(self, kinds: str, shared: nn.Module) -> None:
        super().__init__()
        made: dict[str, Callable[[], nn.Module]] = {"l": lambda: nn.Linear(WIDTH, WIDTH), "s": Row, "t": lambda: shared}
        self.experts = nn.ModuleList(made[kind]() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        chosen = [int(abs(row.detach()[0]) * 4) % len(self.experts) for row in x]
        return torch.stack([self.experts[expert](row) for row, expert in zip(x, chosen, strict=True)])


def model_of(recipe: str) -> nn.Module:
    """`experts "lls tl"`: blocks of linear and sparse experts, and of one that blocks share."""
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    blocks = [nn.Sequential(Experts(kinds, shared), nn.Linear(WIDTH, WIDTH)) for kinds in recipe.split()]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks).double()


def data(step: int) -> tuple[Tensor, Tensor]:
    """Rows that are all alike in some batches, so that they leave out most experts."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=made).double()
    return (x if step % 2 else x[:1] + x / 100), torch.randn(BATCH, WIDTH, generator=made).double()


def sequence(recipe: str) -> LayerSequence:
    return trace(model_of(recipe), data(1)[0])


Trained = tuple[list[float], dict[str, Tensor], list[set[str]]]  # losses, state, and what has a gradient in each step


def trained(model: nn.Module, parameters: list[nn.Parameter], name: str, step: Callable[..., float]) -> Trained:
    """Some steps of the optimizer, every other after two batches."""
    optimizer = OPTIMIZERS[name](parameters)
    losses, reached = [], []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses += [step(*data(2 * number + batch)) for batch in range(1 + number % 2)]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense()  # as optimizers want it, and replicas have it
        reached.append({key for key, parameter in model.named_parameters() if parameter.grad is not None})
        optimizer.step()
    return losses, {key: value.clone() for key, value in model.state_dict().items()}, reached


def piped(plan: Plan, recipe: str, name: str) -> Trained:
    model = model_of(recipe)
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss, compare_first_step=False)
    return trained(model, list(pipe.parameters()), name, lambda x, y: pipe.step(x, target=y).item())


def plain(recipe: str, name: str, parts: int) -> Trained:
    """A loop over micro-batches."""
    model = model_of(recipe)

    def step(x: Tensor, y: Tensor) -> float:
        pairs = zip(x.chunk(parts), y.chunk(parts), strict=True)
        loss = torch.stack([functional.mse_loss(model(part), aims) / parts for part, aims in pairs]).sum()
        loss.backward()
        return loss.item()

    return trained(model, list(model.parameters()), name, step)


def random_recipe(chance: random.Random) -> str:
    return " ".join("".join(chance.choice("lls") for _ in range(chance.randint(2, 4))) for _ in range(2))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("traced_once")
def test_as_a_plain_loop(seed: int, plan_for: Callable[..., Plan]) -> None:
    """Replicas refused a gradient that some of them had and others had not; one replica trained."""
    chance = random.Random(seed)
    recipe, name = random_recipe(chance), [*OPTIMIZERS][seed % 3]
    losses, state, reached = plain(recipe, name, parts=4)
    traced = sequence(recipe)
    for replicas in (1, 2, 4):
        cuts = sorted(chance.sample(range(1, len(traced)), chance.randint(0, 2)))
        plan = plan_for(traced, cuts, batch_size=BATCH, micro_batches=4 // replicas, replicas=replicas)
        found = piped(plan, recipe, name)
        torch.testing.assert_close(found[:2], (losses, state), rtol=1e-9, atol=1e-12)
        assert found[2] == reached
    assert any(len(names) < len(state) for names in reached), "what no sample reaches has no gradient"


@pytest.mark.parametrize(("seed", "shard_optimizer"), [(1, False), (2, True)])
def test_processes_as_one(
    seed: int, shard_optimizer: bool, plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence]
) -> None:
    chance = random.Random(seed)
    recipe, name = random_recipe(chance), [*OPTIMIZERS][seed]
    settings: dict[str, Any] = {"batch_size": BATCH, "micro_batches": 1 + seed % 2, "replicas": 2 + 2 * (seed == 2)}
    traced = inherited(sequence, recipe)
    losses, state, reached = piped(plan_for(traced, **settings), recipe, name)
    parts = launch(piped, plan_for(traced, **settings, shard_optimizer=shard_optimizer), (recipe, name))
    for part in parts:
        assert part[0] == losses
        assert all(torch.equal(value, state[key]) for key, value in part[1].items())
        assert shard_optimizer or part[2] == reached
    assert [set().union(*names) for names in zip(*(part[2] for part in parts), strict=True)] == reached


@pytest.mark.parametrize("recipe", ["ltl ltl", "lllt lllt lllt"])
def test_shared_over_stages(
    recipe: str, plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence]
) -> None:
    """One that no sample had reached got zeros, and its weights decayed."""
    traced, blocks = inherited(sequence, recipe), len(recipe.split())
    cuts = [len(traced) * block // blocks for block in range(1, blocks)]
    shared = f"1.0.experts.{recipe.index('t')}.weight"
    losses, state, reached = plain(recipe, "AdamW", parts=2)
    assert {shared in names for names in reached} == {True, False}
    parts = launch(piped, plan_for(traced, cuts, batch_size=BATCH, micro_batches=2), (recipe, "AdamW"))
    for part in parts:
        torch.testing.assert_close((part[0], part[1][shared]), (losses, state[shared]), rtol=1e-9, atol=1e-12)
        assert [shared in names for names in part[2]] == [shared in names for names in reached]
