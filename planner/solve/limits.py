"""How much a search may take: small limits first, larger ones where a gap is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from planner.solve import segment_choices
from planner.solve.segment_choices import WorkBudget

BEAM_LABELS = 4
"""Labels kept at each place by the first search, which makes the incumbent."""
MOST_LABELS = 1000
"""Labels kept at each place by the search that proves it."""
LISTED = ((64, 256), (2048, 8192))
"""Labels kept at each place when plans are listed to be evaluated one by one, and plans; more where that is little
work."""
LITTLE_WORK = 50_000
"""Labels up to which a list of plans that is cut off is made longer [fitted: 5 ms]."""
MOST_PLANS = 12
"""Plans of one part whose stages are looked at."""
MOVES = 1000
"""Plans with layers moved that are tried [chosen: 0.3 s of 16 stages]."""
WIDER_LABELS = 64
"""Labels kept at each place by the search that bounds a large problem with recompute."""
FEW_STAGES = 4000
"""With up to that many possible stages that recompute, each that a search comes by is looked at; with more, only those
of the best plans."""
MOST_WORK = 10_000_000
"""Labels that one search may try [chosen: 1 to 2 s]."""
FAR_MORE_WORK = 100_000_000
"""The same, however large the other limits grow: so many labels fill some GB."""
SEGMENTS_SHARE = 8
"""One part may take that share of the work that a balance may take for solving segments [chosen: 0.25 s]."""
PROGRAMS = 250
"""Linear programs for the bound of one part from its paths [chosen: 0.5 s of 8 stages]."""
STAGES_OF_WORK = 32
"""Where there are more stages than these for as many, a linear program counts for several [chosen]."""
LARGER, LAST_LEVEL = 4, 5
"""By what all limits grow from one level to the next, and the last one."""
LARGEST = 2**19
"""Labels kept at one place, and plans, however far they grow."""


def program_work(stages: int) -> int:
    """For how many linear programs one over so many stages counts."""
    return max(1, stages // STAGES_OF_WORK)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a search of one part may take.

    Attributes:
        beam_labels: see `BEAM_LABELS`, and so the others.
    """

    beam_labels: int
    most_labels: int
    listed: tuple[tuple[int, int], ...]
    little_work: int
    most_plans: int
    moves: int
    wider_labels: int
    few_stages: int
    most_work: int
    stage_work: int
    segments_work: int
    programs: int

    @classmethod
    def at(cls, level: int) -> Self:
        """Those of a level; 0 and 1 have the same."""
        by = LARGER ** max(0, level - 1)
        return cls(
            beam_labels=BEAM_LABELS * by,
            most_labels=min(MOST_LABELS * by, LARGEST),
            listed=tuple((min(width * by, LARGEST), min(plans * by, LARGEST)) for width, plans in LISTED),
            little_work=LITTLE_WORK * by,
            most_plans=MOST_PLANS * by,
            moves=MOVES * by,
            wider_labels=WIDER_LABELS * by,
            few_stages=FEW_STAGES * by,
            most_work=min(MOST_WORK * by, FAR_MORE_WORK),
            stage_work=segment_choices.STAGE_WORK * by,
            segments_work=segment_choices.ALL_WORK // SEGMENTS_SHARE * by,
            programs=PROGRAMS * by,
        )

    def segments(self) -> WorkBudget:
        """For the segments of one part."""
        return WorkBudget(self.segments_work, stage_work=self.stage_work)
