"""Branches that random numbers decide: both ways come into the graph, or a refusal says why they cannot."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from planner import plan_from_profile
from profiler import Cluster, LayerSequence, Link, NotTraceableError, profile, trace
from profiler.conditions.check import values_made_up
from profiler.machine.local import local_devices
from profiler.observe.random_states import python_and_numpy_states
from profiler.sample_spec import SampleSpec
from tests.coverage.fidelity import eager_difference, run, same_bits, some_cuts
from tests.coverage.model_list import Case

X = torch.linspace(-1, 1, 48).reshape(12, 4)
TARGET = torch.tensor([0, 1, 2] * 4)
DEPTH = 2

Layers = Callable[["Dropping", Tensor], Tensor]


class Statistics:
    def __init__(self) -> None:
        self.dropped = 0


class Dropping(nn.Module):
    """Linear layers around a loop over layers that random numbers leave out."""

    def __init__(self, layers: Layers, depth: int = DEPTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4)) for _ in range(depth)
        )
        self.other = nn.Linear(4, 4)
        self.layerdrop = 0.4
        self.dropped = 0
        self._statistics = Statistics()
        self._layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self._layers(self, self.first(x))))


def of_torch(model: Dropping, x: Tensor) -> Tensor:
    """As transformers' speech encoders do."""
    for layer in model.layers:
        drawn = torch.rand([])
        if model.training and drawn < model.layerdrop:
            continue
        x = x + layer(x)
    return x


def as_an_item(model: Dropping, x: Tensor) -> Tensor:
    for layer in model.layers:
        if torch.rand(1).item() > model.layerdrop:
            x = layer(x)
    return x


def all_at_first(model: Dropping, x: Tensor) -> Tensor:
    dropped = torch.zeros(len(model.layers)).uniform_(0, 1) < model.layerdrop
    for layer in [layer for layer, drop in zip(model.layers, dropped, strict=True) if not drop]:
        x = layer(x)
    return x


def of_python(model: Dropping, x: Tensor) -> Tensor:
    for layer in model.layers:
        if random.random() < model.layerdrop:
            continue
        x = layer(x) + x
    return x


def of_numpy(model: Dropping, x: Tensor) -> Tensor:
    for layer in model.layers:
        if not np.random.uniform(0, 1) < model.layerdrop:
            x = layer(x) + x
    return x


def one_or_the_other(model: Dropping, x: Tensor) -> Tensor:
    """Stochastic depth that scales, with another layer where one is left out, and every state kept for the end."""
    states = [x]
    for layer in model.layers:
        kept = x + layer(x) / (1 - model.layerdrop) if torch.rand(()) > model.layerdrop else model.other(x).relu()
        x = kept
        states.append(x)
    return torch.stack(states).mean(0)


def with_data(model: Dropping, x: Tensor) -> Tensor:
    """A branch on data besides, which is checked."""
    if x.abs().max() > 1e6:
        raise ValueError("too large")
    return of_torch(model, x)


KINDS: list[Layers] = [of_torch, as_an_item, all_at_first, of_python, of_numpy, one_or_the_other, with_data]


@cache
def traced(layers: Layers) -> tuple[Dropping, LayerSequence]:
    torch.manual_seed(0)
    model = Dropping(layers)
    return model, trace(model, X)


@pytest.mark.parametrize("layers", KINDS, ids=lambda layers: layers.__name__)
def test_both_ways_are_the_models(layers: Layers) -> None:
    """Layer drop in the root's own forward pass was refused: no submodule could be called as it is in its place."""
    before = python_and_numpy_states()
    model, sequence = traced(layers)
    assert python_and_numpy_states() == before
    assert len(sequence.sample.chances) == 1
    assert len(sequence.sample.decisions) == (layers is with_data)
    assert not sequence.sample.called_as_is
    assert "both ways of what random numbers decide (test_both_ways.py:" in repr(sequence)
    assert len(sequence) > DEPTH  # it can be cut between the layers
    of = Case(model, X, functional.cross_entropy, TARGET)
    assert all(eager_difference(sequence, of, seed) <= 1e-5 for seed in range(8))  # all layers, none, and between
    whole = run(sequence, of)
    assert all(same_bits(run(sequence, of, cuts), whole) for cuts in some_cuts(sequence))
    if layers in (of_torch, of_numpy, with_data):  # the numbers of torch, of others, and what else is decided
        again = trace(model, SampleSpec.model_validate_json(sequence.sample.to_json()))
        assert again.fingerprint == sequence.fingerprint
        assert again.sample == sequence.sample


