"""Replicas that share the optimizer's state train as if each had all of it, in every bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import Plan, autoplan
from profiler import LayerSequence, trace

STEPS, MOST_NORM = 3, 0.5
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


class Words(nn.Module):
    """A tied embedding, a frozen scale, and parameters of unlike sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, 16)
        self.scale = nn.Parameter(torch.ones(16) / 2, requires_grad=False)
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale
        for linear in self.linears:
            x = torch.tanh(linear(x)) + x
        logits: Tensor = self.head(self.norm(x))
        return logits


IDS = torch.randint(20, (12, 6), generator=torch.Generator().manual_seed(4))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def sequence(precision: str = "") -> LayerSequence:
    return trace(Words(), IDS, precision=precision or None)


def steps(pipe: Pipeline, optimizer: torch.optim.Optimizer, count: int = STEPS) -> list[float]:
    """Of two calls each, the second of which adds to the first's gradients."""
    found = []
    for _ in range(count):
        found += [pipe.step(IDS, target=IDS, accumulate=2).item() for _ in range(2)]
        found.append(pipe.clip_grad_norm_(MOST_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    found.append(pipe.evaluate(IDS, target=IDS).item())
    return found


def train(plan: Plan, name: str) -> tuple[list[float], dict[str, Tensor], list[int]]:
    pipe = Pipeline(Words(), plan, loss_fn=loss_fn)
    optimizer = OPTIMIZERS[name](pipe.parameters())
    losses = steps(pipe, optimizer)
    kept = [parameter.nbytes for parameter in pipe.parameters() if optimizer.state.get(parameter)]
    return losses, {key: value.clone() for key, value in pipe.state_dict().items()}, kept


@pytest.mark.parametrize(
    ("name", "precision", "replicas"),
    [("SGD", "", 2), ("AdamW", "bf16-mixed", 2), ("AdamW", "bf16-grads", 3), ("Adagrad", "", 3), ("Adafactor", "", 2)],
)
def test_equal_in_every_bit_to_replicas_that_share_nothing(
    name: str, precision: str, replicas: int, plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence]
) -> None:
    traced = inherited(sequence, precision)
    settings: dict[str, Any] = {"batch_size": 12, "micro_batches": 2, "schedule": "1f1b", "replicas": replicas}
    cuts = [len(traced) // 2] if replicas == 2 else []
    losses, state, kept = train(plan_for(traced, cuts, **settings), name)
    parts = launch(train, plan_for(traced, cuts, **settings, shard_optimizer=True), (name,))
    assert len(parts) == replicas * (1 + len(cuts))
    for part in parts:
        assert part[0] == losses
        assert all(torch.equal(value, state[key]) for key, value in part[1].items())
    assert all(sum(part[2]) < sum(kept) / 1.2 for part in parts), "each keeps the state of a part"
    assert sum(sum(part[2]) for part in parts) >= sum(kept), "all keep all of it together"


def few_parameters() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid())


def by_groups(plan: Plan) -> list[float]:
    """Groups by name, empty in a process whose stages have no parameters."""
    pipe = Pipeline(few_parameters(), plan, loss_fn=functional.mse_loss)
    named = list(pipe.named_parameters())
    groups = [[one for name, one in named if name.endswith(kind)] for kind in ("bias", "weight")]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    return some_steps(pipe, optimizer, 3)


def frozen_later(plan: Plan) -> list[float]:
    """All parameters of the first stage are frozen in the midst of training."""
    pipe = Pipeline(few_parameters(), plan, loss_fn=functional.mse_loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = some_steps(pipe, optimizer, 2)
    for name, parameter in pipe.named_parameters():
        parameter.requires_grad_(not name.startswith("0."))
    return losses + some_steps(pipe, optimizer, 20)


def some_steps(pipe: Pipeline, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for x, y in pipe.batches([(torch.ones(8, 4), torch.zeros(8, 4))] * count):
        losses.append(pipe.step(x, target=y).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("script", "cut"), [(by_groups, 4), (frozen_later, 2)])
def test_all_exchange_whatever_their_own_parameters_are(
    script: Callable[[Plan], list[float]], cut: int, plan_for: Callable[..., Plan]
) -> None:
    """Those that had none to step, or none any more, left the exchange out, and the ranks waited for each other."""
    traced = trace(few_parameters(), torch.ones(8, 4))
    settings: dict[str, Any] = {"batch_size": 8, "micro_batches": 2, "replicas": 2}
    expected = script(plan_for(traced, [cut], **settings))
    assert launch(script, plan_for(traced, [cut], **settings, shard_optimizer=True)) == [expected] * 4


def saved(plan: Plan, folder: Path) -> list[float]:
    pipe = Pipeline(Words(), plan, loss_fn=loss_fn)
    optimizer = OPTIMIZERS["AdamW"](pipe.parameters())
    steps(pipe, optimizer, 1)
    save_checkpoint(folder, pipe, optimizer)
    return steps(pipe, optimizer, 1)


def loaded(plan: Plan, folder: Path) -> tuple[list[float], int]:
    pipe = Pipeline(Words(), plan, loss_fn=loss_fn)
    optimizer = OPTIMIZERS["AdamW"](pipe.parameters())
    load_checkpoint(folder, pipe, optimizer)
    kept = len(optimizer.state)
    return steps(pipe, optimizer, 1), kept


def test_checkpoints_hold_all_state_for_any_stages_with_shares_and_without(
    plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence], tmp_path: Path
) -> None:
    traced = inherited(sequence, "bf16-mixed")
    settings: dict[str, Any] = {"batch_size": 12, "micro_batches": 2, "schedule": "1f1b", "replicas": 2}
    shared = plan_for(traced, [len(traced) // 2], **settings, shard_optimizer=True)
    (expected, *_) = launch(saved, shared, (tmp_path,))
    alone, everything = loaded(plan_for(traced, [3], **settings), tmp_path)
    assert alone == expected
    parts = launch(loaded, plan_for(traced, [], **settings, shard_optimizer=True), (tmp_path,))
    assert [part[0] for part in parts] == [expected] * 2
    assert sum(part[1] for part in parts) == everything
    assert all(0 < part[1] < everything for part in parts)


def state_bytes(plan: Plan) -> int:
    """What this process holds for the optimizer: master weights and state."""
    pipe = Pipeline(Words(), plan, loss_fn=loss_fn)
    optimizer = OPTIMIZERS["AdamW"](pipe.parameters())
    steps(pipe, optimizer, 1)
    kept = [value.nbytes for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    return sum(kept) + sum(held.nbytes for held in pipe.parameters() if held.requires_grad)


@pytest.mark.usefixtures("nothing_beside")
def test_each_process_keeps_what_the_plan_says() -> None:
    plan = autoplan(
        Words(), IDS, 4, loss_fn=loss_fn, target=IDS, precision="bf16-mixed", optimizer="AdamW", replicas=2, stages=2,
        micro_batches_per_stage=1, shard_optimizer=True, time_budget_s=0.0, cache=False, progress=False,
    )  # fmt: skip
    found = launch(state_bytes, plan)
    by_stage = [[found[replica * 2 + stage] for replica in range(2)] for stage in range(2)]
    assert [max(own) for own in by_stage] == [stage.memory.optimizer for stage in plan.stages]


def test_one_process_steps_all_parameters(plan_for: Callable[..., Plan], traced_once: None) -> None:
    plan = plan_for(sequence(), [3], batch_size=12, micro_batches=2, replicas=2, shard_optimizer=True)
    pipe = Pipeline(Words(), plan, loss_fn=loss_fn)
    pipe.step(IDS, target=IDS)
    assert all(held.grad is not None for held in pipe.parameters() if held.requires_grad)
    assert dict(pipe.stepped_parameters()).keys() == dict(pipe.named_parameters()).keys()
