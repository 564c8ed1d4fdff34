"""The same training for every cut: bitwise between cuts, close to the plain model."""

import copy
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import Plan
from planner.plan.timeline import save_timeline_json
from profiler import ArgumentError, ForeignPlanError, LayerSequence, trace
from tests.executor.trained_cases import (
    BATCH_SIZE,
    CASES,
    Case,
    M,
    ResidualCNN,
    Trained,
    assert_same,
    case,
    random_segments,
    token_loss,
    traced,
    train,
)

if TYPE_CHECKING:
    import pandas  # each process that a test starts imports this file

STAGES = {"gpipe": ((1, True), (2, False), (4, True)), "1f1b": ((3, True), (4, False))}


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_every_cut_trains_the_same_in_one_process(name: str, schedule: str, plan_for: Callable[..., Plan]) -> None:
    current, sequence = case(name), traced(name)
    evaluates = schedule == next(iter(STAGES))  # evaluation has forward passes alone, which a schedule does not order
    whole = train(
        plan_for(sequence, batch_size=BATCH_SIZE, micro_batches=M, schedule=schedule), current, evaluates=evaluates
    )
    chance = random.Random(0)
    for stages, recompute in STAGES[schedule]:
        cuts = sorted(chance.sample(range(1, len(sequence)), stages - 1))
        plan = plan_for(sequence, cuts, batch_size=BATCH_SIZE, micro_batches=M, recompute=recompute, schedule=schedule)
        evaluates_again = evaluates and stages == 4  # each pipeline traces the model once more for it
        again = train(plan, current, evaluates=evaluates_again)
        assert_same(again, whole if evaluates_again else replace(whole, evaluated=None))
        assert again.state.keys() == whole.state.keys()


# Each process traces the model once more to evaluate it: one with tied weights, and one with running statistics.
EVALUATED = ("gpt", "cnn")


@pytest.mark.parametrize(
    ("name", "stages", "schedule"),
    [
        ("gpt", 3, "gpipe"),
        ("cnn", 3, "1f1b"),
        ("shared", 4, "1f1b"),
        ("layouts", 3, "1f1b"),
    ],
)
def test_processes_train_as_one(
    name: str, stages: int, schedule: str, plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence]
) -> None:
    current, sequence = case(name), inherited(traced, name)
    evaluates = name in EVALUATED
    whole = train(
        plan_for(sequence, batch_size=BATCH_SIZE, micro_batches=M, schedule=schedule), current, evaluates=evaluates
    )
    cuts = sorted(random.Random(stages).sample(range(1, len(sequence)), stages - 1))
    recompute = [index % 2 == 0 for index in range(stages)]
    plan = plan_for(sequence, cuts, batch_size=BATCH_SIZE, micro_batches=M, recompute=recompute, schedule=schedule)
    parts: list[Trained] = launch(partial(train, evaluates=evaluates), plan, (current,))
    for part in parts:
        assert_same(part, whole)
    assert set().union(*(part.state for part in parts)) == set(whole.state)
    assert set().union(*(part.gradients for part in parts)) == set(whole.gradients)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("name", "schedule"), list(zip(CASES, cycle(("gpipe", "1f1b")), strict=False)))
def test_recompute_by_segments_changes_nothing(name: str, schedule: str, plan_for: Callable[..., Plan]) -> None:
    """Segments at the start, in the middle and at the end of a stage, with kept layers between them."""
    current, sequence = case(name), traced(name)
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "micro_batches": M, "schedule": schedule}
    whole = train(plan_for(sequence, **settings), current, evaluates=False)
    chance = random.Random(1)
    for stages in (1, 2, 3):
        cuts = sorted(chance.sample(range(1, len(sequence)), stages - 1))
        segments = [random_segments(chance, *bounds) for bounds in pairwise([0, *cuts, len(sequence)])]
        plan = plan_for(sequence, cuts, **settings, recompute=segments)
        assert_same(train(plan, current, evaluates=False), whole)


