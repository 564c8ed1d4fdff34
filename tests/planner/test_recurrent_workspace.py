"""What oneDNN's LSTM keeps grows by pages; sizes between two that were measured have room for it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from planner.cost.layer_costs import CostModel
from planner.cost.recurrent_workspace import PAGE_BYTES, PARTS, lstm_bytes, with_room
from profiler import profile, trace
from profiler.observe.storage_watch import StorageWatch
from profiler.record import InStage, LayerCost, Workspace
from profiler.run.inputs import micro_batch
from tests.models.tracked import CPU, Allocator, run_stages

KIND = "cpu/1 thread"
LONGEST = 16


def _law(steps: int, samples: int, entering: int, width: int) -> int:
    return int(lstm_bytes(*(np.array([extent]) for extent in (steps, samples, entering, width)))[0])


def _cost(size: int, *calls: tuple[int, int, int, int], more_bytes: int = 0, is_kept: bool = True) -> LayerCost:
    """A layer with one LSTM for each (steps, samples, entering, width)."""
    names = ("steps", "samples", "entering", "width")
    workspaces = tuple(
        Workspace(**dict(zip(names, call, strict=True)), size_bytes=_law(*call) + more_bytes, is_kept=is_kept)
        for call in calls
    )
    nothing: dict[str, Any] = {"forward_s": 0.0, "recompute_s": 0.0, "backward_s": 0.0, "spread": 0.0}
    total = sum(workspace.size_bytes for workspace in workspaces)
    return LayerCost(
        layer=0,
        micro_batch_size=size,
        device_kind=KIND,
        **nothing,
        kept_bytes=total * is_kept,
        transient_bytes=total * (not is_kept),
        in_stage=InStage(forward_bytes=0, backward_bytes=0, last_backward_bytes=0, workspaces=workspaces),
        output_bytes=0,
        output_gradient_bytes=0,
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 300), st.integers(1, 300))
def test_the_law_says_what_the_kernel_gives_back(steps: int, samples: int, entering: int, width: int) -> None:
    lstm = nn.LSTM(entering, width)
    with StorageWatch() as watch:
        lstm(torch.randn(steps, samples, entering))
    ((_, workspace),) = watch.workspaces
    assert (workspace.steps, workspace.samples, workspace.entering, workspace.width) == (
        steps,
        samples,
        entering,
        width,
    )
    assert workspace.size_bytes == _law(steps, samples, entering, width)


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600)), min_size=1, max_size=3),
    st.lists(st.integers(1, 40), min_size=2, max_size=4, unique=True),
    st.booleans(),
)
def test_no_size_between_keeps_more_than_the_line(
    steps: int, widths: list[tuple[int, int]], measured: list[int], is_kept: bool
) -> None:
    """With room that stays below the pages of all parts."""
    measured.sort()

    def layer(size: int) -> LayerCost:
        return _cost(size, *((steps, size, entering, width) for entering, width in widths), is_kept=is_kept)

    def held_bytes(cost: LayerCost) -> int:
        return cost.kept_bytes if is_kept else cost.transient_bytes

    found = with_room({(KIND, size): [layer(size)] for size in measured})
    at = [held_bytes(found[KIND, size][0]) for size in measured]
    for size in range(measured[0], measured[-1] + 1):
        assert np.interp(size, measured, at) >= held_bytes(layer(size)) - 1e-6
    for size in measured:
        assert 0 <= held_bytes(found[KIND, size][0]) - held_bytes(layer(size)) < len(widths) * PARTS * PAGE_BYTES


def test_neighbouring_sizes_need_no_room() -> None:
    rows = {(KIND, size): [_cost(size, (7, size, 64, 64))] for size in (1, 2, 3)}
    assert with_room(rows) == rows


def test_where_the_law_does_not_hold_there_is_room_for_any() -> None:
    """A kernel of other bytes; steps that lie on no line of whole numbers; an LSTM that runs at one size alone."""
    one, other = (7, 2, 64, 64), (7, 5, 64, 64)
    pairs = [
        (_cost(2, one, more_bytes=PAGE_BYTES), _cost(5, other)),
        (_cost(2, one), _cost(5, (8, 5, 64, 64))),
        (_cost(2), _cost(5, other)),
    ]
    for low, high in pairs:
        found = with_room({(KIND, 2): [low], (KIND, 5): [high]})
        assert found[KIND, 2][0].kept_bytes == low.kept_bytes + PARTS * PAGE_BYTES
        assert found[KIND, 5][0].kept_bytes == high.kept_bytes + PARTS * PAGE_BYTES


class _Recurrent(nn.Module):
    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.first = nn.Linear(recurrent.input_size, recurrent.input_size)
        self.recurrent = recurrent
        self.last = nn.Linear(recurrent.hidden_size * (1 + recurrent.bidirectional), 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(self.first(x))[0])


MAKERS: dict[str, Callable[[], nn.RNNBase]] = {
    "width 64": lambda: nn.LSTM(64, 64, batch_first=True),
    "width 200": lambda: nn.LSTM(40, 200, batch_first=True),
    "width 256": lambda: nn.LSTM(256, 256, batch_first=True),
    "2 layers": lambda: nn.LSTM(48, 72, num_layers=2, batch_first=True),
    "both directions": lambda: nn.LSTM(48, 72, bidirectional=True, batch_first=True),
    "frozen": lambda: nn.LSTM(48, 72, batch_first=True).requires_grad_(False),
    "GRU": lambda: nn.GRU(48, 72, batch_first=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_stages_between_sizes_need_no_more_than_predicted(name: str) -> None:
    model, sample = _Recurrent(MAKERS[name]()), torch.randn(LONGEST, 5, MAKERS[name]().input_size)
    model.first.requires_grad_(name != "frozen")
    sequence = trace(model, sample)
    found = profile(
        sequence,
        1,
        sample=sample,
        micro_batch_sizes=[2, 8, LONGEST],
        time_budget_s=0.0,
        progress=False,
        cache=False,
    )
    costs = CostModel(found)
    for size in (2, 3, 5, 11, 14, LONGEST):
        bounds = [0, len(sequence)]
        inputs = micro_batch(sequence, sample, size, CPU)
        ((kept, _),) = run_stages(sequence, bounds, inputs, None, None, has_loss=False)
        ((_, most),) = run_stages(sequence, bounds, inputs, None, None, has_loss=False, meter=Allocator)
        predicted_kept, predicted_most = costs.stage(KIND, size, *bounds)
        assert kept <= predicted_kept <= kept + 2 * PARTS * PAGE_BYTES
        assert most <= predicted_most
