"""Mean, variance and number of the values that a batch normalization sees: of a micro-batch, and of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from profiler.machine.backend import HOST, backend_of

WHOLE_MOMENTUM = 1.0  # running = (1 - momentum) * running + momentum * batch: the scratch buffer becomes the batch's


def elements_per_channel(values: Tensor) -> Tensor:
    """Elements that one channel (dimension 1) has, as a float64 scalar tensor on the CPU.

    Raises:
        ValueError: it is one; torch's modules refuse that too, while its operation makes the running variance NaN.
    """
    count = values.numel() // values.shape[1]
    if count == 1:
        raise ValueError(f"batch normalization of values of shape {list(values.shape)}: one per channel, 2 are needed")
    return torch.tensor(count, dtype=torch.float64, device=HOST)


@dataclass(frozen=True, slots=True)
class _Alike:
    """What normalizations of one type on one device have seen, their channels one after the other in each tensor.

    To be told of a hundred one by one takes a card, and Python, longer than to compute them.

    Attributes:
        positions: of these normalizations among all.
        channels: of each.
        dtype: of the mean and variance of each.
        mean: shape (sum of channels,), as the next two.
        variance: unbiased.
        number: elements per channel.
    """

    positions: tuple[int, ...]
    channels: tuple[int, ...]
    dtype: torch.dtype
    mean: Tensor
    variance: Tensor
    number: Tensor

    def then(self, other: _Alike) -> _Alike:
        """Of both, by the law of total variance.

        Each product, quotient, sum and difference is taken by itself: so it is rounded alike wherever a channel lies.
        """
        number = self.number + other.number
        off = other.mean - self.mean
        between = off * off * (self.number * other.number / number)
        within = self.variance * (self.number - 1) + other.variance * (other.number - 1)
        mean = self.mean + off * (other.number / number)
        return replace(self, mean=mean, variance=(within + between) / (number - 1), number=number)

    def each(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Position, mean and variance of each."""
        parts = (whole.to(self.dtype).split(self.channels) for whole in (self.mean, self.variance))
        yield from zip(self.positions, *parts, strict=True)


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean, unbiased variance and number of what several batch normalizations have seen, in one micro-batch or more.

    Attributes:
        lots: of normalizations that are alike.
    """

    lots: tuple[_Alike, ...]

    @classmethod
    def of(cls, means: Sequence[Tensor], variances: Sequence[Tensor], counts: Sequence[float]) -> Moments:
        """Of one micro-batch.

        Args:
            means: per normalization, shape (channels,).
            variances: unbiased, likewise.
            counts: elements per channel, likewise.
        """
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
        for position, value in enumerate(means):
            alike[value.dtype, value.device].append(position)
        lots = []
        for (dtype, device), positions in alike.items():
            channels = tuple(means[position].numel() for position in positions)
            exact = torch.promote_types(dtype, torch.float32)
            mean, variance = (
                torch.cat([values[position] for position in positions]).to(exact) for values in (means, variances)
            )
            number = _along(tuple(counts[position] for position in positions), channels, exact, device)
            lots.append(_Alike(tuple(positions), channels, dtype, mean, variance, number))
        return cls(tuple(lots))

    def then(self, other: Moments) -> Moments:
        """Of what these have seen, and after that those of the same normalizations."""
        return Moments(tuple(one.then(two) for one, two in zip(self.lots, other.lots, strict=True)))

    def each(self) -> tuple[list[Tensor], list[Tensor]]:
        """Mean and variance of each normalization, of shape (channels,)."""
        found = sorted((entry for lot in self.lots for entry in lot.each()), key=lambda entry: entry[0])
        return [mean for _, mean, _ in found], [variance for _, _, variance in found]

    def packed(self) -> Tensor:
        """All numbers as one vector; float64 holds them exactly."""
        device = self.lots[0].mean.device
        parts = [part for lot in self.lots for part in (lot.mean, lot.variance, lot.number)]
        return torch.cat([part.to(device=device, dtype=torch.float64) for part in parts])

    def unpacked(self, vector: Tensor) -> Moments:
        """Of the same normalizations, from what `packed` made of them elsewhere."""
        lots, begin = [], 0
        for lot in self.lots:
            like, size = lot.mean, lot.mean.numel()
            parts = vector[begin : begin + 3 * size].to(device=like.device, dtype=like.dtype).split(size)
            lots.append(replace(lot, mean=parts[0], variance=parts[1], number=parts[2]))
            begin += 3 * size
        return Moments(tuple(lots))


@lru_cache(maxsize=64)  # micro-batches of one size have the same, in each step
def _along(numbers: tuple[float, ...], channels: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number of its normalization for each channel."""
    repeats = torch.tensor(channels, device=HOST)
    on_host = torch.tensor(numbers, dtype=dtype, device=HOST).repeat_interleave(repeats)
    return backend_of(device).from_host(on_host, device)
