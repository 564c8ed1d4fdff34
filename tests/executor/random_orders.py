"""Random orders for schedules whose plans have orders of their own."""

import random

from planner.plan.actions import room_between
from planner.plan.order_text import LETTERS
from planner.plan.orders import PassKind
from planner.plan.schedules import SCHEDULES, Ring, ScheduleName

LIKING = 3.0
"""A pass may be liked so many powers of ten more or less than another, so that some ranks run far ahead [chosen]."""


def orders_for(
    schedule: ScheduleName, stages: int, micro_batches: int, chance: random.Random, chunks: int = 1
) -> tuple[str, ...]:
    """Random ones for a plan of this schedule; none where it has fixed ones."""
    record = SCHEDULES[schedule]
    if not record.made_for_plan:
        return ()
    return random_orders(record.ring(stages // chunks, chunks), micro_batches, chance)


def random_chunks(schedule: ScheduleName, most: int, chance: random.Random) -> int:
    """Chunks a rank that the schedule may have, no more than `most` where it leaves a choice."""
    record = SCHEDULES[schedule]
    return chance.randint(record.fewest_chunks, max(record.fewest_chunks, min(record.most_chunks, most)))


def random_orders(ring: Ring, micro_batches: int, chance: random.Random) -> tuple[str, ...]:
    """Orders that no rank waits in for ever, as letters of each rank; any that such a plan may have.

    One pass after the other that can be taken is, with no more messages of a boundary and direction that nobody has
    read than there is room for. There always is one: of the passes in the way of a message the last on its way can go.
    """
    letters, last = LETTERS[ring.chunks - 1], ring.stages - 1
    done = [[0] * len(PassKind) for _ in range(ring.stages)]
    texts = [""] * ring.ranks
    likings = {
        (stage, kind): 10 ** chance.uniform(-LIKING, LIKING) for stage in range(ring.stages) for kind in PassKind
    }

    def can_be_taken(stage: int, kind: PassKind) -> bool:
        number = done[stage][kind]
        if number == micro_batches or (kind and done[stage][kind - 1] == number):
            return False
        step = {PassKind.FORWARD: 1, PassKind.BACKWARD: -1, PassKind.WEIGHTS: 0}[kind]
        source, target = stage - step, stage + step
        if step and 0 <= source <= last and done[source][kind] == number:
            return False
        sends = 0 <= target <= last and ring.rank_of(target) != ring.rank_of(stage)
        return not sends or number - done[target][kind] < room_between(stage, target, ring)

    for _ in range(ring.stages * len(PassKind) * micro_batches):
        able = [one for one in likings if can_be_taken(*one)]
        stage, kind = chance.choices(able, [likings[one] for one in able])[0]
        done[stage][kind] += 1
        texts[ring.rank_of(stage)] += letters[kind * ring.chunks + stage // ring.ranks]
    return tuple(texts)
