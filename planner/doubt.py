"""How sure a prediction is: the one place that says so.

    plan.prediction.doubt                     # shares by which step and memory may differ
    plan.prediction.doubt.lines(step_s)       # the same in words

Of a stage's seconds these are in doubt, each as a share. What all layers have in common adds up:

    the model of a step itself                                        MODEL
    slowdown of the device meanwhile, which was divided out           x OF_SLOWDOWN
    a line between two measured sizes                                 half of what lies between its extremes
    a data sheet instead of a measurement                             its own error

What varies by chance adds in squares:

    drift of the pace from step to step, as a reference between the layers has it
    the laps of each layer, independent of each other, in M micro-batches and in the profile's medians

The step has the doubt of the stage that can delay it most, and of the links' seconds their error of fit. A step is
longer, but not shorter, by what the executor's own code takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from planner.cost.layer_costs import CostModel, Floats
from planner.plan.plan import Plan
from planner.plan.prediction import Doubt
from planner.plan.stage import Stage
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


def with_doubt(plan: Plan, costs: CostModel, links: Sequence[Link]) -> Plan:
    """The plan whose prediction says how sure it is.

    Args:
        plan: the plan.
        costs: of its profile.
        links: between its devices.
    """
    prediction = plan.prediction
    busy_s = [_busy_s(plan, stage) for stage in plan.stages]
    optimizer = prediction.optimizer_s / prediction.step_s
    off = (1 - optimizer) * _of_passes(plan, busy_s, costs) + optimizer * MODEL + _of_links(plan, links)
    overhead_s = plan.M * OVERHEAD_S * (plan.K // plan.ranks)
    in_parts = plan.chunks > 1 or any(times.weight_s for stage in plan.stages for times in stage.times)
    loose = in_parts or recipe_of(plan.sample.precision) is not None
    found = Doubt(
        step_less=min(1.0, off),
        step_more=min(MOST_RELATIVE, off + overhead_s / prediction.step_s),
        memory_less=LESS_MEMORY_OF_PARTS if loose else LESS_MEMORY,
        memory_more=0.0,
        slowdown=max(costs.slowdown(device.kind) for stage in plan.stages for device in stage.devices),
        link_error=_off_the_line(links) if plan.K > 1 or plan.replicas > 1 else 0.0,
    )
    return plan.model_copy(update={"prediction": prediction.model_copy(update={"doubt": found})})


def _busy_s(plan: Plan, stage: Stage) -> float:
    """Seconds of a step that a stage computes."""
    by_size = {times.micro_batch_size: times.forward_s + times.recompute_s + times.backward_s for times in stage.times}
    return sum(by_size[size] for size in plan.micro_batch_sizes)


def _of_passes(plan: Plan, busy_s: list[float], costs: CostModel) -> float:
    """The share of the seconds of all passes that is in doubt, by the stage that can delay a step most."""
    size = max(plan.micro_batch_sizes)
    off_s = [_of_stage(stage, costs, size, plan.M) * own_s for stage, own_s in zip(plan.stages, busy_s, strict=True)]
    return max(off_s) / max(busy_s) if max(busy_s) > 0 else MODEL


def _of_stage(stage: Stage, costs: CostModel, size: int, passes: int) -> float:
    """The share of a stage's seconds that is in doubt, with so many micro-batches of that size."""
    kind = stage.device.kind
    estimated = {estimate.device_kind: estimate.error for estimate in costs.profile.estimates}
    layers = slice(stage.first_layer, stage.stop_layer)
    seconds = _seconds(costs, kind, size)[layers]
    whole_s = float(seconds.sum())
    if not whole_s > 0:
        return MODEL
    below, above, share = costs.around(kind, size)
    lower_s = np.maximum(_seconds(costs, kind, below), _seconds(costs, kind, above) * (size / above))[layers].sum()
    of_line = max(0.0, whole_s - float(lower_s)) / whole_s / 2 if share else 0.0
    if kind in estimated:
        return max(MODEL, estimated[kind]) + of_line
    of_laps = np.sqrt(((seconds * costs.spread(kind, above)[layers]) ** 2).sum()) / whole_s / NORMAL
    by_chance = np.hypot(costs.drift(kind), NINE_OF_TEN * of_laps * sqrt(1 / passes + OF_A_MEDIAN))
    return MODEL + OF_SLOWDOWN * costs.slowdown(kind) + of_line + MORE * float(by_chance)


def _seconds(costs: CostModel, kind: str, size: int) -> Floats:
    layers = costs.layers(kind, size)
    return layers.forward_s + layers.backward_s


def _of_links(plan: Plan, links: Sequence[Link]) -> float:
    """The share of a step that its messages are in doubt by, if nothing hides them; and its all-reduce."""
    error = max((min(link.error, OF_TABLE) if link.measured else link.error for link in links), default=0.0)
    sent_s = [max(times.send_forward_s, times.send_backward_s) for times in (stage.times[0] for stage in plan.stages)]
    sent_s += [max(times.send_forward_s, times.send_backward_s) for times in (skip.times[0] for skip in plan.skips)]
    reduced_s = [sum(stage.all_reduce_s for stage in plan.stages_of(rank)) for rank in range(plan.ranks)]
    return min(1.0, error) * min(1.0, (plan.M * max(sent_s) + max(reduced_s)) / plan.prediction.step_s)


def _off_the_line(links: Sequence[Link]) -> float:
    """The error of the line that what was measured stands for; 0 where a line is near enough."""
    return max((link.error for link in links if link.measured), default=0.0)
