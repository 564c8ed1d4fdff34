"""What the optimizer costs where replicas share its state: bytes by the real assignment, seconds of its exchange."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from planner import ArgumentError, InfeasibleError, Plan, PlanFileError, autoplan, plan_from_profile
from planner.cost.parameter_ranges import ParameterRanges
from planner.plan.shares import owners_of
from profiler import Cluster, Profile, profile, trace
from tests.planner.made_up import build_profile

SIZES = st.lists(st.integers(1, 60).map(lambda size: 4 * size), max_size=9)


@given(SIZES, st.integers(1, 5))
def test_shares_are_near_even(sizes: list[int], replicas: int) -> None:
    loads = [0] * replicas
    for size, owner in zip(sizes, owners_of(sizes, replicas), strict=True):
        loads[owner] += size
    assert sum(loads) == sum(sizes)
    assert max(loads) <= max(max(sizes, default=0), sum(sizes) / replicas + max(sizes, default=0))
    assert max(loads) - min(loads) <= max(sizes, default=0)


def drawn(data: Any, layers: int) -> tuple[list[tuple[int, bool]], list[list[int]], Profile]:
    """Parameters by size and whether they are trained, those that each layer reads, and a profile of these."""
    parameters = [(size, data.draw(st.integers(0, 3)) > 0) for size in data.draw(SIZES)]
    positions = st.lists(st.integers(0, len(parameters) - 1), max_size=4, unique=True) if parameters else st.just([])
    readers = [data.draw(positions) for _ in range(layers)]
    made = build_profile({("a", 1): [(1.0,) * 7] * layers}, parameters=parameters, readers=readers)
    return parameters, readers, made


@given(st.data())
def test_each_range_counts_its_largest_share_and_no_less_than_a_smaller_range(data: Any) -> None:
    """The assignment of all ranges at once is the executor's, of one."""
    layers, replicas = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 4))
    parameters, readers, made = drawn(data, layers)
    found = ParameterRanges(made).stepped(replicas)
    assert np.array_equal(ParameterRanges(made).stepped(1), ParameterRanges(made).trainable)
    for first, stop in itertools.combinations(range(layers + 1), 2):
        names = dict.fromkeys(position for layer in readers[first:stop] for position in layer)
        sizes = [parameters[position][0] for position in names if parameters[position][1]]
        loads = [0] * replicas
        for size, owner in zip(sizes, owners_of(sizes, replicas), strict=True):
            loads[owner] += size
        inner = [found[i, j] for i, j in itertools.combinations(range(first, stop + 1), 2) if (i, j) != (first, stop)]
        assert found[first, stop] == max([max(loads), *inner])


@given(st.data())
def test_each_range_has_room_for_the_state_of_unlike_parameters(data: Any) -> None:
    """What one replica has of it is exact, and of those that share it none has more."""
    layers, replicas = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    parameters, readers, made = drawn(data, layers)
    states = {name: data.draw(st.integers(0, 500)) for name, (_, trained) in enumerate(parameters) if trained}
    optimizer = made.optimizers[0].model_copy(update={"state_bytes": tuple(states.values())})
    ranges = ParameterRanges(made)
    found = ranges.state(optimizer, replicas, ...)
    for first, stop in itertools.combinations(range(layers + 1), 2):
        names = dict.fromkeys(position for layer in readers[first:stop] for position in layer if position in states)
        kept = [0] * replicas
        owners = owners_of([parameters[name][0] for name in names], replicas)
        for name, owner in zip(names, owners, strict=True):
            kept[owner] += states[name]
        assert found[first, stop] == ranges.state(optimizer, replicas, (first, stop))
        if states:
            assert max(kept) <= found[first, stop] <= sum(kept)
        if replicas == 1 and states:
            assert found[first, stop] == max(kept)
        inner = [found[i, j] for i, j in itertools.combinations(range(first, stop + 1), 2)]
        assert max(inner) == found[first, stop]


@pytest.mark.parametrize("size", [4 * elements for elements in range(1, 41)])
def test_the_state_of_one_parameter_that_is_shared_has_room_whole_bytes_and_no_byte_more(size: int) -> None:
    """57 bytes of state of 100 had room for 56.99999999999999."""
    made = build_profile({("a", 1): [(1.0,) * 7]}, parameters=[(size, True)], readers=[[0]])
    ranges = ParameterRanges(made)
    for state in range(0, 300):
        optimizer = made.optimizers[0].model_copy(update={"state_bytes": (state,)})
        assert ranges.state(optimizer, 2, (0, 1)) == state


WIDTH, BLOCKS, REPLICAS = 64, 6, 4
ELEMENTS = BLOCKS * (WIDTH * WIDTH + WIDTH)


