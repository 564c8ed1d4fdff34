"""Whether a plan still fits: at an interval its step is compared with the prediction, and what differs is said.

Pipeline(model, plan, replan="report")      # the default: a warning where a step takes longer, or less, than doubted
Pipeline(model, plan, replan=profile)       # and plans again with what was measured; nothing changes by itself
Pipeline(model, plan, replan=None)

A plan that does not say its doubt (of an earlier version, or made by hand) has nothing to be compared with.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Literal, TypeAlias

from executor.measure.measured import Recorded, measured_frame, real_timelines
from planner.plan.plan import Plan
from planner.plan.simulator import simulate_plan
from planner.plan.units import seconds_text
from profiler.errors import ArgumentError, PlanError
from profiler.record import Profile

Replan: TypeAlias = Literal["report"] | Profile | None
FIRST_STEP = 20
EVERY = 1000
"""Steps from one comparison to the next [chosen: it takes milliseconds]."""
SHORTEST_S = 0.02
"""Steps that take less, and should, are the executor's own time for a good part, which no plan changes."""
SAME = 0.1
"""What changed by less since it was said is not said again."""
SEARCH_S = 2.0
"""For the search for another plan, while the other processes wait; that it is compiled, once an installation, comes on
top of it."""


class Replanning:
    """Compares the steps of one replica with their plan.

    Args:
        plan: the plan.
        replan: what is done.

    Raises:
        ArgumentError: it is none of the three.
    """

    def __init__(self, plan: Plan, replan: Replan) -> None:
        if not (replan is None or replan == "report" or isinstance(replan, Profile)):
            raise ArgumentError(f'replan is {replan!r}; pass "report", the profile of the plan, or None')
        self._plan = plan
        self._profile = replan if isinstance(replan, Profile) else None
        self._doubt = plan.prediction.doubt if replan is not None else None
        self._said = 1.0

    def due(self, steps: int) -> bool:
        """Whether it is time to compare, after so many steps."""
        return self._doubt is not None and steps % EVERY == FIRST_STEP

    def report(self, recorded: Sequence[Recorded]) -> str:
        """What differs and was not said yet; "" if nothing does.

        Args:
            recorded: the last steps of each process of a replica.
        """
        timelines = real_timelines(self._plan, recorded)
        if not timelines or self._doubt is None:
            return ""
        lasted_s = median(timeline.makespan_s for timeline in timelines)
        predicted_s = simulate_plan(self._plan, events=False).makespan_s
        ratio = lasted_s / predicted_s
        less, more = self._doubt.step_less, self._doubt.step_more
        is_short = max(lasted_s, predicted_s) < SHORTEST_S
        if is_short or 1 - less <= ratio <= 1 + more or abs(ratio / self._said - 1) < SAME:
            return ""
        self._said = ratio
        said = (
            f"a step takes {seconds_text(lasted_s)} before the optimizer, {ratio:.3g} times the "
            f"{seconds_text(predicted_s)} that were predicted, and {1 - less:.2g} to {1 + more:.2g} times were in doubt"
        )
        return f"{said}; {self._other_plan(recorded)}"

    def _other_plan(self, recorded: Sequence[Recorded]) -> str:
        if self._profile is None:
            return "plan.refined(pipe.measured(), profile) says whether another plan is worth a change"
        measured = measured_frame(self._plan, recorded)
        try:
            with _interrupts_left_alone():
                return str(self._plan.refined(measured, self._profile, time_limit_s=SEARCH_S))
        except PlanError as problem:
            return f"no other plan could be made of what was measured: {problem}"


@contextmanager
def _interrupts_left_alone() -> Iterator[None]:
    """Within, Ctrl-C ends the training: a search takes it for itself only where Python's own answer is in force."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
