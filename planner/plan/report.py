"""A plan on one screen, for people, and as a data frame."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import TYPE_CHECKING

from planner.plan.plan import Plan
from planner.plan.stage import Stage, StageMemory
from planner.plan.units import bytes_text, count_text, seconds_text
from profiler.text import one_line

if TYPE_CHECKING:
    import pandas

WIDTH = 110
"""Columns of the widest line."""
_CLASSES = tuple(StageMemory.model_fields)


def plan_report(plan: Plan) -> str:
    """The plan in words and two tables: what each stage holds and takes, and what its memory is filled with."""
    return "\n".join([*_headline(plan), "", *_stage_table(plan), "", *_memory_table(plan)])


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


def _headline(plan: Plan) -> list[str]:
    prediction = plan.prediction
    gap = prediction.gap
    speedup = prediction.one_device_s / prediction.step_s
    optimal = (
        "proven optimal for these predictions"
        if gap == 0
        else f"at most {max(gap, 1e-4):.2%} above the lower bound of {seconds_text(prediction.lower_bound_s)}"
    )
    lines = [
        f"K = {plan.K} stages, M = {plan.M} micro-batches of {_sizes(plan)} samples, batch {plan.batch_size}, "
        f"schedule {plan.schedule}, {one_line(plan.optimizer)}",
        *([f"{plan.chunks} chunks on each of {plan.ranks} ranks"] if plan.chunks > 1 else []),
        f"predicted step {seconds_text(prediction.step_s)} (optimizer {seconds_text(prediction.optimizer_s)}), "
        f"{prediction.samples_per_s:.4g} samples/s, bubble {prediction.bubble:.1%}",
        f"{speedup:.2f} x one device ({seconds_text(prediction.one_device_s)}), {optimal}",
    ]
    if plan.unused is not None:
        for line in plan.unused.lines(prediction.step_s):
            lines.extend(textwrap.wrap(line, WIDTH, subsequent_indent="  "))
    if plan.sample.decisions or plan.sample.called_as_is:
        lines.extend(textwrap.wrap(one_line(f"traced {plan.sample.means}"), WIDTH, subsequent_indent="  "))
    if plan.skips:
        times = [skip.times_at(max(plan.micro_batch_sizes)) for skip in plan.skips]
        ways = ", ".join(
            f"{skip.sender} to {skip.receiver} ({len(skip.values)}, "
            f"{seconds_text(entry.send_forward_s + entry.send_backward_s)})"
            for skip, entry in zip(plan.skips, times, strict=True)
        )
        lines.append(f"values sent past the stages between: {ways}")
    return lines


def _sizes(plan: Plan) -> str:
    """Micro-batch sizes such as `3 x 5 + 2 x 4`, or one number when they are equal."""
    runs = [(size, len(list(run))) for size, run in groupby(plan.micro_batch_sizes)]
    return str(runs[0][0]) if len(runs) == 1 else " + ".join(f"{number} x {size}" for size, number in runs)


def _stage_table(plan: Plan) -> list[str]:
    rank = ["rank"] if plan.chunks > 1 else []
    head = ["stage", *rank, "device", "layers", "modules", "parameters"]
    head += ["forward", "recompute", "backward", "send", "memory"]
    rows = [_stage_row(plan, index, stage) for index, stage in enumerate(plan.stages)]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    room = WIDTH - sum(widths) - 2 * (len(widths) - 1)
    modules = head.index("modules")
    device = head.index("device")
    for column, least in ((modules, 15), (device, 8)):
        if room < 0:
            cut = min(-room, max(0, widths[column] - least))
            widths[column] -= cut
            room += cut
    rows = [[_shortened(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    size = max(plan.micro_batch_sizes)
    note = f"seconds of one micro-batch of {size} samples; memory, and its share of the device's"
    return [*_aligned([head, *rows], widths, left={device, modules}), note]


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


def _memory_table(plan: Plan) -> list[str]:
    """A row for each stage, or for each rank where it has several."""
    head = ["rank" if plan.chunks > 1 else "stage", *(name.replace("_", " ") for name in _CLASSES), "device"]
    rows = [
        [
            str(index),
            *(bytes_text(getattr(memory, name)) for name in _CLASSES),
            bytes_text(plan.stages[index].device.memory_bytes),
        ]
        for index, memory in enumerate(plan.device_memories)
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return ["predicted peak memory", *_aligned([head, *rows], widths, left=set())]


def _aligned(rows: list[list[str]], widths: list[int], left: set[int]) -> list[str]:
    """Rows as lines, columns two spaces apart, numbers to the right."""
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _shortened(text: str, width: int) -> str:
    """The text, or its beginning and end with `...` between when it is longer than `width`."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return text[:head] + "..." + text[len(text) - (width - 3 - head) :]