def planned(*, precision: str | None = None, devices: int = REPLICAS, **settings: Any) -> Plan:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    cluster = Cluster.of(f"{devices}xA100-40GB", link="nvlink3")
    given = {"batch_size": 16, "micro_batches_per_stage": 1, "progress": False, **settings}
    return autoplan(model, torch.zeros(8, WIDTH), cluster, precision=precision, optimizer="Adam", **given)


def test_state_is_divided_and_the_rest_is_not() -> None:
    """Six equal weights among four replicas: two of them have two each, and the others the rest."""
    asked: dict[str, Any] = {"replicas": REPLICAS, "stages": 1, "micro_batches": 4, "precision": "bf16-mixed"}
    whole, shared = planned(**asked), planned(**asked, shard_optimizer=True)
    of_whole, of_shared = whole.stages[0].memory, shared.stages[0].memory
    assert of_whole.optimizer == 12 * ELEMENTS
    assert of_shared.optimizer == 4 * ELEMENTS + 8 * (2 * WIDTH * WIDTH)
    alike = {"optimizer": 0, "transient": 0}  # of buckets at the end all have as much as the largest share
    assert of_shared.model_copy(update=alike) == of_whole.model_copy(update=alike)
    assert of_whole.transient < of_shared.transient < 2 * of_whole.transient
    assert shared.shard_optimizer
    assert "4 replicas share the optimizer's state" in str(shared)
    assert shared.stages[0].optimizer_s < whole.stages[0].optimizer_s / 2.5


def test_the_exchange_takes_as_long_as_the_other_half_of_a_ring() -> None:
    asked: dict[str, Any] = {"replicas": REPLICAS, "stages": 1, "micro_batches": 4}
    seconds = {
        (precision, shared): planned(**asked, precision=precision, shard_optimizer=shared).stages[0].all_reduce_s
        for precision in (None, "bf16-grads")
        for shared in (False, True)
    }
    assert seconds[None, True] == pytest.approx(seconds[None, False])
    assert seconds["bf16-grads", False] < seconds["bf16-grads", True] < seconds[None, True]


def test_one_replica_has_the_same_plan_and_file() -> None:
    asked: dict[str, Any] = {"devices": 2, "stages": 2, "micro_batches": 4}
    assert planned(**asked, shard_optimizer=True).to_json() == planned(**asked).to_json()
    assert "shard_optimizer" not in json.loads(planned(**asked).to_json())


def test_a_plan_says_so_and_is_read_again(tmp_path: Any) -> None:
    plan = planned(replicas=2, stages=2, micro_batches=4, shard_optimizer=True)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    broken = json.loads(planned(devices=2, stages=2, micro_batches=4).to_json()) | {"shard_optimizer": True}
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    with pytest.raises(PlanFileError, match="there is 1 replica"):
        Plan.load(tmp_path / "broken.json")


@pytest.mark.usefixtures("nothing_beside")
def test_replicas_fit_where_their_whole_state_would_not() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    sequence = trace(model, torch.zeros(8, WIDTH))
    cluster = Cluster.of("4xA100-40GB", link="nvlink3")
    found = profile(sequence, cluster, sample=torch.zeros(8, WIDTH), optimizer="Adam", batch_size=16, progress=False)
    asked: dict[str, Any] = {"batch_size": 16, "stages": 1, "replicas": 4, "micro_batches": 4}
    asked |= {"micro_batches_per_stage": 1}
    whole = plan_from_profile(found, cluster, **asked).stages[0].memory.total
    shared = plan_from_profile(found, cluster, **asked, shard_optimizer=True).stages[0].memory.total
    assert shared < whole
    with pytest.raises(InfeasibleError):
        plan_from_profile(found, cluster, **asked, memory_limit=shared)
    assert plan_from_profile(found, cluster, **asked, memory_limit=shared, shard_optimizer=True).replicas == 4
    with pytest.raises(InfeasibleError):
        plan_from_profile(found, cluster, **asked, memory_limit=shared - 1, shard_optimizer=True)


def test_engines_are_told_or_refuse() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    plan = planned(replicas=2, stages=2, micro_batches=4, schedule="1f1b", shard_optimizer=True)
    assert plan.export("deepspeed", model).value["config"]["zero_optimization"] == {"stage": 1}
    with pytest.raises(InfeasibleError, match="all of the optimizer's state in each of 2 replicas"):
        plan.export("torchtitan", model)


def test_what_is_no_answer_is_refused() -> None:
    with pytest.raises(ArgumentError, match="shard_optimizer is 'yes'; give True or False"):
        planned(shard_optimizer="yes")
