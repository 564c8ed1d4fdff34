"""The cores of this machine as a kind of device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from profiler.device import Device
from profiler.machine.device_kind import Backend, Peak
from profiler.machine.host_memory import machine_bytes, process_bytes
from profiler.machine.stopwatches import ClockMarks, ClockStopwatch, Marks, Stopwatch
from profiler.text import counted
from profiler.torch_private import allocations_in, reports_to_a_profiler

T = TypeVar("T")

FOR_TENSORS = 0.92
"""Of a worker's memory: the rest is room in which holes between tensors come up until they are given back, and for what
micro-batches in flight hold besides tensors, 2 KiB an operation and micro-batch. Of an AmoebaNet-D in 1 GiB a worker
all but tensors took 45 MiB more than is counted, and 38 MiB of room were not enough [measured, `tests/benchmarks`]."""
OWN_BYTES = 2**30 // 10
COMMON_BYTES = 2**30 // 4
"""What a worker holds besides: code and libraries of its own, and what all workers of one `launch` have from the
process that starts them [measured with GPTs and AmoebaNet-Ds, `tests/benchmarks`]."""
OPERATION_BYTES = 50 * 2**10
"""What tracing leaves in a worker for each operation of the model, in arenas of Python's objects that have holes
[measured: 28 KiB with GPTs, 50 to 52 KiB with AmoebaNet-Ds]."""


def for_tensors(share_bytes: int, common_bytes: int = COMMON_BYTES) -> int:
    """What tensors may take of a worker's memory.

    Args:
        share_bytes: that the worker may hold.
        common_bytes: its part of what all workers hold together.
    """
    return max(share_bytes // 10, int(FOR_TENSORS * share_bytes) - OWN_BYTES - common_bytes)


class Cpu(Backend):
    """The cores of this machine. Its allocator keeps no books, but reports each allocation to a profiler that asks."""

    type = "cpu"
    block_bytes = 1
    is_host = True
    most_enqueued = None
    keeps_order = False
    process_group = "gloo"
    ends_by_abort = False

    def count(self) -> None:
        """As many workers as anybody asks for."""

    def described(self, device: torch.device, threads: int, sharing: int) -> Device:
        """A worker, with its share of the memory of the machine or of the container."""
        kind = f"{self.type}/{counted(threads, 'thread')}"
        share = min(machine_bytes() // sharing, process_bytes() or machine_bytes())
        memory_bytes = for_tensors(share, COMMON_BYTES // sharing)
        return Device(name=self.type, kind=kind, memory_bytes=memory_bytes, threads=threads)

    def context_bytes(self, device: torch.device, operations: int) -> int:
        """The traced graph; libraries are no part of what a worker has for tensors."""
        return operations * OPERATION_BYTES

    def use(self, device: torch.device) -> None:
        """There is but one."""

    def synchronize(self, device: torch.device) -> None:
        """A call that has returned is done."""

    def aside(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Threads do not wait for each other."""
        return contextlib.nullcontext()

    def moment(self, device: torch.device) -> None:
        """A call that has returned is done."""

    def after(self, moment: object, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """There is nothing to wait for."""
        return contextlib.nullcontext()

    def message_options(self) -> None:
        """Gloo's own."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        """It is there."""
        return tensor, _is_there

    def from_host(self, tensor: Tensor, device: torch.device) -> Tensor:
        """It is there."""
        return tensor

    def generator(self, device: torch.device) -> torch.Generator:
        """Torch's own."""
        return torch.default_generator

    def stopwatch(self, device: torch.device) -> Stopwatch:
        """By the clock."""
        return ClockStopwatch()

    def marks(self) -> Marks:
        """By the clock."""
        return ClockMarks()

    def can_watch(self) -> bool:
        """Unless a profiler at work around us has the reports."""
        return not reports_to_a_profiler()

    def peak_of(self, device: torch.device, call: Callable[[], T]) -> tuple[T, int]:
        """From the reports to a profiler."""
        result, changes = allocations_in(call)
        return result, max(accumulate(changes), default=0)

    @contextlib.contextmanager
    def watching(self, device: torch.device, held: Sequence[Tensor]) -> Iterator[Peak]:
        """From the reports to torch's full profiler, whose events of all threads lie on one line of time."""
        found = Peak()
        storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in held)}
        with torch.autograd.profiler.profile(profile_memory=True) as watched:
            yield found
        results = watched.kineto_results
        assert results is not None, "the profiler has run"
        changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
        found.peak_bytes = sum(storages.values()) + max(accumulate((change for _, change in changes), initial=0))


def _is_there() -> bool:
    return True
