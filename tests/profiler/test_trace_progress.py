"""A trace says on a terminal what it does and how long it will take, and nothing elsewhere."""

import io
import re
import sys

import pytest
import torch
from torch import nn

from profiler import Cluster, profile, progress_line
from profiler.tracing import progress
from profiler.tracing.tracing import trace


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes is shown."""
    for name in ("DELAY_S", "REFRESH_S"):
        monkeypatch.setattr(progress_line, name, 0.0)


def told(monkeypatch: pytest.MonkeyPatch, error: io.StringIO, *, wanted: bool = True) -> str:
    monkeypatch.setattr(sys, "stderr", error)
    at_once(monkeypatch)
    trace(nn.Sequential(*[nn.Linear(3, 3) for _ in range(9)]), torch.ones(4, 3), progress=wanted)
    return error.getvalue()


def test_each_part_is_named_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(monkeypatch, Terminal())
    lines = re.findall(r"trace: ([a-z ,]+?)\s+(\d+)%\|[^|]*\| \d\d:\d\d", text)
    assert re.search(r"\| \d\d:\d\d, \d\d:\d\d left", text)
    named = list(dict.fromkeys(words for words, _ in lines))
    assert named == [part.words for part in progress.Part]
    percent = [int(number) for _, number in lines]
    assert percent == sorted(percent)
    assert percent[-1] == 100
    modules = {number for words, number in lines if words == progress.Part.MODULES.words}
    assert len(modules) > 5  # module by module


def test_where_nobody_looks_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, io.StringIO()) == ""
    assert told(monkeypatch, Terminal(), wanted=False) == ""


def test_a_further_attempt_begins_anew_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * int(x.shape[0])

    error = Terminal()
    monkeypatch.setattr(sys, "stderr", error)
    at_once(monkeypatch)
    trace(nn.Sequential(Fixed(3, 3)), torch.ones(4, 3))
    assert "trace (attempt 2): " in error.getvalue()


def test_an_estimate_names_its_parts_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was at 100 % for the last third of its time."""
    sequence = trace(nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]), torch.ones(64, 3), progress=False)
    error = Terminal()
    monkeypatch.setattr(sys, "stderr", error)
    at_once(monkeypatch)
    profile(sequence, Cluster.of("2xA100-40GB"), batch_size=64)
    parts = re.findall(r"profile: (\w+)[^%|]*?\s(\d+)%\|", error.getvalue())
    assert list(dict.fromkeys(words for words, _ in parts)) == ["loss", "memory", "operations", "optimizer", "rows"]
    done = [int(number) for _, number in parts]
    assert (done, done[-1]) == (sorted(done), 100)
    assert len({*done}) == 8
