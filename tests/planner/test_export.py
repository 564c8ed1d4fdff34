"""Plans for other engines: what is written for each, what moves and what that costs, and what is refused."""

import ast
import itertools
import re
import tomllib
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from planner import Plan, plan_from_profile
from planner.explain import _with_cuts_s
from planner.export import export as exporting
from planner.export.export import TARGETS
from planner.export.hugging_face import one_after_the_other_s
from planner.export.megatron import layout_text
from planner.export.moving import Form, _searched
from planner.export.target import Recompute
from planner.export.units import block_paths, child_paths, listed_paths, units_of
from planner.plan.schedules import SCHEDULES, schedules_of
from planner.plan.simulator import simulate_plan
from planner.plan.stage import Segment
from planner.plan.units import seconds_text
from planner.planned_for import as_it_is_s, evaluated, placed_as, problem_of
from planner.solve.build_plan import make_plan
from profiler.device import Cluster
from profiler.errors import ArgumentError, ForeignPlanError, InfeasibleError
from tests.planner.exported import BATCH, Case, case

SCHEDULE = {"deepspeed": "1f1b", "megatron-lm": "1f1b"}


@pytest.fixture(autouse=True)
def traced_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of `exported` are traced once; that an export traces by itself is tested without."""

    def known(model: nn.Module, plan: Plan) -> Any:
        return next(entry for entry in map(case, NAMES) if entry.model is model).sequence

    monkeypatch.setattr(exporting, "traced_as_planned", known)


NAMES = ("decoder", "skipping", "tied", "counting", "norms", "plain")


IN_A_V = {"schedule": "zb-v", "stages": 4, "chunks": 2}


def planned(name: str, target: str, **settings: Any) -> tuple[Case, Plan]:
    settings = {"schedule": SCHEDULE.get(target, "gpipe"), "stages": 2, **settings}
    return case(name), case(name).plan(**settings)


def test_units_are_what_engines_put_on_stages() -> None:
    decoder, skipping, norms = (case(name).model for name in ("decoder", "skipping", "norms"))
    blocks = [f"layers.{index}" for index in range(4)]
    assert listed_paths(decoder) == block_paths(decoder) == ("embed", *blocks, "norm", "head")
    assert listed_paths(skipping) == ("decoder",)
    assert block_paths(skipping) == tuple(f"decoder.{path}" for path in ("embed", *blocks, "norm", "head"))
    assert child_paths(norms) == ("0", "1", "2", "3")
    assert block_paths(norms) == ("0.0", "0.1", "0.2", "1", "2", "3")


@pytest.mark.parametrize("name", ["decoder", "skipping", "norms", "plain"])
def test_a_border_parts_no_unit_and_all_others_do(name: str) -> None:
    sequence = case(name).sequence
    units = units_of(sequence, case(name).model, block_paths)
    paths = {path: number for number, path in enumerate(units.paths)}
    for position in range(1, len(sequence)):
        sides = [
            {number for layer in side for module in layer.module_paths for path, number in paths.items()
             if f"{module}.".startswith(f"{path}.")}
            for side in (sequence.layers[:position], sequence.layers[position:])
        ]  # fmt: skip
        assert (position in units.before) == (not sides[0] & sides[1] and all(sides)), position
        if position in units.before:
            assert max(sides[0]) < units.before[position] <= min(sides[1])


@pytest.mark.parametrize("target", ["torchtitan", "megatron-lm", "deepspeed", "huggingface"])
@pytest.mark.parametrize("stages", [2, 3])
def test_cuts_move_to_the_best_borders(target: str, stages: int) -> None:
    """Of all choices of borders, each planned by itself, none is faster; and the cost is the difference."""
    known, plan = planned("decoder", target, stages=stages)
    units = units_of(known.sequence, known.model, block_paths)
    made = plan.export(target, known.model)
    problem = problem_of(plan, known.profile)
    choices = {
        cuts: _with_cuts_s(plan, problem, cuts)
        for cuts in itertools.combinations(sorted(units.before), stages - 1)
        if target != "megatron-lm" or all(1 <= units.before[cut] <= 5 for cut in cuts)
    }
    assert made.plan.prediction.step_s == pytest.approx(min(choices.values()), rel=1e-9)
    cuts = [stage.stop_layer for stage in made.plan.stages[:-1]]
    assert {*cuts} <= units.before.keys()
    assert made.original_s == pytest.approx(plan.prediction.step_s, rel=1e-9)
    assert made.cost_s == made.plan.prediction.step_s - made.original_s >= -1e-12
    moved = [(stage, old.first_layer, new.first_layer) for stage, (old, new) in pairs(plan, made.plan)]
    assert [(move.stage, move.before, move.after) for move in made.moves] == moved
    assert made.plan.prediction.step_s == pytest.approx(simulate_plan(made.plan).step_s)


def recomputing_blocks(known: Case, target: str, **settings: Any) -> Plan:
    """The best plan whose cuts part no block, but it recomputes each block by itself."""
    plan = planned(known_name(known), target, **settings)[1].export(target, known.model).plan
    units = units_of(known.sequence, known.model, block_paths)
    stages = tuple(
        stage.model_copy(
            update={
                "recompute": tuple(
                    Segment(first=first, stop=stop)
                    for first, stop in units.spans(stage.first_layer, stage.stop_layer, blocks_only=True)
                )
            }
        )
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})


def known_name(known: Case) -> str:
    return next(name for name in NAMES if case(name) is known)


def pairs(plan: Plan, other: Plan) -> list[Any]:
    both = enumerate(zip(plan.stages, other.stages, strict=True))
    return [(stage, two) for stage, two in both if two[0].first_layer != two[1].first_layer]


def cut_inside(known: Case, **settings: Any) -> Plan:
    """The best plan with two stages that cuts a block in two."""
    units = units_of(known.sequence, known.model, block_paths)
    plan = known.plan(stages=2, **settings)
    problem = problem_of(plan, known.profile)
    positions = frozenset(range(1, len(known.sequence))) - units.before.keys()
    found = _searched(problem, plan, Form(positions, Recompute.ANY, None, "", ""), "auto")
    if found is None or {found.stages[0].stop_layer} <= units.before.keys():
        (cut,) = [*sorted(positions)][len(positions) // 2 : len(positions) // 2 + 1]
        found = _searched(problem, plan, Form(frozenset({cut}), Recompute.ANY, None, "", ""), "auto")
    assert found is not None
    return found


def test_an_export_says_what_moved_and_what_it_costs() -> None:
    known = case("decoder")
    plan = cut_inside(known, schedule="1f1b")
    with pytest.raises(ArgumentError, match=r"cuts inside of blocks .* must move for huggingface.*pass profile="):
        plan.export("huggingface", known.model)
    made = plan.export("huggingface", known.model, profile=known.profile)
    (move,) = made.moves
    assert f"stage 1 begins at {move.path} (layer {move.after} in place of {move.before})" in str(made)
    assert re.search(r"by our prediction, [\d.]+ \w+ \([\d.]+%\) (more|less) than planned", made.changed)
    assert made.cost_share == pytest.approx(made.plan.prediction.step_s / made.original_s - 1)
    with pytest.raises(ForeignPlanError, match="not made from this profile"):
        plan.export("huggingface", known.model, profile=case("plain").profile)


def test_a_plan_that_fits_as_it_is_needs_no_profile() -> None:
    known, plan = planned("decoder", "torch.distributed.pipelining")
    loaded = Plan.model_validate_json(plan.to_json())
    made = loaded.export("torch.distributed.pipelining", known.model)
    assert (made.plan, made.moves, made.cost_s, made.cost_share) == (plan, (), 0.0, 0.0)
    assert made.changed == "nothing moved: the engine runs the plan as it is"


def test_an_export_traces_the_model_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    known, plan = planned("plain", "torchgpipe")
    assert plan.export("torchgpipe", known.model, profile=known.profile).module is known.model
    with pytest.raises(ForeignPlanError, match="made for a model with fingerprint"):
        plan.export("torchgpipe", nn.Sequential(nn.Linear(6, 3)), profile=known.profile)


# Each target's own words.


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_torchs_csv_has_every_pass_of_every_rank_in_our_order(schedule: str) -> None:
    known, plan = planned("skipping", "", schedule=schedule, recompute="always")
    text = plan.export("torch.distributed.pipelining", known.model).files["schedule.csv"]
    for line, actions in zip(text.splitlines(), plan.actions(), strict=True):
        ours = [(a.stage, str(a.kind), a.micro_batch) for a in actions if str(a.kind) in ("F", "B", "I", "W")]
        tokens = [re.fullmatch(r"(\d+)([FBIW])(\d+)", token) for token in line.split(",")]
        assert [(int(t[1]), t[2], int(t[3])) for t in tokens if t] == ours
        assert len(ours) == len(tokens)


@pytest.mark.parametrize("name", ["decoder", "skipping"])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_stage_modules_in_a_row_are_the_model(name: str, recompute: str) -> None:
    known, plan = planned(name, "", stages=3, recompute=recompute)
    pipe = plan.export("torch.distributed.pipelining", known.model).value
    _, expected = known.gradients()
    known.model.zero_grad()
    names: set[str] = set()
    tensors = pipe.inputs(*known.inputs)
    for module in pipe.modules:
        tensors = module(*tensors)
        own = dict(module.named_parameters())
        assert names.isdisjoint(own)
        assert all(dict(known.model.named_parameters())[path] is parameter for path, parameter in own.items())
        names |= own.keys()
    output = {"logits": tensors[0]} if name == "skipping" else tensors[0]
    known.loss_fn(output, known.target).backward()
    for path, gradient in expected.items():
        torch.testing.assert_close(known.model.get_parameter(path).grad, gradient)
    known.model.zero_grad()
    with pytest.raises(ArgumentError, match="cannot be switched to evaluation"):
        pipe.modules[0].eval()
    with pytest.raises(ArgumentError, match=f"and {len(known.inputs) + 2} came"):
        pipe.modules[0](*known.inputs, torch.ones(()), torch.ones(()))


def test_where_the_backward_pass_is_split_results_can_be_detached_in_place() -> None:
    """torch's engine does so, and a tensor that passed through as a view ended the step of a stage in the middle."""
    known, plan = planned("skipping", "", stages=3, schedule="zb-h1")
    pipe = plan.export("torch.distributed.pipelining", known.model).value
    tensors = pipe.inputs(*known.inputs)
    for module in pipe.modules:
        given, tensors = tensors, module(*tensors)
        assert {tensor.data_ptr() for tensor in tensors}.isdisjoint(tensor.data_ptr() for tensor in given)
        tensors = tuple(tensor.detach_().requires_grad_() for tensor in tensors)


