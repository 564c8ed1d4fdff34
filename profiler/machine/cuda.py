"""NVIDIA's devices as a kind of device; AMD's answer to the same names.

A CUDA device works off a queue. Laps are enqueued while a spin kernel holds the device back, so that the events
around a lap stand `device time` apart, without the gaps of a queue that runs dry; what it takes the CPU to enqueue the
lap is measured as well, and a lap took the larger of the two:

    CPU     | launch 1 | launch 2 | launch 3 |
    device  | spin                            | lap 1 | lap 2 | lap 3 |
                                              e0      e1      e2      e3
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from profiler.device import Device
from profiler.machine.device_kind import Backend, Peak
from profiler.machine.stopwatches import Marks, Stopwatch
from profiler.torch_private import clear_product_workspaces, hold_back

T = TypeVar("T")

WITHOUT_HOLES = 8 / 9
"""Of a card's memory, what stages may fill: free blocks between others take the rest. On an H200 a GPT held 1.125 times
what it had allocated; to train at all, a DenseNet needed 1.1 times that and a U-Net 1.03 times [measured]."""
COMMUNICATORS, COMMUNICATOR_BYTES = 5, 19 * 2**20
"""Of NCCL: to and from each neighbour, and of all ranks; and what one takes of the card in each rank [measured on an
H200, over sockets: 17 to 19 MiB]."""
SPIN_S = 2e-3  # head start of the first round, before it is known how long its launches take
SPIN_MARGIN = 1.5  # later head starts last this times as long as the launches of the round before
SPIN_AT_MOST_S = 0.25
WAITED_FACTOR, WAITED_S = 2.0, 5e-4
"""Of what a lap took to be enqueued at best, and at least: that long, and the head start is over, is a full queue."""
SPIN_CYCLES_PER_S = 2e9  # `hold_back` counts clock cycles; a device that clocks lower waits longer, no harm


class Cuda(Backend):
    """NVIDIA's devices; AMD's answer to the same names."""

    type = "cuda"
    block_bytes = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator
    is_host = False
    most_enqueued = 300  # a queue takes 1024 launches; an operation launches up to 3 kernels backward
    keeps_order = True
    process_group = "nccl"
    ends_by_abort = True

    def count(self) -> int:
        """Those that the process sees."""
        return torch.cuda.device_count()

    def described(self, device: torch.device, threads: int, sharing: int) -> Device:
        """One card, of whose memory holes take a share."""
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(index)
        return Device(
            name=f"{self.type}:{index}", kind=properties.name, memory_bytes=int(WITHOUT_HOLES * properties.total_memory)
        )

    def context_bytes(self, device: torch.device, operations: int) -> int:
        """Its context, what cuBLAS allocates for itself at the first product and keeps, and NCCL's communicators."""
        torch.cuda.init()
        workspaces = _product_workspaces(device)
        free, total = torch.cuda.mem_get_info(device)
        taken = total - free - torch.cuda.memory_reserved(device) + workspaces
        return int(taken) + COMMUNICATORS * COMMUNICATOR_BYTES

    def use(self, device: torch.device) -> None:
        """NCCL, too, works on the current device."""
        torch.cuda.set_device(device)

    def synchronize(self, device: torch.device) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(device).synchronize()

    def aside(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """In a stream of its own."""
        return torch.cuda.stream(torch.cuda.Stream(device))

    def moment(self, device: torch.device) -> torch.cuda.Event:
        """An event."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def after(self, moment: object, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """In a stream that waits for the event."""
        assert isinstance(moment, torch.cuda.Event), "of this kind of device"
        stream = _stream_of_receives(device)
        stream.wait_event(moment)
        return torch.cuda.stream(stream)

    def message_options(self) -> object:
        """NCCL's kernels come before others that wait: a message holds up another rank, a pass only its own."""
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        return options

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        """A copy that the current stream makes."""
        copy = tensor.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        return copy, event.query

    def from_host(self, tensor: Tensor, device: torch.device) -> Tensor:
        """By a stream of its own: from memory that is not pinned the host waits until the stream gets to the copy."""
        stream = _stream_of_copies(device)
        with torch.cuda.stream(stream):
            copy = tensor.to(device, non_blocking=True)
        reader = torch.cuda.current_stream(device)
        reader.wait_stream(stream)
        copy.record_stream(reader)
        return copy

    def generator(self, device: torch.device) -> torch.Generator:
        """The card's."""
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]

    def stopwatch(self, device: torch.device) -> Stopwatch:
        """By events after a spin kernel."""
        return CudaStopwatch(device)

    def marks(self) -> Marks:
        """By events."""
        return CudaMarks()

    def can_watch(self) -> bool:
        """The allocator keeps books."""
        return True

    def peak_of(self, device: torch.device, call: Callable[[], T]) -> tuple[T, int]:
        """From the allocator's books."""
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        return result, torch.cuda.max_memory_allocated(device) - before

    @contextlib.contextmanager
    def watching(self, device: torch.device, held: Sequence[Tensor]) -> Iterator[Peak]:
        """From the allocator's books, which know of `held`."""
        found = Peak()
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.peak_bytes = torch.cuda.max_memory_allocated(device)


