"""The rows of `planner.cost.ledger` added up for every stage at once: plain arrays, which the compiled search reads.

The bytes of a stage of layers [i, j) of class c, with number v + 1 from the end, are `always[c, v]` and

    ranges[r, i, j] + first_boundary[c, v, i] + last_boundary[c, v, j]       r = range_of[c]

and, by its form, with one micro-batch's figures `kept` and `most` of [i, j), see `Tables.stage_kept`,

    KEPT        own_kept[c, v, i:j]         + in flight * kept + (most - kept) + largest of moments_whole[0, c, i:j]
    AS_ONE      own_recomputed[c, v, i:j]   + most                             + largest of moments_whole[1, c, i:j]
    IN_PARTS    own_recomputed[c, v, i:j]   + what `planner.kernel.segments.pattern_costs` makes of the rest

or, where that is more, `always[c, v] + ranges[r, i, j] + ends[r, i, j]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices, prefix_sums
from planner.cost.ledger import WHOLE_ROWS, Ledger, range_rows, rows_of, whole_rows
from planner.cost.ledger_rows import Basis, Form, Of, When

KEPT_PLACE, AS_ONE_PLACE = 0, 1
"""Places of `StageSums.moments_whole`."""


class StageSums(NamedTuple):
    """Sums of rows for C classes of devices, V numbers of stages from the end, L layers and N = L + 1 positions.

    Attributes:
        in_flight: how many micro-batches of the larger and of the smaller size are, shape (V, 2).
        always: of any stage, shape (C, V).
        range_of: which of the `ranges` is a class's, shape (C,).
        ranges: of layers [i, j) together, shape (kinds, N, N).
        ends: the same at the end of the step, in place of all that follows from micro-batches.
        first_boundary: at the boundary where a stage begins, shape (C, V, N).
        last_boundary: at the boundary where it ends, likewise.
        own_kept: prefix sums over the layers of a stage that keeps everything, shape (C, V, N).
        own_recomputed: the same of one that recomputes some.
        kept_layers: prefix sums over layers that no segment recomputes, shape (C, V, N).
        segment_edges: at each boundary next to a segment, shape (C, V, N).
        segment: prefix sums of the values of a segment, for one micro-batch, shape (C, N).
        moments: of each layer for a moment, in a stage with segments, shape (C, L).
        moments_whole: the same in a stage that keeps everything, and in one that is one segment, shape (2, C, L).
    """

    in_flight: Floats
    always: Floats
    range_of: Indices
    ranges: Floats
    ends: Floats
    first_boundary: Floats
    last_boundary: Floats
    own_kept: Floats
    own_recomputed: Floats
    kept_layers: Floats
    segment_edges: Floats
    segment: Floats
    moments: Floats
    moments_whole: Floats


def stage_sums(bases: Sequence[Basis], numbers: Sequence[int]) -> StageSums:
    """The sums of all rows but `WHOLE_ROWS`.

    Args:
        bases: of each class of devices; alike but for the kind.
        numbers: of stages from the end, for which micro-batches in flight and messages under way may differ.

    Raises:
        ValueError: there is a row more of the stage as a whole, which the search would leave out.
    """
    more = [row.name for row in whole_rows() if row not in WHOLE_ROWS]
    if more:
        raise ValueError(f"the search has the {len(WHOLE_ROWS)} rows of a whole stage written out, and not {more}")
    ledgers = [Ledger(basis, numbers) for basis in bases]
    kinds = list(dict.fromkeys(basis.device_kind for basis in bases))
    of_kind = {basis.device_kind: basis for basis in bases}

    def layers(*of: Of, form: Form) -> Floats:
        return np.stack([prefix_sums(own_bytes(ledger, *of, form=form)) for ledger in ledgers])

    def boundaries(of: Of, form: Form = Form.ANY) -> Floats:
        return np.stack([after_layers(own_bytes(ledger, of, form=form)) for ledger in ledgers])

    def moments(form: Form) -> Floats:
        return np.stack([moment_bytes(ledger, Of.LAYERS, form) for ledger in ledgers])

    return StageSums(
        in_flight=ledgers[0].in_flight,
        always=np.stack([always_bytes(ledger) for ledger in ledgers]),
        range_of=np.array([kinds.index(basis.device_kind) for basis in bases]),
        ranges=_stacked([range_bytes(of_kind[kind]) for kind in kinds]),
        ends=_stacked([end_bytes(of_kind[kind]) for kind in kinds]),
        first_boundary=boundaries(Of.FIRST_BOUNDARY),
        last_boundary=boundaries(Of.LAST_BOUNDARY),
        own_kept=layers(Of.LAYERS, Of.KEPT_LAYERS, form=Form.KEPT),
        own_recomputed=layers(Of.LAYERS, form=Form.RECOMPUTES),
        kept_layers=layers(Of.KEPT_LAYERS, form=Form.IN_PARTS),
        segment_edges=boundaries(Of.SEGMENT_EDGES, Form.IN_PARTS),
        segment=np.stack([prefix_sums(moment_bytes(ledger, Of.SEGMENT, Form.IN_PARTS)) for ledger in ledgers]),
        moments=moments(Form.IN_PARTS),
        moments_whole=np.stack([moments(Form.KEPT), moments(Form.AS_ONE)]),
    )


def _stacked(arrays: Sequence[Floats]) -> Floats:
    """The arrays as one; a single one, which may be large, is not copied."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def always_bytes(ledger: Ledger) -> Floats:
    """Bytes of any stage, one entry for each number."""
    total = np.zeros(len(ledger.in_flight))
    for row in rows_of(Of.STAGE):
        total += ledger.counted(row)
    return total


