"""Mean, variance and number of the values that a batch normalization sees: of a micro-batch, and of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profiler.machine.backend import HOST

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


def combined(means: Sequence[Tensor], variances: Sequence[Tensor], counts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance per channel of a mini-batch from those of its micro-batches.

    Args:
        means: per micro-batch, shape (channels,).
        variances: unbiased, per micro-batch, shape (channels,).
        counts: elements per channel, per micro-batch.

    Returns:
        The two over all elements, by the law of total variance; each of shape (channels,).
    """
    weights = torch.stack(list(counts)).to(device=means[0].device, dtype=means[0].dtype).unsqueeze(1)
    total = weights.sum()
    stacked = torch.stack(list(means))
    mean = (stacked * weights).sum(0) / total
    within = (torch.stack(list(variances)) * (weights - 1)).sum(0)
    between = ((stacked - mean) ** 2 * weights).sum(0)
    return mean, (within + between) / (total - 1)
