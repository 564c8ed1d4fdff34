"""How long each action took, for the comparison of a plan's predictions with what was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from planner.schedule import Action


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
    """Times the actions of one step: by the clock on CPU, by events on CUDA (read after the step)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._actions: list[Action] = []
        self._marks: list[tuple[float, float]] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._zero = 0.0
        self._zero_event: torch.cuda.Event | None = None

    def start(self) -> None:
        """Begin a step."""
        self._actions.clear()
        self._marks.clear()
        self._events.clear()
        self._zero = time.perf_counter()
        if self._cuda:
            self._zero_event = _recorded()

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Time the body of a `with` statement as that action."""
        self._actions.append(action)
        if self._cuda:
            begin = _recorded()
            yield
            self._events.append((begin, _recorded()))
        else:
            begun = time.perf_counter()
            yield
            self._marks.append((begun, time.perf_counter()))

    def read(self) -> tuple[TimedAction, ...]:
        """The actions of the last step in order; waits for the device on CUDA."""
        if self._cuda and self._zero_event is not None:
            torch.cuda.synchronize()
            zero = self._zero_event
            marks = [(zero.elapsed_time(a) / 1e3, zero.elapsed_time(b) / 1e3) for a, b in self._events]
        else:
            marks = [(a - self._zero, b - self._zero) for a, b in self._marks]
        return tuple(TimedAction(action, *mark) for action, mark in zip(self._actions, marks, strict=True))


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
