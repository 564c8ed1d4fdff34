"""Room for what LSTMs keep at micro-batch sizes between two that were measured.

oneDNN's LSTM gives back a workspace of seven parts, each in proportion to the samples and each rounded up to a page
[measured, torch 2.13 with oneDNN 3.12: to the byte at 364 shapes; as in its src/cpu/rnn/rnn_utils.cpp]. So at a size
between it may lie above the line through two sizes, by less than seven pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise, zip_longest
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from profiler.between_sizes import on_line, whole_bytes
from profiler.record import LayerCost, Workspace

PAGE_BYTES = 4096
PARTS = 7
FLOAT_BYTES = 4
ROUNDING = 1e-6
"""Distance from a whole number that a line's own rounding explains."""

Rows: TypeAlias = dict[tuple[str, int], list[LayerCost]]
Floats: TypeAlias = NDArray[np.float64]


def with_room(rows: Rows) -> Rows:
    """The rows with so much more that no workspace lies above the line between two neighbouring sizes.

    Args:
        rows: by device kind and micro-batch size, of all layers in their order.
    """
    if not any(cost.in_stage and cost.in_stage.workspaces for costs in rows.values() for cost in costs):
        return rows
    kinds = {kind: sorted(size for other, size in rows if other == kind) for kind, _ in rows}
    room = {key: [(0, 0)] * len(costs) for key, costs in rows.items()}
    for kind, sizes in kinds.items():
        for small, large in pairwise(sizes):
            found = [
                tuple(
                    _above_line(_workspaces(low, kept), _workspaces(high, kept), small, large) for kept in (True, False)
                )
                for low, high in zip(rows[kind, small], rows[kind, large], strict=True)
            ]
            for size in (small, large):
                room[kind, size] = [
                    (max(pair[0], other[0]), max(pair[1], other[1]))
                    for pair, other in zip(room[kind, size], found, strict=True)
                ]
    return {
        key: [_with(cost, *more_bytes) for cost, more_bytes in zip(costs, room[key], strict=True)]
        for key, costs in rows.items()
    }


def lstm_bytes(steps: Floats, samples: Floats, entering: Floats, width: Floats) -> Floats:
    """The workspace of one direction of one LSTM layer in float32, whose input has `entering` features; each one array.

    >>> lstm_bytes(*(np.array([extent]) for extent in (20, 3, 256, 256)))
    array([995328.])
    """
    states = 2 * (steps + 1) * samples  # before and after the layer, and before the first step
    state, cell = _spread(np.maximum(entering, width)), width
    parts = [steps * samples * _spread(4 * width), steps * samples * _spread(width)]
    parts += 3 * [states * state] + 2 * [states * cell]
    total: Floats = PAGE_BYTES * np.sum([np.ceil(FLOAT_BYTES * part / PAGE_BYTES) for part in parts], axis=0)
    return total


def _spread(extent: Floats) -> Floats:
    """Elements of a row: whole cache lines, and never a multiple of 256."""
    row = 16.0 * np.ceil(extent / 16)
    spread: Floats = np.where(row % 256, row, row + 16)
    return spread


def _workspaces(cost: LayerCost, is_kept: bool) -> tuple[Workspace, ...]:
    found = cost.in_stage.workspaces if cost.in_stage else ()
    return tuple(workspace for workspace in found if workspace.is_kept == is_kept)


@cache
def _above_line(low: Sequence[Workspace], high: Sequence[Workspace], small: int, large: int) -> int:
    """The most bytes by which a layer's workspaces lie above the line, at any size between `small` and `large`."""
    if not (low or high) or large - small == 1:
        return 0
    above = [_beyond(one, other, np.arange(small, large + 1.0)) for one, other in zip_longest(low, high)]
    return int(whole_bytes(np.max(np.sum(above, axis=0))))


def _beyond(low: Workspace | None, high: Workspace | None, sizes: Floats) -> Floats:
    """Bytes of a workspace beyond the line from the first to the last size; where no law says, what it may be."""
    unknown = np.full(len(sizes), float(PARTS * PAGE_BYTES))
    if low is None or high is None:
        return unknown
    share = (sizes - sizes[0]) / (sizes[-1] - sizes[0])
    extents = [on_line(*pair, share) for pair in zip(_extents(low), _extents(high), strict=True)]
    whole = [np.rint(extent) for extent in extents]
    if any((abs(extent - rounded) > ROUNDING).any() for extent, rounded in zip(extents, whole, strict=True)):
        return unknown
    beyond: Floats = lstm_bytes(*whole) - on_line(low.size_bytes, high.size_bytes, share)
    return unknown if beyond[0] or beyond[-1] else beyond


def _extents(workspace: Workspace) -> tuple[int, int, int, int]:
    return workspace.steps, workspace.samples, workspace.entering, workspace.width


def _with(cost: LayerCost, kept_bytes: int, passing_bytes: int) -> LayerCost:
    if cost.in_stage is None or not kept_bytes + passing_bytes:
        return cost
    more = {"workspace_bytes": cost.in_stage.workspace_bytes + passing_bytes}
    return cost.model_copy(
        update={
            "kept_bytes": cost.kept_bytes + kept_bytes,
            "transient_bytes": cost.transient_bytes + passing_bytes,
            "in_stage": cost.in_stage.model_copy(update=more),
        }
    )
