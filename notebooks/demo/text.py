"""English text that comes with every Python installation, as bytes to train on."""

from collections.abc import Iterator
from pydoc_data import topics

import torch
from torch import Tensor


def train_and_held_out(held_out_share: float = 0.1) -> tuple[Tensor, Tensor]:
    """The text of Python's help topics, in alphabetical order of the topics.

    Args:
        held_out_share: part of the text, at its end, to keep for validation.

    Returns:
        Bytes to train on and bytes to validate with, int64 vectors of values 0 to 255.
    """
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    first_held_out = round(len(data) * (1 - held_out_share))
    return data[:first_held_out], data[first_held_out:]


def batches(data: Tensor, batch_size: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text without end; the same seed gives the same windows.

    Args:
        data: vector of bytes, longer than `context`.
        batch_size: windows in a batch.
        context: bytes in a window.
        seed: of the positions.

    Yields:
        Inputs and targets, both int64 (batch_size, context); targets are the inputs moved on by one byte.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context)
    while True:
        starts = torch.randint(len(data) - context, (batch_size, 1), generator=generator)
        yield data[starts + offsets], data[starts + offsets + 1]
