"""Which process of the world runs which stages of which replica.

With 2 replicas of 2 ranks each, where rank 0 runs stages 0 and 2:

    process      0          1          2          3
    replica      0          0          1          1
    stages      0 2         1         0 2         1

A process that is alone runs all stages of all replicas, one replica after the other: the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan.plan import Plan
from planner.plan.schedules import ONE_CHUNK, Ring


@dataclass(frozen=True, slots=True)
class Layout:
    """One process's place in the world.

    Attributes:
        process: number of this process.
        processes: of the world.
        replicas: R.
        replica: the one that this process belongs to; 0 where it runs alone.
        stages: that this process runs, ascending.
        process_of: by stage: the process that runs it in this process's replica.
        ring: which rank of the plan runs which stages.
    """

    process: int
    processes: int
    replicas: int
    replica: int
    stages: tuple[int, ...]
    process_of: tuple[int, ...]
    ring: Ring = ONE_CHUNK

    @property
    def alone(self) -> bool:
        """Whether one process runs everything."""
        return self.processes == 1

    @property
    def has_all_stages(self) -> bool:
        """Whether this process runs each stage, of one replica at least."""
        return len(self.stages) == len(self.process_of)

    @property
    def own_replicas(self) -> tuple[int, ...]:
        """Replicas whose micro-batches this process runs."""
        return self.replicas_of(self.process)

    def replicas_of(self, process: int) -> tuple[int, ...]:
        """Replicas whose micro-batches a process runs."""
        return tuple(range(self.replicas)) if self.alone else (process * self.replicas // self.processes,)

    def stages_of(self, process: int) -> tuple[int, ...]:
        """Stages that a process runs, ascending."""
        peers = self.peers_of(process)
        return tuple(stage for stage, other in enumerate(self.process_of) if other in peers)

    @property
    def peers(self) -> tuple[int, ...]:
        """Processes that run the same stages, by replica; only this one where it is alone."""
        return self.peers_of(self.process)

    def peers_of(self, process: int) -> tuple[int, ...]:
        """Processes that run the same stages as another one."""
        if self.alone:
            return (process,)
        ranks = self.processes // self.replicas
        return tuple(replica * ranks + process % ranks for replica in range(self.replicas))

    @property
    def last_processes(self) -> tuple[int, ...]:
        """By replica the process that runs the last stage."""
        return self.peers_of(self.process_of[-1])


def layout_of(plan: Plan, process: int, processes: int) -> Layout:
    """The layout of a plan as one process sees it; `processes` is what the plan needs, or 1."""
    if processes == 1:
        return Layout(process, 1, plan.replicas, 0, tuple(range(plan.K)), (0,) * plan.K)
    replica, rank = divmod(process, plan.ranks)
    return Layout(
        process=process,
        processes=processes,
        replicas=plan.replicas,
        replica=replica,
        stages=tuple(index for index, stage in enumerate(plan.stages) if stage.rank == rank),
        process_of=tuple(replica * plan.ranks + stage.rank for stage in plan.stages),
        ring=plan.ring,
    )
