"""Parameters on the device that measures: of a few layers at a time where the device does not hold the whole model.

    pool = ParameterPool(sequence, device, room_bytes=2**30)
    pool.hold(range(4, 7))        # layers 4 to 6 are there; others give way if there is no room for all
    pool[5, "blocks.1.weight"]    # a tensor with a `.grad`, as from the second micro-batch of a step on

A model on the meta device has no values: its layers get random ones of a scale that keeps activations about as large
as they come in, for kernels are slow on numbers that vanish.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from profiler.machine.allocator import give_back_freed_memory
from profiler.run.main_gradients import with_gradient
from profiler.run.recurrent_weights import lay_together, recurrent_weights
from profiler.tracing.computing_model import adding_dtype, main_like
from profiler.tracing.sequence import LayerSequence

Key = tuple[int, str]  # index of a layer, name of a parameter that it reads
BLOCK_BYTES = 64  # parameters begin at multiples, as the allocator's do
REPEATED_ELEMENTS = 2**14  # random numbers of which a large tensor holds many copies: drawing all would take seconds


class ParameterPool(Mapping[Key, Tensor]):
    """For each layer its parameters, sharing memory with the model's where they are on the device already.

    Args:
        sequence: the layers.
        device: where the parameters go.
        room_bytes: that they and their gradients may occupy; one layer may take more. None for no limit.

    Attributes:
        timed: whether what layers do is timed while others give way: fresh pages would cost them time.
    """

    def __init__(self, sequence: LayerSequence, device: torch.device, room_bytes: int | None = None) -> None:
        self._sequence = sequence
        self._device = device
        self._room_bytes = room_bytes
        self._held: dict[int, dict[str, Tensor]] = {}
        self._room: Tensor | None = None  # one block for all: blocks that come and go would leave holes between them
        self._filled_bytes = 0
        self._in_turns = False
        self.timed = False

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
        """Bytes that a layer's parameters and their gradients take on the device in addition to the model's own."""
        tensors = [self._sequence.parameters[name] for name in self._sequence.layers[index].parameters]
        own = sum(_block_bytes(tensor) for tensor in tensors if tensor.device != self._device)
        return own + sum(_block_bytes(self._main(tensor)) for tensor in tensors if tensor.requires_grad)

    def hold(self, layers: range) -> None:
        """Bring the parameters of these layers to the device; where room is short, all others go first."""
        new = [index for index in layers if index not in self._held]
        if self._room is None:
            read = (name for layer in self._sequence.layers for name in layer.parameters if name in self._apart)
            apart = sum(_block_bytes(self._sequence.parameters[name]) for name in read)  # by each layer that reads it
            self._room = torch.empty(self.capacity_bytes - apart, dtype=torch.uint8, device=self._device)
        if not self._all_fits and self._filled_bytes + sum(map(self.bytes_of, new)) > len(self._room):
            self._held, self._filled_bytes, new = {}, 0, list(layers)
            self._in_turns = True
            if not self.timed:
                self.tidy()
            assert sum(map(self.bytes_of, new)) <= len(self._room), "a window fits the pool"
        for index in new:
            layer = self._sequence.layers[index]
            values = {name: self._values(name) for name in layer.parameters}
            lay_together([layer], {name: values[name] for name in self._apart & values.keys()})
            self._held[index] = {name: self._trainable(name, value) for name, value in values.items()}

    def clear(self) -> None:
        """Remove all parameters from the device."""
        self._held, self._room, self._filled_bytes = {}, None, 0
        give_back_freed_memory()

    def tidy(self) -> None:
        """Where layers of unlike sizes take turns, give back the pages of what they freed: the next do not fit in."""
        if self._in_turns:
            give_back_freed_memory()

    @property
    def capacity_bytes(self) -> int:
        """What layers that are held together may occupy."""
        sizes = [self.bytes_of(layer.index) for layer in self._sequence.layers]
        return sum(sizes) if self._room_bytes is None else min(sum(sizes), max(self._room_bytes, *sizes))

    @cached_property
    def _all_fits(self) -> bool:
        """Whether no layer gives way to another one."""
        return self.capacity_bytes == sum(self.bytes_of(layer.index) for layer in self._sequence.layers)

    @cached_property
    def _apart(self) -> frozenset[str]:
        """Parameters with memory of their own: what `lay_together` moves."""
        if not self._all_fits:
            return frozenset()
        weights = (one for layer in self._sequence.layers for one in recurrent_weights(layer))
        names = frozenset(name for one in weights for name in one.names)
        return frozenset(name for name in names if self._sequence.parameters[name].device != self._device)

    def _values(self, name: str) -> Tensor:
        parameter = self._sequence.parameters[name]
        if parameter.device == self._device:
            return parameter.detach()
        if name in self._apart:
            flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=self._device)
        else:
            flat = self._block(parameter)
        placed = _shaped(flat, parameter)
        if parameter.is_meta:
            fill(flat, parameter.shape)
        else:
            placed.copy_(parameter.detach())
        return placed

    def _trainable(self, name: str, placed: Tensor) -> Tensor:
        parameter = self._sequence.parameters[name]
        placed.requires_grad_(parameter.requires_grad)
        if placed.requires_grad:
            like = self._main(parameter)
            placed = with_gradient(placed, _shaped(self._block(like).zero_(), like))
        return placed

    def _main(self, parameter: Tensor) -> Tensor:
        """What a parameter's gradients are added up like: itself, or its master weight."""
        precision = self._sequence.sample.precision
        added_as_computed = adding_dtype(precision, parameter) == parameter.dtype
        return parameter if added_as_computed else main_like(precision, parameter)

    def _block(self, like: Tensor) -> Tensor:
        """As many elements of that dtype, one after the other in the room."""
        assert self._room is not None, "the room is taken before it is filled"
        start, self._filled_bytes = self._filled_bytes, self._filled_bytes + _block_bytes(like)
        return self._room[start : start + like.nbytes].view(like.dtype)


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """The elements in that shape, and in that memory layout if it has no holes.

    By `.data`, so that a write to one part of the room is not taken for a change of another one.
    """
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride()).data


def _block_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // BLOCK_BYTES) * BLOCK_BYTES


def fill(flat: Tensor, shape: Sequence[int]) -> None:
    """Give random values to a parameter of that shape, so that products with it keep the scale of what comes in.

    Vectors, which scale and shift, are near 1.
    """
    drawn = torch.randn(REPEATED_ELEMENTS, device=flat.device)
    drawn = 1 + drawn / 10 if len(shape) < 2 else drawn / max(1, prod(shape[1:])) ** 0.5
    whole, rest = divmod(len(flat), REPEATED_ELEMENTS)
    flat[: whole * REPEATED_ELEMENTS].view(whole, REPEATED_ELEMENTS).copy_(drawn.expand(whole, -1))
    flat[whole * REPEATED_ELEMENTS :].copy_(drawn[:rest])


def valued_buffer(buffer: Tensor, device: torch.device) -> Tensor:
    """A buffer on the device; without values it is 1 where it scales, 0 where it points, true where it selects."""
    if not buffer.is_meta:
        return buffer.detach().to(device)
    one = buffer.dtype.is_floating_point or buffer.dtype.is_complex or buffer.dtype == torch.bool
    return torch.full(buffer.shape, 1 if one else 0, dtype=buffer.dtype, device=device)
