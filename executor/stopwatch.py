"""How long each action took, for the comparison of a plan's predictions with what was measured."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from planner.schedule import Action, ActionKind

_COMPUTED = frozenset({ActionKind.F, ActionKind.R, ActionKind.B})


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action of the last step.

    Attributes:
        action: what was done.
        start_s: seconds after the step began on this rank.
        end_s: likewise.
    """

    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds that the action took."""
        return self.end_s - self.start_s


class Stopwatch:
    """Times the actions of one step: by the clock on CPU, by events on CUDA (read after the step).

    A process does one action after the other, so one mark behind each is enough.

    Attributes:
        began_s: when the step began, by `time.perf_counter`.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._actions: list[Action] = []
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.began_s = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._actions.clear()
        self._marks.clear()
        self._events.clear()
        self.began_s = time.perf_counter()
        if self._cuda:
            self._events.append(_recorded())

    def mark(self, action: Action) -> None:
        """The action has just been carried out."""
        self._actions.append(action)
        if self._cuda:
            self._events.append(_recorded())
        else:
            self._marks.append(time.perf_counter())

    def read_all(self) -> tuple[TimedAction, ...]:
        """All actions of the last step in order; waits for the device on CUDA."""
        if self._cuda and self._events:
            torch.cuda.synchronize()
            marks = [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        else:
            marks = [0.0, *(mark - self.began_s for mark in self._marks)]
        return tuple(
            TimedAction(action, begun, ended)
            for action, begun, ended in zip(self._actions, marks, marks[1:], strict=False)
        )

    def read(self) -> tuple[TimedAction, ...]:
        """The actions of the last step that computed."""
        return tuple(timed for timed in self.read_all() if timed.action.kind in _COMPUTED)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
