"""A model cut for evaluation: each stage reads what it holds, and no other cuts send fewer bytes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from profiler import NotTraceableError, trace
from profiler.tracing.cuts import Body, allowed_positions
from profiler.tracing.evaluation_cuts import stage_starts
from profiler.tracing.front_ends import graph_of
from profiler.tracing.prelude import prelude_nodes
from profiler.tracing.sequence import LayerSequence
from profiler.tracing.tracing import trace_evaluation

X = torch.zeros(4, 6)


class Chain(nn.Module):
    """Linear layers of the given widths with what evaluation leaves out between them; some weights are tied."""

    def __init__(self, widths: tuple[int, ...], tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise((6, *widths, 6)))
        self.dropout = nn.Dropout(0.5)
        weight = self.get_parameter("layers.0.weight")
        self.first = weight if tied and widths[0] >= 6 else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.training:
                x = self.dropout(x * 2) / 2
        return x if self.first is None else x @ self.first.T[:, :6]


def least(body: Body, held: list[set[str]], named: set[str]) -> tuple[float, float]:
    """The fewest stages without operations, and bytes sent, of all cuts that there are."""
    found = (float("inf"), 0.0)
    reads = [{str(n.target) for n in node.all_input_nodes if n.op == "get_attr"} & named for node in body.nodes]
    sizes = [sum(body.facts[value].value_bytes for value in alive) for alive in body.alive]
    positions = [0, *allowed_positions(body), len(body.nodes)]
    for cuts in itertools.combinations_with_replacement(positions, len(held) - 1):
        bounds = list(itertools.pairwise((0, *cuts, len(body.nodes))))
        if all(read <= names for names, (a, b) in zip(held, bounds, strict=True) for read in reads[a:b]):
            found = min(found, (sum(a == b for a, b in bounds), sum(sizes[cut] for cut in cuts)))
    return found


@settings(max_examples=15, deadline=None)
@given(
    widths=st.lists(st.sampled_from([2, 6, 9]), min_size=1, max_size=4).map(tuple),
    tied=st.booleans(),
    data=st.data(),
)
def test_no_other_cuts_send_less(widths: tuple[int, ...], tied: bool, data: st.DataObject) -> None:
    model = Chain(widths, tied)
    sequence = trace(model, X)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sequence) - 1), max_size=2)))
    held = [sequence.names_read(range(a, b)) for a, b in itertools.pairwise((0, *cuts, len(sequence)))]
    named = {name for name, _ in model.named_parameters()}
    served = graph_of(model, sequence.sample, training=False)
    graph = served.graph.module.graph
    body = Body.of(graph, prelude_nodes(graph, served.facts), served.facts)
    starts = stage_starts(body, held, named)
    expected = least(body, held, named)
    if starts is None:
        assert expected[0] == float("inf")
    else:
        assert starts[0] == 0
        sent_bytes = sum(sum(body.facts[v].value_bytes for v in body.alive[start]) for start in starts)
        idle = sum(a == b for a, b in itertools.pairwise((*starts, len(body.nodes))))
        assert (idle, sent_bytes) == expected


def evaluated(model: nn.Module, cuts: list[int]) -> tuple[LayerSequence, LayerSequence]:
    sequence = trace(model, X)
    stages = [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(sequence)))]
    return sequence, trace_evaluation(model, sequence, sequence.sample, stages)


def test_each_stage_is_a_layer_that_reads_what_the_stage_trains() -> None:
    sequence, found = evaluated(Chain((9, 2, 6), tied=False), [3, 5])
    assert len(found) == 3
    for layer, stage in zip(found.layers, (range(3), range(3, 5), range(5, len(sequence))), strict=True):
        assert set(layer.parameters) == sequence.names_read(stage)
        assert not layer.draws


class Swapped(nn.Module):
    """Takes its layers in another order where it evaluates, or one that does not train."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.second(torch.tanh(self.first(x)))
        if self.what == "order":
            return self.first(torch.tanh(self.second(x)))
        return self.other(torch.tanh(self.first(x)))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("order", "in evaluation mode the model reads its parameters in other places, so its 2 stages cannot"),
        ("other", "in evaluation mode the model reads other.bias, which training does not read, so its 2 stages"),
    ],
)
def test_what_the_stages_do_not_hold_is_an_error(what: str, message: str) -> None:
    with pytest.raises(NotTraceableError, match=message):
        evaluated(Swapped(what), [1])
