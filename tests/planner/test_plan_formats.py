"""Committed plan files, one for each feature of the format, mean today what they meant when they were written."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from planner.plan.actions import ActionKind
from planner.plan.plan import Plan
from planner.plan.plan_fields import PLAN_SCHEMA_VERSION
from planner.plan.plan_schema import PARTS
from planner.plan.simulator import Durations, simulate_plan
from planner.plan.stage import Segment
from profiler.errors import PlanFileError
from profiler.sample_spec import ConstantLeaf, TensorLeaf

FORMATS = Path(__file__).resolve().parents[1] / "data" / "formats"


def _skips(plan: Plan) -> None:
    """Of five layers on three stages x goes from the first past the second; all is recomputed; sizes differ."""
    assert plan.micro_batch_sizes == (3,) * 4 + (2,) * 9
    assert [(stage.first_layer, stage.stop_layer) for stage in plan.stages] == [(0, 2), (2, 4), (4, 5)]
    assert [stage.recompute for stage in plan.stages] == [
        (Segment(first=stage.first_layer, stop=stage.stop_layer),) for stage in plan.stages
    ]
    assert [(skip.ends, skip.values) for skip in plan.skips] == [((0, 2), ("x",))]
    assert plan.skips[0].times_at(3).send_forward_s > plan.skips[0].times_at(2).send_forward_s > 0
    assert {entry.micro_batch_size for stage in plan.stages for entry in stage.times} == {2, 3}


def _chunks(plan: Plan) -> None:
    """Four stages on two ranks, two chunks each, and that twice, side by side; ranks need the sum of their chunks."""
    assert (plan.schedule, plan.K, plan.chunks, plan.ranks, plan.replicas) == ("interleaved", 4, 2, 2, 2)
    assert [stage.rank for stage in plan.stages] == [0, 1, 0, 1]
    assert [[device.name for device in stage.devices] for stage in plan.stages[:2]] == [
        ["cuda:0", "cuda:1"],
        ["cuda:2", "cuda:3"],
    ]
    assert plan.stages[0].all_reduce_s > plan.stages[1].all_reduce_s == 0  # which has nothing to train
    assert plan.rank_memory(0).activations == plan.stages[0].memory.activations + plan.stages[2].memory.activations


def _rank_memories(plan: Plan) -> None:
    """What the chunks of a rank need together at one moment is less than the sum of what each needs at its own."""
    first, second = plan.stages[0].memory.activations, plan.stages[2].memory.activations
    assert plan.rank_memory(0) == plan.rank_memories[0]
    assert max(first, second) < plan.rank_memory(0).activations == 756 < first + second


def _orders(plan: Plan) -> None:
    """Each stage has its own order of passes, the last of which are passes of weights."""
    assert plan.schedule == "zb"
    assert len(plan.orders) == 3
    for order in plan.orders:
        assert [order.count(letter) for letter in "FIW"] == [12] * 3
        assert (order[0], order[-1]) == ("F", "W")
    assert plan.stages[0].memory.deferred > 0
    assert plan.stages[0].times_at(1).weight_s > 0
    kinds = {action.kind for actions in plan.actions() for action in actions}
    assert {ActionKind.I, ActionKind.W} <= kinds
    assert ActionKind.B not in kinds


def _hosts(plan: Plan) -> None:
    """Two hosts of two devices: the boundary between them takes longer than the two inside."""
    assert [stage.device.name for stage in plan.stages] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    first, between, second, _ = (stage.times_at(1).send_forward_s for stage in plan.stages)
    assert first == second == pytest.approx(1e-6 + 80 / 1e9)
    assert between == pytest.approx(1e-4 + 80 / 1e6)


def _adjacent(plan: Plan) -> None:
    """Two hosts of two devices: each has both replicas of a stage, which average inside it."""
    assert (plan.processes, plan.positions) == (((0, 1), (2, 3)),) * 2
    assert [stage.all_reduce_s for stage in plan.stages] == pytest.approx([0.0625, 0.0625])


def _placed(plan: Plan) -> None:
    """The first stage is on the second host, whose devices are slower, and runs in the last processes."""
    assert (plan.positions, plan.devices_per_host) == (((2, 3), (0, 1)), 2)
    assert (plan.processes, plan.processes_by_host) == (plan.positions, {0: 2, 1: 2})
    assert [stage.device.kind for stage in plan.stages] == ["old", "new"]
    assert "2 processes on each of hosts 0 and 1, numbered in the order of their devices" in repr(plan)


def _shared_optimizer(plan: Plan) -> None:
    """Two replicas share the optimizer's state of a recipe of mixed precision; throughput, MFU and doubt are said."""
    assert (plan.shard_optimizer, plan.replicas, plan.sample.precision) == (True, 2, "bf16-mixed")
    prediction = plan.prediction
    assert (prediction.device_flops_per_s, prediction.mfu) == (1.5e12, 0.25)
    assert prediction.tokens_per_s == pytest.approx(16 * prediction.samples_per_s)
    doubt = prediction.doubt
    assert doubt is not None
    assert doubt.lines(1.0)[0].startswith("in doubt: step 950 ms to 1.12 s, peak memory 90% to 102%")
    assert "20% slower" in doubt.lines(1.0)[1]
    assert "30% off" in doubt.lines(1.0)[2]


