"""What limits a step: the device or the link with which, were it faster, the step would gain most.

Asked of the simulator, with copies of messages where they belong: in the passes of both ends. What a device or a link
is busy for bounds what it can bring, so most need not be tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.plan.plan import Plan
from planner.plan.schedules import Ring
from planner.plan.simulator import Durations, simulate

FASTER = 0.1
"""By what part each is taken to be faster [chosen]: above rounding, and below what would make another the slowest."""
SEARCH_S = 2.0
"""Seconds that the search may take, after which the best so far counts [chosen]."""

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """A device, or a link between neighbours in both directions.

    Attributes:
        rank: of the device; of a link that of its lower end.
        is_link: which of both.
        gain_s: by what the step is shorter if this takes `FASTER` less.
    """

    rank: int
    is_link: bool
    gain_s: float


def limit_of(plan: Plan) -> Limit:
    """What would help most if it were faster; among equals what is busy longest."""
    durations, actions, until = Durations.of(plan), plan.actions(), time.monotonic() + SEARCH_S
    whole_s = simulate(actions, durations, events=False).makespan_s
    best = Limit(0, is_link=False, gain_s=-1.0)
    for busy_s, rank, is_link in sorted(_busy(plan, durations), key=lambda one: -one[0]):
        if best.gain_s >= FASTER * busy_s or (best.gain_s >= 0 and time.monotonic() > until):
            break
        changed = (_faster_link if is_link else _faster_device)(durations, rank, plan.ring)
        gain_s = whole_s - simulate(actions, changed, events=False).makespan_s
        if gain_s > best.gain_s * (1 + 1e-9):
            best = Limit(rank, is_link, max(gain_s, 0.0))
    return best


def _busy(plan: Plan, durations: Durations) -> Iterator[tuple[float, int, bool]]:
    """Seconds of each device and of each link between neighbours."""
    ring = plan.ring
    for rank in range(ring.ranks):
        rows = (durations.forward_s, durations.recompute_s, durations.backward_s)
        yield sum(sum(table[stage]) for table in rows for stage in ring.stages_of(rank)), rank, False
    busy_s = [0.0] * ring.ranks
    for stage in range(ring.stages):
        busy_s[ring.lower_end(stage, forward=True)] += sum(durations.send_forward_s[stage])
        busy_s[ring.lower_end(stage, forward=False)] += sum(durations.send_backward_s[stage])
    for (sender, receiver), (outputs, gradients) in durations.skips.items():
        busy_s[ring.lower_end(sender, forward=True)] += sum(outputs)
        busy_s[ring.lower_end(receiver, forward=False)] += sum(gradients)
    for rank in range(ring.ranks if ring.chunks > 1 else ring.ranks - 1):
        yield busy_s[rank], rank, True


def _faster_device(durations: Durations, rank: int, ring: Ring) -> Durations:
    faster = _faster(lambda stage: ring.rank_of(stage) == rank)
    return replace(
        durations,
        forward_s=faster(durations.forward_s),
        recompute_s=faster(durations.recompute_s),
        backward_s=faster(durations.backward_s),
        weight_s=faster(durations.weight_s),
    )


def _faster_link(durations: Durations, rank: int, ring: Ring) -> Durations:
    def there(stage: int) -> bool:
        return ring.lower_end(stage, forward=True) == rank

    def back(stage: int) -> bool:
        return ring.lower_end(stage, forward=False) == rank

    return replace(
        durations,
        send_forward_s=_faster(there)(durations.send_forward_s),
        send_backward_s=_faster(back)(durations.send_backward_s),
        skips={
            (sender, receiver): (_row(outputs, there(sender)), _row(gradients, back(receiver)))
            for (sender, receiver), (outputs, gradients) in durations.skips.items()
        },
    )


def _faster(is_meant: Callable[[int], bool]) -> Callable[[Table], Table]:
    return lambda table: tuple(_row(row, is_meant(stage)) for stage, row in enumerate(table))


def _row(seconds: Sequence[float], is_meant: bool) -> tuple[float, ...]:
    return tuple((1 - FASTER) * value if is_meant else value for value in seconds)