def whole_stages(known: Case) -> Plan:
    """A plan that torchgpipe can have and that recomputes all."""
    plan = planned(known_name(known), "torchgpipe")[1].export("torchgpipe", known.model).plan
    stages = (
        stage.model_copy(update={"recompute": (Segment(first=stage.first_layer, stop=stage.stop_layer),)})
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": tuple(stages)})


def trained_by_torchgpipe(known: Case, plan: Plan) -> tuple[Any, float, dict[str, Tensor]]:
    gpipe = pytest.importorskip("torchgpipe")
    made = plan.export("torchgpipe", known.model, profile=known.profile)
    pipeline = gpipe.GPipe(made.module, **{**made.value, "devices": ["cpu"] * plan.K})
    known.model.zero_grad()
    given = known.inputs if len(known.inputs) > 1 else known.inputs[0]
    output = pipeline(given)
    loss = known.loss_fn(
        {"logits": output} if isinstance(known.model, type(case("skipping").model)) else output, known.target
    )
    loss.backward()
    found = {name: parameter.grad for name, parameter in known.model.named_parameters() if parameter.grad is not None}
    return made, float(loss.detach()), found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "recompute"), [("plain", "never"), ("plain", "always"), ("skipping", "always")])
def test_torchgpipe_trains_the_model_by_the_plan(name: str, recompute: str) -> None:
    known, plan = planned(name, "torchgpipe", recompute=recompute)
    if name == "plain":  # such cuts as torchgpipe can have
        plan = plan.export("torchgpipe", known.model).plan if recompute == "never" else whole_stages(known)
    expected_loss, expected = known.gradients()
    made, loss, found = trained_by_torchgpipe(known, plan)
    assert sum(made.value["balance"]) == len(list(made.module))
    assert (made.module is known.model) == (name == "plain")
    assert made.value["chunks"] == plan.M == 4
    assert made.value["checkpoint"] == ("except_last" if (name, recompute) == ("plain", "always") else "never")
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(found, expected)
    known.model.zero_grad()


