"""Plan files of earlier forms of the format, in today's form.

The first version knew GPipe's schedule and one replica alone: a stage had one device in the place of one for each
replica, and no rank, for stage k was on rank k. The second once said of devices on several hosts no more than whether
the replicas of a rank were after each other. All else means what it means today.
"""

from __future__ import annotations

import json
from typing import Any

from planner.plan.schedules import SCHEDULE_OF_OLD_PLANS
from profiler.quantities import MOST_DEVICES
from profiler.value import first_twice

FIRST, NEXT = 1, 2


def in_later_form(text: str) -> str:
    """The text of a plan file of version 2 that means the same; any other text stays as it is."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if first_twice(text) is not None:
        return text
    if _has_adjacent_replicas(fields):
        return json.dumps(_with_positions(fields))
    if not _is_of_first_version(fields):
        return text
    stages = [
        {name: value for name, value in stage.items() if name != "device"}
        | {"devices": [stage["device"]], "rank": rank}
        for rank, stage in enumerate(fields["stages"])
    ]
    return json.dumps({**fields, "schema_version": NEXT, "stages": stages})


def _has_adjacent_replicas(fields: Any) -> bool:
    """Whether it says so, and not where its devices are."""
    if not isinstance(fields, dict) or fields.get("adjacent_replicas") is not True or "positions" in fields:
        return False
    stages, replicas = fields.get("stages"), fields.get("replicas")
    ranks = isinstance(stages, list) and all(isinstance(one, dict) and type(one.get("rank")) is int for one in stages)
    most = type(replicas) is int and 1 <= replicas <= MOST_DEVICES
    return fields.get("schema_version") == NEXT and ranks and most


def _with_positions(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with devices for all ranks of all replicas and no other ones."""
    ranks, replicas = len({stage["rank"] for stage in fields["stages"]}), fields["replicas"]
    rest = {name: value for name, value in fields.items() if name != "adjacent_replicas"}
    return rest | {"positions": [[*range(rank * replicas, (rank + 1) * replicas)] for rank in range(ranks)]}


def _is_of_first_version(fields: Any) -> bool:
    """Whether it says so, and has no more than a file of that version could say."""
    if not isinstance(fields, dict) or type(fields.get("schema_version")) is not int:
        return False
    alone = fields.get("schedule") == SCHEDULE_OF_OLD_PLANS and fields.get("replicas") == 1
    stages = fields.get("stages")
    return (
        fields["schema_version"] == FIRST
        and alone
        and isinstance(stages, list)
        and all(isinstance(one, dict) and "device" in one and not {"devices", "rank"} & one.keys() for one in stages)
    )
