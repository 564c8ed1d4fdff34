"""Memory of all layers at each micro-batch size: from fake tensors where they tell the truth.

Fake tensors may take another path than real ones (recurrent layers do, on CPU, where oneDNN keeps a workspace), or
none (a loss that selects by a mask). So the smallest size is run for real as well, and if the two do not agree every
size is.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from profiler.memory import LayerMemory, layer_memory
from profiler.stand_ins import fake_runner, parameter_aliases, real_runner
from profiler.task import Task

NOT_FAKEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def memory_by_size(task: Task, place: torch.device) -> dict[int, list[LayerMemory]]:
    """Memory of all layers by micro-batch size.

    Args:
        task: what is measured.
        place: the device.
    """
    smallest, *larger = task.sizes
    memory = {smallest: _real(task, smallest, place)}
    faithful = _fake(task, smallest, place) == memory[smallest]
    task.bar.update()
    for size in larger:
        memory[size] = (_fake(task, size, place) if faithful else None) or _real(task, size, place)
        task.bar.update()
    return memory


def _fake(task: Task, size: int, place: torch.device) -> list[LayerMemory] | None:
    """From fake tensors; None if they cannot follow."""
    inputs, about = task.micro_batch(size, place)
    try:
        with fake_runner(task.sequence, inputs, **about) as runner:
            return layer_memory(task.sequence, runner)
    except NOT_FAKEABLE:
        return None


def _real(task: Task, size: int, place: torch.device) -> list[LayerMemory]:
    inputs, about = task.micro_batch(size, place)
    runner = real_runner(task.sequence, parameter_aliases(task.sequence, place), inputs, **about)
    return layer_memory(task.sequence, runner)
