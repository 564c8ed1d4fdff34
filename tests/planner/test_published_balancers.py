"""Our plans of public profiles against an exact search and against what published planners make of them.

`tests/benchmarks/test_public_profiles.py` has all cases, and the table; here are those that take seconds.
"""

import itertools
from collections.abc import Callable

import pytest

from profiler.device import Link
from tests.benchmarks.public_profiles import (
    FREE,
    LINK,
    MODELS,
    Layer,
    cuts_of,
    load_layers,
    our_plan,
    searched_step_s,
    step_s,
)
from tests.benchmarks.published_balancers import (
    BALANCERS,
    block_partition,
    flops_histogram,
    min_max,
    parameters_deepspeed,
    parameters_greedy,
    uniform,
)

ROUNDING = 1e-9
LAYERS = {  # by the number of tensors that may cross a cut: 1, 2, 3, any
    "densenet121": (77, 428, 428, 428),
    "gnmt": (9, 24, 29, 29),
    "inception_v3": (33, 78, 164, 325),
    "resnet50": (39, 176, 176, 176),
    "vgg16": (39, 40, 40, 40),
}


def chain(*costs: float) -> tuple[Layer, ...]:
    """Layers that take these seconds forward and backward, and have as many parameter bytes."""
    return tuple(Layer("", cost, cost, int(cost), 0, 0) for cost in costs)


@pytest.mark.parametrize("model", MODELS)
def test_layers_hold_the_whole_model(model: str) -> None:
    chains = [load_layers(model, crossing) for crossing in (1, 2, 3, None)]
    assert tuple(map(len, chains)) == LAYERS[model]
    for field in ("forward_s", "backward_s", "parameter_bytes", "kept_bytes"):
        totals = [sum(getattr(layer, field) for layer in layers) for layers in chains]
        assert totals == pytest.approx([totals[0]] * 4)


def test_a_tuple_and_what_unpacks_it_stay_in_one_layer() -> None:
    ends = [layer.name.split(" .. ") for layer in load_layers("gnmt", None)]
    assert not any(last.startswith(("LSTM", "RecurrentAttention")) for _, last in ends)
    assert any(first.startswith("LSTM") for first, _ in ends)


def test_what_crosses_is_counted_in_bytes() -> None:
    layers = load_layers("gnmt", 2)
    embedding = next(index for index, layer in enumerate(layers) if layer.name.endswith("padding_idx=0)"))
    assert layers[embedding].crossing_bytes == 6_291_456
    assert layers[-1].crossing_bytes == 0


@pytest.mark.parametrize("link", [FREE, LINK], ids=["free", "link"])
@pytest.mark.parametrize("K", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_no_published_balancer_is_faster(model: str, K: int, link: Link) -> None:
    layers = load_layers(model, crossing=1)
    plan = our_plan(layers, K, link)
    assert plan.prediction.gap == 0
    ours_s = step_s(layers, cuts_of(plan), 4 * K, link)
    assert ours_s == pytest.approx(plan.prediction.step_s, rel=ROUNDING)
    for name, balancer in BALANCERS.items():
        assert ours_s <= step_s(layers, balancer(layers, K), 4 * K, link) * (1 + ROUNDING), name


@pytest.mark.parametrize("link", [FREE, LINK], ids=["free", "link"])
@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize(
    ("model", "crossing"),
    [(model, crossing) for model in MODELS for crossing in (1, 2, 3) if LAYERS[model][crossing - 1] <= 40],
)
def test_the_plan_is_what_an_exact_search_finds(model: str, crossing: int, K: int, link: Link) -> None:
    layers = load_layers(model, crossing)
    found_s = searched_step_s(layers, K, 4 * K, link)
    assert our_plan(layers, K, link).prediction.step_s == pytest.approx(found_s, rel=ROUNDING)


@pytest.mark.parametrize("link", [FREE, LINK], ids=["free", "link"])
def test_the_search_passes_over_nothing(link: Link) -> None:
    layers = load_layers("gnmt", 1)
    every = [
        step_s(layers, (0, *inner, len(layers)), 16, link)
        for stages in range(1, 5)
        for inner in itertools.combinations(range(1, len(layers)), stages - 1)
    ]
    assert searched_step_s(layers, 4, 16, link) == min(every)


@pytest.mark.parametrize(
    ("balancer", "costs", "K", "cuts"),
    [
        (uniform, (1, 1, 1, 1, 1, 1, 1), 3, (0, 3, 5, 7)),
        (flops_histogram, (10, 40, 30, 10, 20, 50, 10), 3, (0, 2, 5, 7)),
        (flops_histogram, (9, 1), 4, (0, 2)),  # shares 0.9 and 1 of 4 stages: both on the last
        (parameters_greedy, (3, 0, 3, 3, 3), 2, (0, 3, 5)),
        (parameters_greedy, (9, 0, 1, 1, 1), 2, (0, 1, 5)),  # too large for a stage: it ends its own at once
        (parameters_greedy, (1, 9, 1, 1), 3, (0, 1, 2, 4)),
        (parameters_deepspeed, (4, 0, 4, 0), 2, (0, 2, 4)),
        (parameters_deepspeed, (1, 2, 3, 4), 2, (0, 3, 4)),
    ],
)
def test_published_balancers_do_as_their_sources(
    balancer: Callable[..., tuple[int, ...]], costs: tuple[int, ...], K: int, cuts: tuple[int, ...]
) -> None:
    assert balancer(chain(*costs), K) == cuts


def test_block_partition_is_torchgpipes() -> None:
    assert block_partition(chain(1, 2, 3, 4, 5, 6), 2) == (0, 4, 6)


@pytest.mark.parametrize("costs", [(3, 1, 4, 1, 5, 9, 2, 6), (0, 0, 7, 0, 0, 7, 1, 1), (5, 5, 5, 5, 5, 5, 5, 5)])
@pytest.mark.parametrize("K", [1, 2, 3, 8])
def test_min_max_is_smallest(costs: tuple[int, ...], K: int) -> None:
    def largest(cuts: tuple[int, ...]) -> float:
        return max(sum(costs[first:stop]) for first, stop in itertools.pairwise(cuts))

    every = [largest((0, *inner, 8)) for inner in itertools.combinations(range(1, 8), K - 1)]
    cuts = min_max(costs, K)
    assert len(cuts) == K + 1
    assert largest(cuts) == min(every)
