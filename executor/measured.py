"""What a plan predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from executor.stopwatch import TimedAction
from planner.plan import Plan
from planner.schedule import ActionKind

if TYPE_CHECKING:
    import pandas

_PASSES = {
    ActionKind.F: ("forward", "forward_s"),
    ActionKind.R: ("recompute", "recompute_s"),
    ActionKind.B: ("backward", "backward_s"),
}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One training step in one process.

    Attributes:
        step_s: seconds of the whole step, the optimizer included.
        actions: what `Pipeline.last_step_actions` returned.
    """

    step_s: float
    actions: tuple[TimedAction, ...]


def compare(plan: Plan, steps: Sequence[Sequence[MeasuredStep]]) -> pandas.DataFrame:
    """Predicted and measured times.

    Args:
        plan: the plan.
        steps: of each process in rank order the measured steps.

    Returns:
        One row for the step and one for each stage and kind of pass: seconds for a micro-batch (mean over the
        mini-batch), predicted and measured (median over the steps), and their ratio.
    """
    import pandas

    measured_step = median(max(step.step_s for step in together) for together in zip(*steps, strict=True))
    rows = [("whole step", plan.prediction.step_s, measured_step)]
    for index, stage in enumerate(plan.stages):
        for kind, (name, field) in _PASSES.items():
            measured = [
                durations
                for process in steps
                for step in process
                if (
                    durations := [
                        a.duration_s for a in step.actions if a.action.stage == index and a.action.kind is kind
                    ]
                )
            ]
            if measured:
                predicted = fmean(getattr(stage.times_at(size), field) for size in plan.micro_batch_sizes)
                rows.append((f"stage {index} {name}", predicted, median(fmean(durations) for durations in measured)))
    return pandas.DataFrame(
        [(what, predicted, measured, measured / predicted) for what, predicted, measured in rows],
        columns=["what", "predicted_s", "measured_s", "measured/predicted"],
    )
