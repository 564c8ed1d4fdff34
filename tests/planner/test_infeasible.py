"""Why no plan fits: the figures are those of a stage, and every cure that is named works."""

import re
from typing import Any

import pytest

from planner.from_profile import make_problem, plan_from_profile
from planner.solve import infeasible
from profiler.errors import InfeasibleError

ROW = (1, 1, 2, 20, 10, 16, 16)
LAYERS = 4


@pytest.fixture
def profile(profile_of):
    return profile_of(
        {("a", size): [[size * value for value in ROW]] * LAYERS for size in (1, 16)},
        parameters=[(64, True)] * LAYERS,
        readers=[(layer,) for layer in range(LAYERS)],
        optimizer=(0.001, 2.0),
    )


def refusal(profile, devices, **asked):
    with pytest.raises(InfeasibleError) as caught:
        plan_from_profile(profile, devices, **asked)
    return str(caught.value)


CURES = {  # what a cure says: the setting that carries it out
    r'recompute="auto"': lambda _: {"recompute": "auto"},
    r'schedule="1f1b"': lambda _: {"schedule": "1f1b"},
    r"more micro-batches \(M = (\d+) fits\)": lambda number: {"micro_batches": number},
    r"a smaller batch \((\d+) samples fit\)": lambda number: {"batch_size": number},
    r"more devices \((\d+) fit, with the added ones like the last\)": lambda number: {"devices": number},
}


@pytest.mark.parametrize("limit", [500, 900, 1100])
@pytest.mark.parametrize("asked", [{}, {"micro_batches": 8}, {"recompute": "never"}, {"recompute": "always"}])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_cure_works_and_none_that_does_is_left_out(profile, device, limit, asked, schedule):
    """A cure alone makes a plan; of those that are not named, none does that needs no figure."""
    given = {"batch_size": 32, "schedule": schedule, **asked}
    try:
        plan_from_profile(profile, [device("a", limit)] * 2, **given)
        return
    except InfeasibleError as problem:
        text = str(problem)
    for cure, setting in CURES.items():
        named = re.search(cure, text)
        if named is None and "(" in cure:
            continue
        change = setting(int(named[1]) if named and named.groups() else None)
        count = change.pop("devices", 2)
        if named:
            plan_from_profile(profile, [device("a", limit)] * count, **{**given, **change})
        elif change.items() <= given.items() or ("recompute" in change and "recompute" not in given):
            continue  # it is so already
        else:
            refusal(profile, [device("a", limit)] * count, **{**given, **change})


@pytest.mark.parametrize("limit", [150, 500, 700, 900, 1100])
@pytest.mark.parametrize("recompute", ["auto", "never"])
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb", 1), ("interleaved", 2)])
def test_cures_of_schedules_that_keep_more_work(profile_of, device, limit, recompute, schedule, chunks):
    """Another schedule, more devices and a smaller batch were advised, which nobody had tried."""
    profile = profile_of(
        {("a", size): [[size * value for value in ROW]] * LAYERS for size in (1, 16)},
        parameters=[(64, True)] * LAYERS,
        readers=[(layer,) for layer in range(LAYERS)],
        optimizer=(0.001, 2.0),
        weights=[(0.5, 4)] * LAYERS,
    )
    given = {"batch_size": 32, "recompute": recompute}
    try:
        plan_from_profile(profile, [device("a", limit)] * 2, schedule=schedule, chunks=chunks, **given)
        return
    except InfeasibleError as problem:
        text = str(problem)
    named = [(setting, found) for cure, setting in CURES.items() if (found := re.search(cure, text))]
    assert named
    given |= {"schedule": "1f1b"}
    for setting, found in named:
        change = setting(int(found[1]) if found.groups() else None)
        count = change.pop("devices", 2)
        lean = 'Nor does any with schedule="1f1b"' in text
        if change == {"schedule": "1f1b"} and lean:
            refusal(profile, [device("a", limit)] * count, **given)
        else:
            plan_from_profile(profile, [device("a", limit)] * count, **{**given, **change})


def test_the_stage_overflows_by_what_it_needs_more(profile, device):
    """With that many bytes more it fits, and with one byte less it does not."""
    asked: dict[str, Any] = {"batch_size": 16, "recompute": "never", "stages": 2, "micro_batches": 16}
    text = refusal(profile, [device("a", 650)] * 2, **asked)
    (over,) = map(int, re.findall(r"(\d+) bytes \(\d+ B\) too many", text))
    plan_from_profile(profile, [device("a", 650 + over)] * 2, **asked)
    assert ": 1 bytes (1 B) too many" in refusal(profile, [device("a", 650 + over - 1)] * 2, **asked)


def test_of_many_places_some_say_which_plan_is_nearest(profile, device, monkeypatch):
    """With all of 2,000, and 64 devices, it took 40 s."""
    monkeypatch.setattr(infeasible, "MOST_PLACES", 1)
    text = refusal(profile, [device("a", 500)] * 2, batch_size=16, cut_at=["blocks.1"])
    assert text.startswith("no plan was found that fits the memory. The nearest one with cuts at 2 of the 3 places")
    assert re.search(r"K = 2 stages .* its stage \d \(layers \d to \d", text)


def test_where_rules_leave_no_plan_memory_is_not_blamed(profile, device):
    """A cut makes two stages, and three devices are enough for one stage in two replicas."""
    devices = [device("a", 10**6)] * 3
    text = refusal(profile, devices, batch_size=16, replicas=2, cut_at=["blocks.2"])
    assert text.startswith("no plan satisfies all rules on these devices, whatever the memory")
    problem = make_problem(profile, devices, batch_size=16, optimizer=None, settings={})
    assert infeasible._too_few_micro_batches(problem) == ""  # where no rule makes a stage


def test_where_there_are_too_few_micro_batches_for_the_stages_of_rules_these_are_named(profile, device):
    """It said that there are fewer devices than stages, of which there were four and two."""
    devices = [device("a", 10**6)] * 4
    asked: dict[str, Any] = {"batch_size": 16, "micro_batches": 6, "cut_at": ["blocks.2"]}
    text = refusal(profile, devices, **asked)
    assert "the rules make 2 stages at least" in text
    assert "asks for M = 8 micro-batches, and there are at most 6" in text
    assert plan_from_profile(profile, devices, **asked, micro_batches_per_stage=3).K == 2


def test_a_refusal_is_of_what_could_be_tried(profile, device):
    """With one chunk a rank there is no M for four stages, and what does not fit are two ranks of two chunks."""
    asked: dict[str, Any] = {"schedule": "interleaved", "chunks": "auto", "stages": 4, "micro_batches_per_stage": 1}
    with pytest.raises(InfeasibleError, match="no plan with 2 chunks a rank was found that fits the memory"):
        plan_from_profile(profile, [device("a", 130)] * 4, batch_size=2, **asked)


def test_where_nothing_helps_the_error_says_so(profile, device):
    """A single layer's parameters are more than a device has."""
    text = refusal(profile, [device("a", 100)] * 2, batch_size=16)
    assert "Neither recompute, 1f1b, more micro-batches, a smaller batch nor more devices would help alone" in text
