"""Checkpoints know nothing of stages, and there is always a whole one."""

import json
import math
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import ArgumentError, ExecutionError, Plan
from profiler import LayerSequence, trace
from tests.executor.fault_trials import plan_of
from tests.executor.rich_training import Rich, Training, X, plans_of, sequence


def save_after_two(plan: Plan, path: Path) -> list[float]:
    training = Training(plan, seed=5)
    training.steps(2)
    training.save(path)
    return training.steps(3)


def load_and_go_on(plan: Plan, path: Path) -> list[float]:
    training = Training(plan, seed=9)  # the checkpoint's seed counts
    assert training.load(path) == training.pipe.steps == 2
    return training.steps(3)


def test_saved_with_three_stages_goes_on_with_any_number(
    plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence], tmp_path: Path
) -> None:
    inherited(sequence)
    plans, others = plans_of(plan_for), plans_of(plan_for, recompute=True)
    expected = save_after_two(plans[1], tmp_path / "1")
    assert launch(save_after_two, plans[3], (tmp_path / "3",)) == [expected] * 3
    for path, plan in (("1", plans[2]), ("1", others[2]), ("3", plans[1]), ("3", plans[4])):
        assert load_and_go_on(plan, tmp_path / path) == expected
    assert launch(load_and_go_on, plans[4], (tmp_path / "3",)) == [expected] * 4