def _unused(plan: Plan) -> None:
    """The search was interrupted, devices are idle, and a rule forbids a faster plan."""
    assert plan.interrupted
    assert plan.prediction.gap == pytest.approx(0.25)
    assert plan.stages[0].device.threads == 2
    assert plan.unused is not None
    assert (plan.unused.devices, plan.unused.looser is not None) == (2, True)
    assert "2 devices stay idle" in plan.unused.lines(1.0)[0]
    assert "set micro_batches_per_stage=2" in plan.unused.lines(1.0)[1]


def _looser_chunks(plan: Plan) -> None:
    """A rule is one of ranks: of two stages in two chunks there is one, with four micro-batches."""
    assert plan.unused is not None
    assert "K = 2 in 2 chunks a rank, M = 4" in plan.unused.lines(1.0)[1]
    assert "set micro_batches_per_stage=4 for it" in plan.unused.lines(1.0)[1]


def _sample(plan: Plan) -> None:
    """How the model was traced: with static shapes, conditions, chances, and a function that is called as it is."""
    sample = plan.sample
    assert sample.leaves == (
        TensorLeaf(shape=(2, 3), dtype="float32", batch_dim=0),
        TensorLeaf(shape=(3,), dtype="bool", batch_dim=None),
        ConstantLeaf(value=None),
    )
    assert (sample.only_micro_batch_size, sample.autocast, sample.stages) == (2, "bfloat16", 6)
    assert (sample.keep_together, sample.called_as_is) == (("blocks.1",), ("made_up.layers:scan",))
    assert [(one.module, one.answer) for one in sample.decisions] == [("blocks.0", True), ("", 3)]
    assert [one.code for one in sample.chances] == ["if torch.rand(1) < self.drop:"]
    assert "2 conditions checked in each micro-batch" in sample.means


def _version_1(plan: Plan) -> None:
    """Two stages, each recomputed as a whole by GPipe's schedule; micro-batches of 2 and 1 samples."""
    assert (plan.K, plan.schedule, plan.replicas, plan.micro_batch_sizes) == (2, "gpipe", 1, (2,) + (1,) * 7)
    assert [(stage.device.name, stage.rank) for stage in plan.stages] == [("cuda:0", 0), ("cuda:1", 1)]
    assert [stage.recompute for stage in plan.stages] == [(Segment(first=0, stop=2),), (Segment(first=2, stop=4),)]
    assert plan.stages[0].times_at(1).send_forward_s == 0.001008
    assert plan.stages[1].memory.activations == 64
    assert plan.prediction.step_s == 17.002016


def _first(plan: Plan) -> None:
    """Four stages, 1F1B, nothing else."""
    assert (plan.K, plan.M, plan.schedule) == (4, 16, "1f1b")
    assert plan.prediction.step_s == pytest.approx(1.67, abs=0.01)
    assert plan.prediction.doubt is None