@pytest.mark.parametrize("layers", [of_torch, of_python], ids=lambda each: each.__name__)
def test_it_trains_the_same_for_every_number_of_stages(layers: Layers) -> None:
    """Which layers a micro-batch leaves out depends on seed, step and micro-batch, not on stages or recompute."""
    model, sequence = traced(layers)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    measured = profile(
        sequence,
        Cluster(devices=local_devices(1).devices, link=Link(latency_s=1e-4, bytes_per_s=1e9)),
        sample=X,
        loss_fn=functional.cross_entropy,
        target=TARGET,
        micro_batch_sizes=[1],
        time_budget_s=0,
        progress=False,
    )
    losses, gradients = [], []
    cases: list[tuple[int, Literal["never", "always"]]] = [(1, "never"), (3, "always")]
    for stages, recompute in cases:
        own = Dropping(layers)
        own.load_state_dict(state)
        asked: Any = {"stages": stages, "micro_batches": 12, "recompute": recompute, "schedule": "gpipe"}
        plan = plan_from_profile(measured, local_devices(3), batch_size=12, **asked)
        pipe = Pipeline(own, plan, loss_fn=functional.cross_entropy, seed=1)
        losses.append([pipe.step(X, target=TARGET).item() for _ in range(2)])
        gradients.append({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]
    for other in gradients[1:]:
        assert other.keys() == gradients[0].keys()
        assert all(torch.equal(other[name], gradients[0][name]) for name in gradients[0])


@pytest.mark.parametrize("layerdrop", [0.0, 1.0])
def test_the_sample_may_go_one_way_everywhere(layerdrop: float) -> None:
    """Then the ways are put together in its own graph, whose conditions were looked for afterwards: a ValueError."""
    model = Dropping(of_torch, depth=3)
    model.layerdrop = layerdrop
    sequence = trace(model, X)
    assert sum("either_way" in operation for layer in sequence.layers for operation in layer.operations) == 3


def test_it_is_traced_without_values() -> None:
    """Which numbers are drawn is nobody's sample."""
    assert len(trace(Dropping(of_torch).to("meta"), X.to("meta")).sample.chances) == 1


def test_what_is_measured_leaves_nothing_out() -> None:
    """Else a layer's time would be that of a layer or of nothing, as chance has it."""
    _, sequence = traced(of_torch)
    with values_made_up():
        found = [
            len(run(sequence, Case(Dropping(of_torch), X, functional.cross_entropy, TARGET)).gradients)
            for _ in range(3)
        ]
    assert set(found) == {4 * DEPTH + 4}


def test_where_few_are_left_out_all_can_be_dear() -> None:
    """The FLOPs of a layer are those of the dearer way."""
    _, rarely = traced(of_torch)
    plain = trace(Dropping(lambda model, x: nn.Sequential(*model.layers)(x)), X)
    assert sum(layer.flops for layer in rarely.layers) == sum(layer.flops for layer in plain.layers)


def at_most_one(model: Dropping, x: Tensor) -> Tensor:
    """Whether the second may be left out depends on the first."""
    dropped = 0
    for layer in model.layers:
        if dropped < 1 and torch.rand([]) < model.layerdrop:
            dropped += 1
            continue
        x = layer(x)
    return x


def counted(model: Dropping, x: Tensor) -> Tensor:
    """Each way by itself looks as if it did not matter to the others."""
    dropped = 0
    for layer in model.layers:
        if torch.rand([]) < model.layerdrop:
            dropped += 1
        else:
            x = layer(x)
    return x * 2 if dropped == len(model.layers) else x


def other_shapes(model: Dropping, x: Tensor) -> Tensor:
    x = x.mean(1, keepdim=True) if torch.rand([]) < model.layerdrop else model.layers[0](x)
    return x + model.other.bias


def in_place(model: Dropping, x: Tensor) -> Tensor:
    x = x * 1
    for layer in model.layers:
        if torch.rand([]) > model.layerdrop:
            x += layer(x)
    return x


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (at_most_one, r"one of them asks \d+ times, another \d+ times; "),
        (counted, r"together they do something else than one after the other; "),
        (other_shapes, r"they leave values of different shapes or types; "),
        (in_place, r"one of them writes a value in place that it has not made; "),
    ],
)
def test_ways_that_do_not_meet_are_refused(layers: Layers, message: str) -> None:
    with pytest.raises(NotTraceableError, match=message) as caught:
        trace(Dropping(layers), X)
    assert "in the model, " in str(caught.value)
    assert "random numbers decide which way the forward pass takes" in str(caught.value)
    assert "this is layer drop: set layerdrop to 0" in str(caught.value)


