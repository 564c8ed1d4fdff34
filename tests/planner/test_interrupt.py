"""Ctrl-C while a plan is searched gives the best plan so far, which says so; these tests send the signal."""

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import planner
from executor import command
from planner import search_watch
from planner.explain import what_if
from planner.from_profile import plan_from_profile
from planner.plan.plan import Plan
from planner.search_watch import SearchWatch
from profiler import progress_line
from profiler.device import Cluster, Device, Link
from profiler.record import Profile
from tests.planner.made_up import build_profile

DEVICES = [Device(name=f"cuda:{index}", kind="a", memory_bytes=3000) for index in range(2)]
MODEL = "def build():\n    return None, None\n"


@pytest.fixture(scope="module")
def profile() -> Profile:
    """One whose first plan is proven the best by a search that takes a moment."""
    draw = random.Random(0)
    base = [
        [draw.uniform(0.01, 1), draw.uniform(0.01, 1), draw.uniform(0.01, 2), draw.randrange(100), 4, 50, 50]
        for _ in range(8)
    ]
    rows = {("a", size): [[value * size for value in row] for row in base] for size in (1, 8)}
    for table in rows.values():
        table[-1][5:] = [0, 0]
    return build_profile(
        rows,
        links=(Link(latency_s=0.01, bytes_per_s=5e4),),
        parameters=[(100, True)] * 8,
        readers=[(layer,) for layer in range(8)],
    )


@pytest.fixture(autouse=True)
def it_is_heard() -> Iterator[None]:
    """A job in a shell's background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sends the signal as soon as there is a plan, as often as the number in the list says."""
    times = [1]

    def tell(self: SearchWatch, step_s: float, bound_s: float, patience_s: float) -> None:
        assert step_s < float("inf")
        for _ in range(times[0]):
            os.kill(os.getpid(), signal.SIGINT)
        times[0] = 0

    monkeypatch.setattr(SearchWatch, "tell", tell)
    return times


