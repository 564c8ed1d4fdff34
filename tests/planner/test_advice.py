"""What a refusal advises makes a plan when it is done as it is said, and nothing else is changed."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from planner.from_profile import plan_from_profile
from profiler.errors import InfeasibleError, PlanError
from tests.planner.restricted import Asked, problems, restrictions

VALUE = re.compile(r'(\w+)=("[\w-]+"|\d+|None)')
AS_SETTINGS = (
    (re.compile(r"more micro-batches \(M = (\d+) fits\)"), "micro_batches"),
    (re.compile(r"a (?:smaller batch \(|batch of at least )(\d+)"), "batch_size"),
    (re.compile(r"more devices \((\d+) fit"), "devices"),
)
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TOO_SMALL = "is too small for"
BASIS = re.compile(r'Nor does any with (schedule="[^;]*) fit; with it, ')


@st.composite
def short_of_memory(draw: st.DrawFn) -> Asked:
    """A problem of any kind, restricted up to twice, on devices with some of the memory."""
    several = draw(st.booleans())
    problem = draw(problems(most_layers=6, most_devices=4, hosts=draw(st.booleans()), chunks=several))
    for _ in range(draw(st.integers(0, 2))):
        problem = draw(st.sampled_from(restrictions(problem)))
    share, limits = draw(st.sampled_from(SHARES)), problem.settings.get("memory_limit")
    devices = [
        device.model_copy(
            update={"memory_bytes": max(1, int(share * (limits[place] if limits else device.memory_bytes)))}
        )
        for place, device in enumerate(problem.devices.devices)
    ]
    asked = {name: value for name, value in problem.settings.items() if name != "memory_limit"}
    if several and draw(st.booleans()):
        asked |= {"stages": draw(st.sampled_from([4, 6, 8]))}
    return replace(problem, settings=asked).on(tuple(devices))


def said_in(text: str) -> dict[str, Any]:
    """What is to be set, by the words of one piece of advice."""
    values = {name: None if value == "None" else value.strip('"') for name, value in VALUE.findall(text)}
    said: dict[str, Any] = {name: int(value) if value and value.isdigit() else value for name, value in values.items()}
    return said | {name: int(found[1]) for words, name in AS_SETTINGS if (found := words.search(text))}


def advice(text: str) -> Iterator[dict[str, Any]]:
    """Each change that an error advises."""
    basis = BASIS.search(text)
    every = re.split(r"[Ww]hat would help: ", text)[1:] or text.split("holds at least 1 sample; ")[1:]
    for one in re.split(r"; |, or ", every[0]) if every else ():
        if said := said_in(one):
            yield (said_in(basis[1]) if basis else {}) | said


def changed(problem: Asked, said: dict[str, Any]) -> Asked:
    """The problem as it is advised to be."""
    devices = problem.devices.devices
    added = devices[-1:] * (said.pop("devices", len(devices)) - len(devices))
    batch_size = said.pop("batch_size", problem.batch_size)
    return replace(problem, batch_size=batch_size, settings=problem.settings | said).on(devices + added)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(short_of_memory())
def test_what_is_advised_makes_a_plan(problem):
    try:
        planned_or_raised(problem)
    except InfeasibleError as refusal:
        text = str(refusal)
    except PlanError:
        return  # settings that contradict each other
    else:
        return
    for said in advice(text):
        if TOO_SMALL in text:  # which is noticed before anything else
            assert TOO_SMALL not in refused_text(changed(problem, {**said})), (said, problem.settings, text)
        else:
            assert not refused_text(changed(problem, {**said})), (said, problem.settings, text)


def planned_or_raised(problem: Asked) -> None:
    plan_from_profile(problem.profile, problem.devices, batch_size=problem.batch_size, **problem.settings)


def refused_text(problem: Asked) -> str:
    try:
        planned_or_raised(problem)
    except PlanError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'no plan. What would help: recompute="auto"; more micro-batches (M = 8 fits); more devices (4 fit with '
            "stages=4, with the added ones like the last)",
            [{"recompute": "auto"}, {"micro_batches": 8}, {"devices": 4, "stages": 4}],
        ),
        (
            'Nor does any with schedule="1f1b" with chunks=1 and stages=None fit; with it, what would help: a smaller '
            "batch (1 sample fits)",
            [{"schedule": "1f1b", "chunks": 1, "stages": None, "batch_size": 1}],
        ),
        ("and a micro-batch holds at least 1 sample; use a batch of at least 8", [{"batch_size": 8}]),
    ],
)
def test_advice_is_read_as_it_is_meant(text, said):
    assert [*advice(text)] == said
