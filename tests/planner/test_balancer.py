"""The balancer against brute force over all cuts, K, M and recompute, judged by the simulator."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.from_profile import plan_from_profile
from profiler.errors import InfeasibleError

CLOSE = 1e-9


def draw_devices(data, device, oracle, profile, batch_size):
    """Up to three devices with memories around what some cuts need, so that limits bind."""
    kinds = data.draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=3), label="kinds")
    roomy = oracle(profile, tuple(device(kind) for kind in kinds), batch_size)
    memories = []
    for stage in range(len(kinds)):
        first = data.draw(st.integers(0, len(profile.layers) - 1))
        stop = data.draw(st.integers(first + 1, len(profile.layers)))
        sizes = [2] * (batch_size // 2)
        needed = roomy.memory(stage, first, stop, sizes, recompute=data.draw(st.booleans()))
        memories.append(max(1, int(needed) + data.draw(st.integers(-2, 20))))
    return tuple(device(kind, memory) for kind, memory in zip(kinds, memories, strict=True))


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_balancer_finds_the_optimum_of_every_fixed_m(profiles, oracle, device, data):
    profile = data.draw(profiles())
    batch_size, count = data.draw(st.sampled_from([(4, 4), (8, 4), (8, 8), (10, 5), (12, 4), (12, 6), (12, 12)]))
    devices = draw_devices(data, device, oracle, profile, batch_size)
    mode = data.draw(st.sampled_from(["auto", "always", "never"]))
    per_stage = data.draw(st.sampled_from([1, 2, 4]))
    best_s = oracle(profile, devices, batch_size, mode, per_stage).best_step_s([count])
    settings_ = {
        "batch_size": batch_size,
        "micro_batches": count,
        "recompute": mode,
        "micro_batches_per_stage": per_stage,
    }
    if best_s is None:
        with pytest.raises(InfeasibleError):
            plan_from_profile(profile, devices, **settings_)
        return
    plan = plan_from_profile(profile, devices, **settings_)
    assert plan.prediction.step_s == pytest.approx(best_s, rel=CLOSE)
    assert plan.prediction.gap == 0


@given(st.data())
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_the_bound_encloses_the_optimum_over_every_m(profiles, oracle, device, data):
    profile = data.draw(profiles())
    batch_size = data.draw(st.integers(4, 14))
    devices = draw_devices(data, device, oracle, profile, batch_size)
    best_s = oracle(profile, devices, batch_size, micro_batches_per_stage=2).best_step_s()
    settings_ = {"batch_size": batch_size, "micro_batches_per_stage": 2}
    if best_s is None:
        with pytest.raises(InfeasibleError):
            plan_from_profile(profile, devices, **settings_)
        return
    plan = plan_from_profile(profile, devices, **settings_)
    assert plan.prediction.lower_bound_s <= best_s * (1 + CLOSE)
    assert best_s * (1 - CLOSE) <= plan.prediction.step_s <= best_s * (1 + plan.prediction.gap) * (1 + CLOSE)
