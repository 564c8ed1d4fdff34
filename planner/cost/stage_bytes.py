"""What a stage of layers [i, j) holds of one micro-batch, for all i and j at once, from `profiler.record.InStage`.

A micro-batch keeps what layers of the stage create and layers of the stage save. While layer l runs, forward or
backward, what layers i to l keep is there and what layers after l keep is not, so the most that is held is

    max over l in [i, j) of   kept(i, l + 1) + moment(l)

with `moment` the larger of what is there in the layer's forward and in its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from profiler.record import InStage, LayerCost

_VECTORS = (
    "held_bytes",
    "forward_bytes",
    "backward_bytes",
    "last_backward_bytes",
    "workspace_bytes",
    "prelude_peak_bytes",
)


@dataclass(frozen=True, slots=True, eq=False)
class StageBytes:
    """The fields of `InStage` for all L layers.

    Attributes:
        own_bytes: what each layer keeps itself, nothing of it carried, shape (L,).
        held_bytes: shape (L,); so `forward_bytes`, `backward_bytes`, `last_backward_bytes`, `workspace_bytes` and
            `prelude_peak_bytes`.
        pairs: bytes that a stage keeps if it holds both layers u < v, at [u, v]; negative where both are charged with
            the same; shape (L, L), and so the next two.
        waiting_bytes: values of layer u that are there while layer v runs, at [u, v].
        prelude_bytes: prelude values that are there while layer u runs and wait for layer v >= u, at [u, v].
        copied_bytes: copies of gradients of layer u's values in layer v's backward pass, at [u, v].
        returning_bytes: gradients of values after layer u that layer v reads next, at [u, v]; one more column for what
            only the model's output reads.
        made_bytes: the storages that these lie on, at [u, v] for those that layer v's backward pass makes, likewise.
        passing_bytes: the part of these that layer u has nothing to do with, likewise.
        leaves: `InStage.leaf_bytes`, one row an entry: layer, earlier layer, later layer, maker; shape (n, 4).
        leaf_bytes: their bytes, shape (n,).
    """

    own_bytes: NDArray[np.float64]
    held_bytes: NDArray[np.float64]
    forward_bytes: NDArray[np.float64]
    backward_bytes: NDArray[np.float64]
    last_backward_bytes: NDArray[np.float64]
    workspace_bytes: NDArray[np.float64]
    prelude_peak_bytes: NDArray[np.float64]
    pairs: NDArray[np.float64]
    waiting_bytes: NDArray[np.float64]
    prelude_bytes: NDArray[np.float64]
    copied_bytes: NDArray[np.float64]
    returning_bytes: NDArray[np.float64]
    made_bytes: NDArray[np.float64]
    passing_bytes: NDArray[np.float64]
    leaves: NDArray[np.float64]
    leaf_bytes: NDArray[np.float64]

    @classmethod
    def of(cls, costs: Sequence[LayerCost]) -> Self:
        """From the costs of all layers in their order; a layer without `in_stage` needs its transients all along."""
        layers = len(costs)
        entries = [cost.in_stage or _alone(cost.transient_bytes) for cost in costs]
        own = np.array([cost.kept_bytes for cost in costs], dtype=np.float64)
        pairs, waiting, prelude, copied = np.zeros((4, layers, layers))
        returning, made, passing = np.zeros((3, layers, layers + 1))
        for index, entry in enumerate(entries):
            for later, size_bytes in entry.carried_bytes:
                own[index] -= size_bytes
                pairs[index, later] += size_bytes
            for earlier, size_bytes in entry.repeated_bytes:
                pairs[earlier, index] -= size_bytes
            for earlier, size_bytes in entry.waiting_bytes:
                waiting[earlier, index] += size_bytes
            for later, size_bytes in entry.prelude_bytes:
                prelude[index, later] += size_bytes
            for earlier, size_bytes in entry.copied_bytes:
                copied[earlier, index] += size_bytes
            for later, size_bytes in entry.returning_bytes:
                returning[index, later] += size_bytes
            for later, size_bytes in entry.made_bytes:
                made[index, later] += size_bytes
            for later, size_bytes in entry.passing_bytes:
                passing[index, later] += size_bytes
        leaves = [(index, *layers, size) for index, entry in enumerate(entries) for *layers, size in entry.leaf_bytes]
        at_leaves = np.array(leaves, dtype=np.float64).reshape(-1, 5)
        vectors = {name: np.array([getattr(entry, name) for entry in entries], dtype=np.float64) for name in _VECTORS}
        return cls(
            own,
            **vectors,
            pairs=pairs,
            waiting_bytes=waiting,
            prelude_bytes=prelude,
            copied_bytes=copied,
            returning_bytes=returning,
            made_bytes=made,
            passing_bytes=passing,
            leaves=at_leaves[:, :4],
            leaf_bytes=at_leaves[:, 4],
        )

    def kept(self) -> NDArray[np.float64]:
        """Bytes that one micro-batch keeps until its backward pass, at [i, j] for a stage of layers [i, j)."""
        kept: NDArray[np.float64] = _triangle(self.own_bytes) + pair_sums(self.pairs)
        return kept

    def most(self, kept: NDArray[np.float64]) -> NDArray[np.float64]:
        """The most bytes at any moment, inputs and received gradients not counted, at [i, j].

        Args:
            kept: of `kept()`.
        """
        layers = len(self.own_bytes)
        held = np.concatenate(([0.0], np.cumsum(self.held_bytes)))
        waiting, copied = np.zeros((2, layers + 1, layers))
        waiting[:layers] = np.cumsum(self.waiting_bytes[::-1], axis=0)[::-1]  # of layers from i on
        copied[1:] = np.cumsum(self.copied_bytes, axis=0)  # of layers before i
        prelude, returning, made, passing = (  # for layers before j
            np.concatenate((np.zeros((layers, 1)), np.cumsum(by_reader, axis=1)), axis=1)
            for by_reader in (self.prelude_bytes, self.returning_bytes, self.made_bytes, self.passing_bytes)
        )
        shares_before = (self.prelude_bytes, self.made_bytes + self.passing_bytes)
        newly_forward, newly_backward = (_changed(by_reader) for by_reader in shares_before)
        there = np.triu(np.ones((layers + 1, layers), dtype=bool))
        kept_then = np.where(there, kept[:, 1:] - held[1:] + self.workspace_bytes, -np.inf)
        while_forward, while_backward = kept_then + self.forward_bytes + waiting, kept_then + copied
        most = np.zeros((layers + 1, layers + 1))
        # Of the layers before a stop only those are looked at that need more than with the stop before; see `_changed`.
        forward, backward_alone = np.full((2, layers + 1), -np.inf)
        for stop in range(1, layers + 1):
            received = passing[:stop, -1] - passing[:stop, stop]
            inner = self.backward_bytes[:stop] - received
            moment = np.minimum(inner, self.last_backward_bytes[:stop] + made[:stop, stop])
            own = newly_backward[stop]
            np.maximum(backward_alone, (while_backward[:, own] + moment[own]).max(axis=1), out=backward_alone)
            at_leaves, copies = self._at_leaves(stop)
            with_copies = while_backward[:stop, at_leaves] + moment[at_leaves] + copies
            backward = np.maximum(backward_alone[:stop], with_copies.max(axis=1, initial=-np.inf))
            backward[1:] += returning[: stop - 1, -1] - returning[: stop - 1, stop]  # of what passes the stage by
            own = newly_forward[stop]
            np.maximum(forward, (while_forward[:, own] + prelude[own, stop]).max(axis=1), out=forward)
            computed = np.maximum.accumulate(self.prelude_peak_bytes[:stop][::-1])[::-1]
            most[:stop, stop] = np.maximum(np.maximum(forward[:stop], backward) + held[stop], computed)
        return most

    def _at_leaves(self, stop: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Layers that copy received gradients at leaves in their backward pass, and the bytes.

        Returns:
            Layers, shape (n,), and at [i, place of the layer] the bytes in stages [i, stop), shape (stop, n).
        """
        layer, earlier, later, maker = self.leaves.T
        entries = np.flatnonzero((layer < stop) & (later < stop) & (maker >= stop))
        layers, places = np.unique(layer[entries].astype(np.intp), return_inverse=True)
        copies = np.zeros((stop, len(layers)))
        for entry, place in zip(entries, places, strict=True):
            copies[int(earlier[entry]) + 1 :, place] += self.leaf_bytes[entry]
        return layers, copies