def test_torchgpipe_defers_batch_normalization() -> None:
    """A child without operations is counted where it is declared, and no block is cut."""
    known, plan = planned("norms", "torchgpipe")
    made = plan.export("torchgpipe", known.model, profile=known.profile)
    assert made.value["deferred_batch_norm"]
    assert made.value["balance"] in ([2, 2], [3, 1])
    assert sum(made.value["balance"]) == 4


@pytest.mark.parametrize(
    "settings", [{}, {"schedule": "zb-h1"}, {"recompute": "always"}, {"replicas": 2, "micro_batches": 2}]
)
def test_torchtitans_fragment_is_toml(settings: dict[str, Any]) -> None:
    known, plan = planned("decoder", "torchtitan", **settings)
    if "recompute" in settings:
        plan = recomputing_blocks(known, "torchtitan")
    made = plan.export("torchtitan", known.model)
    tables = tomllib.loads(made.text)
    assert tables == made.value == tomllib.loads(made.files["torchtitan.toml"])
    parts = tables["parallelism"]["module_fqns_per_model_part"]
    assert [path for part in parts for path in part] == [*listed_paths(known.model)]
    assert tables["training"]["local_batch_size"] == BATCH // plan.replicas
    assert (
        tables["training"]["local_batch_size"] // tables["parallelism"]["pipeline_parallel_microbatch_size"] == plan.M
    )
    assert tables["activation_checkpoint"]["mode"] == ("full" if "recompute" in settings else "none")
    named = tables["parallelism"].get("pipeline_parallel_schedule_csv")
    assert (named is not None) == ("schedule" in settings)
    assert named is None or made.files[named].startswith("0F0,")


