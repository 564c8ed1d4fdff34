"""Results of long experiments, of which none is lost: a run that was interrupted goes on where it stopped.

ROWS=rows.jsonl python -m pytest -m benchmark tests/benchmarks/test_plan_quality.py -s
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def kept(key: str, compute: Callable[[], T]) -> T:
    """What the file that `ROWS` names holds for this key, or else what is computed now, which is added to it.

    Args:
        key: that no other result has.
        compute: makes a value that JSON can hold.
    """
    path = Path(os.environ["ROWS"]) if "ROWS" in os.environ else None
    found: T
    if path is not None and path.exists():
        for line in path.read_text().splitlines():
            name, found = json.loads(line)
            if name == key:
                return found
    found = compute()
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps([key, found]) + "\n")
    return found
