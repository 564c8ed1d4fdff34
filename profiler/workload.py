"""What is measured, with which data and settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from profiler.progress_line import ProgressLine
from profiler.run.inputs import micro_batch, resized_target
from profiler.run.loss import LossFunction
from profiler.tracing.sequence import LayerSequence


@dataclass(frozen=True, slots=True)
class Workload:
    """One model to be measured.

    Attributes:
        sequence: its layers.
        sample: values of its inputs, or None.
        loss_fn: computes the loss from its output and the target, or None.
        target: for `loss_fn`.
        has_loss: whether there is a loss, of `loss_fn` or the model's own.
        sizes: of micro-batches.
        optimizer: class name.
        time_budget_s: per kind of device.
        bar: moved on with each measurement.
    """

    sequence: LayerSequence
    sample: Any
    loss_fn: LossFunction | None
    target: Any
    has_loss: bool
    sizes: tuple[int, ...]
    optimizer: str
    time_budget_s: float
    bar: ProgressLine

    def micro_batch(self, size: int, place: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The inputs of a micro-batch of `size` samples, and what else a runner is told."""
        return micro_batch(self.sequence, self.sample, size, place), {
            "loss_fn": self.loss_fn,
            "target": resized_target(self.target, size, place),
            "has_loss": self.has_loss,
            "device": place,
        }
