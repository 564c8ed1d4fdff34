"""What messages between stages take of memory while they are under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.layer_costs import Floats, Indices, LayerArrays
from planner.plan.actions import AHEAD_BYTES, SENDS_AHEAD, receives_ahead
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import ONE_CHUNK, SCHEDULES, Ring, ScheduleName


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What one stage sends to a later one for each micro-batch, or for many places at once; all arrays have one shape.

    Attributes:
        outputs: bytes for a large and for a small micro-batch.
        gradients: the part of them that gradients come back for, likewise.
        distance: how many stages it goes.
        ahead_bytes: of short messages as many may be under way as these hold.
    """

    outputs: tuple[Floats, Floats]
    gradients: tuple[Floats, Floats]
    distance: int = 1
    ahead_bytes: int = AHEAD_BYTES

    @classmethod
    def after_layers(cls, large: LayerArrays, small: LayerArrays, ahead_bytes: int = AHEAD_BYTES) -> Message:
        """What crosses the boundary after each layer."""
        return cls(
            (large.output_bytes, small.output_bytes),
            (large.output_gradient_bytes, small.output_gradient_bytes),
            ahead_bytes=ahead_bytes,
        )

    def at(self, layer: int) -> Message:
        """Of what crosses after each layer, what crosses after one."""
        (more, less), (many, few) = self.outputs, self.gradients
        outputs, gradients = (
            (np.array(more[layer]), np.array(less[layer])),
            (np.array(many[layer]), np.array(few[layer])),
        )
        return replace(self, outputs=outputs, gradients=gradients)

    def less(self, others: Iterable[Message]) -> Message:
        """What is left of it when parts of it travel by themselves."""
        left = [*self.outputs, *self.gradients]
        for other in others:
            left = [
                np.maximum(mine - theirs, 0.0)
                for mine, theirs in zip(left, (*other.outputs, *other.gradients), strict=True)
            ]
        return replace(self, outputs=(left[0], left[1]), gradients=(left[2], left[3]))

    def in_slots(self, micro_batches: MicroBatches) -> Floats:
        """Bytes of outputs in memory that both stages share, in addition to those of `at_sender`.

        There are slots for as many long messages as both ends may have under way, as far as there are so many. Where
        the inputs of all micro-batches are kept, no receives are counted that could stand for those at the other end.
        """
        slots = min(SENDS_AHEAD + receives_ahead(self.distance), micro_batches.count)
        large, small = np.maximum(*self.outputs), np.minimum(*self.outputs)
        counted = self._ahead(SENDS_AHEAD, small, micro_batches.count)
        long = self.ahead_bytes // np.maximum(1, large) < SENDS_AHEAD + receives_ahead(self.distance)
        further: Floats = np.where(long, np.maximum(slots - counted, 0), 0) * large
        return further

    def at_sender(self, schedule: ScheduleName, micro_batches: MicroBatches, number: int, ring: Ring) -> Floats:
        """Bytes under way at the stage that sends it.

        Outputs that have not left, gradients whose receives are posted, and the one that is read.

        Args:
            schedule: says how many micro-batches are under way.
            micro_batches: how a replica's samples are cut.
            number: of the stage from the end, 1 for the last.
            ring: ranks, and chunks of each.
        """
        most = SCHEDULES[schedule].most_under_way(number, micro_batches.count, ring)
        sent = self._ahead(SENDS_AHEAD, np.minimum(*self.outputs), most)
        posted = self._ahead(receives_ahead(self.distance), np.minimum(*self.gradients), most)
        posted_and_read = np.minimum(posted + 1, micro_batches.count)
        under_way: Floats = posted_and_read * np.maximum(*self.gradients) + sent * np.maximum(*self.outputs)
        return under_way

    def at_receiver(
        self,
        schedule: ScheduleName,
        micro_batches: MicroBatches,
        number: int,
        ring: Ring = ONE_CHUNK,
        flying: int | Indices | None = None,
    ) -> Floats:
        """Bytes under way at the stage that it comes to.

        Gradients that have not left and inputs whose receives are posted. Where the inputs of all micro-batches are
        kept anyway, those that are under way are among them.

        Args:
            schedule: says how many micro-batches are under way.
            micro_batches: how a replica's samples are cut.
            number: of the stage from the end, 1 for the last.
            ring: ranks, and chunks of each.
            flying: how many micro-batches are under way, where the schedule does not say it; at one place at several
                moments.
        """
        most = SCHEDULES[schedule].most_under_way(number + self.distance, micro_batches.count, ring)
        gradients: Floats = self._ahead(SENDS_AHEAD, np.minimum(*self.gradients), most) * np.maximum(*self.gradients)
        if SCHEDULES[schedule].keeps_all:
            return gradients
        large, small = self.outputs
        if flying is None:
            flying = sum(micro_batches.in_flight(schedule, number, ring))
        posted_ahead = self._ahead(receives_ahead(self.distance), np.minimum(large, small), most)
        soon = np.minimum(flying + posted_ahead, micro_batches.count)
        soon_large, now_large = (np.minimum(many, micro_batches.number_largest) for many in (soon, flying))
        more_large = soon_large - now_large
        posted: Floats = more_large * large + (soon - flying - more_large) * small
        return gradients + posted

    def _ahead(self, at_least: int, message_bytes: Floats, most: int) -> Floats:
        """How many messages of a length may be under way in one direction."""
        many: Floats = np.minimum(np.maximum(at_least, self.ahead_bytes // np.maximum(1, message_bytes)), most)
        return many
