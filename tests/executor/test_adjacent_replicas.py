"""Processes that number the replicas of a rank after each other train as those that number the ranks of a replica."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor import launch
from executor.layout import layout_of
from planner import Plan
from tests.executor.rich_training import Training, X, Y, same, sequence


def adjacent(plan: Plan) -> Plan:
    return plan.model_copy(update={"adjacent_replicas": True})


def trained(plan: Plan, folder: Path) -> tuple[list[float], dict[str, Any], Tensor | None, int, int]:
    """Losses, what this process has afterwards, its replica's outputs, how many rows were measured, which replica."""
    training = Training(plan)
    losses = training.steps(2)
    losses.append(training.pipe.clip_grad_norm_(0.5).item())
    losses.append(training.pipe.evaluate(X, target=Y).item())
    outputs = training.pipe.predict(X)
    training.save(folder)
    return losses, training.state(), outputs, len(training.pipe.measured()), training.pipe.replica


@pytest.mark.parametrize("shard_optimizer", [False, True])
@pytest.mark.parametrize(
    ("cuts", "settings"),
    [([1, 3], {}), ([2], {"schedule": "1f1b"}), ([1, 2, 3], {"schedule": "interleaved", "chunks": 2})],
    ids=["three ranks", "1f1b", "interleaved"],
)
def test_every_process_has_what_one_for_all_has(
    plan_for: Callable[..., Plan], tmp_path: Path, cuts: list[int], settings: dict[str, Any], shard_optimizer: bool
) -> None:
    asked: Any = {"batch_size": 10, "micro_batches": 2, "replicas": 2, "shard_optimizer": shard_optimizer, **settings}
    plan = plan_for(sequence(), cuts, **asked)
    losses, state, outputs, rows, _ = trained(plan, tmp_path / "alone")
    assert outputs is not None
    found = launch(trained, adjacent(plan), (tmp_path / "adjacent",))
    assert {len(own) for own in (one for one, *_ in found)} == {len(losses)}
    for process, (own_losses, own, own_outputs, own_rows, replica) in enumerate(found):
        layout = layout_of(adjacent(plan), process, plan.ranks * 2)
        assert (own_losses, own_rows, replica) == (losses, rows, process % 2)
        assert same(own, {name: state[name] for name in own})
        assert (own_outputs is not None) == (plan.K - 1 in layout.stages)
        if own_outputs is not None:
            assert torch.equal(own_outputs, outputs.tensor_split(2)[replica])
    names = {name for _, own, *_ in found for name in own}
    assert names == state.keys()
    later = Training(plan)
    assert later.load(tmp_path / "adjacent") == 2
    assert same(later.state(), state)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_stage_of_each_replica_has_one_process(plan_for: Callable[..., Plan], ranks: int, replicas: int) -> None:
    plan = plan_for(sequence(), [*range(1, ranks)], batch_size=6, micro_batches=1, replicas=replicas)
    for numbered in (plan, adjacent(plan)):
        layouts = [layout_of(numbered, process, ranks * replicas) for process in range(ranks * replicas)]
        assert {(one.replica, one.stages) for one in layouts} == {
            (replica, (stage,)) for replica in range(replicas) for stage in range(ranks)
        }
        for one in layouts:
            assert one.own_replicas == (one.replica,)
            assert one.process_of[one.stages[0]] == one.process
            assert one.peers[one.replica] == one.process
            assert [layouts[peer].replica for peer in one.peers] == list(range(replicas))
            assert {layouts[peer].stages for peer in one.peers} == {one.stages}
            assert [layouts[process].stages for process in one.first_replica] == [(stage,) for stage in range(ranks)]
            assert {layouts[process].replica for process in one.first_replica} == {0}
    near = [layout_of(adjacent(plan), process, ranks * replicas).stages for process in range(replicas)]
    assert near == [(0,)] * replicas
