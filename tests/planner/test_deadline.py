"""A search that is out of time says no more than it knows."""

import re
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from planner.from_profile import make_problem, plan_from_profile
from planner.kernel.candidate_stages import make_arcs
from planner.kernel.front import before_bounds, step_bound_s
from planner.kernel.search import search
from planner.keywords import SettingKeywords
from planner.plan.schedules import ScheduleName
from planner.solve import all_schedules, balancer
from planner.solve.all_schedules import balance_of_all
from planner.solve.balancer import balance
from planner.solve.candidate_search import CandidateSearch, first_balance
from planner.solve.chunk_candidates import plans_of
from planner.solve.chunk_search import ROUNDS_OF_FIRST_PLANS, chunk_balance
from planner.solve.cut_climb import CutClimb
from planner.solve.deadline import UNLIMITED, Deadline
from planner.solve.first_plans import PROBES
from planner.solve.moved_cuts import with_moved_cuts
from planner.solve.segment_choices import SegmentChoices, WorkBudget
from planner.solve.tables import make_tables
from profiler.device import Link
from profiler.errors import InfeasibleError


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_search_without_time_has_the_bound_of_its_stages(profile_of, device, schedule):
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 12 for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    asked: SettingKeywords = {"schedule": schedule, "micro_batches": 21}
    problem = make_problem(profile, [device()] * 4, batch_size=32, optimizer=None, settings=asked)
    tables = make_tables(problem, next(problem.candidates()))
    arcs = make_arcs(tables, np.inf)
    before = before_bounds(arcs)
    choices = SegmentChoices(tables, arcs, Deadline(None), WorkBudget()).known()
    whole = search(arcs, before, choices, np.inf, 100, 1, False, UNLIMITED)
    short = search(arcs, before, choices, np.inf, 100, 1, False, 0)
    assert len(whole.objective_s) == 1
    assert whole.dropped_s == np.inf
    assert short.work < whole.work
    assert short.dropped_s <= whole.objective_s[0] * (1 + 1e-12)
    assert short.dropped_s == step_bound_s(arcs, before[0, -1])


def test_a_deadline_that_is_over_leaves_no_labels():
    assert Deadline(1e-9).labels == 0
    assert Deadline(1e-9).over
    assert not Deadline(None).over
    assert Deadline(None).labels == UNLIMITED


def test_a_search_for_some_plan_of_a_part_ends_when_time_is_up(profile_of, device, monkeypatch):
    """With 64 devices it went on for 15 s beyond a limit of 10 s, in searches that were let try no more labels."""
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 12 for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    asked: SettingKeywords = {"schedule": "1f1b", "micro_batches": 16}
    problem = make_problem(profile, [device()] * 4, batch_size=32, optimizer=None, settings=asked)
    (candidate,) = problem.candidates()
    searches, found = [], CandidateSearch._found

    def noted(self, *given, **named):
        searches.append(self)
        return found(self, *given, **named)

    monkeypatch.setattr(CandidateSearch, "_found", noted)
    assert first_balance(problem, candidate, Deadline(None)) is not None
    assert searches
    searches.clear()
    assert first_balance(problem, candidate, Deadline(1e-9)) is None
    assert not searches


def test_a_search_that_others_have_plans_for_ends_without_one(profile_of, device):
    """A search on one host went on for minutes of a limit of 15 s for want of a first plan, beside one over all."""
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 12 for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    asked: SettingKeywords = {"schedule": "1f1b", "time_limit_s": 1e-9}
    problem = make_problem(profile, [device()] * 4, batch_size=32, optimizer=None, settings=asked)
    assert balance(problem) is not None
    assert balance(replace(problem, dispensable=True)) is None


