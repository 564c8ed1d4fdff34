"""Mean, variance and number of the values that a batch normalization sees: of a micro-batch, and of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profiler.machine.backend import HOST
from profiler.torch_private import add_all, multiply_all, subtract_all

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


def combined(
    means: Sequence[Sequence[Tensor]], variances: Sequence[Sequence[Tensor]], counts: Sequence[Sequence[float]]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Mean and unbiased variance per channel of a mini-batch from those of its micro-batches, of many normalizations.

    One operation is for all normalizations: a card takes longer to be told of them one by one than to compute them, and
    the numbers go along with it, since to bring a tensor there the host would wait until the card is idle.

    Args:
        means: per micro-batch and normalization, shape (channels,).
        variances: unbiased, likewise.
        counts: elements per channel, likewise.

    Returns:
        The two over all elements, by the law of total variance; per normalization, each of shape (channels,).
    """
    totals = [sum(of_one) for of_one in zip(*counts, strict=True)]
    mean = _sums([(of_batch, _over(count, totals)) for of_batch, count in zip(means, counts, strict=True)])
    parts = []
    for of_batch, spread, count in zip(means, variances, counts, strict=True):
        rest = [total - 1 for total in totals]
        parts.append((spread, _over([each - 1 for each in count], rest)))
        off = subtract_all(of_batch, mean)
        parts.append((multiply_all(off, off), _over(count, rest)))
    return mean, _sums(parts)


def _over(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def _sums(parts: Sequence[tuple[Sequence[Tensor], list[float]]]) -> Sequence[Tensor]:
    """By normalization the sum of tensors times numbers, in their order."""
    tensors, factors = parts[0]
    total = multiply_all(tensors, factors)
    for tensors, factors in parts[1:]:
        add_all(total, multiply_all(tensors, factors))
    return total
