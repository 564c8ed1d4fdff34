"""Laps on a device that works off a queue, of a made-up card: what they take, however many launches they have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from profiler.machine import cuda
from profiler.machine.cuda import CudaMarks, CudaStopwatch

PLACES = 1024  # of a queue
RECORD_S = 1e-6
SWEEPS = 9


@dataclass
class Card:
    """A host and a device, by a clock of their own.

    Attributes:
        now_s: of the host.
        idle_s: when the device is through with all that it has been given.
    """

    now_s: float = 0.0
    idle_s: float = 0.0
    _ends: deque[float] = field(default_factory=deque)

    def launch(self, host_s: float, device_s: float) -> float:
        """One kernel; the host waits where the queue is full."""
        self.now_s += host_s
        while self._ends and self._ends[0] <= self.now_s:
            self._ends.popleft()
        if len(self._ends) == PLACES:
            self.now_s = self._ends.popleft()
        self.idle_s = max(self.idle_s, self.now_s) + device_s
        self._ends.append(self.idle_s)
        return self.idle_s

    def synchronize(self, *_: object) -> None:
        self.now_s = max(self.now_s, self.idle_s)


class Event:
    """Of the card."""

    card = Card()

    def __init__(self, **_: object) -> None:
        self.at_s = 0.0

    def record(self, _: object = None) -> None:
        self.at_s = self.card.launch(RECORD_S, 0.0)

    def synchronize(self) -> None:
        self.card.now_s = max(self.card.now_s, self.at_s)

    def query(self) -> bool:
        return self.at_s <= self.card.now_s

    def elapsed_time(self, after: Event) -> float:
        return 1e3 * (after.at_s - self.at_s)


class Layer(NamedTuple):
    """Launches of one lap, all alike."""

    launches: int
    host_s: float
    device_s: float

    def seconds(self) -> float:
        return self.launches * max(self.host_s, self.device_s)


@pytest.fixture(scope="module")
def card() -> Any:
    """In place of the one that torch would find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda _: None)
        patch.setattr(torch.cuda, "synchronize", lambda _: Event.card.synchronize())
        patch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
        patch.setattr("time.perf_counter", lambda: Event.card.now_s)
        patch.setattr(cuda, "hold_back", lambda cycles: Event.card.launch(5e-6, cycles / cuda.SPIN_CYCLES_PER_S))
        yield


def timed(layers: Sequence[Layer]) -> list[float]:
    """The medians of some sweeps over the layers, by key."""
    Event.card = Card()
    watch = CudaStopwatch(torch.device("cuda:0"))
    sweeps = []

    def call(layer: Layer) -> Callable[[], None]:
        def launch() -> None:
            for _ in range(layer.launches):
                Event.card.launch(layer.host_s, layer.device_s)

        return launch

    for _ in range(SWEEPS):
        for key, layer in enumerate(layers):
            watch.lap(call(layer), key)
        sweeps.append(watch.take())
    return [median(laps) for laps in zip(*sweeps, strict=True)]


def test_networks_of_many_launches(card: Any) -> None:
    """An encoder-decoder of eight LSTMs: each backward pass launches 50 times 12 kernels, other layers a few."""
    recurrent, other = Layer(600, 6e-6, 2e-6), Layer(4, 8e-6, 2e-5)
    layers = [recurrent, other, other] * 8
    assert timed(layers) == pytest.approx([layer.seconds() for layer in layers], rel=0.1, abs=2e-5)


def test_one_lap_of_more_than_a_queue(card: Any) -> None:
    """Whether the device or the host is the slower one."""
    layers = [Layer(3000, 4e-6, 1e-6), Layer(10, 5e-6, 1e-6), Layer(3000, 2e-6, 6e-6), Layer(10, 5e-6, 1e-4)]
    assert timed(layers) == pytest.approx([layer.seconds() for layer in layers], rel=0.1, abs=2e-5)


LAYERS = st.lists(
    st.builds(Layer, st.integers(1, 60) | st.integers(100, 4000), st.floats(2e-6, 2e-5), st.floats(1e-6, 5e-5)),
    min_size=1,
    max_size=40,
)


@given(LAYERS)
@example([Layer(141, 2e-5, 3.8e-5), Layer(871, 1.1e-5, 3e-5), Layer(5, 8.4e-6, 7.5e-6)])
@settings(max_examples=60)
def test_any_laps(card: Any, layers: list[Layer]) -> None:
    """Each takes what its device takes, or its host where that is the slower one."""
    assert timed(layers) == pytest.approx([layer.seconds() for layer in layers], rel=0.1, abs=6e-5)


@pytest.mark.parametrize("backlog_s", [0.0, 0.02])
def test_marks_are_where_the_device_is(card: Any, backlog_s: float) -> None:
    """However far the host is ahead when it sets them, and whatever comes after them."""
    Event.card = Card(now_s=7.0)
    Event.card.launch(0.0, backlog_s)
    marks = CudaMarks()
    for _ in range(3):
        Event.card.launch(1e-6, 1e-3)
        marks.mark()
    Event.card.launch(1e-6, 0.5)
    Event.card.now_s += 3.0
    assert marks.began_s() == pytest.approx(7.0 + backlog_s, abs=1e-5)
    assert marks.seconds() == pytest.approx([0.0, 1e-3, 2e-3, 3e-3], abs=1e-5)