@pytest.mark.parametrize(
    ("name", "ranks", "schedule"),
    [("shared", [0, 1, 1, 0], "gpipe"), ("cnn", [1, 0, 1], "1f1b")],
)
def test_a_process_may_run_several_stages(
    name: str,
    ranks: list[int],
    schedule: str,
    plan_for: Callable[..., Plan],
    inherited: Callable[..., LayerSequence],
) -> None:
    current, sequence = case(name), inherited(traced, name)
    evaluates = name == "shared"
    whole = train(
        plan_for(sequence, batch_size=BATCH_SIZE, micro_batches=M, schedule=schedule), current, evaluates=evaluates
    )
    chance = random.Random(2)
    cuts = sorted(chance.sample(range(1, len(sequence)), len(ranks) - 1))
    segments = [random_segments(chance, *bounds) for bounds in pairwise([0, *cuts, len(sequence)])]
    plan = plan_for(
        sequence,
        cuts,
        batch_size=BATCH_SIZE,
        micro_batches=M,
        schedule=schedule,
        ranks=ranks,
        recompute=segments,
    )
    parts: list[Trained] = launch(partial(train, evaluates=evaluates), plan, (current,))
    assert len(parts) == 2
    for part in parts:
        assert_same(part, whole)
    assert set().union(*(part.state for part in parts)) == set(whole.state)


