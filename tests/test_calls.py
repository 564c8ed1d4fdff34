"""Calls that do not fit a public function are refused by `PlanError`, with the name that is nearest."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import ArgumentError, Cluster, Plan, PlanError, autoplan, plan_from_profile, what_if
from profiler import profile, trace


def public() -> Iterator[Callable[..., Any]]:
    """What the packages offer by name, but for errors and records, whose fields are checked otherwise."""
    for package in map(importlib.import_module, ("planner", "profiler", "executor")):
        for name in package.__all__:
            held = getattr(package, name)
            if not inspect.isclass(held) or held is Pipeline:
                yield held


@pytest.mark.parametrize(
    "function",
    [*public(), save_checkpoint, load_checkpoint, Cluster.of, Plan.load],
    ids=lambda function: function.__qualname__,
)
def test_a_strange_keyword_is_refused_by_every_public_function(function: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{function.__qualname__} takes no argument 'qqq'; it takes "):
        function(qqq=1)
    with pytest.raises(ArgumentError, match=f"{function.__qualname__}: .*argument"):
        function(*range(40))


@pytest.mark.parametrize(
    ("function", "args", "keywords", "message"),
    [
        (Pipeline, (None, None), {"loss": 1}, "Pipeline takes no argument 'loss'; did you mean loss_fn$"),
        (launch, (print, None), {"timeout": 1}, "launch takes no argument 'timeout'; did you mean timeout_s$"),
        (launch, (print,), {}, "launch: missing a required argument: 'plan'; it takes fn, plan, args, timeout_s$"),
        (autoplan, (None, None), {"micro_batch": 4}, "takes no argument 'micro_batch'; did you mean micro_batches$"),
        (autoplan, (None, None), {"los_fn": 4}, "autoplan takes no argument 'los_fn'; did you mean loss_fn$"),
        (plan_from_profile, (None, 2), {"batchsize": 4}, "no argument 'batchsize'; did you mean batch_size$"),
        (what_if, (None, 2, {}), {"batch_sizes": [4]}, "no argument 'batch_sizes'; did you mean batch_size$"),
        (trace, (None, None), {"batch_dim": {}}, "trace takes no argument 'batch_dim'; did you mean batch_dims$"),
        (profile, (None,), {"micro_batches": [4]}, "no argument 'micro_batches'; did you mean micro_batch_sizes$"),
        (Cluster.of, ("8xA100",), {"links": "ndr"}, "Cluster.of takes no argument 'links'; did you mean link$"),
        (Plan.load, (), {}, "Plan.load: missing a required argument: 'path'; it takes path$"),
    ],
)
def test_the_nearest_name_is_told(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], message: str
) -> None:
    """`Pipeline(model, plan, loss=...)` ended with a TypeError, which a caller of PlanError does not expect."""
    with pytest.raises(PlanError, match=message):
        function(*args, **keywords)


def test_a_function_keeps_its_signature_and_its_words() -> None:
    assert list(inspect.signature(launch).parameters) == ["fn", "plan", "args", "timeout_s"]
    assert (launch.__doc__ or "").startswith("Call `fn(plan, *args)`")
    assert "loss_fn" in inspect.signature(Pipeline).parameters