def _changed(by_reader: NDArray[np.float64]) -> list[NDArray[np.intp]]:
    """For each stop of a stage the layers before it that need more there than with the stop before, shape (L + 1,).

    What a layer needs on top of what is kept grows with the stop: at the layer after it, and at each later one that
    reads what the layer holds for it. Most hold something for a few neighbours, so that all stages take L^2 and not
    L^3.

    Args:
        by_reader: bytes of layer u that are there for layer v, at [u, v].
    """
    layers = len(by_reader)
    at_once = [np.flatnonzero(by_reader[: stop - 1, stop - 1]) for stop in range(1, layers + 1)]
    return [np.array([], dtype=np.intp), *(np.append(rows, stop) for stop, rows in enumerate(at_once))]


def _alone(transient_bytes: int) -> InStage:
    return InStage(forward_bytes=transient_bytes, backward_bytes=transient_bytes, last_backward_bytes=transient_bytes)


def _triangle(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of `values[i:j]` at [i, j]; 0 where j <= i."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    within_bytes: NDArray[np.float64] = np.maximum(sums[None, :] - sums[:, None], 0.0)
    return within_bytes


def pair_sums(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of `pairs[u, v]` over all u >= i and v < j at [i, j], for pairs with u < v, shape (L + 1, L + 1)."""
    layers = len(pairs)
    within = np.zeros((layers + 1, layers + 1))
    within[:layers, 1:] = np.cumsum(np.cumsum(pairs[::-1], axis=0)[::-1], axis=1)
    return within
