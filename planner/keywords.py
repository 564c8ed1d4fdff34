"""What a caller may ask of a plan by keyword, each told once for all functions that take them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

from planner.plan.schedules import ScheduleName
from profiler.arguments import fits_its_arguments

RecomputeMode: TypeAlias = Literal["auto", "always", "never"]
SkipMode: TypeAlias = Literal["relayed", "direct"]
MemoryLimit: TypeAlias = int | Sequence[int | None] | Mapping[str, int]
WhichDevice: TypeAlias = str | int


class SettingKeywords(TypedDict, total=False):
    """Keywords of `autoplan` and `plan_from_profile` that say what is asked of a plan; all may be left out.

    Attributes:
        schedule: order of forward and backward passes, a key of `planner.plan.schedules.SCHEDULES`; `"auto"`
            (default) takes the fastest one that fits, of those that the profile and the other settings allow.
        recompute: `"auto"` (default) recomputes no more than must be for a stage to fit or the step to be fast,
            `"always"` every stage as a whole, as GPipe does, `"never"` nothing.
        skips: how values come to a stage past others that do not read them: `"relayed"` (default) by each of these, or
            `"direct"`, past them, where that fits: stages between need no memory and no time for them, and ranks that
            are no neighbours talk.
        chunks: stages a rank, of a schedule that has several ("interleaved"; "zb-v" has 2); `"auto"` to have it chosen,
            which is the default where the schedule is, on one host with at most 16 devices in line and without
            `pinned` or direct skips; else 1. Each is kept or recomputed as a whole, and there are at least 2 ranks.
        stages: K, if it is to be fixed; all chunks of all ranks.
        max_stages: largest K.
        micro_batches: M, if it is to be fixed; at most 16,384 in any case.
        micro_batches_per_stage: M is at least this times K, or times the ranks where these have several chunks; 4 by
            default, below which the bubble is no longer small (GPipe, section 2.3).
        micro_batch_sizes: the only sizes that micro-batches may have.
        replicas: R, pipelines side by side that average their gradients; 1 by default, `"auto"` to have it chosen. A
            stage's run on devices of one kind, which count with the least memory of theirs.
        shard_optimizer: whether the replicas share the optimizer's state (ZeRO, stage 1): each steps a part of every
            stage's parameters and gives it to the others. It changes no result, and nothing where R is 1.
        memory_limit: bytes that a stage may fill, at most what its device has: one number for all, one for each device
            (None for no limit), or by device name.
        keep_together: paths of modules that no cut may part.
        cut_at: paths of modules before which there must be a cut; modules without parameters that are just before one,
            such as an activation, may be behind the cut, too.
        pinned: for paths of modules the device that must run them, by name or position in `devices`.
        time_limit_s: seconds that the search may take, those not counted in which it is compiled at its first use; the
            best plan so far is returned, and its gap says how good it is.
    """

    schedule: ScheduleName
    recompute: RecomputeMode
    skips: SkipMode
    chunks: int | Literal["auto"]
    stages: int | None
    max_stages: int | None
    micro_batches: int | None
    micro_batches_per_stage: int
    micro_batch_sizes: Sequence[int] | None
    replicas: int | Literal["auto"]
    shard_optimizer: bool
    memory_limit: MemoryLimit | None
    keep_together: Sequence[str]
    cut_at: Sequence[str]
    pinned: Mapping[str, WhichDevice] | None
    time_limit_s: float | None


Function = TypeVar("Function", bound=Callable[..., Any])


def takes_settings(function: Function) -> Function:
    """The function with every keyword of `SettingKeywords` in its docstring, where that says `settings: ...`.

    It refuses others.
    """
    attributes = inspect.cleandoc(SettingKeywords.__doc__ or "").partition("Attributes:\n")[2]
    told = textwrap.dedent(attributes)
    lines = inspect.cleandoc(function.__doc__ or "").split("\n")
    place = next(number for number, line in enumerate(lines) if line.startswith("    settings: "))
    lines[place : place + 1] = [
        "",
        "Keywords that say what is asked of the plan:",
        textwrap.indent(told, "    ").rstrip(),
    ]
    function.__doc__ = "\n".join(lines)
    return fits_its_arguments(function, keywords=SettingKeywords.__annotations__)