OPTIMIZERS = {
    "SGD": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "Adam": lambda groups, lr: torch.optim.Adam(groups, lr=torch.tensor(lr), amsgrad=True),
    **{
        name: getattr(torch.optim, name)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}


def test_any_optimizer_goes_on(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    plans = plans_of(plan_for)
    begun, continued = Training(plans[1]), Training(plans[2])
    for name, optimizer in OPTIMIZERS.items():
        begun.choose(optimizer)
        begun.steps(2)
        begun.save(tmp_path / name)
        continued.choose(optimizer)
        continued.load(tmp_path / name)
        assert continued.steps(2) == begun.steps(2), name
        pairs = zip(begun.pipe.named_parameters(), continued.pipe.named_parameters(), strict=True)
        assert all(torch.equal(first, second) for (_, first), (_, second) in pairs), name


def test_the_plain_model_loads_it_under_all_its_names(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    training = Training(plans_of(plan_for)[2])
    training.steps(1)
    training.save(tmp_path)
    plain = Rich()
    state = {"model": plain.state_dict()}
    with warnings.catch_warnings(action="ignore"):  # torch warns of how it uses itself
        dcp.load(state, checkpoint_id=tmp_path / "latest", no_dist=True)  # type: ignore[attr-defined]
    plain.load_state_dict(state["model"])
    for name, value in training.model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name


def test_the_newest_are_kept(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    training = Training(plans_of(plan_for)[1])
    (tmp_path / ".draft-step-00000009").mkdir()  # of a process that was killed
    paths = []
    for _ in range(3):
        paths.append(save_checkpoint(tmp_path, training.pipe, keep=2))
        training.steps(1)
    paths.append(save_checkpoint(tmp_path, training.pipe, keep=2))
    paths.append(save_checkpoint(tmp_path, training.pipe, keep=2))  # of the same step
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "latest",
        "step-00000003",
        "step-00000003.1",
    ]
    assert (tmp_path / "latest").resolve() == paths[-1] == tmp_path / "step-00000003.1"
    assert load_checkpoint(paths[-2], training.pipe) == 3
    with pytest.raises(ArgumentError, match="keep is 0"):
        save_checkpoint(tmp_path, training.pipe, keep=0)


def test_what_does_not_belong_is_refused(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    training = Training(plans_of(plan_for)[1])
    with pytest.raises(ExecutionError, match="holds no complete checkpoint"):
        training.load(tmp_path / "none")
    save_checkpoint(tmp_path / "bare", training.pipe)
    with pytest.raises(ExecutionError, match="holds no optimizer state"):
        load_checkpoint(tmp_path / "bare", training.pipe, training.optimizer)
    training.save(tmp_path / "whole")
    with pytest.raises(ExecutionError, match=r"holds the states of \['scheduler'\], but \[\] are to be loaded"):
        load_checkpoint(tmp_path / "whole", training.pipe, training.optimizer)
    training.choose(torch.optim.SGD)
    with pytest.raises(ExecutionError, match="holds the state of AdamW, which means nothing to SGD"):
        training.load(tmp_path / "whole")
    other = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    with pytest.raises(
        ArgumentError, match="steps 2 parameters, and none of them is one of the pipeline's, so its state"
    ):
        save_checkpoint(tmp_path / "of another", training.pipe, other)  # it was saved without any state
    assert not (tmp_path / "of another").exists() or not any((tmp_path / "of another").glob("*/training.json"))
    small = nn.Sequential(nn.Linear(4, 4))
    pipe = Pipeline(small, plan_for(trace(small, X), batch_size=10, micro_batches=4), loss_fn=functional.cross_entropy)
    with pytest.raises(
        ExecutionError, match=r"belongs to another model: it holds 10 parameters .* not 2 of the model's"
    ):
        load_checkpoint(tmp_path / "whole", pipe)


def save_of_the_last(plan: Plan, path: Path) -> bool:
    """Whether this process has what the optimizer steps."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    save_checkpoint(path, pipe, torch.optim.SGD(model[2].parameters(), lr=0.1))
    return any(name.startswith("2.") for name, _ in pipe.named_parameters())


def test_an_optimizer_may_step_nothing_of_one_process(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    plan = plan_for(trace(model, torch.zeros(2, 4)), [1], batch_size=8, micro_batches=4)
    assert launch(save_of_the_last, plan, (tmp_path,)) == [False, True]
    assert [*tmp_path.glob("*/manifest.json")]


def test_a_kill_while_saving_leaves_a_whole_checkpoint(
    plan_for: Callable[..., Plan], script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """At random moments; kills of one of several ranks are in tests/benchmarks/test_faults.py."""
    plan_of(plan_for, 2).save(tmp_path / "plan.json")
    done = script(Path(__file__).with_name("killed_while_saving.py").resolve(), str(tmp_path), "6")
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["killed"] == 6
    assert counts["old"], "no kill came before the new checkpoint was whole"


def test_its_contents_are_readable_without_trust(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    training = Training(plans_of(plan_for)[1])
    training.steps(1)
    training.save(tmp_path)
    kept = torch.load(tmp_path / "latest" / "training.pt", weights_only=True)
    assert (kept["step"], kept["seed"]) == (1, 0)
    assert json.dumps(kept["names"])
    assert kept["optimizer"]["first.weight"]["options"]["lr"] == pytest.approx(0.045)


def test_arguments_of_other_types_are_said_to_be_wrong(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """And nothing is written: a folder with a lock was left, and the error was Python's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipe = Pipeline(
        model, plan_for(trace(model, torch.randn(4, 4)), batch_size=4, micro_batches=2), loss_fn=functional.mse_loss
    )
    scaler: Any = torch.amp.GradScaler("cpu")
    wrong: list[tuple[Any, Any, Any, str]] = [
        (tmp_path / "a", model, None, "a checkpoint is of a Pipeline, and this is a Sequential"),
        (5, pipe, None, "the checkpoint is 5; give the path of a folder"),
        (tmp_path / "a", pipe, scaler, r"the optimizer is a GradScaler; .* in also="),
    ]
    for path, of, optimizer, said in wrong:
        with pytest.raises(ArgumentError, match=said):
            save_checkpoint(path, of, optimizer)
        with pytest.raises(ArgumentError, match=said):
            load_checkpoint(path, of, optimizer)
    assert not [*tmp_path.iterdir()]
    norms: list[Any] = ["1", torch.ones(3), -1.0, math.nan, torch.tensor(-1.0), torch.tensor(1j), 10**400]
    norms.append(torch.ones(1, device="meta"))
    for norm in norms:
        with pytest.raises(ArgumentError, match=r"max_norm is .*; give a number that is not below 0"):
            pipe.clip_grad_norm_(norm)