def _copies(plan: Plan) -> None:
    """The ends of messages copy half and a quarter of their seconds, also of what skips a stage."""
    assert [stage.copied for stage in plan.stages] == [(0.5, 0.25), (0.5, 0.25), (0.0, 0.0)]
    assert plan.skips[0].copied == (0.5, 0.25)
    message_s, skipping_s = plan.stages[0].times_at(1).send_forward_s, plan.skips[0].times_at(1).send_forward_s
    assert (message_s, skipping_s) == (0.01, 0.5)
    durations = Durations.of(plan)
    assert [row[0] for row in durations.forward_s] == pytest.approx(
        [1 + (message_s + skipping_s) / 2, 2 + message_s / 2 + message_s / 4, 1 + (message_s + skipping_s) / 4]
    )
    assert [row[0] for row in durations.backward_s] == pytest.approx(
        [2 + (message_s + skipping_s) / 4, 4 + message_s / 2 + message_s / 4, 2 + (message_s + skipping_s) / 2]
    )
    assert [row[0] for row in durations.send_forward_s] == pytest.approx([message_s / 4, message_s / 4, 0])
    assert [row[0] for row in durations.skips[0, 2]] == pytest.approx([skipping_s / 4] * 2)


def _cut_at(plan: Plan) -> None:
    """The same as `_sample`, traced with a layer that begins at a module."""
    _sample(plan)
    assert plan.sample.cut_at == ("blocks.1.mlp",)


