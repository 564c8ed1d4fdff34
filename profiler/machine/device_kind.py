"""What a kind of device is to us: what a class has to say so that stages run on devices of its kind.

    class Mps(Backend): ...        # in a file of its own; then an entry in `profiler.machine.backend`

How its work is timed, what its allocator says, which random generator it draws from, how its ranks talk.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from profiler.device import Device
from profiler.machine.stopwatches import Marks, Stopwatch

T = TypeVar("T")


class Peak:
    """Bytes of tensors at the worst moment; 0 before the end of what is watched."""

    peak_bytes = 0


class Backend(ABC):
    """One kind of device.

    Attributes:
        type: of its torch devices.
        block_bytes: what its allocator gives is a multiple of this.
        is_host: whether it computes on the cores and in the memory of the process itself.
        most_enqueued: operations whose passes its queue takes before the host has to wait; None if there is no queue.
        keeps_order: whether messages between two ranks arrive in the order of their calls, whatever their tags; then
            each direction needs a channel of its own.
        process_group: name of the library that carries messages between ranks, as torch knows it.
        ends_by_abort: whether what waits for a message ends when its process group is aborted.
    """

    type: ClassVar[str]
    block_bytes: ClassVar[int]
    is_host: ClassVar[bool]
    most_enqueued: ClassVar[int | None]
    keeps_order: ClassVar[bool]
    process_group: ClassVar[str]
    ends_by_abort: ClassVar[bool]

    @abstractmethod
    def count(self) -> int | None:
        """How many there are for this process; None for as many as anybody asks for."""

    @abstractmethod
    def described(self, device: torch.device, threads: int, sharing: int) -> Device:
        """What the planner is told of a device that `sharing` workers have together."""

    @abstractmethod
    def context_bytes(self, device: torch.device, operations: int) -> int:
        """Memory that a process occupies on it before it holds any tensor, other processes' included.

        Args:
            device: of this kind.
            operations: of the model that the process has traced.
        """

    @abstractmethod
    def use(self, device: torch.device) -> None:
        """Let calls without a device mean this one."""

    @abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Wait for what was given to the device, in the stream of the caller."""

    @abstractmethod
    def aside(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """What runs inside does not wait for the caller's stream, nor hold it up."""

    @abstractmethod
    def moment(self, device: torch.device) -> object:
        """What the device has been given so far by the caller, for `after`."""

    @abstractmethod
    def after(self, moment: object, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """What runs inside waits for what the caller had given the device by that moment, and for nothing since."""

    @abstractmethod
    def message_options(self) -> object:
        """Of process groups that carry messages between stages, as torch takes them; None for torch's own."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        """The tensor in the host's memory, without a wait, and what tells whether its values have arrived there."""

    @abstractmethod
    def from_host(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy on the device of a tensor in the host's memory, for the caller's stream, whose work it does not await.

        The host waits until it is read, if at all; never for what the device has been given before.
        """

    @abstractmethod
    def generator(self, device: torch.device) -> torch.Generator:
        """What its operations draw random numbers from."""

    @abstractmethod
    def stopwatch(self, device: torch.device) -> Stopwatch:
        """What times work on it."""

    @abstractmethod
    def marks(self) -> Marks:
        """New marks on the current device."""

    @abstractmethod
    def can_watch(self) -> bool:
        """Whether `peak_of` works now."""

    @abstractmethod
    def peak_of(self, device: torch.device, call: Callable[[], T]) -> tuple[T, int]:
        """The call's result, and the most bytes that the allocator had given out within, above those before."""

    @abstractmethod
    def watching(self, device: torch.device, held: Sequence[Tensor]) -> contextlib.AbstractContextManager[Peak]:
        """Watch the most bytes of tensors while what is inside runs, those of `held` from before included."""
