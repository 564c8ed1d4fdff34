"""Which process of the world runs which stages of which replica: by rank of the plan the process of each replica.

With 2 replicas of 2 ranks each, where rank 0 runs stages 0 and 2:

                    replicas one after the other    ranks one after the other    one process, the reference
    replica              0     1                         0     1                      0     1
    rank 0               0     2                         0     1                      0     0
    rank 1               1     3                         2     3                      0     0

The plan says it (`planner.plan.plan_fields.PlanFields.processes`). A process that is alone runs all stages of all
replicas, one replica after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planner.plan.plan import Plan
from planner.plan.schedules import ONE_CHUNK, Ring


@dataclass(frozen=True)
class Layout:
    """One process's place in the world.

    Attributes:
        process: number of this process.
        numbers: by rank of the plan the process that runs it in each replica; 0 everywhere for one that is alone.
        rank_of: by stage its rank.
        ring: which rank of the plan runs which stages.
    """

    process: int
    numbers: tuple[tuple[int, ...], ...]
    rank_of: tuple[int, ...]
    ring: Ring = ONE_CHUNK

    @cached_property
    def processes(self) -> int:
        """Of the world."""
        return 1 + max(map(max, self.numbers))

    @property
    def replicas(self) -> int:
        """R."""
        return len(self.numbers[0])

    @cached_property
    def replica(self) -> int:
        """The one that this process belongs to; 0 where it runs alone."""
        return self.own_replicas[0]

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """That this process runs, ascending."""
        return self.stages_of(self.process)

    @cached_property
    def process_of(self) -> tuple[int, ...]:
        """By stage: the process that runs it in this process's replica."""
        return tuple(self.numbers[rank][self.replica] for rank in self.rank_of)

    @property
    def alone(self) -> bool:
        """Whether one process runs everything."""
        return self.processes == 1

    @property
    def has_all_stages(self) -> bool:
        """Whether this process runs each stage, of one replica at least."""
        return len(self.stages) == len(self.rank_of)

    @property
    def own_replicas(self) -> tuple[int, ...]:
        """Replicas whose micro-batches this process runs."""
        return self.replicas_of(self.process)

    def replicas_of(self, process: int) -> tuple[int, ...]:
        """Replicas whose micro-batches a process runs."""
        row = self._row_of(process)
        return tuple(replica for replica, number in enumerate(row) if number == process)

    def stages_of(self, process: int) -> tuple[int, ...]:
        """Stages that a process runs, ascending."""
        return tuple(stage for stage, rank in enumerate(self.rank_of) if process in self.numbers[rank])

    @property
    def peers(self) -> tuple[int, ...]:
        """Processes that run the same stages, by replica; only this one where it is alone."""
        return self.peers_of(self.process)

    def peers_of(self, process: int) -> tuple[int, ...]:
        """Processes that run the same stages as another one."""
        return tuple(dict.fromkeys(self._row_of(process)))

    @property
    def first_replica(self) -> tuple[int, ...]:
        """Processes of replica 0, by rank."""
        return tuple(dict.fromkeys(row[0] for row in self.numbers))

    @property
    def last_processes(self) -> tuple[int, ...]:
        """By replica the process that runs the last stage."""
        return self.peers_of(self.process_of[-1])

    def _row_of(self, process: int) -> tuple[int, ...]:
        """The processes of the first rank that one runs."""
        return next(row for row in self.numbers if process in row)


def layout_of(plan: Plan, process: int, processes: int) -> Layout:
    """The layout of a plan as one process sees it; `processes` is what the plan needs, or 1."""
    numbers = ((0,) * plan.replicas,) * plan.ranks if processes == 1 else plan.processes
    return Layout(process, numbers, tuple(stage.rank for stage in plan.stages), plan.ring)
