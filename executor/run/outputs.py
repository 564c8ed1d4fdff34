"""The model's output for a batch, put together from its outputs for the micro-batches.

    a value                                         for the batch
    with the batch as a dimension                   joined along it
    without it, equal in all micro-batches          this
    a scalar that differs between micro-batches     its mean, weighted by samples

Which dimension is the batch's follows from the extents as the trace has them, expressions of the micro-batch size n. No
other value can be put together; one micro-batch needs no putting together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from executor.run.micro_batch import mean_over_samples
from profiler.errors import ArgumentError
from profiler.run.loss import model_output
from profiler.text import counted
from profiler.tracing.node_text import MICRO_BATCH_SIZE
from profiler.tracing.sequence import LayerSequence


def check_joinable(sequence: LayerSequence, micro_batches: int) -> None:
    """Refuse a model whose outputs for so many micro-batches make up none for the batch.

    Raises:
        ArgumentError: it is not known along which dimension they are to be joined, or there is none.
    """
    if micro_batches > 1:
        for name in sequence.output_shapes:
            _batch_dim(sequence, name)


def whole_output(sequence: LayerSequence, parts: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> Any:
    """The output for all micro-batches together.

    Args:
        sequence: the layers that have run.
        parts: of each micro-batch the values that the last layer leaves.
        sizes: samples of each micro-batch.

    Raises:
        ArgumentError: a value without a batch dimension differs between micro-batches.
    """
    if len(parts) == 1:
        return model_output(sequence, parts[0])
    whole = {name: _whole(sequence, name, [part[name] for part in parts], sizes) for name in parts[0]}
    return model_output(sequence, whole)


def _whole(sequence: LayerSequence, name: str, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    dim = _batch_dim(sequence, name)
    first = parts[0]
    if dim is not None:
        return torch.cat(list(parts), dim)
    other = next((index for index, part in enumerate(parts) if not torch.equal(part, first)), None)
    if other is None:
        return first
    if first.dim() == 0 and first.is_floating_point():
        samples = sum(sizes)
        return mean_over_samples(parts, [size / samples for size in sizes]).to(first.dtype)
    raise ArgumentError(
        f"{_described(sequence, name)}, and differs between micro-batches 0 and {other}, so the batch has no one value "
        "of it; let the model return it for each sample, or not at all"
    )


def _batch_dim(sequence: LayerSequence, name: str) -> int | None:
    """The dimension along which a value's micro-batches are joined; None if no extent depends on their size."""
    shape = sequence.output_shapes[name]
    only = sequence.sample.only_micro_batch_size
    if only is not None and shape:
        raise ArgumentError(
            f"{_described(sequence, name)}, and which dimension is the batch's is not known of a model that could only "
            f"be traced with static shapes; pass {counted(only, 'sample')} at a time to a plan of one replica"
        )
    if shape is not None:
        growing = [dim for dim, extent in enumerate(shape) if getattr(extent, "free_symbols", ())]
        if not growing:
            return None
        if len(growing) == 1 and shape[growing[0]] == MICRO_BATCH_SIZE:
            return growing[0]
    raise ArgumentError(
        f"{_described(sequence, name)} for a micro-batch of n samples, and those of several cannot be joined to one; "
        "let the model return tensors with the batch as one dimension, or without it"
    )


def _described(sequence: LayerSequence, name: str) -> str:
    shape = sequence.output_shapes[name]
    what = "is a number" if shape is None else f"has shape {list(shape)}"
    return f"output {sequence.outputs.index(name)} of the model {what}"
