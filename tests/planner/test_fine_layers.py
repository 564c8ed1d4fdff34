"""Layers as fine as the devices need, and what a plan makes of them."""

import json
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from planner.automatic import autoplan
from planner.from_profile import plan_from_profile
from planner.plan.micro_batches import MicroBatches
from planner.plan.of_model import check_model, traced_as_planned
from planner.plan.plan import Plan
from planner.solve.other_counts import promising
from planner.solve.problem import Candidate
from profiler import LayerSequence, profile, trace
from profiler.device import Cluster
from profiler.errors import ArgumentError
from profiler.sample_spec import SampleSpec

CLOSE = 1e-9


class Blocks(nn.Module):
    """Equal blocks of four products, between two of which a cut is cheap."""

    def __init__(self, blocks: int = 6, width: int = 64) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2 * blocks))
        self.narrow = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2 * blocks))

    def forward(self, x: Tensor) -> Tensor:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = x + narrow(functional.gelu(wide(x)))
        return x.square().mean()


@pytest.fixture(scope="module")
def traced() -> dict[int, LayerSequence]:
    """The blocks in layers for 4, 8 and 32 stages."""
    return {stages: trace(Blocks(), torch.zeros(32, 64), stages=stages) for stages in (4, 8, 32)}


def _starts(sequence: LayerSequence) -> list[int]:
    return list(accumulate((len(layer.operations) for layer in sequence.layers), initial=0))


def test_a_layer_is_an_eighth_of_an_even_stage_or_one_product(traced: dict[int, LayerSequence]) -> None:
    """For 32 stages there were the layers for 4: two thirds of the stages held one of them, the others two."""
    for stages, sequence in traced.items():
        whole = sum(layer.flops for layer in sequence.layers)
        for layer in sequence.layers:
            products = sum("linear" in name for name in layer.operations)
            assert products <= 1 or layer.flops <= whole / (8 * stages)
    assert [len(traced[stages]) for stages in (4, 8, 32)] == sorted(len(sequence) for sequence in traced.values())
    assert len(traced[4]) < len(traced[32])


def test_finer_layers_are_parts_of_coarser_ones_and_equal_blocks_stay_equal(traced: dict[int, LayerSequence]) -> None:
    for coarse, fine in pairwise(traced.values()):
        assert {*_starts(coarse)} <= {*_starts(fine)}
    assert len({layer.signature for layer in traced[32].layers}) <= len(traced[32]) / 3


def test_up_to_four_stages_the_layers_are_those_of_always(traced: dict[int, LayerSequence]) -> None:
    sample = torch.zeros(32, 64)
    assert trace(Blocks(), sample).fingerprint == traced[4].fingerprint
    assert trace(Blocks(), sample, stages=1).fingerprint == traced[4].fingerprint
    assert trace(Blocks(), sample, stages=5).fingerprint == traced[8].fingerprint
    assert "stages" not in json.loads(traced[4].sample.to_json())
    for sequence in traced.values():
        again = SampleSpec.parse_json(sequence.sample.to_json(), source="a file", error=ArgumentError)
        assert again == sequence.sample
    with pytest.raises(ArgumentError, match="stages is 0; give at least 1"):
        trace(Blocks(), sample, stages=0)


@pytest.mark.parametrize(
    ("devices", "asked", "fine_for"),
    [(8, {}, 8), (8, {"stages": 3}, 4), (8, {"replicas": 2}, 4), (16, {"batch_size": 32}, 8), (2, {}, 4)],
)
def test_autoplan_cuts_for_the_devices_and_the_executor_finds_the_same_layers(
    devices: int, asked: dict[str, int], fine_for: int
) -> None:
    model = Blocks(blocks=2)
    cluster = Cluster.of(f"{devices}xH100-80GB", link="nvlink4")
    plan = autoplan(model, torch.zeros(64, 64), cluster, progress=False, **asked)  # type: ignore[arg-type]
    assert plan.sample.stages == fine_for
    loaded = Plan.parse_json(plan.to_json(), source="a file", error=ArgumentError)
    check_model(model, traced_as_planned(model, loaded), loaded)


def test_a_plan_of_finer_layers_is_not_slower(traced: dict[int, LayerSequence]) -> None:
    cluster = Cluster.of("8xH100-80GB", link="nvlink4")
    steps = []
    for sequence in traced.values():
        found = profile(sequence, cluster, batch_size=256, progress=False, cache=False)
        steps.append(plan_from_profile(found, cluster, batch_size=256).prediction.step_s)
    assert all(fine <= coarse * (1 + CLOSE) for coarse, fine in pairwise(steps))


@settings(max_examples=25)
@given(data=st.data())
def test_finer_layers_never_make_a_plan_worse_where_costs_add_up(profile_of, device, data):
    """A plan of the coarse layers is one of the fine ones; with a limit that makes some stages recompute."""
    count = data.draw(st.integers(3, 7))
    row = st.tuples(*(st.integers(1, 8) for _ in range(4)))
    fine = [
        (f, f, b, kept, 0, sent, sent) for f, b, kept, sent in data.draw(st.lists(row, min_size=count, max_size=count))
    ]
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), min_size=1)))
    coarse = [
        (*(sum(layer[field] for layer in fine[low:high]) for field in range(5)), *fine[high - 1][5:])
        for low, high in pairwise([0, *cuts, count])
    ]
    limit = data.draw(st.sampled_from([10**6, 60, 90]))
    steps = []
    for rows in (coarse, fine):
        found = profile_of({("a", 1): rows, ("a", 4): [tuple(4 * number for number in layer) for layer in rows]})
        try:
            plan = plan_from_profile(found, [device(memory_bytes=limit)] * 3, batch_size=12, micro_batches_per_stage=1)
        except Exception as problem:  # judged below: only the coarse layers may fit nowhere
            steps.append((float("inf"), type(problem).__name__))
        else:
            steps.append((plan.prediction.step_s, ""))
    assert {name for _, name in steps} <= {"", "InfeasibleError"}
    assert steps[1][0] <= steps[0][0] * (1 + CLOSE)


def test_the_number_of_micro_batches_that_suits_a_plan_is_found_among_many() -> None:
    """Large problems took M = 513, 514, ... in turn, each a little better, and ended before they came to 1024."""
    candidates = [Candidate("1f1b", 1, MicroBatches(1024, count)) for count in range(513, 1025)]
    asked = []

    def seconds(candidate: Candidate) -> float:
        asked.append(candidate)
        return 10 + abs(candidate.split.count - 801) / 1000

    found = promising(candidates, seconds, lambda candidate: True, 20.0)
    assert found is not None
    assert abs(found.split.count - 801) <= 3
    assert len(asked) <= 32
    fitting = promising(candidates, seconds, lambda candidate: candidate.split.count > 900, 20.0)
    assert fitting is not None
    assert fitting.split.count > 900
    assert promising(candidates, seconds, lambda candidate: True, 10.0) is None
    assert promising([], seconds, lambda candidate: True, 10.0) is None
