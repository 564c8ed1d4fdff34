"""What a kind of device is to us: one class each, and nobody else asks whether a device is a CPU or a CUDA device.

    backend = backend_of(torch.device("cuda:1"))
    backend.stopwatch(device).lap(call)

A further kind is one more class in `BACKENDS`: how its work is timed, what its allocator says, which random generator
it draws from, how its ranks talk.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# torch's light profiler; the other one takes milliseconds for each call and writes lines to the terminal.
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from profiler.device import Device
from profiler.machine.stopwatches import CpuMarks, CpuStopwatch, CudaMarks, CudaStopwatch, Marks, Stopwatch

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
        queues: whether operations wait in a queue, to be launched one by one.
        keeps_order: whether messages between two ranks arrive in the order of their calls, whatever their tags; then
            each direction needs a channel of its own.
        process_group: name of the library that carries messages between ranks, as torch knows it.
    """

    type: ClassVar[str]
    block_bytes: ClassVar[int]
    is_host: ClassVar[bool]
    queues: ClassVar[bool]
    keeps_order: ClassVar[bool]
    process_group: ClassVar[str]

    @abstractmethod
    def count(self) -> int | None:
        """How many there are for this process; None for as many as anybody asks for."""

    @abstractmethod
    def described(self, device: torch.device, threads: int, sharing: int) -> Device:
        """What the planner is told of a device that `sharing` workers have together."""

    @abstractmethod
    def context_bytes(self, device: torch.device) -> int:
        """Memory that a process occupies on it before it holds any tensor, other processes' included."""

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


class Cpu(Backend):
    """The cores of this machine. Its allocator keeps no books, but reports each allocation to a profiler that asks."""

    type = "cpu"
    block_bytes = 1
    is_host = True
    queues = False
    keeps_order = False
    process_group = "gloo"

    def count(self) -> None:
        """As many workers as anybody asks for."""

    def described(self, device: torch.device, threads: int, sharing: int) -> Device:
        """A worker, with its share of the machine's memory."""
        kind = f"cpu/{threads} thread{'s' if threads > 1 else ''}"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(name="cpu", kind=kind, memory_bytes=memory // sharing, threads=threads)

    def context_bytes(self, device: torch.device) -> int:
        """Nothing."""
        return 0

    def use(self, device: torch.device) -> None:
        """There is but one."""

    def synchronize(self, device: torch.device) -> None:
        """A call that has returned is done."""

    def aside(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Threads do not wait for each other."""
        return contextlib.nullcontext()

    def generator(self, device: torch.device) -> torch.Generator:
        """Torch's own."""
        return torch.default_generator

    def stopwatch(self, device: torch.device) -> Stopwatch:
        """By the clock."""
        return CpuStopwatch()

    def marks(self) -> Marks:
        """By the clock."""
        return CpuMarks()

    def can_watch(self) -> bool:
        """Unless a profiler at work around us has the reports."""
        return not _profiler_enabled()

    def peak_of(self, device: torch.device, call: Callable[[], T]) -> tuple[T, int]:
        """From the reports to a profiler."""
        of_memory_alone = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _enable_profiler_legacy(of_memory_alone)
        try:
            result = call()
        finally:
            threads = _disable_profiler_legacy()
        changes = [event for events in threads for event in events if str(event.kind()) == "memory_alloc"]
        return result, max(accumulate(event.cpu_memory_usage() for event in changes), default=0)

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


class Cuda(Backend):
    """NVIDIA's devices; AMD's answer to the same names."""

    type = "cuda"
    block_bytes = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator
    is_host = False
    queues = True
    keeps_order = True
    process_group = "nccl"

    def count(self) -> int:
        """Those that the process sees."""
        return torch.cuda.device_count()

    def described(self, device: torch.device, threads: int, sharing: int) -> Device:
        """One card."""
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(index)
        return Device(name=f"cuda:{index}", kind=properties.name, memory_bytes=properties.total_memory)

    def context_bytes(self, device: torch.device) -> int:
        """Its context, and what cuBLAS allocates for itself at the first product and keeps."""
        torch.cuda.init()
        workspaces = _product_workspaces(device)
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device) + workspaces)

    def use(self, device: torch.device) -> None:
        """NCCL, too, works on the current device."""
        torch.cuda.set_device(device)

    def synchronize(self, device: torch.device) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(device).synchronize()

    def aside(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """In a stream of its own."""
        return torch.cuda.stream(torch.cuda.Stream(device))

    def generator(self, device: torch.device) -> torch.Generator:
        """The card's."""
        return torch.cuda.default_generators[device.index or 0]

    def stopwatch(self, device: torch.device) -> Stopwatch:
        """By events behind a spin kernel."""
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


def _product_workspaces(device: torch.device) -> int:
    """Bytes that stay allocated after a first product, forward and backward: each thread of autograd's has its own."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    factor = torch.ones(64, 64, device=device, requires_grad=True)
    torch.addmm(factor[0], factor, factor).sum().backward()
    del factor
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


BACKENDS: Mapping[str, Backend] = {backend.type: backend for backend in (Cpu(), Cuda())}
WITHOUT_DATA = "meta"
"""Tensors of this type have no data; they are counted as the host's."""


def backend_of(device: torch.device | str) -> Backend:
    """The backend of a device (KeyError for a type that no stage runs on, see `profiler.machine.local`)."""
    kind = torch.device(device).type
    return BACKENDS[Cpu.type if kind == WITHOUT_DATA else kind]


def process_groups() -> str:
    """What torch's process groups are made of: a library for each kind of device that is here."""
    used = [backend for backend in BACKENDS.values() if backend.is_host or (backend.count() and _is_built(backend))]
    if len(used) == 1:
        return used[0].process_group
    return ",".join(f"{backend.type}:{backend.process_group}" for backend in used)


def _is_built(backend: Backend) -> bool:
    return dist.is_backend_available(backend.process_group)
