"""Whatever happens in a worker, the caller gets results or one error, and no process is left."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor import Pipeline, launch
from executor.watch import watch
from planner import ArgumentError, ExecutionError, Plan
from profiler import trace
from profiler.machine import ending

X = torch.randn(8, 4)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def make_plan(plan_for: Callable[..., Plan], stages: int = 2) -> Plan:
    sequence = trace(Fragile(), X)
    return plan_for(sequence, list(range(1, stages)), batch_size=8, micro_batches=8)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def test_results_come_in_rank_order(plan_for: Callable[..., Plan]) -> None:
    def place(plan: Plan, offset: int) -> tuple[int, int, int]:  # a closure: it travels by value
        return dist.get_rank() + offset, dist.get_world_size(), torch.get_num_threads()

    assert launch(place, make_plan(plan_for), (10,)) == [(10, 2, 1), (11, 2, 1)]


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def test_workers_draw_alike_as_the_caller_says(plan_for: Callable[..., Plan]) -> None:
    """Each was seeded by itself: with a loader that shuffles, stages got inputs and targets of different samples."""
    torch.manual_seed(7)
    first = launch(lambda _: drawn(), make_plan(plan_for))
    torch.rand(3)  # what the caller draws moves nothing
    assert first[0] == first[1]
    assert launch(lambda _: drawn(), make_plan(plan_for)) == first
    assert first[0][0] == torch.rand((), generator=torch.Generator().manual_seed(7)).item()
    torch.manual_seed(8)
    assert launch(lambda _: drawn(), make_plan(plan_for))[0] != first[0]


def test_an_exception_in_the_loss_names_stage_micro_batch_and_cause(plan_for: Callable[..., Plan]) -> None:
    def bad_loss(output: Tensor, target: Tensor) -> Tensor:
        if target.sum() == 5:
            raise RuntimeError("the label is 5")
        return mean(output, target)

    def train(plan: Plan) -> None:
        pipe = Pipeline(Fragile(), plan, loss_fn=bad_loss)
        pipe.step(X, target=torch.arange(8.0).reshape(8, 1))

    with pytest.raises(ExecutionError, match=r"rank 1 of 2.*stage 1, micro-batch 5, action 1F5.*the label is 5"):
        launch(train, make_plan(plan_for))


def test_a_killed_worker_ends_all_though_its_forks_live(plan_for: Callable[..., Plan]) -> None:
    """Workers that load data are forks: with what they had inherited they kept all connections of the dead one open."""

    def train(plan: Plan) -> None:
        pipe = Pipeline(Fragile(), plan, loss_fn=mean)
        if pipe.rank == 0 and not os.fork():
            signal.pause()
        pipe.step(X, target=torch.zeros(8, 1))
        if pipe.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.step(X, target=torch.zeros(8, 1))

    with pytest.raises(
        ExecutionError, match=r"rank 0 of 2 failed: step 1, outside of.*: its process was killed by SIGKILL"
    ):
        launch(train, make_plan(plan_for), timeout_s=5.0)


def test_a_swapped_argument_is_refused(plan_for: Callable[..., Plan]) -> None:
    with pytest.raises(ArgumentError, match="call launch"):
        launch(make_plan(plan_for), print)  # type: ignore[arg-type]


SCRIPT = """
import atexit, signal, sys, time
from executor import launch
from planner import Plan

def wait(plan):
    atexit.register(sys.stdout.write, "exit function\\n")  # in one piece, also where Python does not buffer
    print("begun", flush=True)
    time.sleep(600)

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
launch(wait, Plan.load(sys.argv[1]))
"""


def test_an_interrupted_caller_ends_its_workers(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    make_plan(plan_for).save(tmp_path / "plan.json")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    caller = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "plan.json")],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None
    assert [caller.stdout.readline() for _ in range(2)] == ["begun\n"] * 2  # what workers print is seen
    caller.send_signal(signal.SIGINT)
    output, errors = caller.communicate(timeout=60)  # ends only when the workers have closed their output too
    assert output == "exit function\n" * 2
    assert caller.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")


def test_functions_that_use_the_modules_of_torch_that_are_objects_travel(plan_for: Callable[..., Plan]) -> None:
    """`torch.backends.cudnn` is of a class of its own, which cannot be pickled by value."""

    def train(_: Plan) -> tuple[bool, bool]:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
        return torch.backends.cudnn.benchmark, torch.backends.mkldnn.is_available()

    assert launch(train, make_plan(plan_for)) == [(True, torch.backends.mkldnn.is_available())] * 2


def test_what_cannot_come_back_is_said_to_be_the_result(plan_for: Callable[..., Plan]) -> None:
    """It was a TypeError about locks, of nobody's."""
    with pytest.raises(ArgumentError, match=r"what the function returned, a lock, cannot be sent back \(TypeError: .*"):
        launch(lambda _: threading.Lock(), make_plan(plan_for))


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_exception_that_cannot_say_what_it_is_is_named(plan_for: Callable[..., Plan]) -> None:
    """Between calls nothing but the exit code was told, and inside of one another exception, without its place."""

    def bad_loss(output: Tensor, target: Tensor) -> Tensor:
        raise SilentError

    def train(plan: Plan, where: str) -> None:
        pipe = Pipeline(Fragile(), plan, loss_fn=bad_loss)
        if where == "between calls":
            raise SilentError
        pipe.step(X, target=X)

    plan = make_plan(plan_for)
    said = r"SilentError \(which raises ValueError where its text is asked for\)"
    with pytest.raises(ExecutionError, match=rf"micro-batch 0, action 1F0: {said}"):
        launch(train, plan, ("in the loss",))
    with pytest.raises(ExecutionError, match=said):
        launch(train, plan, ("between calls",))


def test_what_cannot_go_to_other_processes_is_refused_before_they_start(plan_for: Callable[..., Plan]) -> None:
    lock = threading.Lock()

    def train(_: Plan) -> bool:
        return lock.locked()

    plan = make_plan(plan_for)
    with pytest.raises(
        ArgumentError, match=r"train and what it uses go to other processes, and cannot: TypeError: .*lock"
    ):
        launch(train, plan)
    with pytest.raises(ArgumentError, match="fn is 3; pass a function"):
        launch(3, plan)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="args is 5; pass a tuple"):
        launch(train, plan, 5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="timeout_s is '3'; give a number of seconds"):
        launch(train, plan, timeout_s="3")  # type: ignore[arg-type]


def test_a_rank_that_is_asked_to_end_answers_while_it_is_waited_for() -> None:
    """Of 12 launches that were interrupted within a step 6 lost exit functions: a rank answered after 1 s."""
    assert watch.ENDING_ECHO_S <= ending.SECONDS_TO_ANSWER / 2
