"""Plans that split the backward pass against every plan there is: cuts, devices, recompute and all orders.

python -m pytest -q -s -m benchmark tests/benchmarks/test_split_plans.py
"""

import random
import time
from collections import Counter

import pytest

from planner import plan_from_profile
from profiler.errors import InfeasibleError
from tests.benchmarks.exhaustive_orders import any_below
from tests.planner.test_split_plans import MOST_OVER, drawn, problem_of

PROBLEMS = 600
NODES = 500_000
SEARCHED = (1.0001, 1.001, MOST_OVER)


@pytest.mark.benchmark
def test_no_plan_is_a_hundredth_faster_nor_below_the_bound() -> None:
    """L of 2 to 8, up to 3 devices, also unlike ones, M up to 6, with messages, and limits in half of them."""
    counts: Counter[str] = Counter()
    gaps, plan_s = [], 0.0
    for seed in range(PROBLEMS):
        profile, devices, asked = drawn(random.Random(seed), most_layers=8, most_devices=3, most_count=6)
        problem = problem_of(profile, devices, "zb", asked)
        began_s = time.perf_counter()
        try:
            said = plan_from_profile(profile, devices, schedule="zb", **asked).prediction
        except InfeasibleError:
            assert not any_below(problem, float("inf"), most_nodes=NODES).faster, f"problem {seed}: a plan was missed"
            counts["none fits"] += 1
            continue
        finally:
            plan_s += time.perf_counter() - began_s
        gaps.append(said.gap)
        below = any_below(problem, said.lower_bound_s, most_nodes=NODES)
        assert not below.faster, f"problem {seed}: a plan is faster than the bound"
        counts["bound undecided"] += bool(below.undecided)
        verdict = "as good as the bound"
        for times in SEARCHED:
            if said.gap < times - 1:
                break
            faster = any_below(problem, said.step_s / times, most_nodes=NODES)
            if not faster.faster:
                verdict = "undecided" if faster.undecided else verdict.replace("the bound", "any")
                break
            verdict = f"more than {times - 1:.2%} over"
        counts[verdict] += 1
        assert verdict != f"more than {MOST_OVER - 1:.2%} over", f"problem {seed}: {verdict} the best"
    gaps.sort()
    print(
        f"\n{PROBLEMS} problems: {dict(counts)}; gap in the middle {gaps[len(gaps) // 2]:.2%}, at most {gaps[-1]:.1%}"
    )
    print(f"planned in {plan_s:.1f} s in all")
