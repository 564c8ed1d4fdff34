"""Memory of all layers at each micro-batch size: from fake tensors where they tell the truth.

Fake tensors may take another path than real ones (recurrent layers do, on CPU, where oneDNN keeps a workspace), or
none (a loss that selects by a mask). So the smallest size is run for real as well, and if the two do not agree every
size is. They agree if they keep the same; in passing fake tensors may need more, never less: autograd adds up two
gradients in place where they are real, and makes a third where they are fake.

Bytes are nearly always linear in the number of samples. Where a size in the middle lies on the line between the
smallest and the largest, byte by byte, the sizes between are taken from the line; otherwise each one is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from typing import Any

import torch

from profiler.errors import PlanError
from profiler.memory import LayerMemory, layer_memory
from profiler.record import InStage
from profiler.refusals import CANNOT_RUN, Refusals
from profiler.shelf import Shelf
from profiler.stand_ins import fake_runner, real_runner
from profiler.task import Task

KEPT = ("carried_bytes", "repeated_bytes", "held_bytes")
PASSING = ("forward_bytes", "backward_bytes", "last_backward_bytes")


def memory_by_size(task: Task, shelf: Shelf, place: torch.device, refusals: Refusals) -> dict[int, list[LayerMemory]]:
    """Memory of all layers by micro-batch size.

    Args:
        task: what is measured.
        shelf: brings parameters to the device.
        place: the device.
        refusals: takes the sizes that cannot be run.

    Returns:
        The memory of all layers; a size that cannot be run is missing.
    """
    sizes = sorted(task.sizes)
    while sizes:
        task.bar.update()
        fake = _fake(task, sizes[0], place)
        real = _real(task, sizes[0], shelf, place, refusals, share=fake is not None)
        if real is not None:
            break
        del sizes[0]
    else:
        return {}
    faithful = fake is not None and agree(fake, real)
    memory = {sizes[0]: fake if fake is not None and faithful else real}
    ends_first = dict.fromkeys((sizes[-1], sizes[len(sizes) // 2], *sizes))
    for size in ends_first:
        if size in memory:
            continue
        line = _line(sizes, memory, size)
        task.bar.update()
        found = line or (_fake(task, size, place) if faithful else None)
        if found is None:
            found = _real(task, size, shelf, place, refusals, share=fake is not None)
        if found is not None:
            memory[size] = found
    return dict(sorted(memory.items()))


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
    if last not in memory:
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
        return ceil(low + share * (high - low) - 1e-6)
    if [layers for *layers, _ in low] != [layers for *layers, _ in high]:
        return None
    return tuple((*layers, _mixed(a, b, share)) for (*layers, a), (*_, b) in zip(low, high, strict=True))


def _fake(task: Task, size: int, place: torch.device) -> list[LayerMemory] | None:
    """From fake tensors; None if they cannot follow, or nothing can: real ones will tell."""
    with suppress(PlanError, *CANNOT_RUN):
        inputs, about = task.micro_batch(size, place)
        with fake_runner(task.sequence, inputs, **about) as runner:
            return layer_memory(task.sequence, runner, share=True)
    return None


def _real(
    task: Task, size: int, shelf: Shelf, place: torch.device, refusals: Refusals, *, share: bool
) -> list[LayerMemory] | None:
    """From real tensors; equal layers are run once where fake tensors can follow: no shape depends on values there.

    None if the size cannot be run.
    """
    with refusals.noting(size):
        inputs, about = task.micro_batch(size, place)
        return layer_memory(task.sequence, real_runner(task.sequence, shelf, inputs, **about), share=share)
    return None