def test_the_best_plan_so_far_says_that_it_is(
    profile: Profile, ctrl_c: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_from_profile(profile, DEVICES, batch_size=8, chunks=1)
    assert plan.interrupted
    assert plan.prediction.gap > 0
    assert "the search was interrupted: this is the best plan so far" in " ".join(str(plan).split())
    told = capsys.readouterr()
    assert (told.out, told.err.count("interrupted: the search ends with the best plan so far")) == ("", 1)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    whole = plan_from_profile(profile, DEVICES, batch_size=8, chunks=1)
    assert not whole.interrupted
    assert whole.prediction.gap == 0
    assert plan.prediction.lower_bound_s < whole.prediction.step_s <= plan.prediction.step_s
    assert "interrupted" not in json.loads(whole.to_json())


def test_a_second_one_ends_the_search(profile: Profile, ctrl_c: list[int]) -> None:
    ctrl_c[0] = 2
    with pytest.raises(KeyboardInterrupt):
        plan_from_profile(profile, DEVICES, batch_size=8, chunks=1)


def test_all_schedules_end(profile: Profile, ctrl_c: list[int]) -> None:
    assert plan_from_profile(profile, DEVICES, batch_size=8, schedule="auto", skips="direct").interrupted


def test_a_table_of_plans_ends_as_programs_do(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan of several that is not the best, with no word about it, would mislead."""

    def ended(problem: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("planner.solve.time_shares.best_plan", ended)
    with pytest.raises(KeyboardInterrupt):
        what_if(profile, DEVICES, {"stages": [1, 2]}, batch_size=8)


def test_whoever_answers_to_the_signal_still_does(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    monkeypatch.setattr(SearchWatch, "tell", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        plan = plan_from_profile(profile, DEVICES, batch_size=8, chunks=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard
    assert not plan.interrupted


def test_the_command_writes_it(
    profile: Profile, ctrl_c: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*_: Any, **__: Any) -> Plan:
        return plan_from_profile(profile, DEVICES, batch_size=8, chunks=1)

    monkeypatch.setitem(planner.__dict__, "autoplan", find)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "interrupted_model.py").write_text(MODEL)
    file = tmp_path / "plan.json"
    done = CliRunner().invoke(command.main, ["plan", f"{tmp_path}/interrupted_model.py:build", "-o", str(file)])
    assert done.exit_code == 0, done.output
    assert "best plan so far" in " ".join(done.stdout.split())
    assert "Ctrl-C again ends it without" in done.stderr
    assert Plan.load(file).interrupted


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is told is shown."""
    for name in ("DELAY_S", "REFRESH_S"):
        monkeypatch.setattr(progress_line, name, 0.0)


def test_a_terminal_sees_the_best_step_so_far(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    at_once(monkeypatch)
    plan = plan_from_profile(profile, DEVICES, batch_size=8, schedule="gpipe", progress=True, time_limit_s=90.0)
    told = capsys.readouterr()
    assert told.out == ""
    assert re.search(r"plan: 00:0\d of 01:30", told.err)
    assert f"step {plan.prediction.step_s:.1f} s (within " in told.err


def test_what_is_no_terminal_sees_nothing(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_once(monkeypatch)
    plan_from_profile(profile, DEVICES, batch_size=8, schedule="gpipe", progress=True)
    assert capsys.readouterr().err == ""


def test_time_goes_on_while_a_search_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first search after an installation was compiled for 40 s before anything was shown."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress_line, "DELAY_S", 0.0)
    monkeypatch.setattr(search_watch, "compiling_since_s", lambda: 1.0)
    drawn, draw = threading.Event(), progress_line.TerminalLine.draw

    def seen(self: progress_line.TerminalLine) -> None:
        draw(self)
        drawn.set()

    monkeypatch.setattr(progress_line.TerminalLine, "draw", seen)
    watch = SearchWatch(progress=True, limit_s=8.0)
    assert drawn.wait(60)
    watch.close()
    last = [part.strip() for part in capsys.readouterr().err.split("\r") if part.strip()][-1]
    assert re.fullmatch(r"plan: 00:\d\d of 00:08, the search is compiled, once an installation", last)


def test_without_a_limit_it_says_how_long_it_goes_on_in_vain(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    at_once(monkeypatch)
    plan_from_profile(profile, DEVICES, batch_size=8, schedule="gpipe", progress=True)
    assert re.search(r"[1-9]\d* s left; Ctrl-C takes it", capsys.readouterr().err)
    plan_from_profile(profile, DEVICES, batch_size=8, schedule="gpipe", progress=True, time_limit_s=90.0)
    assert "s left" not in capsys.readouterr().err


def texts_at(monkeypatch: pytest.MonkeyPatch, watch: SearchWatch, seconds: list[float]) -> list[str]:
    """What a watch says at these times of the clock."""
    shown = []
    for now_s in seconds:
        monkeypatch.setattr(time, "monotonic", lambda now_s=now_s: watch._start_s + now_s)
        shown.append(watch._state()[0])
    return shown


def test_the_time_that_is_left_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "1 s left" for half a minute: the search counts in seconds of its own."""
    watch = SearchWatch(progress=False)
    clock = [watch._start_s]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert "looking for a first plan" in watch._state()[0]
    watch.tell(0.5, 0.4, 10.0)
    clock[0] += 8.0
    watch.tell(0.5, 0.4, 8.0)  # a second of the search takes four
    assert texts_at(monkeypatch, watch, [8.0, 20.0, 45.0]) == [
        "plan: 00:08, step 500 ms (within 25.0% of the best), 32 s left; Ctrl-C takes it",
        "plan: 00:20, step 500 ms (within 25.0% of the best), 20 s left; Ctrl-C takes it",
        "plan: 00:45, step 500 ms (within 25.0% of the best); Ctrl-C takes it",
    ]
    with watch.others_follow():
        assert "20 s left of this search" in texts_at(monkeypatch, watch, [20.0])[0]


def test_after_the_limit_it_says_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "00:51 of 00:30"."""
    watch = SearchWatch(progress=False, limit_s=30.0)
    watch.tell(0.5, 0.4)
    assert texts_at(monkeypatch, watch, [12.0, 31.0]) == [
        "plan: 00:12 of 00:30, step 500 ms (within 25.0% of the best); Ctrl-C takes it",
        "plan: 00:31, step 500 ms, time is up, making the plan",
    ]


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
@pytest.mark.parametrize(("limit_s", "patience_s"), [(None, 12.0), (3599.0, float("inf"))])
def test_what_is_shown_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, limit_s: float | None, patience_s: float, columns: int
) -> None:
    """At 80 columns the line ended before it said that Ctrl-C takes the plan."""
    watch = SearchWatch(progress=False, limit_s=limit_s)
    monkeypatch.setattr(search_watch, "columns", lambda: columns)
    watch.tell(0.9994, 0.5, patience_s)
    for text in texts_at(monkeypatch, watch, [0.0, 3598.0, 3600.0]):
        assert len(text) < columns or columns == 40
        assert columns < 60 or "Ctrl-C takes it" in text or "time is up" in text


@pytest.mark.parametrize(
    "settings", [{"schedule": "auto", "chunks": 1}, {}, {"schedule": "auto", "skips": "direct"}, {"hosts": True}]
)
@pytest.mark.parametrize("interrupted_at", [None, 1, 2, 5])
def test_what_is_proven_is_not_lost_when_the_next_search_begins(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], interrupted_at: int | None
) -> None:
    """The gap that was shown grew with each search from 0.5 to 32 %: each told of its own plans alone."""
    shown: list[float] = []
    told = SearchWatch.tell

    def tell(self: SearchWatch, step_s: float, bound_s: float, patience_s: float = float("inf")) -> None:
        told(self, step_s, bound_s, patience_s)
        shown.append(self._proven_s)
        if len(shown) == interrupted_at:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SearchWatch, "tell", tell)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    devices: Cluster | list[Device] = DEVICES
    asked = {name: value for name, value in settings.items() if name != "hosts"}
    if "hosts" in settings:
        near, far = Link(latency_s=0.01, bytes_per_s=5e4), Link(latency_s=0.05, bytes_per_s=1e4)
        devices = Cluster(devices=tuple(DEVICES), link=near, between=far, devices_per_host=1)
    plan = plan_from_profile(profile, devices, batch_size=8, progress=True, **asked)
    assert shown == sorted(shown)
    assert interrupted_at is not None or shown[-1] > 0
    assert shown[-1] <= plan.prediction.step_s * (1 + 1e-9)
    assert plan.prediction.lower_bound_s >= shown[-1] * (1 - 1e-9)