@pytest.mark.parametrize(("name", "replicas", "schedule"), [("cnn", 2, "gpipe"), ("shared", 2, "1f1b")])
def test_replicas_train_as_one_process(
    name: str, replicas: int, schedule: str, plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence]
) -> None:
    """Gradients over two steps without zero_grad, too: what was there before counts once."""
    current, sequence = case(name), inherited(traced, name)
    settings = {"batch_size": BATCH_SIZE, "micro_batches": 2, "replicas": replicas, "schedule": schedule}
    evaluates = name == "cnn"
    whole = train(plan_for(sequence, **settings), current, evaluates=evaluates)
    cut = plan_for(sequence, [len(sequence) // 2], **settings)
    parts: list[Trained] = launch(partial(train, evaluates=evaluates), cut, (current,))
    assert len(parts) == 2 * replicas
    for part in parts:
        assert_same(part, whole)
    assert set().union(*(part.state for part in parts)) == set(whole.state)


@pytest.mark.usefixtures("traced_once")
def test_replicas_see_the_batch_as_one_pipeline_does(plan_for: Callable[..., Plan]) -> None:
    """Three replicas of 2 micro-batches: same masks and statistics as 6 micro-batches, gradients but for rounding."""
    current, sequence = case("cnn"), traced("cnn")
    inputs, target = current.inputs[0].repeat(2, 1, 1, 1)[:18], current.target.repeat(2)[:18]
    found = []
    for replicas in (1, 3):
        torch.manual_seed(0)
        model = current.make()
        plan = plan_for(sequence, [4], batch_size=18, micro_batches=6 // replicas, replicas=replicas)
        pipe = Pipeline(model, plan, loss_fn=current.loss_fn)
        losses = [pipe.step(inputs, target=target).item() for _ in range(2)]
        tensors = {name: value.clone() for name, value in model.named_buffers()}
        tensors |= {
            f"{name}.grad": value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
        }
        found.append((losses, tensors))
        assert all(value.grad is not None for value in model.parameters())
        assert math.isfinite(pipe.step(inputs[:8], target=target[:8]).item())  # samples 3, 3 and 2
    (losses, one), (others, three) = found
    assert others == pytest.approx(losses, rel=1e-6)
    for name, ours in three.items():
        torch.testing.assert_close(ours, one[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_plain_models(name: str, plan_for: Callable[..., Plan]) -> None:
    """Dropout off; batch normalization with M = 1, since its statistics are the micro-batch's."""
    current = case(name)
    model = without_dropout(current.make())
    expected = copy.deepcopy(model)
    loss = current.loss_fn(expected(*current.inputs), current.target)
    loss.backward()
    sequence = trace(model, current.inputs)
    micro_batches = 1 if name == "cnn" else M
    cuts = [len(sequence) // 2]
    plan = plan_for(sequence, cuts, batch_size=BATCH_SIZE, micro_batches=micro_batches, recompute=True)
    got = Pipeline(model, plan, loss_fn=current.loss_fn).step(*current.inputs, target=current.target)
    assert got.item() == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert theirs.grad is not None
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5 * scale)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    return model


def test_running_statistics_move_once_per_mini_batch_to_its_statistics(plan_for: Callable[..., Plan]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    x = torch.randn(BATCH_SIZE, 5) * 3 + 1
    sequence = trace(model, x)
    plan = plan_for(sequence, batch_size=BATCH_SIZE, micro_batches=M, recompute=True)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    pipe.step(x, target=torch.zeros(BATCH_SIZE, dtype=torch.int64))
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean(0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * x.var(0))


def test_a_smaller_last_batch_is_weighted_by_its_samples(plan_for: Callable[..., Plan]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    expected = copy.deepcopy(model)
    sequence = trace(model, torch.randn(BATCH_SIZE, 4))
    plan = plan_for(sequence, [1], batch_size=BATCH_SIZE, micro_batches=M)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    for samples in (7, 3, 1):
        x, y = torch.randn(samples, 4), torch.randint(3, (samples,))
        loss = pipe.step(x, target=y)
        plain = functional.cross_entropy(expected(x), y)
        plain.backward()
        torch.testing.assert_close(loss.float(), plain.detach())
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class LossInside(nn.Module):
    """Takes keywords and returns a dict with its own loss, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        logits = torch.tanh(self.head(x)) * scale
        return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}


def test_keyword_sample_and_loss_inside(plan_for: Callable[..., Plan]) -> None:
    model = LossInside()
    expected = copy.deepcopy(model)
    sample: dict[str, Any] = {"x": torch.randn(BATCH_SIZE, 4), "labels": torch.randint(3, (BATCH_SIZE,)), "scale": 2.0}
    sequence = trace(model, sample)
    pipe = Pipeline(model, plan_for(sequence, batch_size=BATCH_SIZE, micro_batches=M))
    loss = pipe.step(**sample)
    plain = expected(**sample)["loss"]
    plain.backward()
    torch.testing.assert_close(loss.float(), plain.detach())
    torch.testing.assert_close(model.head.weight.grad, expected.head.weight.grad)
    with pytest.raises(ArgumentError, match=r"argument 'scale' is 3\.0; the model was traced with 2\.0"):
        pipe.step(**{**sample, "scale": 3.0})


@pytest.mark.usefixtures("traced_once")
def test_frozen_parameters_get_no_gradient(plan_for: Callable[..., Plan]) -> None:
    current = case("gpt")
    model = current.make()
    for parameter in model.blocks[0].parameters():  # type: ignore[union-attr, index]
        parameter.requires_grad_(False)
    sequence = trace(model, current.inputs)
    pipe = Pipeline(model, plan_for(sequence, [5, 9], batch_size=BATCH_SIZE, micro_batches=M), loss_fn=token_loss)
    pipe.step(*current.inputs, target=current.target)
    for name, parameter in pipe.named_parameters():
        assert (parameter.grad is None) == name.startswith("blocks.0."), name


@pytest.mark.usefixtures("traced_once")
def test_the_callers_random_state_survives(plan_for: Callable[..., Plan]) -> None:
    current = case("gpt")
    model = current.make()
    plan = plan_for(traced("gpt"), [4], batch_size=BATCH_SIZE, micro_batches=M)
    pipe = Pipeline(model, plan, loss_fn=current.loss_fn)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    pipe.step(*current.inputs, target=current.target)
    assert torch.equal(torch.rand(3), expected)


def test_bad_input_is_refused_before_anything_runs(plan_for: Callable[..., Plan]) -> None:
    current = case("cnn")
    model = current.make()
    plan = plan_for(trace(model, current.inputs), [3], batch_size=BATCH_SIZE, micro_batches=M)
    pipe = Pipeline(model, plan, loss_fn=current.loss_fn)
    with pytest.raises(ArgumentError, match=r"shape \[10, 4, 8, 8\]; the model was traced with \[10, 3, 8, 8\]"):
        pipe.step(torch.randn(BATCH_SIZE, 4, 8, 8), target=current.target)
    with pytest.raises(ArgumentError, match=r"dtype torch.float64; the model was traced with float32"):
        pipe.step(current.inputs[0].double(), target=current.target)
    with pytest.raises(ArgumentError, match="the target holds 9 samples, the inputs 10"):
        pipe.step(*current.inputs, target=current.target[1:])
    with pytest.raises(ArgumentError, match="the loss is a tensor of shape"):
        Pipeline(model, plan).step(*current.inputs)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_for_another_model_is_refused(plan_for: Callable[..., Plan]) -> None:
    current = case("cnn")
    plan = plan_for(trace(current.make(), current.inputs), [3], batch_size=BATCH_SIZE, micro_batches=M)
    other = ResidualCNN()
    other.head = nn.Linear(8, 11)
    message = f"fingerprint {plan.model_fingerprint}, this model has .*; if it is the same"
    with pytest.raises(ForeignPlanError, match=message):
        Pipeline(other, plan, loss_fn=current.loss_fn)


class Ticking(nn.Module):
    """Layers compute with the time of day, which nobody sees them ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x) + time.perf_counter_ns() % 1000)
        return out


def test_a_model_whose_trace_is_another_each_time_is_refused(plan_for: Callable[..., Plan]) -> None:
    """The message said to plan again, which would not have helped."""
    model, x = Ticking(), torch.randn(BATCH_SIZE, 4)
    plan = plan_for(trace(model, x), [], batch_size=BATCH_SIZE, micro_batches=M)
    message = r"traced twice in a row, its layer \d+ \(.*test_pipeline\.py:\d+\) differs; something outside of tensors"
    with pytest.raises(ForeignPlanError, match=message):
        Pipeline(model, plan, loss_fn=functional.mse_loss)


def report(plan: Plan, case: Case, folder: Path) -> "tuple[pandas.DataFrame, list[str]]":
    """What a process knows of its steps afterwards, and the ranges that a profiler saw."""
    pipe = Pipeline(case.make(), plan, loss_fn=case.loss_fn)
    for _ in range(2):
        pipe.step(*case.inputs, target=case.target)
    with pipe.watch_memory():
        pipe.step(*case.inputs, target=case.target)
    with torch.profiler.profile() as watched:
        pipe.step(*case.inputs, target=case.target)
    pipe.save_trace(folder / "real.json")
    return pipe.measured(), [event.name for event in watched.events() or ()]


def test_steps_are_measured_beside_the_prediction(
    plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence], tmp_path: Path
) -> None:
    """One table on every rank, a trace with the predicted one's tracks, and ranges named by action."""
    current, sequence = case("gpt"), inherited(traced, "gpt")
    plan = plan_for(sequence, [len(sequence) // 2], batch_size=BATCH_SIZE, micro_batches=M, recompute=[True, False])
    first, second = launch(report, plan, (current, tmp_path))
    assert first[0].equals(second[0])
    measured = first[0].set_index(["stage", "what"])["measured"]
    for stage in (0, 1):
        assert measured[stage, "forward_s"] > 0
        assert measured[stage, "backward_s"] > 0
        assert (measured[stage, "recompute_s"] > 0) == (stage == 0)
        assert 0 <= measured[stage, "idle_s"] < measured[-1, "makespan_s"]
        held = sum(parameter.nbytes for parameter in sequence.parameters.values()) / 4
        assert measured[stage, "peak_bytes"] > held
    assert measured[0, "send_forward_s"] >= 0
    assert {"0F0", "0R2", "0SEND_F2", "0RECV_B1", "0B0"} <= set(first[1])
    assert "1B3" in second[1]
    save_timeline_json(plan, tmp_path / "predicted.json")
    real, predicted = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("real", "predicted"))
    assert tracks(real) == tracks(predicted)


def tracks(written: dict[str, Any]) -> dict[str, set[str]]:
    """Name of each track -> names of the slices on it."""
    events = written["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, set[str]] = {name: set() for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].add(event["name"])
    return found
