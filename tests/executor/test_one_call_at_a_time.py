"""A call of a pipeline while another one is under way, a copy of a pipeline, and data that are none: what each says."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.checkpoint import save_checkpoint
from planner import ArgumentError, Plan
from profiler import trace

X = torch.linspace(-1, 1, 8 * 4).reshape(8, 4)
Y = torch.linspace(1, -1, 8 * 4).reshape(8, 4)

pytestmark = pytest.mark.usefixtures("traced_once")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.fixture
def plan(plan_for: Callable[..., Plan]) -> Plan:
    return plan_for(trace(small(), X), [1], batch_size=8, micro_batches=4)


def pipe_of(plan: Plan, loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.mse_loss) -> Pipeline:
    return Pipeline(small(), plan, loss_fn=loss_fn)


INSIDE: dict[str, Callable[[Pipeline], Any]] = {
    "step": lambda pipe: pipe.step(X, target=Y),
    "evaluate": lambda pipe: pipe.evaluate(X, target=Y),
    "predict": lambda pipe: pipe.predict(X),
    "clip_grad_norm_": lambda pipe: pipe.clip_grad_norm_(1.0),
    "save_checkpoint": lambda pipe: save_checkpoint("nowhere", pipe),
}


def calls_inside(plan: Plan, name: str) -> Any:
    """A step whose loss function calls the pipeline, too."""
    pipes: list[Pipeline] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        for pipe in pipes:
            INSIDE[name](pipe)
        return functional.mse_loss(output, target)

    pipe = pipe_of(plan, loss_fn)
    pipes.append(pipe)
    return pipe.step(X, target=Y)


@pytest.mark.parametrize("name", INSIDE)
def test_a_call_inside_of_another_is_refused(plan: Plan, name: str) -> None:
    """`evaluate` in a loss function forgot the step that was under way, which ended with "KeyError: 0"."""
    told = (
        rf"^{name} was called inside of another call of the same pipeline \(step 0, stage 1, micro-batch 0, .* before"
    )
    with pytest.raises(ArgumentError, match=told):
        calls_inside(plan, name)


def test_so_it_is_in_several_processes(plan: Plan) -> None:
    told = r"^rank 1 of 2 failed: evaluate was called inside of another call of the same pipeline \(step 0, stage 1"
    with pytest.raises(ArgumentError, match=told):
        launch(calls_inside, plan, ("evaluate",))


def test_a_hook_may_not_call_it_either(plan: Plan) -> None:
    pipe = Pipeline(small(), plan, loss_fn=functional.mse_loss, compare_first_step=False)
    for parameter in pipe.parameters():
        parameter.register_hook(lambda _: pipe.evaluate(X, target=Y) and None)
    with pytest.raises(ArgumentError, match="evaluate was called inside of another call"):
        pipe.step(X, target=Y)


def test_after_what_was_refused_training_goes_on(plan: Plan) -> None:
    once = [True]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if once and pipes:
            once.clear()
            pipes[0].evaluate(X, target=Y)
        return functional.mse_loss(output, target)

    pipes = [pipe := Pipeline(small(), plan, loss_fn=loss_fn, compare_first_step=False)]
    with pytest.raises(ArgumentError, match="inside of another call"):
        pipe.step(X, target=Y)
    assert torch.equal(pipe.step(X, target=Y), pipe_of(plan).step(X, target=Y))


def test_a_loader_may_ask_a_pipeline_in_one_process(plan: Plan) -> None:
    """Nothing is under way while a batch is read, and what it is asked for is there."""
    pipe = pipe_of(plan)
    losses = [pipe.step(x, target=y) for x, y in pipe.batches((X, pipe.predict(X).detach()) for _ in range(2))]
    assert losses == [0.0, 0.0]


def test_of_two_threads_one_is_refused(plan: Plan) -> None:
    """Each took the other's micro-batches, and both trained wrong or ended somewhere."""
    inside, refused = threading.Event(), threading.Event()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        inside.set()
        assert refused.wait(60)
        return functional.mse_loss(output, target)

    pipe, found = pipe_of(plan, loss_fn), []
    training = threading.Thread(target=lambda: found.append(pipe.step(X, target=Y)))
    training.start()
    assert inside.wait(60)
    try:
        with pytest.raises(
            ArgumentError, match=r"^step was called in a second thread, while .* in one thread, or hold"
        ):
            pipe.step(X, target=Y)
    finally:
        refused.set()
        training.join()
    assert torch.equal(found[0], pipe_of(plan).step(X, target=Y))


COPIES: dict[str, Callable[[Pipeline], Any]] = {
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": lambda pipe: torch.save(pipe, io.BytesIO()),
    "launch": lambda pipe: launch(print, pipe.plan, (pipe,)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_pipeline_says_that_it_cannot_be_copied(plan: Plan, name: str) -> None:
    """It said "cannot pickle 'mmap.mmap' object", and a shallow copy trained the tensors of the other."""
    with pytest.raises(ArgumentError, match=r"a Pipeline cannot be pickled or copied; construct another .* save_check"):
        COPIES[name](pipe_of(plan))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            X.numpy(),
            "step was given ndarray and no tensor; pass what the model is called with, made by torch.as_tensor",
        ),
        (X.tolist(), "step was given float and no tensor"),
        ("x", "step was given str and no tensor"),
        (None, "step was given no data; pass what the model is called with"),
        ([X], "argument 0 holds a list of 1; the model was traced with a tensor or constant"),
    ],
)
def test_what_is_no_tensor_is_named(plan: Plan, given: Any, told: str) -> None:
    """Lists of numbers and arrays of numpy were "no data"."""
    for call in (pipe_of(plan).step, partial(pipe_of(plan).step, target=Y)):
        with pytest.raises(ArgumentError, match=told):
            call(given)
