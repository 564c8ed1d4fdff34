"""How sure a prediction is: the one place that says so.

    plan.prediction.doubt                     # shares by which step and memory may differ
    plan.prediction.doubt.lines(step_s)       # the same in words

The whole step is in doubt by the model of a step itself, MODEL. A stage's passes are, each as a share and on top of
that. What all layers have in common adds up:

    slowdown of the device meanwhile, which was divided out           x OF_SLOWDOWN
    a line between two measured sizes                                 half of what lies between its extremes
    a data sheet instead of a measurement                             its own error, which holds MODEL

What varies by chance adds in squares:

    drift of the pace from step to step, as a reference between the layers has it
    the laps of each layer, independent of each other, in all micro-batches and in the profile's medians

A size between two measured ones has the wider of their laps. The optimizer has what does not come from layers: the
slowdown, the drift, the data sheet. Messages and all-reduce have the error of the links.

The step is simulated with all of that longer. By as much it may be shorter: a step is the longest of many sums, so it
grows at least as much when all takes longer as it shrinks when all is so much shorter. And it is longer, but not
shorter, by what the executor's own code takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt

import numpy as np

from planner.cost.layer_costs import CostModel, Floats
from planner.measured_ratios import PassRatios
from planner.plan.plan import Plan
from planner.plan.prediction import Doubt
from planner.plan.schedules import SCHEDULES, ScheduleName
from planner.plan.stage import Stage, StageMemory
from planner.scaled import scaled_plan, simulated_step_s
from profiler.datasheets import ERROR
from profiler.device import Link
from profiler.precision import recipe_of
from profiler.quantities import MOST_RELATIVE
from profiler.timing.sweeps import FEWEST_SWEEPS

MODEL = 0.04
"""Steps of five models in quiet hours lay within this of what was predicted [measured]."""
NORMAL = 1.349
"""Interquartile range of normally distributed values, in their standard deviations."""
NINE_OF_TEN = 1.645
"""Standard deviations around their mean in which nine of ten of them lie."""
MORE = 1.1
"""Of that, as spread and drift are known from a few seconds [chosen]."""
OF_A_MEDIAN = 1.57 / FEWEST_SWEEPS
"""Variance of the median of the fewest laps that a profile takes, in those of a lap."""
OF_SLOWDOWN = 0.25
"""What was divided out is right to a quarter [chosen, see the table of `tests/benchmarks/test_doubt.py`]."""
OF_TABLE = 0.2
"""Of messages whose seconds were measured by size, and do not lie on a line [chosen]."""
OVERHEAD_S = 150e-6
"""For one micro-batch on one stage: 138 microseconds between processes of one machine [measured]."""
LESS_MEMORY = 0.05
"""Peaks lay at 0.955 to 1.000 of the prediction [measured]."""
LESS_MEMORY_OF_PARTS = 0.25
"""With chunks, a split backward pass or main gradients, whose moments are counted together: 0.76 to 0.99 [measured]."""
OF_MESSAGES = 0.5
"""Of messages, which count as if all were there at the peak: much of a model of a few MB [measured]."""


def with_doubt(plan: Plan, costs: CostModel, links: Sequence[Link]) -> Plan:
    """The plan whose prediction says how sure it is.

    Args:
        plan: the plan.
        costs: of its profile.
        links: between its devices.
    """
    prediction = plan.prediction
    off = MODEL + max(0.0, simulated_step_s(_longer(plan, costs, links)) / prediction.step_s - 1)
    overhead_s = plan.M * OVERHEAD_S * (plan.K // plan.ranks)
    in_parts = plan.chunks > 1 or any(times.weight_s for stage in plan.stages for times in stage.times)
    loose = in_parts or recipe_of(plan.sample.precision) is not None
    not_there = max(_not_there(one, plan.schedule) for one in plan.device_memories)
    found = Doubt(
        step_less=min(1.0, off),
        step_more=min(MOST_RELATIVE, off + overhead_s / prediction.step_s),
        memory_less=max(LESS_MEMORY_OF_PARTS if loose else LESS_MEMORY, not_there),
        memory_more=0.0,
        slowdown=max(costs.slowdown(device.kind) for stage in plan.stages for device in stage.devices),
        link_error=_off_the_line(links) if plan.K > 1 or plan.replicas > 1 else 0.0,
    )
    return plan.model_copy(update={"prediction": prediction.model_copy(update={"doubt": found})})


def _not_there(memory: StageMemory, schedule: ScheduleName) -> float:
    """The share of a rank's tensors that may not be there at its peak, though it counts.

    With all micro-batches in flight at once that is before the first backward pass, which makes the gradients, unless
    they were set to zero and kept.
    """
    counted = OF_MESSAGES * memory.receive_buffers + SCHEDULES[schedule].keeps_all * memory.gradients
    return counted / max(1, memory.total - memory.reserve)


def _longer(plan: Plan, costs: CostModel, links: Sequence[Link]) -> Plan:
    """The plan where all takes longer by the share of it that is in doubt, the model's own apart."""
    sizes = Counter(plan.micro_batch_sizes)
    passes = [PassRatios.alike(1 + _of_passes(stage, costs, sizes)) for stage in plan.stages]
    optimizer = [1 + _of_device(costs, stage.device.kind, of_sheet=ERROR) for stage in plan.stages]
    return scaled_plan(plan, passes, 1 + _of_messages(links), optimizer)


