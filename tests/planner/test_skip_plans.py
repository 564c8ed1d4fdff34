"""Values that go past stages: what plans with them cost, against brute force over all plans."""

import hashlib
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cost.layer_costs import fingerprint_of
from planner.from_profile import plan_from_profile
from planner.plan.plan import Plan
from planner.plan.simulator import simulate_plan
from profiler.device import Link
from profiler.errors import ArgumentError, InfeasibleError, ProfileError
from profiler.skip_value import SkipValue
from tests.planner.made_up import most_held

ROUNDING = 1e-9
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def with_skips(profile, values):
    """The profile with further values, which cross all boundaries between their users."""
    saved: dict[tuple[int, int], tuple[int, int]] = {}
    for value in values:
        for layer in range(value.users[0], value.users[-1]):
            for size, size_bytes in value.size_bytes:
                outputs, gradients = saved.get((layer, size), (0, 0))
                saved[layer, size] = outputs + size_bytes, gradients + size_bytes * value.has_gradient

    def more(cost):
        outputs, gradients = saved.get((cost.layer, cost.micro_batch_size), (0, 0))
        update = {"output_bytes": cost.output_bytes + outputs}
        return cost.model_copy(update={**update, "output_gradient_bytes": cost.output_gradient_bytes + gradients})

    return profile.model_copy(update={"costs": tuple(map(more, profile.costs)), "skips": tuple(values)})


def skip(name, users, sample_bytes, sizes=(1, 5, 14), *, has_gradient=True):
    return SkipValue(
        name=name,
        users=users,
        has_gradient=has_gradient,
        size_bytes=tuple((size, sample_bytes * size) for size in sizes),
    )


@st.composite
def skipping_profiles(draw, profiles):
    profile = draw(profiles(kinds=("a",), most_layers=6).filter(lambda profile: len(profile.layers) > 2))
    layers = len(profile.layers)
    users = st.lists(st.integers(0, layers - 1), min_size=2, max_size=4, unique=True).map(lambda u: tuple(sorted(u)))
    far = users.filter(lambda users: any(later - earlier > 1 for earlier, later in pairwise(users)))
    values = [
        skip(f"v{number}", draw(far), draw(st.integers(1, 60)), has_gradient=draw(st.booleans()))
        for number in range(draw(st.integers(1, 3)))
    ]
    return with_skips(profile, values)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(st.data())
@settings(max_examples=20, suppress_health_check=SLOW)
def test_plans_with_skips_lie_between_their_bound_and_the_best_of_all(profiles, oracle, device, schedule, data):
    profile = data.draw(skipping_profiles(profiles))
    batch_size, count = data.draw(st.sampled_from([(4, 4), (8, 4), (10, 5), (12, 6)]))
    roomy = oracle(profile, (device("a"),), batch_size)
    sizes = roomy.sizes(count)
    first = data.draw(st.integers(0, len(profile.layers) - 1))
    stop = data.draw(st.integers(first + 1, len(profile.layers)))
    needed = int(roomy.memory("a", first, stop, sizes, sizes, [])) + data.draw(st.integers(-2, 20))
    devices = (device("a", max(1, needed)),) * data.draw(st.integers(2, 4))
    mode = data.draw(st.sampled_from(["auto", "never"]))
    direct = oracle(profile, devices, batch_size, mode, 1, (schedule,), skips="direct")
    relayed_s = oracle(profile, devices, batch_size, mode, 1, (schedule,)).best_step_s([count])
    steps_s = [step_s for step_s in (direct.best_step_s([count]), relayed_s) if step_s is not None]
    asked = {
        "batch_size": batch_size,
        "micro_batches": count,
        "micro_batches_per_stage": 1,
        "schedule": schedule,
        "recompute": mode,
    }
    try:
        plan = plan_from_profile(profile, devices, skips="direct", **asked)
    except InfeasibleError:
        assert relayed_s is None  # no plan was found, though there may be one
        return
    prediction = plan.prediction
    assert prediction.lower_bound_s <= min(steps_s) * (1 + ROUNDING)
    assert prediction.step_s >= min(steps_s) * (1 - ROUNDING)
    assert relayed_s is None or prediction.step_s <= relayed_s * (1 + ROUNDING)
    assert prediction.step_s == pytest.approx(simulate_plan(plan).step_s, rel=ROUNDING)
    assert all(stage.memory.total <= stage.device.memory_bytes for stage in plan.stages)
    if mode == "never" and plan.skips:  # no freedom is left but the cuts
        cuts = (0, *(stage.stop_layer for stage in plan.stages))
        assert prediction.step_s == pytest.approx(direct.step_s(cuts, count, None, schedule), rel=ROUNDING)
        for stage in plan.stages:
            held = sizes[: most_held(schedule, plan.K - stage.rank, count)]
            needed = direct.memory("a", stage.first_layer, stage.stop_layer, sizes, held, [])
            # messages from far away are of micro-batches in flight there: of one more for each stage between
            far = sum(
                (skip.receiver - skip.sender - 1) * 2 * largest_bytes(profile, skip.values, max(sizes))
                for skip in plan.skips
                if stage.rank == skip.receiver
            )
            assert needed - len(profile.layers) <= stage.memory.total <= needed + far + len(profile.layers)
    assert Plan.model_validate_json(plan.to_json()) == plan


