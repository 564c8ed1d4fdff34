"""Random recurrent networks, in any form that torch has, by random plans: as the model, and alike for any cut."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.executor.trials_of_models import check
from tests.torch_here import HAS_LSTM_IN_BFLOAT16, needs_lstm_in_bfloat16

WIDTH, LENGTH = 4, 3


@dataclass(frozen=True)
class Form:
    """How a network is made and used."""

    kind: str
    settings: dict[str, Any]
    uses: int  # one after the other
    passes_state: bool  # of one use to the next
    learned: bool  # the state that it begins with
    step_by_step: bool
    reads_state: bool
    region: dict[str, Any] | None  # of autocast

    @classmethod
    def drawn(cls, chance: random.Random) -> Form:
        """Any."""
        kind = chance.choice(("LSTM", "GRU", "RNN"))
        settings: dict[str, Any] = {
            "num_layers": chance.choice((1, 1, 2)),
            "batch_first": chance.random() < 0.5,
            "bidirectional": chance.random() < 0.4,
            "bias": chance.random() < 0.8,
        }
        if kind == "LSTM":
            settings["proj_size"] = chance.choice((0, 2))
        if kind == "RNN":
            settings["nonlinearity"] = chance.choice(("tanh", "relu"))
        region = {"enabled": chance.random() < 0.7, "cache_enabled": chance.choice((None, True, False))}
        return cls(
            kind,
            settings,
            uses=chance.choice((1, 2, 3)),
            passes_state=chance.random() < 0.5,
            learned=chance.random() < 0.5,
            step_by_step=chance.random() < 0.25,
            reads_state=chance.random() < 0.5,
            region=region if chance.random() < 0.5 else None,
        )


class Recurrent(nn.Module):
    """A network between linear layers."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.form = form
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.network = getattr(nn, form.kind)(WIDTH, 3, **form.settings)
        ways = 2 if form.settings["bidirectional"] else 1
        wide = form.settings.get("proj_size") or 3
        self.back = nn.Linear(wide * ways, WIDTH)
        self.leave = nn.Linear(WIDTH, 2)
        self.of_state = nn.Linear(wide, 2)
        self.hidden = nn.Parameter(torch.randn(form.settings["num_layers"] * ways, 1, wide) * 0.3)
        self.cell = nn.Parameter(torch.randn(form.settings["num_layers"] * ways, 1, 3) * 0.3)

    def state(self, samples: int) -> Any:
        """What the network begins with."""
        if not self.form.learned:
            return None
        hidden, cell = (held.expand(-1, samples, -1).contiguous() for held in (self.hidden, self.cell))
        return (hidden, cell) if self.form.kind == "LSTM" else hidden

    def used(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """What the network returns, for a sequence in one piece or step by step."""
        if not self.form.step_by_step:
            found, state = self.network(x, state)
            return found, state
        dim, parts = (1 if self.form.settings["batch_first"] else 0), []
        for step in x.unbind(dim):
            part, state = self.network(step.unsqueeze(dim), state)
            parts.append(part)
        return torch.cat(parts, dim), state

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        if not self.form.settings["batch_first"]:
            x = x.transpose(0, 1)
        samples = x.shape[0 if self.form.settings["batch_first"] else 1]
        first = state = self.state(samples)
        region = self.form.region
        with contextlib.nullcontext() if region is None else torch.autocast("cpu", torch.bfloat16, **region):
            for _ in range(self.form.uses):
                found, after = self.used(x, state)
                x = torch.tanh(self.back(found)) + x
                state = after if self.form.passes_state else first
            result = self.leave(x.mean(1 if self.form.settings["batch_first"] else 0))
            if self.form.reads_state:
                hidden = after[0] if self.form.kind == "LSTM" else after
                result = result + self.of_state(hidden[-1])
        return result.float()


def trained(seed: int) -> None:
    chance = random.Random(seed)
    form = Form.drawn(chance)
    lower = form.region is not None and form.region["enabled"]
    if lower and form.kind == "LSTM" and not HAS_LSTM_IN_BFLOAT16:
        form, lower = replace(form, region=None), False
    x = torch.cos(torch.arange(6 * LENGTH * WIDTH) * 1.7).reshape(6, LENGTH, WIDTH)
    check(lambda: Recurrent(form), x, torch.linspace(-1, 1, 12).reshape(6, 2), chance, within=6e-2 if lower else 2e-5)


@settings(derandomize=True, deadline=None, max_examples=2)
@given(st.integers(0, 2**32))
def test_some(seed: int) -> None:
    trained(seed)


class Converted(nn.Module):
    """Its LSTM computes in bfloat16, which the region itself makes float32 of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.leave = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.network(x)[0].float()
        return self.leave(x.mean(1))


@needs_lstm_in_bfloat16
def test_what_a_region_converts_itself() -> None:
    """It was float32 in the export, which checks that: "gives a result whose shape or value depends on data"."""
    x = torch.cos(torch.arange(6 * LENGTH * WIDTH) * 1.7).reshape(6, LENGTH, WIDTH)
    check(Converted, x, torch.linspace(-1, 1, 12).reshape(6, 2), random.Random(0), within=6e-2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_more(seed: int) -> None:
    trained(seed)
