"""What the balancer is asked: a profile, devices and settings, checked and in one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from planner.costs import CostModel, ParameterRanges
from planner.micro_batches import MicroBatches
from profiler.device import Device, Link

RecomputeMode: TypeAlias = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Everything that a plan follows from.

    Attributes:
        costs: costs of the layers.
        parameters: bytes of the parameters of every range of layers.
        devices: in pipeline order; their memory is the limit in force.
        link: between neighbours; may be None for one stage alone.
        batch_size: samples of a mini-batch.
        optimizer: name of the optimizer.
        recompute: `"auto"`: stages that do not fit otherwise; `"always"`, as GPipe; `"never"`.
        stages: fixed K, or None.
        max_stages: largest K to try.
        micro_batches: fixed M, or None.
        micro_batches_per_stage: M is at least this times K.
    """

    costs: CostModel
    parameters: ParameterRanges
    devices: tuple[Device, ...]
    link: Link | None
    batch_size: int
    optimizer: str
    recompute: RecomputeMode
    stages: int | None
    max_stages: int
    micro_batches: int | None
    micro_batches_per_stage: int

    @property
    def layers(self) -> int:
        """L, number of layers."""
        return len(self.costs.profile.layers)

    def stage_numbers(self, count: int) -> range:
        """Every K that may be combined with M = `count`."""
        most = min(self.max_stages, count // self.micro_batches_per_stage)
        if self.stages is not None:
            return range(self.stages, self.stages + 1) if self.stages <= most else range(0)
        return range(1, most + 1)

    def candidates(self) -> list[MicroBatches]:
        """Every M that the batch allows and whose micro-batch sizes the profile covers, ascending."""
        numbers = range(1, self.batch_size + 1) if self.micro_batches is None else (self.micro_batches,)
        splits = [MicroBatches(self.batch_size, count) for count in numbers if self.stage_numbers(count)]
        return [split for split in splits if self._covered(split)]

    def _covered(self, split: MicroBatches) -> bool:
        kinds = {device.kind for device in self.devices[: self.stage_numbers(split.count)[-1]]}
        return all(self.costs.covers(kind, size) for kind in kinds for size in {split.smallest, split.largest})
