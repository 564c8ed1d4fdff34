"""What hostile inputs are made of: a plan, a profile, and a folder where the command's own work is left out."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner
import profiler
from planner import plan_from_profile
from planner.keywords import SettingKeywords
from planner.plan.plan import Plan
from planner.settings import Settings
from profiler.cache import Cache
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError
from profiler.machine.local import local_devices
from profiler.measured_sizes import measured_sizes
from profiler.quantities import check_seconds
from profiler.record import InStage, LayerCost, Profile, Workspace
from profiler.sample_spec import ConstantLeaf, SampleSpec, TensorLeaf
from profiler.sample_tree import LEAF, dumps
from profiler.skip_value import SkipValue
from profiler.timing.optimizers import named_optimizer
from tests.planner.made_up import build_profile

FORMATS = Path(__file__).resolve().parents[1] / "data" / "formats"
MODEL = "def build():\n    return object(), object()\n\ndef train(plan):\n    pass\n\nx = 1\n"


@cache
def good_profile() -> Profile:
    """A profile of six layers with everything that a profile can hold."""
    rows = {}
    for kind, factor in (("a", 1e-3), ("b", 2.5e-3)):
        for size in (1, 2, 4):
            layer = (factor * size, factor * size, 2 * factor * size, 100 * size, 40)
            rows[kind, size] = [(*layer, 80 * size, 80 * size)] * 5 + [(*layer, 0, 0)]
    plain = build_profile(
        rows,
        parameters=[(64, True), (32, False), (16, True)],
        readers=[[0], [1], [], [2], [], [0]],
        buffers=[0, 4, 0, 0, 0, 0],
        optimizer=(1e-9, 2.0),
        links=(Link(latency_s=1e-5, bytes_per_s=1e8, error=0.1),),
        input_bytes=12,
        reserve_bytes=100,
        weights=[(0.4, 0.3)] * 6,
    )
    spec = SampleSpec(
        batch_size=8,
        tree=dumps(((LEAF,), {"mask": [LEAF, LEAF]})),
        leaves=(
            TensorLeaf(shape=(8, 3), dtype="float32", batch_dim=0),
            TensorLeaf(shape=(3, 8), dtype="bool", batch_dim=1),
            ConstantLeaf(value=0.5),
        ),
        autocast="bfloat16",
        keep_together=("blocks.1",),
        front_end="export",
    )
    skip = SkipValue(name="x", users=(0, 4), has_gradient=True, size_bytes=((1, 8), (2, 16), (4, 32)))
    changes = {"sample": spec, "skips": (skip,), "costs": tuple(map(_with_more, plain.costs))}
    return Profile.model_validate({**{name: getattr(plain, name) for name in Profile.model_fields}, **changes})


def _with_more(cost: LayerCost) -> LayerCost:
    in_stage = InStage(
        carried_bytes=((min(5, cost.layer + 1), 8),),
        held_bytes=4,
        forward_bytes=50,
        waiting_bytes=((max(0, cost.layer - 1), 3),),
        backward_bytes=120,
        last_backward_bytes=60,
        leaf_bytes=((0, min(5, cost.layer + 1), 5, 2),),
        workspace_bytes=7,
        workspaces=(
            Workspace(steps=2, samples=cost.micro_batch_size, entering=3, width=4, size_bytes=9, is_kept=True),
        ),
    )
    return cost.model_copy(update={"in_stage": in_stage})


@cache
def good_plan() -> Plan:
    """A plan of three stages with skips, recompute and two micro-batch sizes."""
    devices = tuple(Device(name="cpu", kind=kind, memory_bytes=2**20, threads=1) for kind in ("a", "a", "b"))
    return plan_from_profile(
        good_profile(),
        Cluster(devices=devices, link=Link(latency_s=1e-6, bytes_per_s=1e9)),
        batch_size=30,
        stages=3,
        micro_batches=13,
        recompute="always",
        skips="direct",
        schedule="gpipe",
    )


@cache
def good_plans() -> tuple[Plan, ...]:
    """The committed ones, which have every field of the format."""
    return tuple(Plan.load(file) for file in sorted(FORMATS.glob("plan-*.json")))


def workplace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with a model and a plan; `autoplan` checks its arguments and measures nothing."""
    (folder / "shop_model.py").write_text(MODEL)
    (folder / "bad.json").write_text('{"schema_version": 2}')
    good_plan().save(folder / "plan.json")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "shop_model", None)  # so that it goes again
    del sys.modules["shop_model"]

    def checked(_model: Any, _sample: Any, devices: Any, *, batch_size: int | None, **given: Any) -> Plan:
        samples = 8 if batch_size is None else batch_size
        settings: Any = {name: given[name] for name in SettingKeywords.__annotations__ if name in given}
        check_seconds("time_budget_s", given["time_budget_s"], positive=False)
        Cache.of(given["cache"])
        named_optimizer(given["optimizer"])
        measured_sizes(samples, None, local_devices(devices, threads=given["threads"]))
        Settings.of(devices, samples, settings)
        return good_plan()

    def stop(*_: Any, **__: Any) -> Any:
        raise ArgumentError("the arguments were looked at, and what follows takes seconds")

    monkeypatch.setitem(planner.__dict__, "autoplan", checked)
    monkeypatch.setitem(profiler.__dict__, "trace", stop)
    monkeypatch.setattr("executor.launching.run_workers", lambda *_, **__: [])
