"""What a plan is expected to do, and how sure that is."""

from __future__ import annotations

from math import isclose
from operator import not_
from typing import Final, Self

from pydantic import Field, model_validator

from planner.plan.units import seconds_text
from profiler.field_types import PredictedSeconds, RelativeError, Share, StepSeconds
from profiler.value import Value

ROUNDING: Final = 1e-9
"""Relative difference of two numbers of a plan that must be one, at most."""
DISTURBED: Final = 0.1
"""A slowdown from which on a report asks for another profile."""


class Doubt(Value):
    """How far what is measured may lie from what is predicted; see `planner.doubt`.

    Attributes:
        step_less: share by which a step may be shorter than predicted, in nine of ten steps.
        step_more: share by which it may be longer.
        memory_less: share by which a peak may lie under the predicted one.
        memory_more: share by which it may lie over it.
        slowdown: share by which the devices were slower than usual while they were profiled.
        link_error: relative distance of the line of the link from a message that was measured, where messages are
            predicted from what was measured by size; 0 where the line is near enough.
    """

    step_less: Share
    step_more: RelativeError
    memory_less: Share
    memory_more: RelativeError
    slowdown: RelativeError = 0.0
    link_error: RelativeError = 0.0

    def lines(self, step_s: float) -> list[str]:
        """The same for people.

        Args:
            step_s: the predicted seconds of a step.
        """
        least, most = seconds_text(step_s * (1 - self.step_less)), seconds_text(step_s * (1 + self.step_more))
        found = [
            f"in doubt: step {least} to {most}, peak memory {1 - self.memory_less:.0%} to {1 + self.memory_more:.0%} "
            "of what is predicted"
        ]
        if self.slowdown > DISTURBED:
            found.append(
                f"the devices were {self.slowdown:.0%} slower than usual while they were profiled, by a reference that "
                "ran between the layers, which is divided out: profile again when nothing else runs there, with "
                'cache="off"'
            )
        if self.link_error:
            found.append(
                f"messages are predicted from what was measured by size: a line of latency and bandwidth is "
                f"{self.link_error:.0%} off for one of them"
            )
        return found


class Prediction(Value):
    """What the planner expects of one training step.

    Attributes:
        step_s: seconds of one step, the optimizer included.
        optimizer_s: the part of it that is the optimizer's.
        bubble: share of the devices' time before the optimizer step in which they neither compute nor recompute.
        samples_per_s: throughput.
        lower_bound_s: no plan for the same profile, devices and settings is faster than this.
        gap: `step_s / lower_bound_s - 1`; 0 means proven optimal for the cost model.
        one_device_s: predicted step time of the same batch on the first device alone without recompute, if memory
            were no matter: the base of speed-up figures.
        tokens_per_s: throughput of a model of text; files leave it out where it is not known, as the next two.
        device_flops_per_s: floating-point operations that the model needs in a second, divided by the devices of the
            plan; recompute does not count.
        mfu: model FLOPs utilization, the share of the devices' printed rates that this is.
        doubt: how far what is measured may lie from this; files of earlier versions leave it out.
    """

    step_s: StepSeconds
    optimizer_s: PredictedSeconds
    bubble: Share
    samples_per_s: float = Field(gt=0)
    lower_bound_s: StepSeconds
    gap: float = Field(ge=0)
    one_device_s: StepSeconds
    tokens_per_s: float | None = Field(default=None, gt=0, exclude_if=not_)
    device_flops_per_s: float | None = Field(default=None, gt=0, exclude_if=not_)
    mfu: float | None = Field(default=None, gt=0, exclude_if=not_)
    doubt: Doubt | None = Field(default=None, exclude_if=not_)

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.optimizer_s > self.step_s * (1 + ROUNDING):
            raise ValueError(f"optimizer_s is {self.optimizer_s}, of a step of {self.step_s} s in all")
        if self.lower_bound_s > self.step_s * (1 + ROUNDING):
            raise ValueError(f"lower_bound_s is {self.lower_bound_s}, and step_s is less: {self.step_s}")
        if not isclose(1 + self.gap, self.step_s / self.lower_bound_s, rel_tol=ROUNDING):
            raise ValueError(
                f"gap is {self.gap}, but step_s / lower_bound_s - 1 is {self.step_s / self.lower_bound_s - 1}"
            )
        return self
