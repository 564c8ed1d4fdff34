"""What came of the models of a survey: a row for each, kept in a file as it comes."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One model of a survey.

    Attributes:
        outcome: one of the survey's.
        detail: how it was traced and how far it is from what it should be, or why not.
        seconds: of what the survey measures; 0 if there is nothing to measure.
    """

    library: str
    name: str
    outcome: StrEnum
    detail: str
    seconds: float = 0.0

    def __str__(self) -> str:
        cells = (self.library, self.name, self.outcome, f"{self.seconds:.1f} s", self.detail)
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def known_rows(path: Path, outcomes: type[StrEnum]) -> dict[tuple[str, str], Row]:
    """What earlier surveys found, by library and name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [Row(**{**found, "outcome": outcomes(found["outcome"])}) for found in map(json.loads, lines)]
    return {(row.library, row.name): row for row in rows}
