"""Which layers are swept: of equal ones a few, since a model of 48 equal blocks has little to tell that 12 do not.

    layers    | 0 | a b | a b | a b | a b | a b | a b | 9 |
    swept     | 0 | a b | a b | a b |                 | 9 |       values pass over the gap under new names

A layer that is left out hands on what an equal one computed, so that values flow on as they do in training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from profiler.tracing.sequence import LayerSequence

LEAST_COPIES = 3
LEAST_BYTES = 64 * 2**20
"""What layers that are swept touch together before equal ones are left out: a cache that held all of it from one
sweep to the next would make them seem faster than among the many layers of training."""


def swept_layers(keys: Sequence[Hashable], touched_bytes: Sequence[int]) -> list[int]:
    """Indices of the layers to sweep, ascending: `LEAST_COPIES` with each key, and more until they hold `LEAST_BYTES`.

        >>> swept_layers(["head", "a", "a", "a", "a", "a", "tail"], [LEAST_BYTES] * 7)
        [0, 1, 2, 3, 6]

    Args:
        keys: equal for layers that take equally long.
        touched_bytes: parameters, their gradients, and what is kept for the backward pass.
    """
    copies: Counter[Hashable] = Counter()
    chosen, held = [], 0
    for index, (key, size_bytes) in enumerate(zip(keys, touched_bytes, strict=True)):
        if copies[key] < LEAST_COPIES or held < LEAST_BYTES:
            copies[key] += 1
            held += size_bytes
            chosen.append(index)
    return chosen


def windows(layers: Sequence[int], sizes: Sequence[tuple[int, ...]], limits: tuple[int, ...]) -> list[range]:
    """Runs of neighbouring layers that stay within every limit; a layer that does not is a run by itself.

        >>> windows([0, 1, 2, 4], [(3,), (3,), (3,), (9,), (1,)], (6,))
        [range(0, 2), range(2, 3), range(4, 5)]

    Args:
        layers: indices, ascending.
        sizes: by index, one number for each limit.
        limits: what the numbers of a run may add up to.
    """
    starts, held = [0], (0,) * len(limits)
    for position, index in enumerate(layers):
        together = tuple(map(sum, zip(held, sizes[index], strict=True)))
        too_much = any(sum_ > limit for sum_, limit in zip(together, limits, strict=True))
        if position > starts[-1] and (too_much or index != layers[position - 1] + 1):
            starts.append(position)
            together = sizes[index]
        held = together
    return [range(layers[first], layers[stop - 1] + 1) for first, stop in pairwise((*starts, len(layers)))]


class BoundaryValues:
    """What crosses boundaries in a sweep, also those of layers that are left out.

    Args:
        sequence: the layers.
        keys: of all layers, as for `swept_layers`.
        layers: those that are swept.
    """

    def __init__(self, sequence: LayerSequence, keys: Sequence[Hashable], layers: Sequence[int]) -> None:
        self._sequence = sequence
        self._keys = keys
        self._left_out = sorted(set(range(len(sequence))).difference(layers))
        self._wanted = {
            (keys[index], position)
            for index in self._left_out
            for position, name in enumerate(sequence.layers[index].outputs)
            if any(value.name == name for value in sequence.boundaries[index + 1])
        }
        self._outputs: dict[tuple[Hashable, int], Tensor] = {}

    def note(self, index: int, computed: Mapping[str, Tensor]) -> None:
        """Remember what a layer computed as far as layers that are left out need it."""
        for position, name in enumerate(self._sequence.layers[index].outputs):
            if (self._keys[index], position) in self._wanted:
                self._outputs[self._keys[index], position] = computed[name].detach()

    def pass_over(self, first: int, stop: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is alive after layers [first, stop), which are left out, given what is alive before them."""
        for index in range(first, stop):
            outputs = self._sequence.layers[index].outputs
            made = {
                name: self._outputs[self._keys[index], position]
                for position, name in enumerate(outputs)
                if (self._keys[index], position) in self._outputs
            }
            known = {**values, **made}
            values = {value.name: known[value.name] for value in self._sequence.boundaries[index + 1]}
        return dict(values)

    def clear(self) -> None:
        """Forget all values."""
        self._outputs.clear()
