"""The survey of libraries tells right from refused, wrong, crashed and slow, and no model ends it."""

import os
import time

import pytest
import torch
from torch import Tensor, nn

from profiler.errors import PlanError
from tests.coverage import library_survey
from tests.coverage.library_parts import MINI_BATCH
from tests.coverage.library_survey import Outcome, candidates, in_process, tried
from tests.coverage.model_list import Case
from tests.coverage.survey_models import Candidate, mean_square


class Picking(nn.Linear):
    """Computes with as many elements as data say."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * x[x > 0].mean()


class Ending(nn.Linear):
    """Trains, but cannot be traced alive."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            os._exit(7)
        return super().forward(x)


class Endless(nn.Linear):
    """Trains, but tracing does not come to an end."""

    def forward(self, x: Tensor) -> Tensor:
        while type(x) is not Tensor:
            time.monotonic()
        return super().forward(x)


def chain(*kinds: type[nn.Module]) -> Candidate:
    """A candidate of these layers in a row."""

    def make() -> Case:
        parts = [kind(4, 4) for kind in kinds]
        model = nn.Sequential(*parts) if len(parts) > 1 else parts[0]
        return Case(model, torch.randn(MINI_BATCH, 4), mean_square, torch.zeros(MINI_BATCH))

    return Candidate("own", "model", make)


def test_a_model_that_trains_alike_is_right() -> None:
    row = tried(chain(nn.Linear, nn.Linear, nn.Linear))
    assert row.outcome == Outcome.RIGHT, row
    assert "3 stages and eager" in row.detail


def test_what_is_apart_and_cannot_run_in_float64_is_wrong_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def differences(_: Candidate, *, double: bool = False) -> dict[str, float]:
        if double:
            raise PlanError("no float64 here")
        return {"layers and eager": 0.1}

    monkeypatch.setattr(library_survey, "differences", differences)
    row = tried(chain(nn.Linear, nn.Linear, nn.Linear))
    assert row.outcome == Outcome.WRONG
    assert "layers and eager: 1e-01 in float32, and none in float64: PlanError: no float64 here" in row.detail


def test_what_cannot_be_traced_is_refused() -> None:
    row = tried(chain(Picking))
    assert (row.outcome, "depends on data" in row.detail) == (Outcome.REFUSED, True), row


def test_what_differs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_survey, "differences", lambda *_, double=False: {"3 stages and eager": 1e-3})
    row = tried(chain(nn.Linear))
    assert (row.outcome, row.detail) == (Outcome.WRONG, "3 stages and eager: 1e-03 in float64")


@pytest.mark.parametrize(
    ("kind", "outcome", "detail"),
    [(Ending, Outcome.CRASHED, "the process ended with 7"), (Endless, Outcome.SLOW, "more than")],
)
def test_no_model_ends_the_survey(
    kind: type[nn.Module], outcome: Outcome, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_survey, "CPU_SECONDS", 1)
    row = in_process(chain(kind))
    assert (row.outcome, detail in row.detail) == (outcome, True), row


def test_the_list_is_as_large_as_it_says() -> None:
    names = [(candidate.library, candidate.name) for candidate in candidates()]
    assert len(set(names)) == len(names) >= 100
    assert len({library for library, _ in names}) >= 20