def megatron_stages(layout: str) -> list[str]:
    """Megatron's grammar as its documentation has it: letters E t m L, `x*n`, `(...)*n`, commas mean nothing."""
    layout = layout.replace(",", "")
    while match := re.search(r"\(([^()]+)\)\*(\d+)|([EtmL|])\*(\d+)", layout):
        whole = (match[1] or match[3]) * int(match[2] or match[4])
        layout = layout[: match.start()] + whole + layout[match.end() :]
    assert {*layout} <= {*"EtmL|"}
    return layout.split("|")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_megatrons_layout_reads_back(blocks: list[int]) -> None:
    stages = ["t" * count for count in blocks]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    assert megatron_stages(layout_text(stages)) == stages


def test_megatron_gets_options() -> None:
    known = case("decoder")
    plan = recomputing_blocks(known, "megatron-lm")
    made = plan.export("megatron-lm", known.model)
    options = dict(zip(made.value[::2], made.value[1::2], strict=False))
    stages = megatron_stages(options["--pipeline-model-parallel-layout"])
    assert len(stages) == plan.K
    assert "".join(stages) == "EttttL"
    assert options["--num-layers"] == "4"
    assert int(options["--global-batch-size"]) == BATCH
    assert options["--recompute-num-layers"] == "1"
    assert made.value[-1] == "--untie-embeddings-and-output-weights"
    assert "without operations and hooks of this one" in made.notes[1]
    segments = [segment for stage in made.plan.stages for segment in stage.recompute]
    assert len(segments) == 4  # one for each block, and none for what is before and after them
    assert made.plan == plan


def test_deepspeed_gets_the_bounds_of_its_parts() -> None:
    known, plan = planned("decoder", "deepspeed")
    made = plan.export("deepspeed", known.model)
    assert made.value["layers"] == [*block_paths(known.model)]
    assert made.value["parts"][0] == 0
    assert made.value["parts"][-1] == len(made.value["layers"])
    config = made.value["config"]
    assert (
        config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    )
    lines = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.walk(ast.parse(made.text))
        if isinstance(node, ast.Assign)
    }
    assert ast.literal_eval(lines["self.parts"]) == made.value["parts"]
    assert plan.export("deepspeed", known.model).files == made.files


