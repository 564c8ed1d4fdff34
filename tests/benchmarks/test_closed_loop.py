"""Is a wrong profile mended by one step of measuring? One from a busy core, and one from a data sheet.

    ROUNDS=1 python -m pytest -q -s -o faulthandler_timeout=0 -m benchmark tests/benchmarks/test_closed_loop.py

K = 2 CPU workers with one thread each. The plan comes from a profile that was taken while a program used the first of
two cores for all of the time, or from the data sheet of an A100, whose times are those of quite another device. The
plan trains some steps, `plan.refined(pipe.measured())` plans again, and the new plan trains, too. Asked: how far the
predictions are from what is measured, before and after, and what the new plan gains. The table is in closed_loop.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from statistics import median
from typing import Any

import pandas
import pytest

from planner import Plan, plan_from_profile
from planner.refine import refined
from profiler import Cluster, LayerSequence, Profile, profile, trace
from profiler.machine.local import local_devices
from tests.benchmarks.kept_rows import kept
from tests.benchmarks.stage_models import Model
from tests.benchmarks.steps_alone import steps_alone
from tests.benchmarks.test_schedule_gains import subject

MODELS = ("demo's GPT", "T5", "DenseNet")
SOURCES = ("busy core", "data sheet")
ROUNDS = int(os.environ.get("ROUNDS", "1"))
K, M, STEPS = 2, 8, 12
RIVAL = "import os; os.sched_setaffinity(0, [{core}])\nwhile True: sum(range(10_000))"
SHEET = "2xA100-40GB"
CLOSE = 0.15


def alone(plan: Plan, name: str) -> tuple[float, float, pandas.DataFrame]:
    """The median step of the slowest process, how many cores others used, and what the pipeline measured."""
    taken = steps_alone(plan, name, STEPS)
    return median(taken.steps_s), taken.others, taken.measured


def profiled(source: str, model: Model, sequence: LayerSequence, batch_size: int, cluster: Cluster) -> Profile:
    """A profile that is wrong."""
    settings: dict[str, Any] = {
        "batch_size": batch_size, "loss_fn": model.loss_fn, "target": model.target, "cache": False, "progress": False,
    }  # fmt: skip
    if source == "data sheet":
        found = profile(sequence, Cluster.of(SHEET, link="pcie4"), **settings)
        here = {"device_kind": cluster.devices[0].kind}
        return found.model_copy(
            update={
                name: tuple(entry.model_copy(update=here) for entry in getattr(found, name))
                for name in ("costs", "estimates", "optimizers")
            }
        )
    rival = subprocess.Popen([sys.executable, "-c", RIVAL.format(core=min(os.sched_getaffinity(0)))])
    try:
        return profile(sequence, cluster, sample=model.sample, **settings)
    finally:
        rival.kill()
        rival.wait()


def row(name: str, source: str) -> dict[str, Any]:
    """Of the table."""
    model, batch_size = subject(name)
    sequence, cluster = trace(model.model, model.sample), local_devices(["cpu"] * K)
    found = profiled(source, model, sequence, batch_size, cluster)
    asked: Any = {"stages": K, "micro_batches": M, "schedule": "1f1b"}
    plan = plan_from_profile(found, cluster, batch_size=batch_size, **asked)
    before_s, others, measured = alone(plan, name)
    again = refined(plan, measured, found, cluster, **asked)
    after_s, others_later, _ = alone(again.plan, name)
    one, other = _passes_s(plan), _passes_s(again.plan)
    return {
        "model": name, "profile": source,
        "cut": plan.stages[1].first_layer, "new cut": again.plan.stages[1].first_layer,
        "predicted, s": one, "measured, s": before_s, "measured / predicted": before_s / one,
        "mended, s": again.now_s - plan.prediction.optimizer_s,
        "measured / mended": before_s / (again.now_s - plan.prediction.optimizer_s),
        "new plan, s": other, "its measured, s": after_s, "its measured / predicted": after_s / other,
        "gain said": again.gain, "gain measured": 1 - after_s / before_s, "others, cores": max(others, others_later),
    }  # fmt: skip


def _passes_s(plan: Plan) -> float:
    return plan.prediction.step_s - plan.prediction.optimizer_s


@pytest.mark.benchmark
def test_one_step_of_measuring_mends_a_profile() -> None:
    rows = [
        kept(f"loop {name} {source} {number}", partial(row, name, source))
        for number in range(ROUNDS)
        for name in MODELS
        for source in SOURCES
    ]
    frame = pandas.DataFrame(rows)
    with pandas.option_context("display.width", 300, "display.max_columns", 30):
        print(f"\n{frame.to_string(index=False, float_format='{:.3g}'.format)}")
    for what in ("measured / mended", "its measured / predicted"):
        assert (frame[what] - 1).abs().median() <= CLOSE
    assert (frame["gain measured"] >= -CLOSE).all(), "a new plan is no slower"