@pytest.fixture
def chain(profile_of):
    """Four layers of 1 s each way; what layer 0 computes is 100 bytes a sample and read by layer 3 alone."""
    rows = {("a", size): [(1, 1, 1, 10, 0, 2, 2)] * 3 + [(1, 1, 1, 10, 0, 0, 0)] for size in (1, 2)}
    return with_skips(
        profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=50.0),)), [skip("x", (0, 3), 100, (1, 2))]
    )


def plan_of(profile, device, **asked):
    return plan_from_profile(profile, [device("a")] * 4, batch_size=8, micro_batches=8, stages=4,
                             micro_batches_per_stage=1, **asked)  # fmt: skip


def test_what_skips_stages_costs_them_neither_time_nor_memory(chain, device):
    relayed, direct = plan_of(chain, device), plan_of(chain, device, skips="direct")
    assert relayed.skips == ()
    [far] = direct.skips
    assert (far.ends, far.values) == ((0, 3), ("x",))
    assert far.times_at(1).send_forward_s == pytest.approx(100 / 50)
    assert direct.stages[0].times_at(1).send_forward_s == pytest.approx(2 / 50)
    assert relayed.stages[0].times_at(1).send_forward_s == pytest.approx(102 / 50)
    for stage in (1, 2):
        less = relayed.stages[stage].memory.activations - direct.stages[stage].memory.activations
        assert less == 8 * 100  # of each micro-batch
    assert direct.prediction.step_s < relayed.prediction.step_s
    assert "0SEND_F5@3" in {str(action) for action in direct.actions()[0]}
    lanes = simulate_plan(direct).lanes
    assert {"link 0>3", "link 3>0"} <= set(lanes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_cuts_move_to_where_skipping_saves_most(profile_of, device, oracle, schedule):
    """Six layers over a slow link: none of the three problems that are solved has the best cuts."""
    rows = {("a", size): [(1, 1, 1, 0, 0, more, more) for more in (1, 1, 1, 9, 5, 0)] for size in (1, 2)}
    plain = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=40.0),))
    values = [skip("x", (0, 2, 5), 60, (1, 2)), skip("y", (1, 4), 40, (1, 2))]
    profile, devices = with_skips(plain, values), (device("a"),) * 4
    asked: dict[str, Any] = {
        "micro_batches": 8,
        "micro_batches_per_stage": 1,
        "schedule": schedule,
        "recompute": "never",
    }
    best_s = oracle(profile, devices, 8, "never", 1, (schedule,), skips="direct").best_step_s([8])
    relayed = plan_from_profile(profile, devices, batch_size=8, **asked)
    direct = plan_from_profile(profile, devices, batch_size=8, skips="direct", **asked)
    assert direct.prediction.step_s == pytest.approx(best_s, rel=ROUNDING)
    assert direct.prediction.step_s < relayed.prediction.step_s


def test_a_profile_that_does_not_know_skips_is_refused(profile_of, device):
    rows = {("a", size): [(1, 1, 1, 10, 0, 2, 2)] * 3 + [(1, 1, 1, 10, 0, 0, 0)] for size in (1, 2)}
    with pytest.raises(ProfileError, match="profile the model again"):
        plan_of(profile_of(rows), device, skips="direct")