def test_cuts_over_hosts_are_not_moved_when_time_is_up(profile_of, device):
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 12 for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    asked: SettingKeywords = {"schedule": "1f1b", "stages": 4}
    problem = make_problem(profile, [device()] * 4, batch_size=32, optimizer=None, settings=asked)
    found = balance(problem)
    assert found is not None
    uneven = replace(
        found,
        stages=tuple(
            replace(stage, first=first, stop=stop)
            for stage, (first, stop) in zip(found.stages, pairwise((0, 1, 2, 3, 12)), strict=True)
        ),
    )
    moved = with_moved_cuts(problem, uneven, Deadline(None))
    assert moved.step_s < with_moved_cuts(problem, uneven, Deadline(1e-9)).step_s
    assert [stage.stop for stage in with_moved_cuts(problem, uneven, Deadline(1e-9)).stages] == [1, 2, 3, 12]


def test_a_search_out_of_time_leaves_other_numbers_of_micro_batches(profile_of, device, monkeypatch):
    """Beside the plan of another schedule it went on through all M of a batch of 63,000, where all cuts were tried."""
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 4 for size in (1, 256)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),), weights=[(0.5, 4)] * 4)
    climbs, found = [], CutClimb.found

    def noted(self, *given):
        climbs.append(self)
        return found(self, *given)

    monkeypatch.setattr(CutClimb, "found", noted)

    def searched(schedule: ScheduleName) -> int:
        climbs.clear()
        asked: SettingKeywords = {"schedule": schedule, "time_limit_s": 1e-9, "stages": 2}
        problem = make_problem(profile, [device()] * 2, batch_size=2048, optimizer=None, settings=asked)
        reached = balance(replace(problem, settings=replace(problem.settings, schedules=("1f1b",))))
        assert chunk_balance(problem, reached=reached) is not None
        return len(climbs)

    assert searched("zb-h1") <= PROBES * ROUNDS_OF_FIRST_PLANS


def test_not_even_whether_anything_fits_is_found_out_late(profile_of, device, monkeypatch):
    """To list all stages of a Llama 8B for 64 devices took 18 s, when a first look had taken what was left of 5 s."""
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 12 for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    asked: SettingKeywords = {"schedule": "1f1b", "time_limit_s": 0.5}
    problem = make_problem(profile, [device(memory_bytes=1)] * 4, batch_size=32, optimizer=None, settings=asked)
    listed, fits = [], CandidateSearch.fits

    def noted(self):
        listed.append(self)
        return fits(self)

    monkeypatch.setattr(CandidateSearch, "first", lambda *_: time.sleep(0.6))
    monkeypatch.setattr(CandidateSearch, "fits", noted)
    assert balance(replace(problem, dispensable=True)) is None
    assert not listed
    monkeypatch.setattr(CandidateSearch, "first", lambda *_: None)
    assert balance(problem) is None
    assert listed
    assert 0.0 < listed[0].listing_s < 0.1


ROWS = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 12 for size in (1, 8)}
LIMIT_S = 0.3


@pytest.fixture
def asked(profile_of, device):
    """A problem of all schedules with a limit of time."""
    profile = profile_of(ROWS, links=(Link(latency_s=0.0, bytes_per_s=1e6),), weights=[(0.5, 4)] * 12)
    settings: SettingKeywords = {"time_limit_s": LIMIT_S}
    return make_problem(profile, [device()] * 4, batch_size=32, optimizer=None, settings=settings)


@pytest.fixture
def left_s(monkeypatch):
    """Seconds that each search for a first plan had left; one that has a limit uses it up and finds nothing."""
    seen, first = [], CandidateSearch.first

    def slow(self, bound_s):
        seen.append(self._deadline.left_s)
        if seen[-1] > LIMIT_S:
            return first(self, bound_s)
        time.sleep(seen[-1])
        return None

    monkeypatch.setattr(CandidateSearch, "first", slow)
    return seen


