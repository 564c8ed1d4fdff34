"""Memory of all layers at each micro-batch size: from fake tensors where they tell the truth.

Fake tensors may take another path than real ones (recurrent layers do, on CPU, where oneDNN keeps a workspace), or
none (a loss that selects by a mask). So the smallest size is run for real as well (one still smaller where the device
has no room for that, or nothing says what it needs), and if the two do not agree every size is that there is room for.
They agree if they keep the same; in passing fake tensors may need more, never less: autograd adds up two
gradients in place where they are real, and makes a third where they are fake.

Where they agree, a real run of a small model takes a fifth of the time of a fake one [measured]: each operation on fake
tensors is a few hundred microseconds of Python. So where the largest size is run sooner for real, all sizes are.

Bytes are nearly always linear in the number of samples. Where a size in the middle lies on the line between the
smallest and the largest, byte by byte, the sizes between are taken from the line; otherwise each one is run. Real runs
go from the smallest size up, and each one tells whether there is room for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from time import perf_counter
from typing import Any

import torch

from profiler.between_sizes import on_line, whole_bytes
from profiler.errors import PlanError
from profiler.left_out_sizes import CANNOT_RUN, Refusals
from profiler.memory.capacity import Room
from profiler.memory.in_stage import LayerMemory, layer_memory
from profiler.observe.kernel_orders import RealOrders
from profiler.record import InStage
from profiler.run.inputs import fake_runner, real_runner
from profiler.run.parameter_pool import ParameterPool
from profiler.text import counted
from profiler.workload import Workload

UNKNOWN_SIZE = 2  # run first where nothing says what memory a model needs
KEPT = ("carried_bytes", "repeated_bytes", "held_bytes")
PASSING = ("forward_bytes", "backward_bytes", "last_backward_bytes")


def memory_by_size(
    workload: Workload, pool: ParameterPool, place: torch.device, refusals: Refusals, room: Room
) -> dict[int, list[LayerMemory]]:
    """Memory of all layers by micro-batch size.

    Args:
        workload: what is measured.
        pool: brings parameters to the device.
        place: the device.
        refusals: takes the sizes that cannot be run.
        room: what the device holds.

    Returns:
        The memory of all layers; a size that cannot be run is missing.
    """
    sizes = sorted(workload.sizes)
    while sizes:
        workload.bar.update()
        workload.bar.now(f"memory of {counted(sizes[0], 'sample')}")
        looked_at, fake, fake_s = _affordable(workload, sizes[0], place, room)
        real, start = None, perf_counter()
        if looked_at < sizes[0]:
            with suppress(MemoryError, *CANNOT_RUN):
                real = _real(workload, looked_at, pool, place, share=fake is not None)
        if real is None and looked_at < sizes[0] and fake is not None:
            refusals.no_memory(sizes[0])
        elif real is None:
            looked_at = sizes[0]
            with refusals.noting(looked_at):
                real = _real(workload, looked_at, pool, place, share=fake is not None)
        if real is not None:
            break
        del sizes[0]
    else:
        return {}
    real_s = (perf_counter() - start) / looked_at  # for each sample
    faithful = fake is not None and agree(fake, real)
    largest = [_grown(entry, sizes[-1] / looked_at) for entry in real]
    by_fakes = faithful and (sizes[-1] * real_s > fake_s or not room.holds_run(sizes[-1], largest))
    memory = {looked_at: fake if fake is not None and by_fakes else real} if looked_at in sizes else {}
    ends_first = dict.fromkeys((sizes[-1], sizes[len(sizes) // 2], *sizes))
    for size in ends_first if faithful else sizes:
        if size in memory:
            continue
        workload.bar.update()
        workload.bar.now(f"memory of {counted(size, 'sample')}")
        found = _line(sizes, memory, size) or (_fake(workload, size, place) if by_fakes else None)
        if found is None and not room.holds_run(size, [_grown(entry, size / looked_at) for entry in real]):
            refusals.no_memory(size)
        elif found is None:
            with refusals.noting(size):
                found = real = _real(workload, size, pool, place, share=fake is not None)
                looked_at = size
        if found is not None:
            memory[size] = found
    return dict(sorted(memory.items()))


def _affordable(
    workload: Workload, size: int, place: torch.device, room: Room
) -> tuple[int, list[LayerMemory] | None, float]:
    """The size that can be run for real, at most that one; its memory from fake tensors; the seconds of that run."""
    start = perf_counter()
    fake = _fake(workload, size, place)
    if fake is None:
        return min(size, UNKNOWN_SIZE), None, 0.0
    while size > 1 and fake is not None and not room.holds_run(size, fake):
        size //= 2
        start = perf_counter()
        fake = _fake(workload, size, place)
    return size, fake, perf_counter() - start


def _grown(entry: LayerMemory, times: float) -> LayerMemory:
    """That memory of a layer with so many times the samples, or a little less."""
    fields = entry.in_stage.model_dump(include={*PASSING, "workspace_bytes", "prelude_peak_bytes"})
    grown = {name: ceil(times * size_bytes) for name, size_bytes in fields.items()}
    return replace(
        entry,
        kept_bytes=ceil(times * entry.kept_bytes),
        transient_bytes=ceil(times * entry.transient_bytes),
        in_stage=entry.in_stage.model_copy(update=grown),
    )


def agree(fake: Sequence[LayerMemory], real: Sequence[LayerMemory]) -> bool:
    """Whether both keep the same and the fake one needs no less in passing."""
    return all(
        one.kept_bytes == other.kept_bytes
        and all(getattr(one.in_stage, name) == getattr(other.in_stage, name) for name in KEPT)
        and all(getattr(one.in_stage, name) >= getattr(other.in_stage, name) for name in PASSING)
        for one, other in zip(fake, real, strict=True)
    )


def _line(sizes: Sequence[int], memory: dict[int, list[LayerMemory]], wanted: int) -> list[LayerMemory] | None:
    """The memory at that size, if that of three sizes lies on a line."""
    if len(memory) < 3:
        return None
    first, last = sizes[0], sizes[-1]
    if first not in memory or last not in memory:
        return None
    for size in (sizes[len(sizes) // 2], wanted):
        share = (size - first) / (last - first)
        found = [memory_between(low, high, share) for low, high in zip(memory[first], memory[last], strict=True)]
        if size in memory and memory[size] != found:
            return None
    return [entry for entry in found if entry is not None] if None not in found else None


def memory_between(low: LayerMemory, high: LayerMemory, share: float) -> LayerMemory | None:
    """The line through the memory of a layer at two sizes, rounded up; None where other layers share it."""
    stages = {
        name: _mixed(getattr(low.in_stage, name), getattr(high.in_stage, name), share) for name in InStage.model_fields
    }
    if None in stages.values():
        return None
    return LayerMemory(
        kept_bytes=_mixed(low.kept_bytes, high.kept_bytes, share),
        transient_bytes=_mixed(low.transient_bytes, high.transient_bytes, share),
        in_stage=InStage(**stages),
    )


def _mixed(low: Any, high: Any, share: float) -> Any:
    if low == high:
        return low
    if isinstance(low, int):
        return int(whole_bytes(on_line(low, high, share)))
    if [layers for *layers, _ in low] != [layers for *layers, _ in high]:
        return None
    return tuple((*layers, _mixed(a, b, share)) for (*layers, a), (*_, b) in zip(low, high, strict=True))


def _fake(workload: Workload, size: int, place: torch.device) -> list[LayerMemory] | None:
    """From fake tensors; None if they cannot follow, or nothing can: real ones will tell."""
    with suppress(PlanError, *CANNOT_RUN):
        with RealOrders(allow_non_fake_inputs=True):
            inputs, about = workload.micro_batch(size, place)
        with fake_runner(workload.sequence, inputs, **about) as runner:
            return layer_memory(workload.sequence, runner, share=True)
    return None


def _real(workload: Workload, size: int, pool: ParameterPool, place: torch.device, *, share: bool) -> list[LayerMemory]:
    """From real tensors; equal layers are run once where fake tensors can follow: no shape depends on values there."""
    inputs, about = workload.micro_batch(size, place)
    return layer_memory(workload.sequence, real_runner(workload.sequence, pool, inputs, **about), share=share)