def test_what_fits_relayed_fits(profile_of, device):
    """Of shorter messages more may be under way, so that skipping can need more memory."""
    mebibyte = 2**20
    rows = {("a", size): [(1, 1, 1, 10, 0, mebibyte * 13 // 10, mebibyte * 13 // 10)] * 2 + [(1, 1, 1, 10, 0, 0, 0)]
            for size in (1, 2)}  # fmt: skip
    plain = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e9),))
    profile = with_skips(plain, [skip("x", (0, 2), mebibyte // 10, (1, 2))])
    asked: dict[str, Any] = {
        "batch_size": 4,
        "micro_batches": 4,
        "stages": 3,
        "micro_batches_per_stage": 1,
        "recompute": "never",
    }
    relayed = plan_from_profile(profile, [device("a")] * 3, **asked)
    limit = max(stage.memory.total for stage in relayed.stages)
    roomy = plan_from_profile(profile, [device("a")] * 3, skips="direct", **asked)
    assert max(stage.memory.total for stage in roomy.stages) > limit
    tight = plan_from_profile(profile, [device("a", limit)] * 3, skips="direct", **asked)
    assert (tight.skips, tight.prediction.step_s) == ((), relayed.prediction.step_s)


def test_of_two_stages_none_is_skipped(profile_of, device):
    """Also profiles that know nothing of skips will do, and plans are proven."""
    rows = {("a", size): [(1, 1, 1, 10, 0, 2, 2)] * 3 + [(1, 1, 1, 10, 0, 0, 0)] for size in (1, 2)}
    plan = plan_from_profile(profile_of(rows), [device("a")] * 2, batch_size=8, skips="direct")
    assert (plan.prediction.gap, plan.skips) == (0, ())


def test_direct_skips_are_named_where_they_help(chain, device):
    roomy = plan_of(chain, device, skips="direct", recompute="never")
    limit = max(stage.memory.total for stage in roomy.stages)
    asked: dict[str, Any] = {
        "batch_size": 8,
        "micro_batches": 8,
        "stages": 4,
        "micro_batches_per_stage": 1,
        "recompute": "never",
    }
    with pytest.raises(InfeasibleError, match='Or set skips="direct"'):
        plan_from_profile(chain, [device("a", limit)] * 4, **asked)
    assert plan_from_profile(chain, [device("a", limit)] * 4, skips="direct", **asked).skips


def test_profiles_from_before_skips_keep_their_plans(profile_of, device):
    rows = {("a", 1): [(1, 1, 1, 10, 0, 2, 2), (1, 1, 1, 10, 0, 0, 0)]}
    profile = profile_of(rows)
    before = "".join(line for line in profile.to_json().splitlines(keepends=True) if '"skips"' not in line)
    before = before.replace('"schema_version": 1,', '"schema_version": 1')
    assert type(profile).model_validate_json(before) == profile
    assert fingerprint_of(profile) == hashlib.sha256(before.encode()).hexdigest()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([skip("x", (0, 2), 1), skip("x", (1, 3), 1)], "name a value twice"),
        ([skip("x", (0, 4), 1)], "x is read by layer 4 of 4 layers"),
        ([skip("x", (0, 2), 3)], "skips hold 3 bytes and output_bytes is 2"),
    ],
)
def test_skips_that_cannot_be_are_refused(profile_of, values, problem):
    rows = {("a", 1): [(1, 1, 1, 10, 0, 2, 2)] * 3 + [(1, 1, 1, 10, 0, 0, 0)]}
    with pytest.raises(ValueError, match=problem):
        type(profile_of(rows)).model_validate({**dict(profile_of(rows)), "skips": tuple(values)})


def test_a_value_that_all_layers_use_skips_none():
    with pytest.raises(ArgumentError, match="every layer from 1 to 3 uses x: it skips none"):
        skip("x", (1, 2, 3), 1)


def test_skips_are_relayed_or_direct(chain, device):
    with pytest.raises(ArgumentError, match="choose one of 'relayed', 'direct'"):
        plan_of(chain, device, skips="both")


def largest_bytes(profile, names, size):
    """Of these values for a micro-batch of that size, or of the next that was measured."""
    return sum(min(b for at, b in skip.size_bytes if at >= size) for skip in profile.skips if skip.name in names)
