"""What a stage of layers [i, j) holds of one micro-batch, for all i and j at once, from `profiler.record.InStage`.

A micro-batch keeps what layers of the stage create and layers of the stage save. While layer l runs, forward or
backward, what layers i to l keep is there and what layers after l keep is not, so the most that is held is

    max over l in [i, j) of   kept(i, l + 1) + moment(l)

with `moment` the larger of what is there in the layer's forward and in its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
class PairBytes:
    """Bytes for some pairs of an earlier and a later layer [u, v]; most layers have to do with a few neighbours.

    Attributes:
        earlier: u of each pair, shape (n,).
        size_bytes: of each, shape (n,).
        starts: where the pairs of each v begin, which stand in the order of v, shape (columns + 1,).
    """

    earlier: NDArray[np.intp]
    size_bytes: NDArray[np.float64]
    starts: NDArray[np.intp]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int, int]], columns: int) -> Self:
        """Of u, v and the bytes of each pair, for v below `columns`."""
        table = np.array([*pairs], dtype=np.float64).reshape(-1, 3)
        table = table[np.argsort(table[:, 1], kind="stable")]
        starts = np.searchsorted(table[:, 1], np.arange(columns + 1))
        return cls(table[:, 0].astype(np.intp), table[:, 2], starts)

    def at(self, later: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The earlier layers of those with a later one, and their bytes."""
        own = slice(self.starts[later], self.starts[later + 1])
        return self.earlier[own], self.size_bytes[own]

    def column(self, later: int, rows: int) -> NDArray[np.float64]:
        """The bytes with a layer, shape (rows,) or more: what waits may be of a layer after it (a write in place)."""
        earlier, size_bytes = self.at(later)
        return _summed(earlier, size_bytes, rows)

    def of_earlier(self, rows: int) -> NDArray[np.float64]:
        """The bytes of each earlier layer with all later ones, shape (rows,)."""
        return _summed(self.earlier, self.size_bytes, rows)


