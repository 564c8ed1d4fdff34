"""How long each action took, for the comparison of a plan's predictions with what was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from planner.plan.actions import COMPUTING, Action
from profiler.machine.backend import backend_of
from profiler.machine.stopwatches import Marks

STEPS_KEPT = 20  # of the last ones


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action of a step.

    Attributes:
        action: what was done.
        start_s: seconds after the step began on this rank; of a RECV when it began to wait.
        end_s: likewise.
    """

    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds that the action took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The actions of one step of one process.

    Attributes:
        number: counts the steps of this process.
        began_s: on this process's device, by `time.perf_counter` of this process.
        actions: in order.
    """

    number: int
    began_s: float
    actions: tuple[TimedAction, ...]


@dataclass(slots=True)
class _Step:
    """One mark after each action, since a process does one after the other.

    Attributes:
        number: counts the steps.
        marks: as many as actions were carried out, and one before them.
        actions: to be carried out.
        since: by number of marks before it the moment when an action began to wait.
    """

    number: int
    marks: Marks
    actions: Sequence[Action]
    since: dict[int, float] = field(default_factory=dict)


class ActionTimes:
    """Times the actions of the last steps by marks of the device, which are read after the step."""

    def __init__(self, device: torch.device) -> None:
        self._backend = backend_of(device)
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)
        self._current: _Step | None = None
        self._count = 0

    def start(self, actions: Sequence[Action]) -> Callable[[], None]:
        """Begin a step of these actions; what is returned is called after each of them."""
        self._current = _Step(self._count, self._backend.marks(), actions)
        self._steps.append(self._current)
        self._count += 1
        return self._current.marks.mark

    def waited(self, since_s: float | None) -> None:
        """The action that is not marked yet, a receive, began to wait then, by `time.perf_counter`."""
        step = self._current
        assert step is not None, "start comes first"
        if since_s is not None:
            step.since[len(step.marks)] = since_s

    def steps(self) -> tuple[TimedStep, ...]:
        """The last steps, oldest first; waits for the device."""
        return tuple(TimedStep(step.number, step.marks.began_s(), _timed(step)) for step in self._steps)

    def read(self) -> tuple[TimedAction, ...]:
        """The actions of the last step that computed."""
        actions = () if self._current is None else _timed(self._current)
        return tuple(timed for timed in actions if timed.action.kind in COMPUTING)


def _timed(step: _Step) -> tuple[TimedAction, ...]:
    """Actions with the marks before and after them; an aborted step has fewer marks."""
    moments = step.marks.seconds()
    starts = [
        moment if since is None or not step.marks.on_the_host else since - step.marks.began_s()
        for moment, since in zip(moments, map(step.since.get, range(1, len(moments) + 1)), strict=True)
    ]
    return tuple(TimedAction(*each) for each in zip(step.actions, starts, moments[1:], strict=False))