def at_exactly_one(model: Dropping, x: Tensor) -> Tensor:
    """Of four layers, none, two or all are left out in the ways that are traced."""
    dropped = 0
    for layer in model.layers:
        if torch.rand([]) < model.layerdrop:
            dropped += 1
            continue
        x = layer(x)
    return x * 2 if dropped == 1 else x


def in_a_list(model: Dropping, x: Tensor) -> Tensor:
    kept = []
    for layer in model.layers:
        if torch.rand([]) < model.layerdrop:
            continue
        x = layer(x)
        kept.append(layer)
    return x * 2 if len(kept) == 1 else x


def in_an_attribute(model: Dropping, x: Tensor) -> Tensor:
    model.dropped = 0
    for layer in model.layers:
        if torch.rand([]) < model.layerdrop:
            model.dropped += 1
        else:
            x = layer(x)
    found, model.dropped = model.dropped, 0
    return x * 2 if found == 1 else x


def in_a_tuple(model: Dropping, x: Tensor) -> Tensor:
    kept: tuple[int, ...] = ()
    for number, layer in enumerate(model.layers):
        if torch.rand([]) < model.layerdrop:
            continue
        x, kept = layer(x), (*kept, number)
    return x * 2 if len(kept) == 2 else x


def in_a_helper(model: Dropping, x: Tensor) -> Tensor:
    model._statistics.dropped = 0
    for layer in model.layers:
        if torch.rand([]) < model.layerdrop:
            model._statistics.dropped += 1
        else:
            x = layer(x)
    found, model._statistics.dropped = model._statistics.dropped, 0
    return x * 2 if found == 2 else x


COUNTING = [at_exactly_one, in_a_list, in_an_attribute, in_a_tuple, in_a_helper]


@pytest.mark.parametrize("layers", COUNTING, ids=lambda each: each.__name__)
def test_a_count_of_ways_taken_is_refused(layers: Layers) -> None:
    """No trace left exactly one of four layers out, so the graph was the model's but for that: wrong without error."""
    model = Dropping(layers, depth=4)
    with pytest.raises(NotTraceableError, match="counts which way was taken, and not every number of times can be "):
        trace(model, X)


def by_flags(model: Dropping, x: Tensor) -> Tensor:
    """Whether exactly one is left out, without a number that counts."""
    one = more = False
    for layer in model.layers:
        if torch.rand([]) < model.layerdrop:
            one, more = not one and not more, one or more
        else:
            x = layer(x)
    return x * 2 if one else x


def in_a_comprehension(model: Dropping, x: Tensor) -> Tensor:
    kept = [layer for layer in model.layers if torch.rand([]) > model.layerdrop]
    for layer in kept:
        x = layer(x)
    return x * 2 if len(kept) == 1 else x


def two_in_a_row(model: Dropping, x: Tensor) -> Tensor:
    before = False
    for layer in model.layers:
        dropped = bool(torch.rand([]) < model.layerdrop)
        if dropped and before:
            x = x * 2
        elif not dropped:
            x = layer(x)
        before = dropped
    return x


@pytest.mark.parametrize("layers", [by_flags, in_a_comprehension, two_in_a_row], ids=lambda each: each.__name__)
def test_what_the_model_remembers_of_ways_shows_in_the_proof(layers: Layers) -> None:
    """Neither is a number that is there while the model asks; the first two were wrong without an error."""
    with pytest.raises(NotTraceableError, match=r"random numbers decide which way the forward pass takes"):
        trace(Dropping(layers, depth=4), X)
