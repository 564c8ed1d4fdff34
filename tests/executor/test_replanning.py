"""A step that takes longer than its plan doubts is said, once, and nothing is changed."""

import itertools
import signal
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import Pipeline, launch
from executor.measure import replanning
from executor.measure.replanning import FIRST_STEP, SHORTEST_S, Replanning
from planner import ArgumentError, Plan, autoplan, plan_from_profile
from planner.plan.prediction import Doubt
from planner.search_watch import watched
from profiler import trace

X = torch.randn(8, 4)
TIMEOUT_S = 2.0
DOUBT = Doubt(step_less=0.15, step_more=0.15, memory_less=0.05, memory_more=0.0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def planned() -> Plan:
    return autoplan(
        model(), X, 1, loss_fn=mean, target=X[:, :2], time_budget_s=0.0, cache=False, progress=False, stages=1
    )


def said(plan: Plan, **settings: Any) -> list[str]:
    """What is said in some steps more than it takes."""
    replanning.SHORTEST_S = 0.0
    pipe = Pipeline(model(), plan, loss_fn=mean, **settings)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(FIRST_STEP + 3):
            pipe.step(X, target=X[:, :2])
    return [str(one.message) for one in heard if "were predicted" in str(one.message)]


def train_beside_a_long_search(plan: Plan) -> int:
    """Steps of a training whose rank 0 plans again for longer than the others wait for a call."""
    Replanning.report = lambda *_: time.sleep(3 * TIMEOUT_S) or "planned"  # type: ignore[method-assign,func-returns-value]
    pipe = Pipeline(model(), plan, loss_fn=mean, timeout_s=TIMEOUT_S)
    for _ in range(FIRST_STEP + 3):
        pipe.step(X, target=X[:, :2])
    return pipe.steps


@pytest.fixture(autouse=True)
def steps_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanning, "SHORTEST_S", 0.0)


@pytest.fixture
def hopeful(plan_for: Callable[..., Plan]) -> Callable[..., Plan]:
    """A plan that predicts a tenth of a microsecond."""

    def make(stages: int, doubt: Doubt | None = DOUBT) -> Plan:
        plan = plan_for(trace(model(), X), list(range(1, stages)), batch_size=8, micro_batches=8)
        quick = {
            "forward_s": 1e-8,
            "backward_s": 1e-8,
            "recompute_s": 0.0,
            "send_forward_s": 0.0,
            "send_backward_s": 0.0,
        }
        return plan.model_copy(
            update={
                "prediction": plan.prediction.model_copy(update={"doubt": doubt}),
                "stages": tuple(
                    stage.model_copy(update={"times": tuple(entry.model_copy(update=quick) for entry in stage.times)})
                    for stage in plan.stages
                ),
            }
        )

    return make


def test_the_others_wait_while_it_is_planned_again(hopeful: Callable[..., Plan]) -> None:
    """Where the search was never compiled it took 17 s, and rank 0 was blamed for them."""
    assert launch(train_beside_a_long_search, hopeful(2)) == [FIRST_STEP + 3] * 2


def test_an_interrupt_ends_the_training_while_it_is_planned_again(
    hopeful: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one that asks for the best plan so far, and the training went on."""

    def refined(*_: object, **__: object) -> str:
        with watched(progress=False):
            signal.raise_signal(signal.SIGINT)
        return "planned"

    known = planned().profile
    monkeypatch.setattr(Plan, "refined", refined)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            said(hopeful(1), replan=known)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_differs_is_said_once(hopeful: Callable[..., Plan]) -> None:
    (text,) = said(hopeful(1))
    assert "times the" in text
    assert "plan.refined(pipe.measured(), profile) says whether another plan is worth a change" in text
    assert not said(hopeful(1), replan=None)


def test_steps_are_compared_where_they_take_long_or_should(
    hopeful: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was said of steps of 2 ms for which 43 ms were predicted."""
    monkeypatch.setattr(replanning, "SHORTEST_S", SHORTEST_S)
    plan = hopeful(1)
    for lasted_s, predicted_s in itertools.product([0.002, 0.015, 0.019, 0.02, 0.021, 0.043], repeat=2):
        monkeypatch.setattr(replanning, "real_timelines", lambda *_, s=lasted_s: [SimpleNamespace(makespan_s=s)])
        monkeypatch.setattr(replanning, "simulate_plan", lambda *_, s=predicted_s, **__: SimpleNamespace(makespan_s=s))
        is_long = lasted_s >= SHORTEST_S or predicted_s >= SHORTEST_S
        is_other = not 1 - DOUBT.step_less <= lasted_s / predicted_s <= 1 + DOUBT.step_more
        assert bool(Replanning(plan, "report").report([])) == (is_long and is_other)


def test_a_plan_that_does_not_say_its_doubt_is_not_compared(hopeful: Callable[..., Plan]) -> None:
    """Ranks of a plan of made-up times printed that warning, next to the one error that they all end with."""
    assert not said(hopeful(1, doubt=None))


def test_processes_meet_and_the_first_says_it(hopeful: Callable[..., Plan]) -> None:
    assert [len(texts) for texts in launch(said, hopeful(2))] == [1, 0]


def test_with_the_profile_it_plans_again() -> None:
    plan = planned()
    known = plan.profile
    assert known is not None
    costs = tuple(cost.model_copy(update={"forward_s": 1e-9, "backward_s": 1e-8}) for cost in known.costs)
    wrong = known.model_copy(update={"costs": costs})
    (text,) = said(plan_from_profile(wrong, [plan.stages[0].device], batch_size=8), replan=wrong)
    assert "a step of this plan takes" in text


def test_another_wish_is_refused(hopeful: Callable[..., Plan]) -> None:
    with pytest.raises(ArgumentError, match="replan is 'always'; pass \"report\", the profile of the plan, or None"):
        Pipeline(model(), hopeful(1), loss_fn=mean, replan="always")  # type: ignore[arg-type]