def test_a_first_plan_is_looked_for_until_time_is_up_and_then_where_little_memory_is_needed(asked, left_s):
    """One search for it, begun in time, went on for 80 s beyond a limit of 5 s, in a part that needs much."""
    assert balance(plain := replace(asked, settings=replace(asked.settings, schedules=("1f1b",)))) is not None
    assert left_s[0] <= LIMIT_S
    assert left_s[-1] > LIMIT_S
    left_s.clear()
    assert balance(replace(plain, dispensable=True)) is None
    assert max(left_s) <= LIMIT_S


def test_a_family_without_a_plan_leaves_it_to_the_next(asked, left_s):
    """It went on for 16 s beyond a limit of 2 s, for a plan that the next one had; and no bound forgets it."""
    found = balance_of_all(asked)
    assert found is not None
    assert max(left_s) <= LIMIT_S
    best = balance_of_all(replace(asked, settings=replace(asked.settings, time_limit_s=None)))
    assert best is not None
    assert found.lower_bound_s <= best.step_s <= found.step_s


def test_if_none_has_a_plan_the_first_one_that_fits_is_taken(asked, left_s, monkeypatch):
    monkeypatch.setattr(all_schedules, "chunk_balance", lambda *_, **__: None)
    found = balance_of_all(asked)
    assert found is not None
    assert left_s[-1] > LIMIT_S
    assert balance_of_all(replace(asked, dispensable=True)) is None


