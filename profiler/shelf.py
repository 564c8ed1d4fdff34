"""Parameters on the device that measures: of a few layers at a time where the device does not hold the whole model.

    shelf = Shelf(sequence, device, room_bytes=2**30)
    shelf.hold(range(4, 7))        # layers 4 to 6 are there; others give way if there is no room for all
    shelf[5, "blocks.1.weight"]    # a tensor with a `.grad`, as from the second micro-batch of a step on

A model on the meta device has no values: its layers get random ones of a scale that keeps activations about as large
as they come in, for kernels are slow on numbers that vanish.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from profiler.sequence import LayerSequence

Key = tuple[int, str]  # index of a layer, name of a parameter that it reads
REPEATED_ELEMENTS = 2**14  # random numbers of which a large tensor holds many copies: drawing all would take seconds


class Shelf(Mapping[Key, Tensor]):
    """For each layer its parameters, sharing memory with the model's where they are on the device already.

    Args:
        sequence: the layers.
        device: where the parameters go.
        room_bytes: that they and their gradients may occupy; one layer may take more. None for no limit.
    """

    def __init__(self, sequence: LayerSequence, device: torch.device, room_bytes: int | None = None) -> None:
        self._sequence = sequence
        self._device = device
        self._room_bytes = room_bytes
        self._held: dict[int, dict[str, Tensor]] = {}

    def __getitem__(self, key: Key) -> Tensor:
        """The parameter `key[1]` of layer `key[0]`, which comes to the device if it is not there."""
        index, name = key
        if index not in self._held:
            self.hold(range(index, index + 1))
        return self._held[index][name]

    def __iter__(self) -> Iterator[Key]:
        """All keys, of layers that are on the device and of others."""
        return ((layer.index, name) for layer in self._sequence.layers for name in layer.parameters)

    def __len__(self) -> int:
        """Number of keys."""
        return sum(len(layer.parameters) for layer in self._sequence.layers)

    def bytes_of(self, index: int) -> int:
        """Bytes that a layer's parameters and their gradients take on the device beside the model's own."""
        tensors = [self._sequence.parameters[name] for name in self._sequence.layers[index].parameters]
        own = sum(tensor.nbytes for tensor in tensors if tensor.device != self._device)
        return own + sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)

    def hold(self, layers: range) -> None:
        """Bring the parameters of these layers to the device; where room is short, those of others go first."""
        new = [index for index in layers if index not in self._held]
        needed = sum(self.bytes_of(index) for index in new)
        there = sum(self.bytes_of(index) for index in self._held)
        if self._room_bytes is not None and there + needed > self._room_bytes:
            self._held = {index: held for index, held in self._held.items() if index in layers}
        for index in new:
            self._held[index] = {name: self._placed(name) for name in self._sequence.layers[index].parameters}

    def clear(self) -> None:
        """Remove all parameters from the device."""
        self._held.clear()

    def _placed(self, name: str) -> Tensor:
        parameter = self._sequence.parameters[name]
        placed = valued(parameter, self._device) if parameter.is_meta else parameter.detach().to(self._device)
        placed.requires_grad_(parameter.requires_grad)
        if placed.requires_grad:
            placed.grad = torch.zeros_like(placed)
        return placed


def valued(parameter: Tensor, device: torch.device) -> Tensor:
    """Random values for a parameter without any: products with it keep the scale of what they are given.

    Vectors, which scale and shift, are near 1.
    """
    drawn = torch.randn(REPEATED_ELEMENTS, device=device)
    if parameter.dim() < 2:
        drawn = 1 + drawn / 10
    else:
        drawn /= max(1, prod(parameter.shape[1:])) ** 0.5
    result = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    whole, rest = divmod(parameter.numel(), REPEATED_ELEMENTS)
    flat = result.view(-1)
    flat[: whole * REPEATED_ELEMENTS].view(whole, REPEATED_ELEMENTS).copy_(drawn.expand(whole, -1))
    flat[whole * REPEATED_ELEMENTS :].copy_(drawn[:rest])
    return result


def valued_buffer(buffer: Tensor, device: torch.device) -> Tensor:
    """A buffer on the device; without values it is 1 where it scales, 0 where it points, true where it selects."""
    if not buffer.is_meta:
        return buffer.detach().to(device)
    one = buffer.dtype.is_floating_point or buffer.dtype.is_complex or buffer.dtype == torch.bool
    return torch.full(buffer.shape, 1 if one else 0, dtype=buffer.dtype, device=device)