def test_hugging_face_gets_a_device_map_of_every_tensor() -> None:
    known, plan = planned("skipping", "huggingface")
    made = plan.export("huggingface", known.model)
    device_map = made.value["device_map"]
    names = [name for name, _ in (*known.model.named_parameters(), *known.model.named_buffers())]
    assert all(sum(name.startswith(f"{path}.") for path in device_map) == 1 for name in names)
    assert [*dict.fromkeys(device_map.values())] == [stage.device.name for stage in plan.stages]
    (point,) = made.value["split_points"]
    assert device_map[point] == plan.stages[1].device.name
    assert one_after_the_other_s(plan) > plan.prediction.step_s


# What is refused.


@pytest.mark.parametrize("target", [name for name in TARGETS if name not in ("megatron-lm", "deepspeed")])
def test_tied_weights_apart_are_refused(target: str) -> None:
    """Shown by the engine itself: torch's adds up nothing, and the gradient of each copy lacks the other's part."""
    known, plan = planned("tied", target)
    with pytest.raises(InfeasibleError, match=r"embed.weight and head.weight is one parameter that ranks 0, 1 use"):
        plan.export(target, known.model)


def test_megatron_and_deepspeed_add_up_tied_weights() -> None:
    known, plan = planned("tied", "megatron-lm")
    assert "--untie-embeddings-and-output-weights" not in plan.export("megatron-lm", known.model).value
    assert "TiedLayerSpec" in " ".join(plan.export("deepspeed", known.model).notes)


@pytest.mark.parametrize(
    ("name", "target", "settings", "message"),
    [
        ("norms", "torch.distributed.pipelining", {}, "moves running statistics with each micro-batch"),
        ("norms", "deepspeed", {}, "0.1.running_mean would be another for each M"),
        ("counting", "torch.distributed.pipelining", {"stages": 1}, "writes the buffer calls"),
        ("decoder", "torch.distributed.pipelining", {"micro_batches": 3}, "micro-batches hold 2 and 3 samples"),
        (
            "decoder",
            "torch.distributed.pipelining",
            {"replicas": 2, "micro_batches": 2},
            "averages no gradients, and R = 2",
        ),
        ("decoder", "torchtitan", IN_A_V, "torchtitan has no schedule 'zb-v'; plan with schedule 'gpipe' or '1f1b'"),
        ("decoder", "megatron-lm", IN_A_V, "Megatron-LM has no schedule 'zb-v'"),
        ("decoder", "deepspeed", IN_A_V, "DeepSpeed has no schedule 'zb-v'; plan with schedule '1f1b'"),
        ("decoder", "torchgpipe", IN_A_V, "torchgpipe has no schedule 'zb-v'; plan with schedule 'gpipe'"),
        ("decoder", "torchgpipe", {"schedule": "1f1b"}, "has no schedule '1f1b'; plan with schedule 'gpipe'"),
        ("decoder", "megatron-lm", {"schedule": "gpipe"}, "plan with schedule '1f1b' or 'interleaved'"),
        ("plain", "megatron-lm", {}, "a transformer of one list of blocks, and this model has"),
        ("skipping", "torchtitan", {}, "this model has 0 such places where K = 2 stages need 1"),
        ("skipping", "deepspeed", {"stages": 4}, "where K = 4 stages need 3; plan with stages=3 or fewer"),
        ("plain", "torchgpipe", {"stages": 4}, "children of the nn.Sequential, and this model has 2 such places"),
    ],
)
def test_what_an_engine_cannot_is_refused_with_what_to_do(
    name: str, target: str, settings: dict[str, Any], message: str
) -> None:
    known, plan = planned(name, target, **settings)
    with pytest.raises(InfeasibleError, match=re.escape(message)):
        plan.export(target, known.model, profile=known.profile)