@dataclass(frozen=True, slots=True, eq=False)
class StageBytes:
    """The fields of `InStage` for all L layers.

    Attributes:
        own_bytes: what each layer keeps itself, nothing of it carried, shape (L,).
        held_bytes: shape (L,); so `forward_bytes`, `backward_bytes`, `last_backward_bytes`, `workspace_bytes` and
            `prelude_peak_bytes`.
        pairs: bytes that a stage keeps if it holds both layers u < v; negative where both are charged with the same.
        waiting_bytes: values of layer u that are there while layer v runs.
        prelude_bytes: prelude values that are there while layer u runs and wait for layer v >= u.
        copied_bytes: copies of gradients of layer u's values in layer v's backward pass.
        returning_bytes: gradients of values after layer u that layer v reads next; v = L for what only the model's
            output reads.
        made_bytes: the storages that these lie on, for those that layer v's backward pass makes, likewise.
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
    pairs: PairBytes
    waiting_bytes: PairBytes
    prelude_bytes: PairBytes
    copied_bytes: PairBytes
    returning_bytes: PairBytes
    made_bytes: PairBytes
    passing_bytes: PairBytes
    leaves: NDArray[np.intp]
    leaf_bytes: NDArray[np.float64]

    @classmethod
    def of(cls, costs: Sequence[LayerCost]) -> Self:
        """From the costs of all layers in their order; a layer without `in_stage` needs its transients all along."""
        layers = len(costs)
        entries = [cost.in_stage or _alone(cost.transient_bytes) for cost in costs]
        own = np.array(
            [
                cost.kept_bytes - sum(size_bytes for _, size_bytes in entry.carried_bytes)
                for cost, entry in zip(costs, entries, strict=True)
            ],
            dtype=np.float64,
        )

        def towards(name: str, sign: int = 1) -> list[tuple[int, int, int]]:
            """Of entries about later layers."""
            return [(u, v, sign * size) for u, entry in enumerate(entries) for v, size in getattr(entry, name)]

        def back(name: str, sign: int = 1) -> list[tuple[int, int, int]]:
            """Of entries about earlier layers."""
            return [(u, v, sign * size) for v, entry in enumerate(entries) for u, size in getattr(entry, name)]

        leaves = [(index, *about) for index, entry in enumerate(entries) for about in entry.leaf_bytes]
        at_leaves = np.array(leaves, dtype=np.float64).reshape(-1, 5)
        return cls(
            own,
            **{name: np.array([getattr(entry, name) for entry in entries], dtype=np.float64) for name in _VECTORS},
            pairs=PairBytes.of([*towards("carried_bytes"), *back("repeated_bytes", -1)], layers),
            waiting_bytes=PairBytes.of(back("waiting_bytes"), layers),
            prelude_bytes=PairBytes.of(towards("prelude_bytes"), layers),
            copied_bytes=PairBytes.of(back("copied_bytes"), layers),
            returning_bytes=PairBytes.of(towards("returning_bytes"), layers + 1),
            made_bytes=PairBytes.of(towards("made_bytes"), layers + 1),
            passing_bytes=PairBytes.of(towards("passing_bytes"), layers + 1),
            leaves=at_leaves[:, :4].astype(np.intp),
            leaf_bytes=at_leaves[:, 4],
        )

    def kept(self) -> NDArray[np.float64]:
        """Bytes that one micro-batch keeps until its backward pass, at [i, j] for a stage of layers [i, j)."""
        return sums_with_pairs(self.own_bytes, self.pairs)

    def most(self, kept: NDArray[np.float64]) -> NDArray[np.float64]:
        """The most bytes at any moment, inputs and received gradients not counted, at [i, j].

        What a layer needs on top of what is kept grows with the stop: at the layer after it, and at each later one that
        reads what the layer holds for it. So with each stop those alone are looked at that need more than with the one
        before, and all stages take L^2 and not L^3.

        Args:
            kept: of `kept()`.
        """
        layers = len(self.own_bytes)
        most = np.zeros((layers + 1, layers + 1))
        walk = _Stops(self, kept)
        for stop in range(1, layers + 1):
            most[stop, :stop] = walk.to(stop)
        return most.T


class _Stops:
    """Stages that end at one stop after the other: `forward` and `backward` hold what they have needed so far.

    Args:
        own: bytes of all layers.
        kept: of `StageBytes.kept`.
    """

    def __init__(self, own: StageBytes, kept: NDArray[np.float64]) -> None:
        layers = len(own.own_bytes)
        self._own = own
        self._kept = kept.T
        self._held = np.concatenate(([0.0], np.cumsum(own.held_bytes)))
        # of each layer for those before the stop, and for all of them
        self._prelude, self._returning, self._made, self._passing = np.zeros((4, layers))
        self._all_returning = own.returning_bytes.of_earlier(layers)
        self._all_passing = own.passing_bytes.of_earlier(layers)
        self._leaves = _copying(own.leaves)
        # by the layer at which the stage begins
        self._forward, self._backward = np.full((2, layers), -np.inf)
        self._computed = np.zeros(layers)

    def to(self, stop: int) -> NDArray[np.float64]:
        """The most bytes of stages from each layer to that stop; stops come one after the other."""
        own, last = self._own, stop - 1
        reads = [
            pairs.at(last) for pairs in (own.prelude_bytes, own.returning_bytes, own.made_bytes, own.passing_bytes)
        ]
        sums = self._prelude, self._returning, self._made, self._passing
        for total, (earlier, size_bytes) in zip(sums, reads, strict=True):
            np.add.at(total, earlier, size_bytes)
        prelude, _, made, passing = [earlier[earlier < last].tolist() for earlier, _ in reads]
        for layer in {last, *made, *passing}:
            _raise(self._backward, self._in_backward(layer))
        for layer in {last, *prelude}:
            _raise(self._forward, self._in_forward(layer))
        backward = self._backward[:stop].copy()
        for layer, entries in self._leaves.get(stop, {}).items():
            copies = _summed(own.leaves[entries, 1] + 1, own.leaf_bytes[entries], stop)
            _raise(backward, self._in_backward(layer) + np.cumsum(copies)[: layer + 1])
        backward[1:] += self._all_returning[:last] - self._returning[:last]  # of what passes the stage by
        _raise(self._computed, np.full(stop, own.prelude_peak_bytes[last]))
        most: NDArray[np.float64] = np.maximum(self._forward[:stop], backward) + self._held[stop]
        return np.maximum(most, self._computed[:stop])

    def _in_forward(self, layer: int) -> NDArray[np.float64]:
        """What is there in the layer's forward pass, in stages from each layer to it on."""
        waiting = _from_each_on(self._own.waiting_bytes.column(layer, layer + 1))[: layer + 1]
        more_bytes = float(self._own.forward_bytes[layer] + self._prelude[layer])
        return self._there(layer) + waiting + more_bytes

    def _in_backward(self, layer: int) -> NDArray[np.float64]:
        """The same of its backward pass, but for what passes the stage by and copies at leaves."""
        received = self._all_passing[layer] - self._passing[layer]
        last_bytes = self._own.last_backward_bytes[layer] + self._made[layer]
        copied = self._own.copied_bytes.column(layer, layer + 1)
        before = (np.cumsum(copied) - copied)[: layer + 1]
        return self._there(layer) + before + float(min(self._own.backward_bytes[layer] - received, last_bytes))

    def _there(self, layer: int) -> NDArray[np.float64]:
        """What is kept while a layer runs; what stays until the end of the step comes to it for the whole stage."""
        stays = self._held[layer + 1] - self._own.workspace_bytes[layer]
        there: NDArray[np.float64] = self._kept[layer + 1, : layer + 1] - stays
        return there


def _raise(most: NDArray[np.float64], found: NDArray[np.float64]) -> None:
    """Each of the first to what was found, where that is more."""
    np.maximum(most[: len(found)], found, out=most[: len(found)])


def _copying(leaves: NDArray[np.intp]) -> dict[int, dict[int, list[int]]]:
    """By stop and layer, the entries of `StageBytes.leaves` that have copies there."""
    found: dict[int, dict[int, list[int]]] = {}
    for entry, (layer, _, later, maker) in enumerate(leaves.tolist()):
        for stop in range(max(layer, later) + 1, maker + 1):
            found.setdefault(stop, {}).setdefault(layer, []).append(entry)
    return found


def sums_with_pairs(own: NDArray[np.float64], pairs: PairBytes) -> NDArray[np.float64]:
    """Sum of `own[i:j]` and of all pairs of layers in [i, j), at [i, j]; 0 where j <= i, shape (L + 1, L + 1)."""
    layers = len(own)
    by_stop = np.zeros((layers + 1, layers + 1))
    for layer in range(layers):
        more = pairs.column(layer, layer + 1)
        more[layer] += own[layer]
        by_stop[layer + 1, : layer + 1] = by_stop[layer, : layer + 1] + _from_each_on(more)[: layer + 1]
    return by_stop.T


def _summed(places: NDArray[np.intp], size_bytes: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
    """The bytes at each place, shape (rows,)."""
    return np.bincount(places, weights=size_bytes, minlength=rows).astype(np.float64, copy=False)


def _from_each_on(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of each value and those after it."""
    sums: NDArray[np.float64] = np.cumsum(values[::-1])[::-1]
    return sums


def _alone(transient_bytes: int) -> InStage:
    return InStage(forward_bytes=transient_bytes, backward_bytes=transient_bytes, last_backward_bytes=transient_bytes)
