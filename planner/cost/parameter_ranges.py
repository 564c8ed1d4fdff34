"""What parameters cost a stage of layers [i, j), for all i and j at once: bytes, gradients and optimizer state."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from planner.cost.layer_costs import Floats, Range, range_sums
from planner.cost.stage_bytes import PairBytes, sums_with_pairs
from planner.cost.stepped_bytes import largest_shares
from profiler.record import OptimizerCost, Profile


class ParameterRanges:
    """Bytes of the parameters that a stage of layers [i, j) holds; matrices of shape (L + 1, L + 1), at [i, j].

    Attributes:
        unique: every parameter that one of the layers reads, once.
        trainable: the same for what the optimizer steps: trainable parameters, or their master weights.
        masters: the master weights among these.
        stepped_gradients: of gradients as the optimizer reads them, and of one as it was added up, where it is cast to
            be read; 0 where none is.
        gradients: of trainable parameters, in the type that adds them up; one that several layers of the model read
            has one accumulator for each of these layers, so that gradients do not depend on the cuts.
        largest_gradient: of one parameter, as a backward pass makes it.
        buffers: of the layers' buffers.
        added_up: for an optimizer and a number of shares, what all rows of `planner.cost.ledger` say of the ranges,
            once that was asked.
    """

    def __init__(self, profile: Profile) -> None:
        layers = len(profile.layers)
        readers: dict[str, list[int]] = {}
        for layer in profile.layers:
            for name in sorted(set(layer.parameters)):
                readers.setdefault(name, []).append(layer.index)
        sizes = {parameter.name: parameter.size_bytes for parameter in profile.parameters}
        trained = [parameter for parameter in profile.parameters if parameter.trainable]
        none = dict.fromkeys(sizes, 0)
        main_sizes = none | {parameter.name: profile.main_bytes(parameter) for parameter in trained}
        added_sizes = none | {parameter.name: profile.gradient_bytes(parameter) for parameter in trained}
        master_sizes = {name: size if size != sizes[name] else 0 for name, size in main_sizes.items()}
        cast_sizes = {name: size for name, size in added_sizes.items() if size != main_sizes[name]}
        self.unique = _unique_sums(layers, readers, sizes)
        self.trainable = _unique_sums(layers, readers, main_sizes)
        self.masters = _unique_sums(layers, readers, master_sizes)
        self.stepped_gradients = np.zeros_like(self.masters)
        if cast_sizes:
            self.stepped_gradients += self.trainable + _largest(layers, readers, cast_sizes)
        self.gradients = range_sums(_read_bytes(layers, readers, added_sizes))
        made = {parameter.name: max(sizes[parameter.name], added_sizes[parameter.name]) for parameter in trained}
        self.largest_gradient = _largest(layers, readers, made)
        self.buffers = range_sums(np.array([layer.buffers_bytes for layer in profile.layers], dtype=np.float64))
        self.added_up: dict[tuple[OptimizerCost, int], Floats] = {}
        self._readers, self._main_sizes = readers, main_sizes
        self._stepped: dict[int, Floats] = {1: self.trainable}
        self._trained = [parameter.name for parameter in profile.stepped_parameters]
        self._states: dict[tuple[OptimizerCost, int], Floats] = {}

    def stepped(self, shares: int) -> Floats:
        """Bytes that one replica's optimizer steps at most, where so many share it; no less for a larger range."""
        if shares not in self._stepped:
            layers = len(self.trainable) - 1
            self._stepped[shares] = largest_shares(layers, self._readers, self._main_sizes, shares)
        return self._stepped[shares]

    def state(self, optimizer: OptimizerCost, shares: int, stage: Range) -> Floats:
        """Bytes of state that one replica's optimizer keeps at most, where so many share it; likewise.

        Where parameters have unlike states, which of them are in the largest share is not asked: it keeps no more than
        all of them, and than as many bytes of the parameter with the most state for each of its own.

        Args:
            optimizer: what it keeps.
            shares: replicas that share it.
            stage: index of ranges.
        """
        if not optimizer.state_bytes:
            return np.asarray(optimizer.state_bytes_per_byte * self.stepped(shares)[stage])
        key = (optimizer, shares)
        if key not in self._states:
            sizes = dict.fromkeys(self._main_sizes, 0) | dict(zip(self._trained, optimizer.state_bytes, strict=True))
            found = _unique_sums(len(self.trainable) - 1, self._readers, sizes)
            if shares > 1:
                most = max(math.nextafter(sizes[name] / self._main_sizes[name], math.inf) for name in self._trained)
                found = np.minimum(found, np.ceil(np.nextafter(most * self.stepped(shares), math.inf)))
            self._states[key] = found
        return self._states[key][stage]


def _largest(layers: int, readers: dict[str, list[int]], sizes: dict[str, int]) -> Floats:
    """The largest of these parameters that a layer of [i, j) reads; 0 where none does."""
    of_layer = np.zeros(layers)
    for name, size in sizes.items():
        of_layer[readers.get(name, [])] = np.maximum(of_layer[readers.get(name, [])], size)
    by_stop = np.triu(np.tile(np.append(0.0, of_layer), (layers + 1, 1)), k=1)
    largest: Floats = np.maximum.accumulate(by_stop, axis=1)
    return largest


def _read_bytes(layers: int, readers: dict[str, list[int]], sizes: dict[str, int]) -> Floats:
    """For each layer the bytes of the parameters that it reads."""
    read = np.zeros(layers, dtype=np.float64)
    for name, users in readers.items():
        read[users] += sizes[name]
    return read


def _unique_sums(layers: int, readers: dict[str, list[int]], sizes: dict[str, int]) -> Floats:
    """Bytes of distinct parameters in [i, j): all that is read, less every repeated read within the range.

    A parameter read by layers u and v, and by none between them, is repeated at v in every range with i <= u and
    v < j; so those are pairs (u, v) of which both layers are in the range.
    """
    repeats = [(*both, -sizes[name]) for name, users in readers.items() for both in pairwise(users)]
    read = _read_bytes(layers, readers, sizes)
    return sums_with_pairs(read, PairBytes.of(repeats, layers)) if repeats else range_sums(read)
