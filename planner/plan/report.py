"""A plan on one screen, for people, and as a data frame."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from typing import TYPE_CHECKING

from planner.plan.bubble import bubble_parts
from planner.plan.plan import Plan
from planner.plan.stage import Stage, StageMemory
from planner.plan.units import WIDTH, bytes_text, count_text, flops_text, rate_text, seconds_text
from profiler.precision import recipe_of
from profiler.text import counted, one_line

if TYPE_CHECKING:
    import pandas

NARROWEST = 60
"""Columns that a line may have at least."""
LEAST_MODULES = 15
"""Columns that names of modules keep."""
MOST_STAGES = 16
"""Stages that are all listed; of more the first, the last, the slowest and the fullest [chosen]."""
AT_EACH_END = 4
_CLASSES = tuple(StageMemory.model_fields)


def plan_report(
    plan: Plan, width: int = WIDTH, *, every_stage: bool = False, spoken: Callable[[str], str] = str
) -> str:
    """The plan in words and two tables: what each stage holds and takes, and what its memory is filled with.

    Args:
        plan: what to report.
        width: columns of the screen; a table that is wider goes on below, with its first column again.
        every_stage: list all stages, however many they are.
        spoken: says what names keywords in the words of who reads it.
    """
    width = max(width, NARROWEST)
    listed = [*range(plan.K)] if every_stage else _listed(plan)
    tables = [*_stage_table(plan, width, listed), "", *_memory_table(plan, width, listed)]
    return "\n".join([*headline(plan, width, spoken), "", *tables])


def plan_summary(plan: Plan, width: int = WIDTH, *, spoken: Callable[[str], str] = str) -> str:
    """The plan without its stages: what it is, how fast, what is recomputed, and what fills the fullest device.

    Args:
        plan: what to report.
        width: columns of the screen.
        spoken: says what names keywords in the words of who reads it.
    """
    width = max(width, NARROWEST)
    rank, slowest = fullest_rank(plan), slowest_stage(plan)
    device, memory = plan.stages[rank].device, plan.device_memories[rank]
    classes = ", ".join(
        f"{name.replace('_', ' ')} {bytes_text(size)}" for name, size in memory.model_dump().items() if size
    )
    segments = [segment for stage in plan.stages for segment in stage.recompute]
    redone = sum(segment.stop - segment.first for segment in segments)
    lines = [
        f"fullest device: {one_line(device.name)}, rank {rank}, {bytes_text(memory.total)} of "
        f"{bytes_text(device.memory_bytes)}, {memory.total / device.memory_bytes:.0%}: {classes}",
        f"recompute: {redone} of {plan.stages[-1].stop_layer} layers, in "
        f"{sum(bool(stage.recompute) for stage in plan.stages)} of {plan.K} stages"
        if segments
        else "recompute: nothing, all activations are kept",
        f"slowest stage: {slowest}, {' .. '.join(map(one_line, plan.stages[slowest].module_paths))}",
    ]
    return "\n".join([*headline(plan, width, spoken), *(part for line in lines for part in _wrapped(line, width))])


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)


def _listed(plan: Plan) -> list[int]:
    """Stages that a screen has room for, and those that limit the step or the memory."""
    if plan.K <= MOST_STAGES:
        return [*range(plan.K)]
    notable = {slowest_stage(plan), fullest_rank(plan)}
    return sorted({*range(AT_EACH_END), *range(plan.K - AT_EACH_END, plan.K), *notable})


def slowest_stage(plan: Plan) -> int:
    """The first of the stages that compute longest for a micro-batch."""
    times = [stage.times_at(max(plan.micro_batch_sizes)) for stage in plan.stages]
    return max(range(plan.K), key=lambda k: times[k].forward_s + times[k].recompute_s + times[k].backward_s)


def fullest_rank(plan: Plan) -> int:
    """The first of the ranks whose device is fullest; its first stage has the same number."""
    memories = plan.device_memories
    return max(range(len(memories)), key=lambda rank: memories[rank].total / plan.stages[rank].device.memory_bytes)


def _left_out(plan: Plan, listed: list[int]) -> str:
    """A remark on the stages that are not listed."""
    if len(listed) == plan.K:
        return ""
    return (
        f"; {plan.K - len(listed)} of {plan.K} stages are left out: the slowest and the fullest are here, and "
        "`autoplan show --every-stage` or to_frame() has all"
    )


def plan_frame(plan: Plan) -> pandas.DataFrame:
    """One row a stage, see `Plan.to_frame`."""
    import pandas

    rows = []
    for stage in plan.stages:
        times = stage.times_at(max(plan.micro_batch_sizes)).model_dump()
        memory = {f"{name}_bytes": size for name, size in stage.memory.model_dump().items()}
        rows.append(
            {
                "first_layer": stage.first_layer,
                "stop_layer": stage.stop_layer,
                "first_module": stage.module_paths[0],
                "last_module": stage.module_paths[1],
                "rank": stage.rank,
                "device": stage.device.name,
                "device_kind": stage.device.kind,
                "parameters": stage.parameter_count,
                "recompute": bool(stage.recompute),
                **times,
                "optimizer_s": stage.optimizer_s,
                **memory,
                "total_bytes": stage.memory.total,
                "device_bytes": stage.device.memory_bytes,
            }
        )
    return pandas.DataFrame(rows).rename_axis("stage")


def headline(plan: Plan, width: int, spoken: Callable[[str], str] = str) -> list[str]:
    """What a plan is and what its step takes, in lines of that width."""
    prediction = plan.prediction
    gap = prediction.gap
    speedup = prediction.one_device_s / prediction.step_s
    optimal = (
        "proven optimal for these predictions"
        if gap == 0
        else f"at most {max(gap, 1e-4):.2%} above the lower bound of {seconds_text(prediction.lower_bound_s)}"
    )
    if plan.interrupted:
        optimal += "; the search was interrupted: this is the best plan so far"
    lines = [
        f"K = {counted(plan.K, 'stage')}, M = {counted(plan.M, 'micro-batch')} of {_sizes(plan)}, batch "
        f"{plan.batch_size}, schedule {plan.schedule}, {one_line(plan.optimizer)}",
        *([f"{plan.chunks} chunks on each of {plan.ranks} ranks"] if plan.chunks > 1 else []),
        *_host_lines(plan),
        *([f"{plan.replicas} replicas share the optimizer's state"] if plan.shard_optimizer else []),
        f"predicted step {seconds_text(prediction.step_s)} (optimizer {seconds_text(prediction.optimizer_s)}), "
        f"{rate_text(prediction.samples_per_s)} samples/s"
        + (f", {count_text(prediction.tokens_per_s)} tokens/s" if prediction.tokens_per_s else ""),
        *(map(spoken, prediction.doubt.lines(prediction.step_s)) if prediction.doubt is not None else []),
        *_work_lines(plan),
        _bubble_text(plan),
        *_precision_lines(plan),
        f"{speedup:.2f} x one device ({seconds_text(prediction.one_device_s)}{_too_large_text(plan)}), {optimal}",
    ]
    if plan.unused is not None:
        lines.extend(map(spoken, plan.unused.lines(prediction.step_s)))
    if plan.sample.decisions or plan.sample.called_as_is:
        lines.append(one_line(f"traced {plan.sample.means}"))
    if plan.skips:
        times = [skip.times_at(max(plan.micro_batch_sizes)) for skip in plan.skips]
        ways = ", ".join(
            f"{skip.sender} to {skip.receiver} ({len(skip.values)}, "
            f"{seconds_text(entry.send_forward_s + entry.send_backward_s)})"
            for skip, entry in zip(plan.skips, times, strict=True)
        )
        lines.append(f"values sent past the stages between: {ways}")
    return [part for line in lines for part in _wrapped(line, width)]


def _work_lines(plan: Plan) -> list[str]:
    """What the devices compute, if it is known."""
    rate, mfu = plan.prediction.device_flops_per_s, plan.prediction.mfu
    if rate is None:
        return []
    used = f", MFU {mfu:.1%}" if mfu is not None else ""
    return [f"{flops_text(rate)} a device{used} (3 x the forward pass; what is recomputed is no useful work)"]


def _precision_lines(plan: Plan) -> list[str]:
    """What a recipe of mixed precision costs, if there is one."""
    recipe = recipe_of(plan.sample.precision)
    if recipe is None:
        return []
    memories, count = [stage.memory for stage in plan.stages], sum(stage.parameter_count for stage in plan.stages)
    held = [sum(getattr(memory, name) for memory in memories) for name in ("parameters", "gradients", "optimizer")]
    parts = ", ".join(
        f"{size / max(1, count):.3g} {name}"
        for size, name in zip(held, ("to compute with", "of gradients", "of the optimizer"), strict=True)
    )
    masters = " and master weights" if recipe.has_masters else ""
    return [f"precision {recipe.name}: {sum(held) / max(1, count):.3g} bytes a parameter ({parts}{masters})"]


def _host_lines(plan: Plan) -> list[str]:
    """How many processes are to be started on which host, and how these are numbered; nothing of the first host alone.

    Where replicas of ranks that are after each other are on hosts after each other nothing is said of numbers.
    """
    found = plan.processes_by_host
    if {*found} <= {0}:
        return []
    parts: list[str] = []
    for (count, _), group in groupby(enumerate(found.items()), key=lambda one: (one[1][1], one[1][0] - one[0])):
        hosts = [host for _, (host, _) in group]
        several = f"each of hosts {hosts[0]} {'and' if len(hosts) == 2 else 'to'} {hosts[-1]}"
        where = several if len(hosts) > 1 else f"host {hosts[0]}"
        parts.append(f"{count if parts else counted(count, 'process')} on {where}")
    by_rank, by_replica = ([*chain.from_iterable(rows)] for rows in (plan.processes, zip(*plan.processes, strict=True)))
    if by_replica == sorted(by_replica):
        order = ""
    elif by_rank == sorted(by_rank):
        order = ", the replicas of a stage one after the other"
    else:
        order = ", numbered in the order of their devices and not of the stages"
    return [", ".join(parts) + order]


def _bubble_text(plan: Plan) -> str:
    parts = bubble_parts(plan)
    why = f": fill and drain {parts.fill_and_drain:.1%}, imbalance and messages {parts.imbalance:.1%}" if parts else ""
    return f"bubble {plan.prediction.bubble:.1%}{why}"


def _too_large_text(plan: Plan) -> str:
    """A remark if one device cannot even hold what does not depend on the micro-batches."""
    memories = [stage.memory for stage in plan.stages]
    least = sum(memory.parameters + memory.gradients + memory.optimizer for memory in memories)
    return ", which could not hold the model" if least > plan.stages[0].device.memory_bytes else ""


def _sizes(plan: Plan) -> str:
    """Micro-batch sizes such as `3 x 5 + 2 x 4 samples`, or one number when they are equal."""
    runs = [(size, len(list(run))) for size, run in groupby(plan.micro_batch_sizes)]
    if len(runs) == 1:
        return counted(runs[0][0], "sample")
    return f"{' + '.join(f'{number} x {size}' for size, number in runs)} samples"


def stage_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """What each stage holds and takes: the heads of the columns, and one row a stage."""
    rank = ["rank"] if plan.chunks > 1 else []
    head = ["stage", *rank, "device", "layers", "modules", "parameters"]
    head += ["forward", "recompute", "backward", "send", "memory"]
    return head, [_stage_row(plan, index, stage) for index, stage in enumerate(plan.stages)]


def _stage_table(plan: Plan, width: int, listed: list[int]) -> list[str]:
    head, every_row = stage_rows(plan)
    rows = [every_row[stage] for stage in listed]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    room = width - sum(widths) - 2 * (len(widths) - 1)
    modules = head.index("modules")
    device = head.index("device")
    for column, least in ((modules, LEAST_MODULES), (device, 8)):
        if room < 0:
            cut = min(-room, max(0, widths[column] - least))
            widths[column] -= cut
            room += cut
    paths = _distinct_paths(plan)
    for row, stage in zip(rows, listed, strict=True):
        row[modules] = _range_text(*paths[stage], widths[modules])
        row[device] = _shortened(row[device], widths[device])
    size = max(plan.micro_batch_sizes)
    note = (
        f"seconds of one micro-batch of {counted(size, 'sample')}; memory, and its share of the "
        f"device's{_left_out(plan, listed)}"
    )
    return [*_aligned([head, *rows], width, left={"device", "modules"}), *textwrap.wrap(note, width)]


def _distinct_paths(plan: Plan) -> list[tuple[str, str]]:
    """First and last module of each stage, without the folders that all of them lie in."""
    paths = [path.split(".") for stage in plan.stages for path in stage.module_paths]
    shared = 0
    while len({tuple(path[: shared + 1]) for path in paths}) == 1 and all(len(path) > shared + 1 for path in paths):
        shared += 1
    names = [one_line(".".join(path[shared:])) for path in paths]
    return list(zip(names[::2], names[1::2], strict=True))


def _range_text(first: str, last: str, width: int) -> str:
    """`first .. last`, of which each may have half of the room, and what the other leaves."""
    if first == last:
        return _short_path(first, width)
    room = width - len(" .. ")
    end = _short_path(last, max(room // 2, room - len(first)))
    return f"{_short_path(first, room - len(end))} .. {end}"


def _short_path(path: str, width: int) -> str:
    """A module path that keeps what tells it apart, its numbers, and its last name where there is room for it.

    >>> [_short_path("model.layers.15.self_attn.q_proj", width) for width in (20, 12, 9, 4)]
    ['15.self_attn.q_proj', '15..q_proj', 'layers.15', '15']
    """
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    for place in range(len(parts) - 1):
        if len(_joined(parts)) <= width:
            break
        if not parts[place].isdecimal():
            parts[place] = ""
    short = _joined(parts)
    if len(short) > width and numbers:
        numbered = path.split(".")[: numbers[-1] + 1]
        short = next((text for text in map(".".join, _ends(numbered)) if len(text) <= width), numbered[-1])
    return _shortened(short, width)


def _ends(parts: list[str]) -> Iterator[list[str]]:
    """The whole, and what is left without the first, the first two and so on."""
    return (parts[place:] for place in range(len(parts)))


def _joined(parts: list[str]) -> str:
    """The path with `..` for parts left out, which nothing stands for in front."""
    text = ".".join(parts).lstrip(".")
    while "..." in text:
        text = text.replace("...", "..")
    return text


def _stage_row(plan: Plan, index: int, stage: Stage) -> list[str]:
    times = stage.times_at(max(plan.micro_batch_sizes))
    first, last = stage.module_paths
    share = stage.memory.total / stage.device.memory_bytes
    return [
        str(index),
        *([str(stage.rank)] if plan.chunks > 1 else []),
        one_line(stage.device.name),
        f"{stage.first_layer}-{stage.stop_layer - 1}",
        one_line(first if first == last else f"{first} .. {last}"),
        count_text(stage.parameter_count),
        seconds_text(times.forward_s),
        seconds_text(times.recompute_s) if stage.recompute else "no",
        seconds_text(times.backward_s),
        seconds_text(times.send_forward_s + times.send_backward_s),
        f"{bytes_text(stage.memory.total)} {share:4.0%}",
    ]


def _memory_table(plan: Plan, width: int, listed: list[int]) -> list[str]:
    """A row for each stage, or for each rank where it has several."""
    ranks = {plan.stages[stage].rank for stage in listed}
    deferred = any(memory.deferred for memory in plan.device_memories)
    names = [name for name in _CLASSES if deferred or name != "deferred"]
    head = ["rank" if plan.chunks > 1 else "stage", *(name.replace("_", " ") for name in names), "device"]
    rows = [
        [
            str(index),
            *(bytes_text(getattr(memory, name)) for name in names),
            bytes_text(plan.stages[index].device.memory_bytes),
        ]
        for index, memory in enumerate(plan.device_memories)
        if index in ranks
    ]
    return ["predicted peak memory", *_aligned([head, *rows], width, left=set())]


def _aligned(rows: list[list[str]], width: int, left: set[str]) -> list[str]:
    """Rows as lines, columns two spaces apart, numbers to the right; what is wider goes on below."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    tables = [[0]]
    for column in range(1, len(widths)):
        if len(tables[-1]) > 1 and sum(widths[one] + 2 for one in tables[-1]) + widths[column] > width:
            tables.append([0])
        tables[-1].append(column)
    lines: list[str] = []
    for columns in tables:
        lines.extend([""] if lines else [])
        lines.extend(
            "  ".join(
                row[column].ljust(widths[column]) if rows[0][column] in left else row[column].rjust(widths[column])
                for column in columns
            ).rstrip()
            for row in rows
        )
    return lines


def _shortened(text: str, width: int) -> str:
    """The text, or its beginning and end with `...` between when it is longer than `width`."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return text[:head] + "..." + text[len(text) - (width - 3 - head) :]