@functools.cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _stream_of_receives(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _product_workspaces(device: torch.device) -> int:
    """Bytes that stay allocated after a first product, forward and backward: each thread of autograd's has its own."""
    clear_product_workspaces()
    before = torch.cuda.memory_allocated(device)
    factor = torch.ones(64, 64, device=device, requires_grad=True)
    torch.addmm(factor[0], factor, factor).sum().backward()
    del factor
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


class CudaStopwatch:
    """Times by events on a CUDA device, after a spin kernel; see the head of this file.

    A queue takes 1,024 launches, and the host waits once it is full: for the end of the spin kernel, of which the lap
    knows nothing. Layers with a recurrent network, one operation of hundreds of launches, had been timed at a third of
    their backward passes for it, and the one at which the queue was full at eight times its own [measured]. So the
    device is held back for laps of which it is known what it takes to enqueue them; a lap that once took longer begins
    on an idle device that is not held back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[_Lap] = []
        self._enqueuing_s: dict[Hashable, float] = {}  # by key, at best
        self._too_long: set[Hashable] = set()  # keys of laps for which a queue had no room
        self._spin_s = SPIN_S
        self._released: torch.cuda.Event | None = None  # when the device is held back no more; None if it is not

    def lap(self, call: Callable[[], T], key: Hashable = None) -> T:
        """Enqueue it, with an event before and after."""
        stream = torch.cuda.current_stream(self._device)
        known_s = self._enqueuing_s.get(key)
        is_held = known_s is not None and key not in self._too_long
        if not is_held:
            torch.cuda.synchronize(self._device)
            self._released = None
        elif self._released is None or self._released.query():
            self._released = self._hold_back(stream)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        start = time.perf_counter()
        result = call()
        enqueuing_s = time.perf_counter() - start
        if known_s is not None and self._released is not None and self._released.query():
            if enqueuing_s > max(WAITED_FACTOR * known_s, WAITED_S):
                self._too_long.add(key)
            enqueuing_s = min(enqueuing_s, known_s)  # a part of it may have been a wait
        after.record(stream)
        if key is not None:
            self._enqueuing_s[key] = min(enqueuing_s, known_s or enqueuing_s)
        self._laps.append(_Lap(before, after, enqueuing_s, is_held))
        return result

    def take(self) -> list[float]:
        """Seconds of the laps since the last `take`, in order: on the device, or enqueuing if that took longer."""
        torch.cuda.synchronize(self._device)
        laps, self._laps, self._released = self._laps, [], None
        held_s = sum(lap.enqueuing_s for lap in laps if lap.is_held)
        self._spin_s = min(max(SPIN_S, SPIN_MARGIN * held_s), SPIN_AT_MOST_S)
        return [max(lap.before.elapsed_time(lap.after) / 1e3, lap.enqueuing_s) for lap in laps]

    def lost_share(self) -> float:
        """Nobody says when others have the device."""
        return 0.0

    def _hold_back(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            hold_back(int(self._spin_s * SPIN_CYCLES_PER_S))
        released = torch.cuda.Event()
        released.record(stream)
        return released


class _Lap(NamedTuple):
    """One call.

    Attributes:
        before: event before it.
        after: event after it.
        enqueuing_s: what it took the host.
        is_held: whether the device was held back meanwhile.
    """

    before: torch.cuda.Event
    after: torch.cuda.Event
    enqueuing_s: float
    is_held: bool


class CudaMarks:
    """By events on the current CUDA device."""

    on_the_host = False

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """When the device has done what it was given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._events)

    def seconds(self) -> list[float]:
        """Of all marks, since the first; waits for the last."""
        self._events[-1].synchronize()
        return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]

    def began_s(self) -> float:
        """When the device was at the first one, by `time.perf_counter`; waits until it is idle.

        The host may be ahead of it, by all that the device still had to do when the mark was set: in two ranks by
        unlike times, by which messages seemed to be under way for longer or shorter.
        """
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        since_s: float = self._events[0].elapsed_time(now) / 1e3
        return time.perf_counter() - since_s
