"""Plan files of the first version of the format, in today's form.

It knew GPipe's schedule and one replica alone: a stage had one device in the place of one for each replica, and no
rank, for stage k was on rank k. All else means what it means today.
"""

from __future__ import annotations

import json
from typing import Any

from planner.plan.schedules import SCHEDULE_OF_OLD_PLANS
from profiler.value import first_twice

FIRST, NEXT = 1, 2


def in_later_form(text: str) -> str:
    """The text of a plan file of version 2 that means the same; any other text stays as it is."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not _is_of_first_version(fields) or first_twice(text) is not None:
        return text
    stages = [
        {name: value for name, value in stage.items() if name != "device"}
        | {"devices": [stage["device"]], "rank": rank}
        for rank, stage in enumerate(fields["stages"])
    ]
    return json.dumps({**fields, "schema_version": NEXT, "stages": stages})


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
