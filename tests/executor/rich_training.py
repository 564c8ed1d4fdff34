"""A small training with everything that a checkpoint holds, and what it consists of."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import Plan
from profiler import LayerSequence, trace

X = torch.linspace(-1, 1, 40).reshape(10, 4)
Y = torch.arange(10) % 4


class Rich(nn.Module):
    """One weight in two places, batch normalization, dropout, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(functional.dropout(torch.tanh(self.norm(self.first(x))), 0.3, self.training))
        return self.last(hidden)


class Training:
    """A pipeline with everything that a checkpoint holds."""

    def __init__(self, plan: Plan, *, seed: int = 0) -> None:
        torch.manual_seed(3)
        self.model = Rich()
        self.pipe = Pipeline(self.model, plan, loss_fn=functional.cross_entropy, seed=seed)
        self.choose(torch.optim.AdamW)

    def choose(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        named = list(self.pipe.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [parameter for name, parameter in named if "norm" in name], "lr": 0.01},
            {"params": [parameter for name, parameter in named if "norm" not in name]},
        ]
        self.optimizer = optimizer(groups, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            self.optimizer.zero_grad()
            losses.append(self.pipe.step(X, target=Y).item())
            self.optimizer.step()
            self.scheduler.step()
        return losses

    def save(self, folder: Path) -> None:
        save_checkpoint(folder, self.pipe, self.optimizer, also={"scheduler": self.scheduler})

    def load(self, folder: Path) -> int:
        return load_checkpoint(folder, self.pipe, self.optimizer, also={"scheduler": self.scheduler})

    def state(self) -> dict[str, Any]:
        """Copies of all that training goes on from, by name."""
        found: dict[str, Any] = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        for name, parameter in self.pipe.named_parameters():
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{entry}"] = value.clone()
        for number, group in enumerate(self.optimizer.param_groups):
            found |= {f"group {number} {name}": value for name, value in group.items() if name != "params"}
        found |= {f"scheduler {name}": value for name, value in self.scheduler.state_dict().items()}
        return found | {"step": self.pipe.steps, "seed": self.pipe.seed}

    def spoil(self) -> None:
        """Let nothing be what a checkpoint holds."""
        with torch.no_grad():
            for value in self.pipe.state_dict().values():
                value.add_(1)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.add_(1)
        for group in self.optimizer.param_groups:
            group["lr"] += 1
        self.scheduler.last_epoch += 1
        self.pipe.resume(self.pipe.steps + 1, self.pipe.seed + 1)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two states are equal in every bit."""
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) if isinstance(value, Tensor) else value == second[name]
        for name, value in first.items()
    )


@functools.cache
def sequence(_: str = "") -> LayerSequence:
    return trace(Rich(), X)


def plans_of(plan_for: Callable[..., Plan], **settings: Any) -> dict[int, Plan]:
    """Plans of 1 to 4 stages."""
    layers = len(sequence())
    cuts = {stages: [round(layers * cut / stages) for cut in range(1, stages)] for stages in range(1, 5)}
    return {
        stages: plan_for(sequence(), cut, batch_size=10, micro_batches=4, **settings) for stages, cut in cuts.items()
    }