OF_EARLIER_FORM = ("plan-2-adjacent",)
"""Of today's version, and with a field that has been replaced since."""
MEANINGS: dict[str, Callable[[Plan], None]] = {
    "plan-1": _version_1,
    "plan-2": _first,
    "plan-2-skips": _skips,
    "plan-2-chunks": _chunks,
    "plan-2-rank-memories": _rank_memories,
    "plan-2-orders": _orders,
    "plan-2-hosts": _hosts,
    "plan-2-adjacent": _adjacent,
    "plan-2-placed": _placed,
    "plan-2-shared-optimizer": _shared_optimizer,
    "plan-2-unused": _unused,
    "plan-2-looser-chunks": _looser_chunks,
    "plan-2-sample": _sample,
    "plan-2-copies": _copies,
    "plan-2-cut-at": _cut_at,
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_committed_plan_means_what_it_meant(name: str, tmp_path: Path) -> None:
    file = FORMATS / f"{name}.json"
    plan = Plan.load(file)
    MEANINGS[name](plan)
    if name.startswith(f"plan-{PLAN_SCHEMA_VERSION}") and name not in OF_EARLIER_FORM:
        assert plan.to_json() == file.read_text()
    else:  # it is written in today's form, and means the same
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
    assert simulate_plan(plan).makespan_s + plan.prediction.optimizer_s == pytest.approx(
        plan.prediction.step_s, rel=0.3
    )


def test_every_committed_plan_is_read() -> None:
    assert {file.stem for file in FORMATS.glob("plan-*.json")} == set(MEANINGS)
    versions = {int(name.split("-")[1]) for name in MEANINGS}
    assert versions == {*range(1, PLAN_SCHEMA_VERSION + 1)}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("plan-2", {"schema_version": 1}),
        ("plan-2-chunks", {"schema_version": 1}),
        ("plan-1", {"schema_version": 2}),
        ("plan-1", {"schedule": "1f1b"}),
        ("plan-1", {"replicas": 2}),
        ("plan-1", {"schema_version": True}),
        ("plan-1", {"schema_version": 0}),
        ("plan-1", {"stages": []}),
        ("plan-2-adjacent", {"adjacent_replicas": False}),
        ("plan-2-adjacent", {"positions": [[0, 1], [2, 3]]}),
        ("plan-2-adjacent", {"replicas": 10**12}),
        ("plan-2-adjacent", {"stages": [7]}),
    ],
)
def test_what_no_file_of_its_version_says_is_refused(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    """A file of today that says that it is of the first version must not be read as one."""
    record = json.loads((FORMATS / f"{name}.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(record | changed))
    with pytest.raises(PlanFileError, match=r"\$\."):
        Plan.load(tmp_path / "plan.json")


def test_every_field_of_the_format_is_in_a_committed_plan() -> None:
    """Whoever adds a field adds a file that has it, and says in `MEANINGS` what it means."""
    said = {name for file in FORMATS.glob("plan-*.json") for name in _said(Plan.load(file))}
    fields = {f"{part.__name__}.{field}" for part in PARTS for field in part.model_fields}
    assert fields - said == set()


def _said(value: Any) -> Iterator[str]:
    """Fields of a plan that say something else than their default."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            inner = getattr(value, name)
            if field.is_required() or inner != field.get_default() or name in ("kind", "schema_version"):
                yield f"{type(value).__name__}.{name}"
            yield from _said(inner)
    elif isinstance(value, tuple):
        for inner in value:
            yield from _said(inner)


LEFT_OUT = (
    *("rank_memories", "positions", "devices_per_host", "shard_optimizer", "interrupted", "copied", "looser.chunks"),
    *("prediction.doubt", "prediction.tokens_per_s", "prediction.device_flops_per_s", "prediction.mfu"),
    *("sample.stages", "sample.chances", "sample.precision", "sample.cut_at"),
)
"""What files leave out, and of which no other part of them says whether they had it."""


def _places(part: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Of all keys in a file, of lists only those of the first entry."""
    for place, inside in part.items() if isinstance(part, dict) else enumerate(part[:1]):
        if isinstance(part, dict):
            yield (*path, place)
        if isinstance(inside, dict | list):
            yield from _places(inside, (*path, place))


@pytest.mark.parametrize("name", sorted(path.name for path in FORMATS.glob("plan-2*.json")))
def test_a_file_without_one_of_its_keys_is_refused_or_means_the_same(name: str, tmp_path: Path) -> None:
    """Without its schedule a plan was one of gpipe; without what it recomputes it kept everything."""
    text = (FORMATS / name).read_text(encoding="utf-8")
    whole = Plan.load(FORMATS / name)
    for path in _places(json.loads(text)):
        fields = part = json.loads(text)
        for place in path[:-1]:
            part = part[place]
        value = part.pop(path[-1])
        (tmp_path / "plan.json").write_text(json.dumps(fields))
        try:
            found = Plan.load(tmp_path / "plan.json")
        except PlanFileError:
            continue
        named = ".".join(place for place in path if isinstance(place, str))
        assert found == whole or named.endswith((*LEFT_OUT, "adjacent_replicas")), (path, value)


def _in_times(fields: dict[str, Any], stage: int, **changes: float) -> None:
    for entry in fields["stages"][stage]["times"]:
        entry.update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fields: fields.update(schedule="1f1b"), "'1f1b' does not split the backward pass, and stage 0 keeps"),
        (lambda fields: fields["stages"][1].update(recompute=[]), "stage 1 recomputes nothing, and its recompute_s"),
        (
            lambda fields: [entry.update(forward_s=entry["forward_s"] * 1e3) for entry in fields["stages"][0]["times"]],
            "the passes of rank 0 take",
        ),
        (lambda fields: fields["stages"][0].pop("all_reduce_s"), "$.stages[0].all_reduce_s: is missing"),
        (
            lambda fields: fields["stages"][0].update(all_reduce_s=0.5),
            "there is 1 replica, and all_reduce_s of stage 0",
        ),
        (lambda fields: _in_times(fields, -1, send_forward_s=1e-9), "is the last one, and its send_forward_s"),
        (
            lambda fields: _in_times(fields, 0, send_backward_s=1e-9),
            "stage 0 is the first one, and its send_backward_s",
        ),
        (lambda fields: _in_times(fields, 1, send_backward_s=1e3), "a message of stage 1 takes 1000 s, and step_s is"),
        (lambda fields: fields["prediction"].update(samples_per_s=1e9), "samples_per_s is 1000000000.0, with"),
        (lambda fields: fields["prediction"].update(optimizer_s=0.0), "optimizer_s is 0.0, and by the stages it is"),
        (lambda fields: fields["prediction"].update(bubble=0.0), "bubble is 0.0, and by the passes of all stages"),
        (lambda fields: fields["prediction"].update(bubble=1.0), "bubble is 1.0, and by the passes of all stages"),
        (lambda fields: fields["stages"][0]["memory"].update(parameters=2**50), "bytes of memory on"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    """Of a plan that says one thing of its stages and another one of them all, or of what no plan has."""
    name = "plan-2-skips.json" if "recompute" in said else "plan-2-orders.json"
    fields = json.loads((FORMATS / name).read_text(encoding="utf-8"))
    if "split" in said:
        fields["orders"] = []
    change(fields)
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    with pytest.raises(PlanFileError, match=re.escape(said)):
        Plan.load(tmp_path / "plan.json")
