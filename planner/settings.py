"""What a caller may ask of a plan, as one frozen value; checked before anything is measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, get_args

from planner.keyword_values import choice_of, memory_limits_of, pinned_of
from planner.keywords import RecomputeMode, SettingKeywords, SkipMode
from planner.plan.schedules import (
    MOST_CHUNKS,
    SCHEDULES,
    ScheduleName,
    check_chunks,
    chunk_schedules,
    one_chunk_schedules,
    split_schedules,
)
from profiler.arguments import meant
from profiler.errors import ArgumentError, InfeasibleError
from profiler.quantities import (
    MOST_DEVICES,
    MOST_LAYERS,
    MOST_MICRO_BATCHES,
    MOST_SAMPLES,
    check_count,
    check_seconds,
    paths_of,
    shown,
)
from profiler.text import are, counted

if TYPE_CHECKING:
    from profiler.device import Cluster

MICRO_BATCHES_PER_STAGE = 4
"""By default, see there."""
_MOST = {
    "chunks": MOST_CHUNKS,
    "stages": MOST_LAYERS,
    "max_stages": MOST_LAYERS,
    "micro_batches": MOST_MICRO_BATCHES,
    "micro_batches_per_stage": MOST_MICRO_BATCHES,
}


CHUNKS_TRIED = (2, 3, 4)
"""Chunks a rank that are tried where they are to be chosen [chosen: more send more, and gain ever less]."""
FEW_RANKS = 2
"""Fewer have nothing to interleave."""
_OF_SEVERAL = frozenset({"micro_batch_sizes", "memory_limit", "keep_together", "cut_at"})
"""Settings that may be arrays; of others an array would be compared item by item."""
MOST_WITH_CHUNKS = 16
"""Devices in line up to which several chunks a rank are tried where nothing is said of them [chosen: to plan 8B
parameters takes 19 s then in place of 6 on 8 devices, 19 in place of 9 on 16, and 140 in place of 51 on 64]."""
_ONLY_WHOLE: tuple[tuple[str, str | None], ...] = (("skips", "direct"), ("pinned", None))
"""Settings that are for one stage a rank and a backward pass in one: with that value, or any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`SettingKeywords` with their defaults, checked against the batch and the devices.

    Attributes:
        batch_size: samples of a mini-batch, over all replicas.
        schedules: those to choose from.
        choose_chunks: whether any number of chunks will do, where the schedule may have several; `chunks` is then the
            least that goes together with the number of stages that is asked for.
        chunks_for_cuts: whether they may be as many as the cuts that are asked for take; else cuts stay within the
            devices.
        stages_limit: of K as it was given, whatever the chunks; None for no limit.
        memory_limits: bytes for each device, the device's own where no limit was given.
        pinned: module paths and positions of devices.
    """

    batch_size: int
    schedules: tuple[ScheduleName, ...] = one_chunk_schedules()
    recompute: RecomputeMode = "auto"
    skips: SkipMode = "relayed"
    chunks: int = 1
    choose_chunks: bool = False
    chunks_for_cuts: bool = False
    stages: int | None = None
    max_stages: int
    stages_limit: int | None = None
    micro_batches: int | None = None
    micro_batches_per_stage: int = MICRO_BATCHES_PER_STAGE
    micro_batch_sizes: frozenset[int] | None = None
    replicas: int | None = 1
    shard_optimizer: bool = False
    memory_limits: tuple[int, ...]
    keep_together: tuple[str, ...] = ()
    cut_at: tuple[str, ...] = ()
    pinned: tuple[tuple[str, int], ...] = ()
    time_limit_s: float | None = None

    @classmethod
    def of(cls, cluster: Cluster, batch_size: int, keywords: SettingKeywords) -> Self:
        """The settings that these keywords mean.

        Raises:
            ArgumentError: a keyword does not exist, or has a value that cannot mean anything.
            InfeasibleError: the batch is too small for what is fixed.
        """
        unknown = sorted(set(keywords) - set(SettingKeywords.__annotations__))
        if unknown:
            known = sorted(SettingKeywords.__annotations__)
            near = meant(unknown[0], known)
            raise ArgumentError(f"there is no setting {shown(unknown[0])}{near}; there are {', '.join(known)}")
        given: dict[str, Any] = {name: value for name, value in keywords.items() if value is not None}
        arrays = [name for name, value in given.items() if getattr(value, "ndim", 0) and name not in _OF_SEVERAL]
        if arrays:
            raise ArgumentError(f"{arrays[0]} is {shown(given[arrays[0]])}; give a single value, not an array")
        check_count("batch_size", batch_size, most=MOST_SAMPLES)
        schedule = given.pop("schedule", "auto")
        schedule = schedule.lower() if isinstance(schedule, str) else schedule  # 1F1B, as people write it
        schedule = choice_of("schedule", schedule, (*SCHEDULES, "auto"))
        choose_chunks = _chooses_chunks(schedule, given, cluster)
        for name, most in _MOST.items():
            if name in given:
                check_count(name, given[name], most=most)
        choice_of("recompute", given.get("recompute", "auto"), get_args(RecomputeMode))
        choice_of("skips", given.get("skips", "relayed"), get_args(SkipMode))
        replicas = given.pop("replicas", 1)
        if replicas != "auto":
            check_count("replicas", replicas, most=MOST_DEVICES)
        if not isinstance(given.get("shard_optimizer", False), bool):
            raise ArgumentError(f"shard_optimizer is {shown(given['shard_optimizer'])}; give True or False")
        if "time_limit_s" in given:
            check_seconds("time_limit_s", given["time_limit_s"])
        sizes = given.pop("micro_batch_sizes", None)
        if sizes is not None and (isinstance(sizes, str) or not isinstance(sizes, Collection)):
            raise ArgumentError(f"micro_batch_sizes is {shown(sizes)}; give a list of sizes")
        for size in () if sizes is None else sizes:
            check_count("micro_batch_sizes", size, most=MOST_SAMPLES)
        if sizes is not None and not len(sizes):
            raise ArgumentError("micro_batch_sizes is empty; name at least one size, or leave it out")
        chunks = given.get("chunks", 1)
        _check_chunks(chunks, schedule, given, len(cluster.devices))
        cut_at = paths_of("cut_at", given.pop("cut_at", ()))
        if choose_chunks:
            _check_choice_of_chunks(given)
            share = 1 if replicas == "auto" else replicas
            chunks = given["chunks"] = _least_chunks_fed(given, batch_size // share, len(cluster.devices) // share)
        limit = given.pop("max_stages", None)
        settings = cls(
            batch_size=batch_size,
            schedules=_schedules(schedule, given, choose_chunks=choose_chunks),
            choose_chunks=choose_chunks,
            chunks_for_cuts=choose_chunks and keywords.get("chunks") == "auto",
            max_stages=min(len(cluster.devices) * chunks, limit or MOST_LAYERS),
            stages_limit=limit,
            micro_batch_sizes=None if sizes is None else frozenset(sizes),
            replicas=None if replicas == "auto" else replicas,
            memory_limits=memory_limits_of(cluster.devices, given.pop("memory_limit", None)),
            keep_together=paths_of("keep_together", given.pop("keep_together", ())),
            cut_at=cut_at,
            pinned=pinned_of(cluster.devices, given.pop("pinned", {})),
            **given,
        )
        settings._check_numbers(len(cluster.devices), keywords.get("max_stages"))
        return settings

    def for_cuts(self, cuts: int) -> Self:
        """These with the fewest chunks a rank that go together with so many demanded cuts, if chunks may be chosen so.

        Raises:
            ArgumentError: other settings do not go together with so many chunks.
            InfeasibleError: the batch is too small for them.
        """
        if not self.chunks_for_cuts or self.stages is not None:
            return self
        share, devices = self.replicas or 1, len(self.memory_limits)
        batch = self.batch_size // share
        fed = min(batch, self.micro_batches or batch) // self.micro_batches_per_stage
        chunks = _least_chunks(None, cuts, min(devices // share, fed))
        most = min(devices * chunks, self.stages_limit or MOST_LAYERS)
        settings = replace(self, chunks=chunks, max_stages=most)
        settings._check_numbers(devices, self.stages_limit)
        return settings

    @property
    def most_stages(self) -> int:
        """The most devices in line that devices, replicas, batch and settings allow, whatever the model."""
        replicas = self.replicas or 1
        able = min(self.max_stages // self.chunks, len(self.memory_limits) // replicas)
        return self.ranks or max(1, min(able, self.batch_size // replicas // self.micro_batches_per_stage))

    @property
    def ranks(self) -> int | None:
        """Devices in line, if K is fixed."""
        return None if self.stages is None else self.stages // self.chunks

    def _check_numbers(self, devices: int, max_stages: int | None) -> None:
        """K, M, R and the batch do not contradict each other."""
        stages, count, replicas = self.ranks, self.micro_batches, self.replicas or 1
        if self.chunks > 1 and max_stages is not None and max_stages < 2 * self.chunks:
            raise ArgumentError(
                f"max_stages is {max_stages}, and 2 ranks with {self.chunks} chunks each have {2 * self.chunks} stages"
            )
        if stages is not None and stages > devices:
            each = "each stage needs its own" if self.chunks == 1 else f"{self.chunks} of them share one"
            if self.choose_chunks:
                each += f", or {_or(CHUNKS_TRIED)} of them share one"
                able = [n * chunks for n in range(FEW_RANKS, devices // replicas + 1) for chunks in CHUNKS_TRIED]
                each += f": stages={min(able, key=lambda n: abs(n - stages))} is the nearest" if able else ""
            raise ArgumentError(
                f"stages is {self.stages}, and there {are(devices)} {counted(devices, 'device')}; {each}"
                f"{self._with_chunks_text(devices)}"
            )
        if self.stages is not None and max_stages is not None and self.stages > max_stages:
            raise ArgumentError(f"stages is {self.stages} and max_stages is {max_stages}; leave one of them out")
        least_stages = stages or (1 if self.chunks == 1 else 2)
        if replicas * least_stages > devices:
            each = counted(least_stages, "stage") if self.chunks == 1 else self._line_text(least_stages)
            raise ArgumentError(
                f"replicas is {replicas} with {each} each, and there {are(devices)} {counted(devices, 'device')}; "
                f"{replicas * least_stages} are needed{self._with_chunks_text(devices)}"
            )
        if self.batch_size % replicas:
            share = max(-(-self.batch_size // replicas), count or 0)
            raise ArgumentError(
                f"replicas is {replicas}, which does not divide the batch of "
                f"{counted(self.batch_size, 'sample')}; choose a batch of {share * replicas}"
            )
        if self.pinned and self.replicas != 1:
            raise ArgumentError(
                f"pinned names one device for a module, and replicas is {self.replicas or 'auto'}: each pipeline runs "
                "it on a device of its own, and these are chosen together; leave one of them out"
            )
        batch, needed = self.batch_size // replicas, self.micro_batches_per_stage * least_stages
        if count is not None and count > batch:
            raise ArgumentError(
                f"micro_batches is {count}, but the batch has {counted(batch, 'sample')}; each needs at least 1"
            )
        if count is not None and count < needed:
            raise ArgumentError(
                f"micro_batches is {count}, and {self._line_text(least_stages)} with micro_batches_per_stage = "
                f"{self.micro_batches_per_stage} asks for at least {needed}; give more micro-batches, "
                f"{'fewer stages, ' if (stages or 1) > 1 else ''}or a smaller micro_batches_per_stage"
            )
        if batch < needed:
            raise InfeasibleError(self._batch_too_small_text(batch, least_stages))

    def _with_chunks_text(self, devices: int) -> str:
        """What several chunks a rank would do for too many stages; "" where that is nothing, or they may not be."""
        named = self.schedules[0] if len(self.schedules) == 1 else None
        able = self.chunks == 1 and not self.choose_chunks and (named is None or named in chunk_schedules())
        chunks = _least_chunks(self.stages, 0, devices // (self.replicas or 1)) if able else 1
        if chunks == 1 or _for_one_chunk({"skips": self.skips, "pinned": self.pinned}):
            return ""
        number = "" if named is None else f"chunks={chunks} or "
        return f'; with {number}chunks="auto" a device has several'

    def _line_text(self, ranks: int) -> str:
        return f"K = {ranks}" if self.chunks == 1 else f"{ranks} ranks of {self.chunks} chunks"

    def _batch_too_small_text(self, batch: int, ranks: int) -> str:
        """Why a batch cannot be cut into enough micro-batches."""
        per_stage, replicas = self.micro_batches_per_stage, self.replicas or 1
        needed, most = per_stage * ranks, batch // per_stage
        cures = [f"use a batch of at least {needed * replicas}"]
        if self.stages is not None and most >= (1 if self.chunks == 1 else FEW_RANKS):
            cures.append(f"set stages={most * self.chunks}{' or less' if self.chunks == 1 else ''}")
        if batch // ranks >= 1:
            cures.append(f"set micro_batches_per_stage={batch // ranks} or less")
        each = "stage" if self.chunks == 1 else "rank"
        each_has = "" if replicas == 1 else f", {batch} for each of {replicas} replicas,"
        return (
            f"a batch of {counted(self.batch_size, 'sample')}{each_has} is too small for {self._line_text(ranks)}: M "
            f"must be at least {needed} ({per_stage} micro-batches for each {each}), and a micro-batch holds at least "
            f"1 sample; {', or '.join(cures)}"
        )


def _schedules(schedule: ScheduleName, given: Mapping[str, Any], *, choose_chunks: bool) -> tuple[ScheduleName, ...]:
    """Those to choose from; one that is named and cannot go together with another setting is refused."""
    for_neighbours = _for_one_chunk(given)
    if schedule == "auto":
        # Of equally fast plans the first stays: the one that keeps less, and adds up gradients in the others' order.
        whole = sorted(one_chunk_schedules(), key=lambda name: SCHEDULES[name].keeps_all)
        split = () if for_neighbours else split_schedules()
        return (*whole, *split, *(chunk_schedules() if choose_chunks else ()))
    if SCHEDULES[schedule].splits_backward and for_neighbours:
        name = for_neighbours[0]
        raise ArgumentError(
            f"{name} is {shown(given[name])}, and schedule {schedule!r} splits the backward pass, for which there are "
            f"no such plans; leave {name} out, or choose one of {', '.join(map(repr, one_chunk_schedules()))}"
        )
    return (schedule,)


def _chooses_chunks(schedule: ScheduleName, given: dict[str, Any], cluster: Cluster) -> bool:
    """Whether the number of chunks is to be chosen, for which there is a choice; else it is among what is given.

    With the schedule it is chosen, too, where nothing is said of it, nothing else forbids it, and few devices are in
    line, over one link.
    """
    asked = given.get("chunks") == "auto" and bool(given.pop("chunks"))
    if schedule == "auto" and not asked and "chunks" not in given:
        replicas, devices = given.get("replicas", 1), len(cluster.devices)
        in_line = devices // replicas if isinstance(replicas, int) and replicas > 0 else devices
        return not cluster.has_unlike_links and FEW_RANKS <= in_line <= MOST_WITH_CHUNKS and not _for_one_chunk(given)
    fewest = 1 if schedule == "auto" else SCHEDULES[schedule].fewest_chunks
    if fewest > 1:
        given.setdefault("chunks", fewest)
    return asked and fewest == 1 and schedule in ("auto", *chunk_schedules())


def _for_one_chunk(given: Mapping[str, Any]) -> list[str]:
    """Settings that are given and are for one stage a rank and a backward pass in one."""
    return [name for name, value in _ONLY_WHOLE if given.get(name) and value in (None, given[name])]


def _least_chunks_fed(given: Mapping[str, Any], batch: int, devices: int) -> int:
    """The fewest chunks a rank with which there are enough micro-batches, or which there would be with a larger batch.

    Args:
        given: settings.
        batch: samples of a replica.
        devices: in line.
    """
    stages, per_stage = given.get("stages"), given.get("micro_batches_per_stage", MICRO_BATCHES_PER_STAGE)
    fed = min(batch, given.get("micro_batches", batch)) // per_stage
    chunks = _least_chunks(stages, 0, min(devices, fed))
    too_many = stages is not None and stages > devices
    return _least_chunks(stages, 0, devices) if chunks == 1 and too_many else chunks


def _least_chunks(stages: int | None, cuts: int, devices: int) -> int:
    """Of the chunks a rank that may be chosen the fewest with so many stages, or at least so many cuts; else 1.

    Args:
        stages: K, if it is fixed.
        cuts: that are demanded.
        devices: the most in line for which there are enough micro-batches.
    """
    for chunks in (1, *CHUNKS_TRIED):
        fewest = 1 if chunks == 1 else FEW_RANKS
        if stages is None and cuts < devices * chunks:
            return chunks
        if stages is not None and stages % chunks == 0 and fewest <= stages // chunks <= devices:
            return chunks
    return 1


def _or(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def _check_choice_of_chunks(given: Mapping[str, Any]) -> None:
    """Several chunks a rank, as they may be chosen, go together with the other settings."""
    for name in _for_one_chunk(given):
        raise ArgumentError(
            f"chunks is 'auto' and {name} is {shown(given[name])}, which is for one chunk a rank; leave one of them out"
        )


def _check_chunks(chunks: int, schedule: ScheduleName, given: Mapping[str, Any], devices: int) -> None:
    """Several chunks a rank go together with the other settings."""
    fixed = schedule != "auto" and SCHEDULES[schedule].fewest_chunks > 1
    if chunks == 1 and not fixed:
        return
    able = ", ".join(map(repr, chunk_schedules()))
    if schedule == "auto":
        raise ArgumentError(
            f'schedule is "auto" and chooses the chunks, too; leave chunks={chunks} out, or name {able}'
        )
    check_chunks(schedule, given.get("stages", chunks), chunks)
    if given.get("stages", 2 * chunks) < 2 * chunks or devices < 2:
        raise ArgumentError(
            f"chunks is {chunks}, and there would be 1 rank; give at least 2 devices and {2 * chunks} stages, or "
            f"{'choose another schedule' if fixed else 'leave chunks out'}"
        )
    for name in _for_one_chunk(given):
        raise ArgumentError(
            f"chunks is {chunks} and {name} is {shown(given[name])}, which is for one chunk a rank; leave one of "
            "them out"
        )