@pytest.mark.parametrize("target", TARGETS)
def test_who_takes_a_plan_under_autocast_computes_in_that_region(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four engines took it without a word, and would have computed in float32."""
    known, plan = planned("decoder", target)
    sample = plan.sample.model_copy(update={"autocast": "bfloat16"})
    sequence = replace(known.sequence, sample=sample)
    monkeypatch.setattr(exporting, "traced_as_planned", lambda *_: sequence)
    asked = plan.model_copy(update={"sample": sample})
    try:
        made = asked.export(target, known.model, profile=known.profile)
    except InfeasibleError as refusal:
        assert "is not told autocast=torch.bfloat16 with a plan" in str(refusal)
        instead = re.findall("precision='(.*?)'", str(refusal))
        for precision in instead:
            recipe = plan.model_copy(update={"sample": plan.sample.model_copy(update={"precision": precision})})
            assert recipe.export(target, known.model, profile=known.profile).text
        assert instead or "a model in the types that you set there" in str(refusal)
        return
    values = known.inputs
    for module in made.value.modules if made.module is None else ():
        values = module(*values)
    output = values[0] if made.module is None else made.module(*values)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(output, known.model(*known.inputs))


@pytest.mark.parametrize("target", ["torchgpipe", "huggingface"])
def test_one_process_has_no_devices_of_two_hosts(target: str) -> None:
    """Both stages were to be on cuda:0."""
    known, plan = planned("plain", target)
    apart = plan.model_copy(update={"positions": ((0,), (4,)), "devices_per_host": 4})
    together = plan.model_copy(update={"positions": ((4,), (5,)), "devices_per_host": 4})
    with pytest.raises(InfeasibleError, match="runs in one process, and the plan is for devices of 2 hosts"):
        apart.export(target, known.model)
    assert together.export(target, known.model).value == plan.export(target, known.model).value


@pytest.mark.parametrize("target", ["torchtitan", "deepspeed", "megatron-lm"])
@pytest.mark.parametrize(
    ("positions", "said"),
    [(((0, 1), (2, 3)), None), (((0, 2), (1, 3)), "0, 2, 1, 3"), (((4, 5), (0, 2)), "4, 5, 0, 2"), ((), None)],
)
def test_who_numbers_processes_otherwise_is_told_where_they_belong(target: str, positions: Any, said: str) -> None:
    """These engines number the replicas of a stage one after the other."""
    known, plan = planned("decoder", target, replicas=2, micro_batches=2)
    fields = plan.model_dump() | {"positions": positions, "devices_per_host": 2 if positions else None}
    plan = Plan.model_validate(fields)  # which knows no cluster
    notes = [note for note in plan.export(target, known.model, profile=known.profile).notes if "belong" in note]
    assert [f"belong on devices {said} of the cluster" in note for note in notes] == [True] * (said is not None)


def test_what_a_step_takes_in_the_engines_own_order_is_said() -> None:
    """Steps that were exported as they are took 3.8 times as long where torchrun numbers processes."""
    known = case("decoder")
    hosts = Cluster.of("2x2xA100-40GB", link="nvlink3", between="10gbe")
    asked: Any = {"batch_size": BATCH, "micro_batches": 2, "micro_batches_per_stage": 1, "schedule": "1f1b"}
    plan = plan_from_profile(known.profile, hosts, stages=2, replicas=2, **asked)
    assert plan.positions == ((0, 1), (2, 3))
    assert not [note for note in plan.export("deepspeed", known.model).notes if "belong" in note]
    problem = problem_of(plan, known.profile, hosts)
    apart = placed_as(problem, plan, ((0, 2), (1, 3)))
    other = make_plan(apart, evaluated(apart, plan, [plan.stages[0].stop_layer], lambda first, stop: ()))
    assert other.positions == ((0, 2), (1, 3))
    made = other.made_from(known.profile, hosts).export("deepspeed", known.model)
    (note,) = [note for note in made.notes if "belong" in note]
    assert as_it_is_s(problem, made.plan) < made.plan.prediction.step_s
    assert f"a step would take {seconds_text(as_it_is_s(problem, made.plan))} by our prediction" in note
    assert "belong on devices 0, 2, 1, 3" in note


def test_a_plan_from_a_file_that_must_change_needs_the_links_that_it_was_made_for() -> None:
    """It was priced over the profile's one link: "10.5 % less than planned", where a step took a third more."""
    known = case("decoder")
    hosts = Cluster.of("2x1xA100-40GB", link="nvlink3", between="10gbe")
    asked: Any = {"batch_size": BATCH, "micro_batches": 2, "micro_batches_per_stage": 1, "schedule": "1f1b"}
    plan = plan_from_profile(known.profile, hosts, stages=2, cut_at=["layers.2.relu"], **asked)
    made = plan.export("deepspeed", known.model)
    assert made.moves
    loaded = Plan.model_validate_json(plan.to_json())
    with pytest.raises(ArgumentError, match="was made for other links; pass devices="):
        loaded.export("deepspeed", known.model, profile=known.profile)
    again = loaded.export("deepspeed", known.model, profile=known.profile, devices=hosts)
    assert (again.text, again.cost_s, again.notes) == (made.text, made.cost_s, made.notes)


def test_who_would_not_fit_in_the_engines_own_order_is_said() -> None:
    """Ranks stayed on devices of their own memory there, so no plan of unlike ones had a word about processes."""
    known = case("decoder")
    hosts = Cluster.of("2x1xA100-40GB", link="nvlink3", between="10gbe")
    asked: Any = {"batch_size": BATCH, "micro_batches": 2, "micro_batches_per_stage": 1, "schedule": "1f1b"}
    asked |= {"stages": 2, "cut_at": ["layers.1"]}
    needed = [stage.memory.total for stage in plan_from_profile(known.profile, hosts, **asked).stages]
    assert needed[0] != needed[1]
    in_order = plan_from_profile(known.profile, hosts, memory_limit=needed, **asked)
    assert in_order.positions == ((0,), (1,))
    assert not [note for note in in_order.export("torch.distributed.pipelining", known.model).notes if "belong" in note]
    other = plan_from_profile(known.profile, hosts, memory_limit=needed[::-1], **asked)
    assert other.positions == ((1,), (0,))
    (note,) = [n for n in other.export("torch.distributed.pipelining", known.model).notes if "belong" in n]
    larger = 0 if needed[0] > needed[1] else 1
    assert f"as torchrun does it, rank {larger} would not fit in its device's memory" in note


def test_an_unknown_target_is_named() -> None:
    known, plan = planned("plain", "torchgpipe")
    with pytest.raises(ArgumentError, match="there is no target 'torch-titan'; did you mean torchtitan; there are"):
        plan.export("torch-titan", known.model)


def test_files_are_written_into_a_folder(tmp_path: Any) -> None:
    known, plan = planned("skipping", "")
    made = plan.export("torch.distributed.pipelining", known.model)
    (written,) = made.save(tmp_path / "new")
    assert written.read_text() == made.text
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot write"):
        made.save(tmp_path / "file")


def test_trees_of_inputs_come_by_position_or_by_keyword() -> None:
    known, plan = planned("skipping", "")
    pipe = plan.export("torch.distributed.pipelining", known.model).value
    assert pytree.tree_all(torch.is_tensor, pipe.inputs(*known.inputs))
    with pytest.raises(ArgumentError, match="1 argument by position and 1 by keyword"):
        pipe.inputs(known.inputs[0], scale=known.inputs[1])
    with pytest.raises(ArgumentError, match="rank is 2, and the plan has ranks 0 to 1"):
        pipe.stages(2)


def test_engines_that_schedules_name_are_targets() -> None:
    named = {engine for record in SCHEDULES.values() for engine in record.elsewhere}
    assert named <= TARGETS.keys()
    assert schedules_of("deepspeed") == ("1f1b",)


class _OfThreeInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x + y + z


def test_a_model_that_is_called_otherwise_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    _, plan = planned("plain", "torchgpipe")
    with pytest.raises(ForeignPlanError, match=r"made for another model than this _OfThreeInputs: .*argument: 'y'"):
        plan.export("torchgpipe", _OfThreeInputs())
    with pytest.raises(ArgumentError, match=r"the model is a int; pass a torch.nn.Module"):
        plan.export("torchgpipe", 3)  # type: ignore[arg-type]