def own_bytes(ledger: Ledger, *of: Of, form: Form) -> Floats:
    """Bytes of each layer, or at each boundary, of stages of a form; an axis for the numbers, one of length L."""
    total = np.zeros((len(ledger.in_flight), ledger.layers))
    for row in rows_of(*of, form=form):
        total += ledger.counted(row)
    return total


def moment_bytes(ledger: Ledger, of: Of, form: Form) -> Floats:
    """The transient bytes of each layer in stages of a form, shape (L,)."""
    total = np.zeros(ledger.layers)
    for row in rows_of(of, form=form, transient=True):
        total += ledger.moments(row)
    return total


def range_bytes(basis: Basis) -> Floats:
    """Bytes of layers [i, j) together, at [i, j]; no micro-batches are in them, so they are added up once."""
    known, key = basis.parameters.added_up, (basis.optimizer, basis.replicas.shares)
    if key not in known:
        figures = basis.of_ranges(...)
        none = np.zeros_like(basis.parameters.unique)
        known[key] = sum((row.figure(figures) for row in range_rows()), start=none)
    return known[key]


def pooled_bytes(basis: Basis) -> float:
    """What stages hold of all layers together at least: with even shares of what several replicas keep."""
    figures = basis.of_ranges((0, -1))
    even = replace(figures, state=basis.parameters.state(basis.optimizer, 1, (0, -1)) / basis.replicas.shares)
    return float(sum(row.figure(even) for row in range_rows()))


def end_bytes(basis: Basis) -> Floats:
    """Bytes of layers [i, j) at the end of the step alone, at [i, j]."""
    figures = basis.of_ranges(...)
    none = np.zeros_like(basis.parameters.unique)
    return sum((row.figure(figures) for row in range_rows(When.AT_END)), start=none)


def after_layers(layer_bytes: Floats) -> Floats:
    """Bytes at boundary i, between layers i - 1 and i, the last axis of length L + 1; 0 at both ends of the model."""
    at_boundary = np.zeros((*layer_bytes.shape[:-1], layer_bytes.shape[-1] + 1))
    at_boundary[..., 1:-1] = layer_bytes[..., :-1]
    return at_boundary