def _of_device(costs: CostModel, kind: str, *, by_laps: float = 0.0, of_sheet: float = 0.0) -> float:
    """The share of a device's seconds that is in doubt.

    Args:
        costs: of the profile.
        kind: of the device.
        by_laps: the share that is by chance of their laps.
        of_sheet: the least error if they come from a data sheet: refining measures passes, and not the optimizer.
    """
    for estimate in costs.profile.estimates:
        if estimate.device_kind == kind:
            return max(0.0, max(of_sheet, estimate.error) - MODEL)
    return OF_SLOWDOWN * costs.slowdown(kind) + MORE * float(np.hypot(costs.drift(kind), NINE_OF_TEN * by_laps))


def _of_passes(stage: Stage, costs: CostModel, sizes: Mapping[int, int]) -> float:
    """The share of a stage's seconds that is in doubt, with so many micro-batches of each size."""
    kind, layers = stage.device.kind, slice(stage.first_layer, stage.stop_layer)
    whole_s = of_lines_s = 0.0
    medians_s, laps_s2 = np.zeros((2, stage.stop_layer - stage.first_layer))
    for size, count in sizes.items():
        below, above, share = costs.around(kind, size)
        seconds = count * _seconds(costs, kind, size)[layers]
        whole_s += float(seconds.sum())
        if share:
            least = np.maximum(_seconds(costs, kind, below), _seconds(costs, kind, above) * (size / above))[layers]
            of_lines_s += max(0.0, float((seconds - count * least).sum())) / 2
        varying_s = seconds * np.maximum(costs.spread(kind, below), costs.spread(kind, above))[layers]
        medians_s += varying_s  # of two sizes they may be off alike: those around both are the same
        laps_s2 += varying_s**2 / count
    if not whole_s > 0:
        return 0.0
    of_laps = sqrt((laps_s2 + OF_A_MEDIAN * medians_s**2).sum()) / whole_s / NORMAL
    return _of_device(costs, kind, by_laps=of_laps) + of_lines_s / whole_s


def _seconds(costs: CostModel, kind: str, size: int) -> Floats:
    layers = costs.layers(kind, size)
    return layers.forward_s + layers.backward_s


def _of_messages(links: Sequence[Link]) -> float:
    """The share of the seconds of messages and all-reduce that is in doubt."""
    return max((min(link.error, OF_TABLE) if link.measured else link.error for link in links), default=0.0)


def _off_the_line(links: Sequence[Link]) -> float:
    """The error of the line that what was measured stands for; 0 where a line is near enough."""
    return max((link.error for link in links if link.measured), default=0.0)
