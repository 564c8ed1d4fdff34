"""Mean, variance and number of the values that a batch normalization sees: of a micro-batch, and of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial

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


def combined(
    means: Sequence[Sequence[Tensor]], variances: Sequence[Sequence[Tensor]], counts: Sequence[Sequence[float]]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Mean and unbiased variance per channel of a mini-batch from those of its micro-batches, of many normalizations.

    The channels of all normalizations lie in one tensor: to be told of a hundred one by one takes a card, and Python,
    longer than to compute them. Only sums, differences and products are taken, each by itself: they are rounded alike
    wherever in a tensor a channel lies.

    Args:
        means: per micro-batch and normalization, shape (channels,).
        variances: unbiased, likewise.
        counts: elements per channel, likewise.

    Returns:
        The two over all elements, by the law of total variance; per normalization, each of shape (channels,).
    """
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for position, value in enumerate(means[0]):
        alike[value.dtype, value.device].append(position)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for (dtype, _), chosen in alike.items():
        of_batches = [[[row[position] for position in chosen] for row in rows] for rows in (means, variances)]
        numbers = [[row[position] for position in chosen] for row in counts]
        channels = tuple(value.numel() for value in of_batches[0][0])
        flat = _combined(
            [torch.cat(row) for row in of_batches[0]], [torch.cat(row) for row in of_batches[1]], numbers, channels
        )
        pairs = zip(*(whole.to(dtype).split(channels) for whole in flat), strict=True)
        found.update(zip(chosen, pairs, strict=True))
    ordered = [found[position] for position in range(len(found))]
    return [mean for mean, _ in ordered], [variance for _, variance in ordered]


def _combined(
    means: Sequence[Tensor], variances: Sequence[Tensor], counts: Sequence[Sequence[float]], channels: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The same of all channels one after the other."""
    totals = [sum(of_one) for of_one in zip(*counts, strict=True)]
    rest = [total - 1 for total in totals]
    along = partial(_along, channels=channels, dtype=_exact(means[0].dtype), device=means[0].device)
    shares = [along(_over(count, totals)) for count in counts]
    mean = _sum([value * share for value, share in zip(means, shares, strict=True)])
    parts = []
    for value, variance, count in zip(means, variances, counts, strict=True):
        parts.append(variance * along(_over([each - 1 for each in count], rest)))
        off = value - mean
        parts.append(off * off * along(_over(count, rest)))
    return mean, _sum(parts)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _over(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, ...]:
    return tuple(above / below for above, below in zip(numerators, denominators, strict=True))


@lru_cache(maxsize=1024)  # micro-batches of one size have the same, in each step
def _along(
    numbers: tuple[float, ...], *, channels: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The number of its normalization for each channel."""
    repeats = torch.tensor(channels, device=HOST)
    on_host = torch.tensor(numbers, dtype=dtype, device=HOST).repeat_interleave(repeats)
    return backend_of(device).from_host(on_host, device)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In their order."""
    total, *others = parts
    for part in others:
        total = total + part
    return total
