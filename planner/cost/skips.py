"""What of a model's values goes past stages, for given cuts, and what that costs.

A value that stages between two of its users do not read may skip them. It goes from each stage that uses it to the
next one that does, so the gradients of several readers are added up in the same order as when it is relayed:

    relayed   0 ==x==> 1 ==x==> 2 ==x==> 3        computed in stage 0, read in stages 2 and 3
    skips     0 =======x=======> 2 ==x==> 3       stage 1 neither holds nor sends it
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from planner.cost.layer_costs import Floats, LayerArrays
from planner.cost.messages import Message
from planner.cost.stage_memory import StageSkips
from planner.cost.time_ledger import message_s
from planner.cost.transfers import copied_shares
from planner.plan.micro_batches import MicroBatches
from planner.plan.stage import Skip, SkipTimes
from profiler.device import Link
from profiler.skip_value import SkipValue

LinkOf: TypeAlias = Callable[[int, int], Link | None]
"""What lies between two stages, by their positions."""


@dataclass(frozen=True, slots=True)
class Route:
    """Values that go from one stage to a later one past those between.

    Attributes:
        sender: stage that uses them last before the receiver.
        receiver: the next stage that reads them.
        values: in the order in which the profile names them.
    """

    sender: int
    receiver: int
    values: tuple[SkipValue, ...]

    def bytes_at(self, size: int) -> tuple[float, float]:
        """Bytes of the values, and of the part that gradients come back for, for a micro-batch of that size."""
        each = [(float(value.bytes_at(size)), value.has_gradient) for value in self.values]
        return sum(size_bytes for size_bytes, _ in each), sum(size_bytes for size_bytes, has in each if has)

    def message(self, micro_batches: MicroBatches) -> Message:
        """What is sent for a large and for a small micro-batch."""
        pairs = [self.bytes_at(size) for size in (micro_batches.largest, micro_batches.smallest)]
        outputs, gradients = ((np.array(large), np.array(small)) for large, small in zip(*pairs, strict=True))
        return Message(outputs, gradients, self.receiver - self.sender)


def routes_of(values: Iterable[SkipValue], stops: Sequence[int]) -> tuple[Route, ...]:
    """What skips stages.

    Args:
        values: that may.
        stops: index after the last layer of each stage.
    """
    found: dict[tuple[int, int], list[SkipValue]] = {}
    for value in values:
        stages = [bisect_right(stops, layer) for layer in value.users]
        for sender, receiver in pairwise(stages):
            if receiver - sender > 1:
                found.setdefault((sender, receiver), []).append(value)
    return tuple(Route(*ends, tuple(found[ends])) for ends in sorted(found))


def stage_skips(routes: Sequence[Route], stage: int, micro_batches: MicroBatches) -> StageSkips:
    """What they mean for the memory of one stage."""
    past = [route for route in routes if route.sender < stage < route.receiver]
    return StageSkips(
        incoming=tuple(route.message(micro_batches) for route in routes if route.receiver == stage),
        outgoing=tuple(route.message(micro_batches) for route in routes if route.sender == stage),
        past=(_sums(past, micro_batches.largest), _sums(past, micro_batches.smallest)),
    )


def plan_skips(routes: Sequence[Route], link: LinkOf, sizes: Sequence[int]) -> tuple[Skip, ...]:
    """The routes as a plan says them, with what their messages take."""

    def times(route: Route, size: int) -> SkipTimes:
        between = link(route.sender, route.receiver)
        forward_s, backward_s = (float(message_s(between, np.array(part))) for part in route.bytes_at(size))
        return SkipTimes(micro_batch_size=size, send_forward_s=forward_s, send_backward_s=backward_s)

    return tuple(
        Skip(
            sender=route.sender,
            receiver=route.receiver,
            values=tuple(value.name for value in route.values),
            times=tuple(times(route, size) for size in sizes),
            copied=copied_shares(link(route.sender, route.receiver)),
        )
        for route in routes
    )


def neighbour_s(link: LinkOf, layers: LayerArrays, size: int, stops: Sequence[int], routes: Sequence[Route]) -> Floats:
    """Seconds that each stage sends outputs to the next one, and gradients to the one before, shape (2, K).

    Args:
        link: between two stages.
        layers: what crosses boundaries for a micro-batch of `size` samples.
        size: samples.
        stops: index after the last layer of each stage.
        routes: what does not go to a neighbour.
    """
    crossing = np.zeros((2, len(stops) + 1))  # boundary k lies before stage k
    for boundary, stop in enumerate(stops[:-1], start=1):
        skipping = _sums([route for route in routes if route.sender < boundary <= route.receiver], size)
        crossing[:, boundary] = layers.output_bytes[stop - 1], layers.output_gradient_bytes[stop - 1]
        crossing[:, boundary] -= skipping
    seconds = np.zeros_like(crossing)
    for boundary in range(1, len(stops)):
        seconds[:, boundary] = message_s(link(boundary - 1, boundary), crossing[:, boundary])
    return np.stack((seconds[0, 1:], seconds[1, :-1]))


def _sums(routes: Sequence[Route], size: int) -> tuple[float, float]:
    each = [route.bytes_at(size) for route in routes]
    return sum(outputs for outputs, _ in each), sum(gradients for _, gradients in each)
