"""Which micro-batch sizes are measured. The planner takes the line between measured sizes and goes never beyond."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.device import Cluster
from profiler.errors import ArgumentError
from profiler.quantities import MOST_SAMPLES, shown
from profiler.text import counted

MICRO_BATCHES_PER_STAGE = 4  # M >= 4K (GPipe, section 2.2), so no micro-batch holds more than a quarter of the batch


def measured_sizes(
    batch_size: int, micro_batch_sizes: Sequence[int] | None, cluster: Cluster, only: int | None = None
) -> tuple[int, ...]:
    """The sizes to measure, ascending.

    By default powers of two up to a quarter of the batch, the quarter itself, and the smallest number of micro-batches
    for each number of stages:

        batch of 100 on 3 devices: 1, 2, 4, 8, 12, 16, 25

    Args:
        batch_size: samples of a mini-batch.
        micro_batch_sizes: sizes that the user asks for instead; between 1 and a larger one 2 is added.
        cluster: as many stages as it has devices are possible.
        only: the one size that the model was traced for, if there is but one.

    Raises:
        ArgumentError: a size is not a positive whole number, or there is none, or it is not the only one possible.
    """
    _check_size("batch_size", batch_size)
    if micro_batch_sizes is not None:
        _check_list(micro_batch_sizes)
    if only is not None:
        return _only(only, batch_size, micro_batch_sizes)
    if micro_batch_sizes is not None:
        return _checked(batch_size, micro_batch_sizes)
    largest = -(-batch_size // MICRO_BATCHES_PER_STAGE)
    sizes = {largest}
    sizes.update(2**power for power in range(largest.bit_length()) if 2**power <= largest)
    for stages in range(1, len(cluster.devices) + 1):
        sizes.add(max(1, batch_size // (MICRO_BATCHES_PER_STAGE * stages)))
    return tuple(sorted(sizes))


def _only(size: int, batch_size: int, micro_batch_sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The one size of a model that was traced with static shapes."""
    reason = f"the model could only be traced with static shapes, for micro-batches of {counted(size, 'sample')}"
    if batch_size % size:
        raise ArgumentError(
            f"{reason}, and a batch of {batch_size} cannot be cut into those; take a multiple of {size}, or a sample "
            "with as many samples as a micro-batch is to have"
        )
    for other in micro_batch_sizes or ():
        if other != size:
            raise ArgumentError(
                f"{reason}, and micro_batch_sizes holds {other}; trace it with {counted(other, 'sample')}"
            )
    return (size,)


def _check_list(micro_batch_sizes: Sequence[int]) -> None:
    if isinstance(micro_batch_sizes, str) or not isinstance(micro_batch_sizes, Sequence):
        raise ArgumentError(f"micro_batch_sizes={micro_batch_sizes!r} is not a list; pass sizes such as [1, 2, 4]")
    if not micro_batch_sizes:
        raise ArgumentError("micro_batch_sizes holds 0 sizes, at least 1 is needed; leave it out for sizes by default")


def _checked(batch_size: int, micro_batch_sizes: Sequence[int]) -> tuple[int, ...]:
    for size in micro_batch_sizes:
        _check_size("micro_batch_sizes", size)
        if size > batch_size:
            raise ArgumentError(
                f"micro_batch_sizes holds {size}, but the batch has {counted(batch_size, 'sample')}; leave "
                f"{size} out or raise batch_size"
            )
    sizes = set(micro_batch_sizes)
    if 1 in sizes and len(sizes) > 1:
        sizes.add(2)  # kernels compute one sample differently: the line from it to a larger size lies too low
    return tuple(sorted(sizes))


def _check_size(name: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_SAMPLES:
        raise ArgumentError(
            f"{name}: {shown(size)} is no size; sizes are whole numbers of samples, at least 1 and at most "
            f"{MOST_SAMPLES}"
        )


def by_importance(sizes: Sequence[int], batch_size: int, stages: int) -> tuple[int, ...]:
    """The sizes in the order in which they make a plan good.

    First the size of 4K micro-batches on all K devices, then the two ends, which make every size between them
    possible, then the sizes nearest to the first.

        >>> by_importance((1, 2, 4, 8, 16), batch_size=64, stages=4)
        (4, 16, 1, 2, 8)
    """
    likely = batch_size / (MICRO_BATCHES_PER_STAGE * stages)
    nearest = sorted(sizes, key=lambda size: abs(size - likely))
    return tuple(dict.fromkeys((nearest[0], max(sizes), min(sizes), *nearest)))
