"""What messages between stages take of memory while they are under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from planner.cost.layer_costs import Floats, Indices, LayerArrays
from planner.plan.actions import AHEAD_BYTES, MOST_SLOTS, SENDS_AHEAD, SLOT_ALIGNMENT, receives_ahead
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import ONE_CHUNK, Ring
from profiler.device import Device


class Carrier(Enum):
    """What carries messages, and so what they take of memory meanwhile."""

    POSTED = auto()
    """Sent from tensors into tensors whose receives are posted ahead: sockets, and devices that are no cores."""
    SLOTS = auto()
    """Copied into memory that both processes have, and out of it when they are used: the cores of one host."""
    EITHER = auto()
    """The one or the other: the cores of several hosts."""


def carrier_of(device: Device, *, hosts: bool = False) -> Carrier:
    """What carries messages of a stage on that device; `hosts` where the devices are on several."""
    if not device.threads:
        return Carrier.POSTED
    return Carrier.EITHER if hosts else Carrier.SLOTS


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What one stage sends to a later one for each micro-batch, or for many places at once; all arrays have one shape.

    Attributes:
        outputs: bytes for a large and for a small micro-batch.
        gradients: the part of them that gradients come back for, likewise.
        distance: how many stages it goes.
        ahead_bytes: of short messages as many may be under way as these hold.
        carrier: what carries it.
        ring: which rank runs which stages.
    """

    outputs: tuple[Floats, Floats]
    gradients: tuple[Floats, Floats]
    distance: int = 1
    ahead_bytes: int = AHEAD_BYTES
    carrier: Carrier = Carrier.POSTED
    ring: Ring = ONE_CHUNK

    @classmethod
    def after_layers(
        cls,
        large: LayerArrays,
        small: LayerArrays,
        ahead_bytes: int = AHEAD_BYTES,
        carrier: Carrier = Carrier.POSTED,
        ring: Ring = ONE_CHUNK,
    ) -> Message:
        """What crosses the boundary after each layer."""
        return cls(
            (large.output_bytes, small.output_bytes),
            (large.output_gradient_bytes, small.output_gradient_bytes),
            ahead_bytes=ahead_bytes,
            carrier=carrier,
            ring=ring,
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

    def at_sender(self, most: int, count: int) -> Floats:
        """Bytes under way at the stage that sends it.

        Outputs that have not left, gradients whose receives are posted, and the one that is read; in shared memory all
        slots of outputs, and the gradient that is read.

        Args:
            most: micro-batches in flight there at most: no more messages of one kind are under way.
            count: M.
        """
        outputs, gradients = (np.maximum(*both) for both in (self.outputs, self.gradients))
        posted = self._ahead(receives_ahead(self.distance, self.ring), np.minimum(*self.gradients), most)
        sent = self._ahead(SENDS_AHEAD, np.minimum(*self.outputs), most)
        on_the_way = np.minimum(posted + 1, count) * gradients + sent * outputs
        return self._by_carrier(on_the_way, self._slots(outputs, most) + self.at_hand(sender=True))

    def at_hand(self, *, sender: bool) -> Floats:
        """Of the bytes under way at an end in shared memory, those that are there while that stage computes alone.

        One message is copied into its slot and, at the stage that sends outputs, one gradient is read.

        Args:
            sender: whether it is that stage.
        """
        outputs, gradients = (np.maximum(*both) for both in (self.outputs, self.gradients))
        return outputs + gradients if sender else gradients

    def at_receiver(
        self, most: int, micro_batches: MicroBatches, flying: int | Indices, *, keeps_all: bool = False
    ) -> Floats:
        """Bytes under way at the stage that it comes to.

        Gradients that have not left and inputs whose receives are posted; in shared memory all slots of gradients.
        Where the inputs of all micro-batches are kept anyway, those that are under way are among them.

        Args:
            most: micro-batches in flight at most at the stage that sends it.
            micro_batches: how a replica's samples are cut.
            flying: how many are in flight at the receiver; at one place at several moments.
            keeps_all: whether the inputs of all micro-batches are kept.
        """
        gradients = np.maximum(*self.gradients)
        on_the_way = self._ahead(SENDS_AHEAD, np.minimum(*self.gradients), most) * gradients
        in_slots = self._slots(gradients, most) + self.at_hand(sender=False)
        if not keeps_all:
            large, small = self.outputs
            posted_ahead = self._ahead(receives_ahead(self.distance, self.ring), np.minimum(large, small), most)
            soon = np.minimum(flying + posted_ahead, micro_batches.count)
            soon_large, now_large = (np.minimum(many, micro_batches.number_largest) for many in (soon, flying))
            more_large = soon_large - now_large
            on_the_way = on_the_way + more_large * large + (soon - flying - more_large) * small
        return self._by_carrier(on_the_way, in_slots)

    def _by_carrier(self, on_the_way: Floats, in_slots: Floats) -> Floats:
        """What counts of both: where nobody knows which carries it, the larger one."""
        if self.carrier is Carrier.SLOTS:
            return in_slots
        return on_the_way if self.carrier is Carrier.POSTED else np.maximum(on_the_way, in_slots)

    def _slots(self, message_bytes: Floats, most: int) -> Floats:
        """Bytes of a ring in memory that both stages share, which its sender holds, see `profiler.machine.ring`."""
        slot_bytes = np.ceil(message_bytes / SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        at_least = SENDS_AHEAD + receives_ahead(self.distance, self.ring)
        slots: Floats = np.minimum(self._ahead(at_least, slot_bytes, most), MOST_SLOTS) * slot_bytes
        return slots

    def _ahead(self, at_least: int, message_bytes: Floats, most: int) -> Floats:
        """How many messages of a length may be under way in one direction."""
        many: Floats = np.minimum(np.maximum(at_least, self.ahead_bytes // np.maximum(1, message_bytes)), most)
        return many
