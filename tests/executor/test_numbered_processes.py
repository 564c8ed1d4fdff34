"""Processes are numbered in the order of their devices, and train in any order as one process does."""

import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from executor import launch
from executor.layout import layout_of
from planner import Plan
from tests.executor.rich_training import Training, X, Y, same, sequence


def placed(plan: Plan, order: Sequence[int]) -> Plan:
    """Devices of rank 0 are the first in this order, one for each replica, and so on."""
    rows = tuple(tuple(sorted(order[first : first + plan.replicas])) for first in range(0, len(order), plan.replicas))
    return Plan.model_validate(plan.model_dump() | {"positions": rows})


def shuffled(plan: Plan) -> Plan:
    """In neither order, with devices that are left out."""
    found = placed(plan, Random(plan.ranks).sample(range(20), plan.ranks * plan.replicas))
    assert sorted(chain.from_iterable(found.processes)) == [*range(plan.ranks * plan.replicas)]
    return found


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
    numbered = shuffled(plan)
    replica_of = {process: replica for row in numbered.processes for replica, process in enumerate(row)}
    losses, state, outputs, rows, _ = trained(plan, tmp_path / "alone")
    assert outputs is not None
    found = launch(trained, numbered, (tmp_path / "numbered",))
    assert {len(own) for own in (one for one, *_ in found)} == {len(losses)}
    for process, (own_losses, own, own_outputs, own_rows, replica) in enumerate(found):
        layout = layout_of(numbered, process, plan.ranks * 2)
        assert (own_losses, own_rows, replica) == (losses, rows, replica_of[process])
        assert same(own, {name: state[name] for name in own})
        assert (own_outputs is not None) == (plan.K - 1 in layout.stages)
        if own_outputs is not None:
            assert torch.equal(own_outputs, outputs.tensor_split(2)[replica])
    names = {name for _, own, *_ in found for name in own}
    assert names == state.keys()
    later = Training(plan)
    assert later.load(tmp_path / "numbered") == 2
    assert same(later.state(), state)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_stage_of_each_replica_has_one_process(plan_for: Callable[..., Plan], ranks: int, replicas: int) -> None:
    plan = plan_for(sequence(), [*range(1, ranks)], batch_size=6, micro_batches=1, replicas=replicas)
    for numbered in (plan, placed(plan, range(ranks * replicas)), shuffled(plan)):
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


def test_processes_are_in_the_order_of_their_devices(plan_for: Callable[..., Plan]) -> None:
    plan = plan_for(sequence(), [2], batch_size=6, micro_batches=1, replicas=2)
    assert plan.processes == ((0, 2), (1, 3))
    assert placed(plan, [0, 1, 2, 3]).processes == ((0, 1), (2, 3))
    assert placed(plan, [9, 2, 5, 3]).processes == ((0, 3), (1, 2))
    assert [layout_of(placed(plan, [9, 2, 5, 3]), process, 4).stages for process in range(4)] == [
        (0,),
        (1,),
        (1,),
        (0,),
    ]


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        (((0, 1),), "positions has 1 rank of [2] replicas, and the plan 2 ranks of 2"),
        (((0,), (1,)), "positions has 2 ranks of [1, 1] replicas, and the plan 2 ranks of 2"),
        (((0, 1), (1, 2)), "positions names device 1 2 times"),
        (((0, 1), (-1, 2)), "positions.1.0"),
        (((0, 1), (3, 2)), "positions of rank 1 are [3, 2]; they ascend"),
        ((), "positions has 0 ranks of [] replicas, and the plan 2 ranks of 2"),
    ],
)
def test_positions_that_are_none_are_refused(plan_for: Callable[..., Plan], positions: Any, said: str) -> None:
    plan = plan_for(sequence(), [2], batch_size=6, micro_batches=1, replicas=2)
    with pytest.raises(ValueError, match=re.escape(said)):
        Plan.model_validate(plan.model_dump() | {"positions": positions, "devices_per_host": 2})
