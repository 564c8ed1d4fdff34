"""Every stage that a device could run: whether it fits, and whether it must recompute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs import Mask
from planner.memory import MemoryTable, memory_table
from planner.micro_batches import MicroBatches
from planner.problem import Problem
from profiler.device import Device


@dataclass(frozen=True, slots=True, eq=False)
class StageOptions:
    """Stages of layers [i, j) on one device for one M, at [i, j] of matrices of shape (L + 1, L + 1).

    Attributes:
        device: where the stages would run.
        fits: whether the stage is possible: not empty and within the device's memory.
        recomputed: whether it is recomputed.
    """

    device: Device
    fits: Mask
    recomputed: Mask


def options_for_devices(problem: Problem, split: MicroBatches, stages: int) -> list[StageOptions]:
    """Options of each of the first `stages` devices; equal devices share one value."""
    shared: dict[tuple[str, int], StageOptions] = {}
    for device in problem.devices[:stages]:
        key = (device.kind, device.memory_bytes)
        if key not in shared:
            shared[key] = stage_options(problem, device, split)
    return [shared[device.kind, device.memory_bytes] for device in problem.devices[:stages]]


def stage_options(problem: Problem, device: Device, split: MicroBatches) -> StageOptions:
    """Every stage that the device could run with that M."""
    fits_kept = memory_of(problem, device, split, recompute=False).total <= device.memory_bytes
    fits_recomputed = memory_of(problem, device, split, recompute=True).total <= device.memory_bytes
    not_empty = np.triu(np.ones_like(fits_kept), k=1)
    match problem.recompute:
        case "auto":
            fits, recomputed = fits_kept | fits_recomputed, ~fits_kept
        case "always":
            fits, recomputed = fits_recomputed, np.ones_like(fits_kept)
        case "never":
            fits, recomputed = fits_kept, np.zeros_like(fits_kept)
    return StageOptions(device, fits & not_empty, recomputed)


def memory_of(problem: Problem, device: Device, split: MicroBatches, *, recompute: bool) -> MemoryTable:
    """Bytes of every stage on the device, recomputed or not."""
    optimizer = problem.costs.optimizer(device.kind, problem.optimizer)
    return memory_table(problem.costs, problem.parameters, device, split, optimizer, recompute=recompute)
