"""Which process of the world runs which stages of which replica.

With 2 replicas of 2 ranks each, where rank 0 runs stages 0 and 2:

    process      0          1          2          3             adjacent replicas:    0      1      2      3
    replica      0          0          1          1                                   0      1      0      1
    stages      0 2         1         0 2         1                                  0 2    0 2     1      1

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
        adjacent: whether the replicas of a rank are numbered after each other, and not the ranks of a replica.
    """

    process: int
    processes: int
    replicas: int
    replica: int
    stages: tuple[int, ...]
    process_of: tuple[int, ...]
    ring: Ring = ONE_CHUNK
    adjacent: bool = False

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
        if self.alone:
            return tuple(range(self.replicas))
        return (_place(process, self.processes // self.replicas, self.replicas, self.adjacent)[1],)

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
        rank, _ = _place(process, ranks, self.replicas, self.adjacent)
        return tuple(_number(rank, replica, ranks, self.replicas, self.adjacent) for replica in range(self.replicas))

    @property
    def first_replica(self) -> tuple[int, ...]:
        """Processes of replica 0, by rank."""
        ranks = self.processes // (1 if self.alone else self.replicas)
        return tuple(_number(rank, 0, ranks, self.replicas, self.adjacent) for rank in range(ranks))

    @property
    def last_processes(self) -> tuple[int, ...]:
        """By replica the process that runs the last stage."""
        return self.peers_of(self.process_of[-1])


def layout_of(plan: Plan, process: int, processes: int) -> Layout:
    """The layout of a plan as one process sees it; `processes` is what the plan needs, or 1."""
    if processes == 1:
        return Layout(process, 1, plan.replicas, 0, tuple(range(plan.K)), (0,) * plan.K)
    numbering = plan.ranks, plan.replicas, plan.adjacent_replicas
    rank, replica = _place(process, *numbering)
    return Layout(
        process=process,
        processes=processes,
        replicas=plan.replicas,
        replica=replica,
        stages=tuple(index for index, stage in enumerate(plan.stages) if stage.rank == rank),
        process_of=tuple(_number(stage.rank, replica, *numbering) for stage in plan.stages),
        ring=plan.ring,
        adjacent=plan.adjacent_replicas,
    )


def _number(rank: int, replica: int, ranks: int, replicas: int, adjacent: bool) -> int:
    """The process of a rank of a replica."""
    return rank * replicas + replica if adjacent else replica * ranks + rank


def _place(process: int, ranks: int, replicas: int, adjacent: bool) -> tuple[int, int]:
    """The rank that a process is, and of which replica: what `_number` numbers."""
    first, second = divmod(process, replicas if adjacent else ranks)
    return (first, second) if adjacent else (second, first)
