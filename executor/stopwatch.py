"""How long each action took, for the comparison of a plan's predictions with what was measured."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from planner.actions import Action, ActionKind

STEPS_KEPT = 20  # of the last ones
_COMPUTED = frozenset({ActionKind.F, ActionKind.R, ActionKind.B})


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
        began_s: by `time.perf_counter` of this process.
        actions: in order.
    """

    number: int
    began_s: float
    actions: tuple[TimedAction, ...]


@dataclass(slots=True)
class _Marks:
    """One mark behind each action, since a process does one after the other."""

    number: int
    began_s: float
    actions: list[Action] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    events: list[torch.cuda.Event] = field(default_factory=list)
    since: dict[int, float] = field(default_factory=dict)  # by position of an action: when it began to wait


class Stopwatch:
    """Times the actions of the last steps: by the clock on CPU, by events on CUDA (read after the step)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: deque[_Marks] = deque(maxlen=STEPS_KEPT)
        self._current = _Marks(-1, 0.0)
        self._count = 0

    def start(self) -> None:
        """Begin a step."""
        self._current = _Marks(self._count, time.perf_counter())
        self._steps.append(self._current)
        self._count += 1
        if self._cuda:
            self._current.events.append(_recorded())

    def mark(self, action: Action, since_s: float | None = None) -> None:
        """The action has just been carried out; `since_s` is when a receive began to wait, by `time.perf_counter`."""
        if since_s is not None:
            self._current.since[len(self._current.actions)] = since_s
        self._current.actions.append(action)
        if self._cuda:
            self._current.events.append(_recorded())
        else:
            self._current.times.append(time.perf_counter())

    def steps(self) -> tuple[TimedStep, ...]:
        """The last steps, oldest first; waits for the device on CUDA."""
        if self._cuda:
            torch.cuda.synchronize()
        return tuple(TimedStep(step.number, step.began_s, self._timed(step)) for step in self._steps)

    def read(self) -> tuple[TimedAction, ...]:
        """The actions of the last step that computed."""
        if self._cuda:
            torch.cuda.synchronize()
        return tuple(timed for timed in self._timed(self._current) if timed.action.kind in _COMPUTED)

    def _timed(self, step: _Marks) -> tuple[TimedAction, ...]:
        """Actions with the marks before and behind them; an aborted step has fewer marks."""
        marks = self._seconds(step)
        starts = [
            mark if since is None or self._cuda else since - step.began_s
            for mark, since in zip(marks, map(step.since.get, range(len(marks))), strict=True)
        ]
        return tuple(TimedAction(*each) for each in zip(step.actions, starts, marks[1:], strict=False))

    def _seconds(self, step: _Marks) -> list[float]:
        if self._cuda:
            return [step.events[0].elapsed_time(event) / 1e3 for event in step.events]
        return [0.0, *(mark - step.began_s for mark in step.times)]


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
