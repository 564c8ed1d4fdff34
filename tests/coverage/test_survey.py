"""The survey tells faithful models from refused and wrong ones, and makes tiny models of transformers by itself."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.coverage import survey
from tests.coverage.model_list import Case, transformers
from tests.coverage.shrinking import VOCABULARY, WIDTH, small_settings
from tests.coverage.survey import Outcome, tried
from tests.coverage.survey_models import Candidate, hugging_face, mean_square, transformers_models


class Picking(nn.Module):
    """Computes with as many elements as data say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * x[x > 0].mean()


class Untrainable(Picking):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float("nan")


@pytest.mark.parametrize(
    ("make", "outcome", "detail"),
    [
        (lambda: nn.Linear(8, 3), Outcome.FAITHFUL, "export, apart 0 at 4, 0 at 1"),
        (Picking, Outcome.REFUSED, "depends on data"),
        (Untrainable, Outcome.UNTRAINABLE, "the loss is nan"),
    ],
)
def test_outcomes(make: Callable[[], nn.Module], outcome: Outcome, detail: str) -> None:
    row = tried(Candidate("own", "model", lambda: Case(make(), torch.ones(4, 8), mean_square)))
    assert (row.outcome, detail in row.detail) == (outcome, True), row


def test_what_differs_from_the_eager_model_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "eager_difference", lambda *_: 1e-3)
    row = tried(Candidate("own", "model", lambda: Case(nn.Linear(8, 3), torch.ones(4, 8), mean_square)))
    assert row.outcome == Outcome.WRONG
    assert row.detail == "apart 1e-03 at 4, 1e-03 at 1 in float64"


def test_an_error_without_a_line_is_wrong() -> None:
    good = "cannot trace the model: in module 'a', /x/y.py:3 \"if x:\": it branches; do not"
    assert survey.says_where_and_what_to_do(good)
    assert not survey.says_where_and_what_to_do("cannot trace the model: it branches; do not")
    assert not survey.says_where_and_what_to_do(good.rpartition(";")[0])


def test_configurations_are_made_small() -> None:
    settings = small_settings(transformers().LlavaConfig)
    assert settings["text_config"]["vocab_size"] == VOCABULARY
    assert settings["vision_config"]["hidden_size"] == WIDTH
    assert (
        sum(parameter.numel() for parameter in hugging_face("Gemma3ForCausalLM", "text").model.parameters()) < 100_000
    )


def test_no_class_is_surveyed_twice() -> None:
    names = [candidate.name for candidate in transformers_models()]
    assert len(names) > 300
    assert len(set(names)) == len(names)