@pytest.mark.parametrize("schedule", ["zb", "interleaved"])
def test_candidates_are_not_listed_when_time_is_up(profile_of, device, monkeypatch, schedule):
    """On several hosts all of them were, three times, which took 6 s of a limit of 1 s."""
    profile = profile_of(ROWS, links=(Link(latency_s=0.0, bytes_per_s=1e6),), weights=[(0.5, 4)] * 12)
    settings: SettingKeywords = {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
    problem = make_problem(profile, [device()] * 4, batch_size=128, optimizer=None, settings=settings)
    best = chunk_balance(problem)
    reached = balance(replace(problem, settings=replace(problem.settings, schedules=("1f1b",), chunks=1)))
    listed = []

    def noted(*given):
        listed.append(given)
        return plans_of(*given)

    monkeypatch.setattr("planner.solve.chunk_search.plans_of", noted)
    late = replace(problem, settings=replace(problem.settings, time_limit_s=1e-9))
    found = chunk_balance(late, reached=reached)
    assert best is not None
    assert found is not None
    assert len(listed) < 8 < len([*problem.candidates()])
    assert found.lower_bound_s <= min(best.step_s, found.step_s)


def test_where_nothing_fits_not_all_cuts_of_all_candidates_are_tried_late(asked, device, monkeypatch):
    """On four hosts it took 27 s of a limit of 0.2 s to find that out, cut by cut."""
    climbs, found = [], CutClimb.found

    def noted(self, *given):
        climbs.append(self)
        return found(self, *given)

    monkeypatch.setattr(CutClimb, "found", noted)
    devices = [device(memory_bytes=30) for _ in range(4)]
    settings: SettingKeywords = {"time_limit_s": 1e-9, "recompute": "never", "chunks": 1}
    problem = make_problem(asked.costs.profile, devices, batch_size=128, optimizer=None, settings=settings)
    assert balance_of_all(problem) is None
    late = len(climbs)
    climbs.clear()
    assert balance_of_all(replace(problem, settings=replace(problem.settings, time_limit_s=None))) is None
    assert late <= 2 < len(climbs)


@pytest.mark.parametrize("memory_bytes", [500, 300])
def test_a_family_whose_patience_is_over_in_time_may_have_a_plan(asked, device, monkeypatch, memory_bytes):
    """It was taken for one without any: a step of zb-h1 of 120 s was proven the best beside one of 1F1B of 85 s.

    With less memory, where 1F1B alone fits, that nothing does was said.
    """
    devices = [device(memory_bytes=memory_bytes) for _ in range(4)]
    settings: SettingKeywords = {"time_limit_s": 2.0, "recompute": "never", "micro_batches": 16}
    problem = make_problem(asked.costs.profile, devices, batch_size=32, optimizer=None, settings=settings)
    problem = replace(problem, settings=replace(problem.settings, schedules=("1f1b", "zb-h1")))
    best = balance_of_all(problem)
    first = CandidateSearch.first

    def in_vain(self, bound_s):
        return None if self._problem.dispensable else first(self, bound_s)

    monkeypatch.setattr(balancer, "MOST_S", 1e-9)
    monkeypatch.setattr(CandidateSearch, "first", in_vain)
    found = balance_of_all(problem)
    assert best is not None
    assert found is not None
    assert found.lower_bound_s <= best.step_s <= found.step_s


def test_without_any_plan_a_search_goes_on_past_its_limit_but_not_for_ever(profile_of, device, monkeypatch):
    """One of 1 s took 100; then what is refused is said to be not found, with what would fit."""
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 12 for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    settings: SettingKeywords = {"schedule": "1f1b", "micro_batches": 16, "stages": 4, "time_limit_s": 1e-6}
    plan_from_profile(profile, [device()] * 4, batch_size=32, **settings)
    monkeypatch.setattr(balancer, "LATE_S", 0.0)
    with pytest.raises(InfeasibleError) as caught:
        plan_from_profile(profile, [device()] * 4, batch_size=32, **settings)
    found = re.fullmatch(
        r"no plan was found, though one fits the memory: with "
        r'schedule="1f1b", K = 4 stages, M = 16 micro-batches and cuts before (\w+), (\w+), (\w+)\. '
        r"Set cut_at to the modules that begin there, or a time_limit_s of more than 1e-06 s, which may find others",
        str(caught.value),
    )
    assert found is not None, caught.value
    assert [*found.groups()] == sorted(found.groups(), key=[layer.name for layer in profile.layers].index)
    free: SettingKeywords = {"schedule": "1f1b", "replicas": "auto", "max_stages": 4, "time_limit_s": 1e-6}
    with pytest.raises(
        InfeasibleError, match=r"\. Set stages, replicas and micro_batches so, or a time_limit_s of more"
    ):
        plan_from_profile(profile, [device()] * 4, batch_size=32, **free)


def test_chunks_that_fit_and_were_not_found_are_named(profile_of, device, monkeypatch):
    """Not as a plan of which 0 bytes are too many."""
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 8 for size in (1, 2, 4, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    settings: SettingKeywords = {"schedule": "interleaved", "chunks": 2, "stages": 4, "micro_batches": 8}
    plan_from_profile(profile, [device()] * 2, batch_size=8, **settings)
    monkeypatch.setattr(CutClimb, "found", lambda *_: ([], 0.0))
    monkeypatch.setattr(CutClimb, "kicked", lambda *_: None)
    with pytest.raises(InfeasibleError) as caught:
        plan_from_profile(profile, [device()] * 2, batch_size=8, **settings)
    found = re.match(
        r'no plan was found, though one fits the memory: with schedule="interleaved", K = 4 stages in 2 chunks a rank, '
        r"M = 8 micro-batches and cuts before (\w+), (\w+), (\w+)\. Set cut_at to the modules that begin there",
        str(caught.value),
    )
    assert found is not None, caught.value


def test_what_is_found_in_haste_is_tried_with_more_replicas(profile_of, device):
    """The one that needs least memory has 1: on 1,024 devices its step took 500 times as long as that of another."""
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 3 for size in (1, 2, 4, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e9),))
    asked: SettingKeywords = {"schedule": "gpipe", "replicas": "auto", "time_limit_s": 1e-6}
    plan = plan_from_profile(profile, [device()] * 64, batch_size=1024, **asked)
    one = plan_from_profile(profile, [device()] * 64, batch_size=1024, replicas=1, schedule="gpipe")
    assert plan.replicas > 1
    assert plan.prediction.step_s < one.prediction.step_s / 4
