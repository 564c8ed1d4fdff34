"""What travels and why, as frame, graph and picture."""

from html import escape

import matplotlib as mpl
import pytest
import torch
from torch import Tensor, nn

from profiler import ArgumentError, trace
from profiler.tracing.dataflow import skip_values

mpl.use("agg")


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(16) < lengths.unsqueeze(-1)
        first = self.layers[0](x)
        y = self.layers[1](first * mask)
        y = self.layers[2](y) * mask
        return self.layers[3](y + first)


class WrittenLate(nn.Module):
    """A solver's table: made early, each row is written when it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        table = torch.zeros(len(x), 2, 16) + x.detach().mean(1).view(-1, 1, 1)
        for position, layer in enumerate(self.layers[1:]):
            x = torch.tanh(layer(x))
            if position in (1, 4):
                table[:, position // 4] = x
        return table.sum(1) + x


def test_a_value_that_carries_a_gradient_later_skips_no_stage() -> None:
    """Its two kinds of boundary counted as two values of one name, and no profile could hold them."""
    sequence = trace(WrittenLate(), torch.randn(4, 16))
    kinds = {
        value.name: {v.requires_grad for b in sequence.boundaries for v in b if v.name == value.name}
        for boundary in sequence.boundaries
        for value in boundary
    }
    (changing,) = [name for name, found in kinds.items() if len(found) > 1]
    names = [value.name for value in skip_values(sequence, [4])]
    assert len(names) == len(set(names))
    assert changing not in names


def test_every_value_has_a_reason() -> None:
    sequence = trace(Skips(), (torch.randn(4, 16), torch.ones(4, dtype=torch.int64)))
    frame = sequence.travel_frame()
    for boundary in range(1, len(sequence)):
        rows = frame[frame.boundary == boundary]
        sent = rows[rows.reason.str.startswith("sent")]
        assert list(sent.value) == [value.name for value in sequence.boundaries[boundary]]
        assert set(sent["shape"]) == {"[n, 16]"}
        assert set(sent.bytes) == {4 * 16 * 4}
        assert set(sent.requires_grad) == {True}
    free = frame[~frame.reason.str.startswith("sent")]
    assert set(free[free.reason.str.startswith("computed by each stage")].dtype) == {"bool"}
    assert not set(free.value) & {value.name for boundary in sequence.boundaries for value in boundary}
    (x,) = [value for value in sequence.free_values if value.name in sequence.inputs]
    assert x.consumers == (0,)


def test_the_skip_is_an_edge_of_the_graph_and_the_picture() -> None:
    sequence = trace(Skips(), (torch.randn(4, 16), torch.ones(4, dtype=torch.int64)))
    graph = sequence.dataflow()
    assert len(graph) == len(sequence) + 1
    assert any(reader > producer + 1 for producer, reader in graph.edges())
    assert sum(edge["bytes"] for *_, edge in graph.edges(data=True)) >= 4 * 16 * 4 * (len(sequence) - 1)
    axes = sequence.plot()
    texts = {text.get_text() for text in axes.texts}
    assert "0  layers.0" in texts
    assert "256 B" in texts
    shown = sequence._repr_html_()
    assert shown.count("<tr") == len(sequence) + 1
    assert all(escape(layer.name) in shown for layer in sequence.layers)


def test_a_picture_has_room_for_few_layers() -> None:
    deep = nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(4, 4), nn.Tanh())))
    sequence = trace(deep, torch.randn(2, 4))
    assert len(sequence) > 60
    with pytest.raises(ArgumentError, match="at most 60"):
        sequence.plot()
