import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.from_profile import plan_from_profile
from planner.keywords import SettingKeywords
from planner.plan.plan import Plan
from profiler.errors import InfeasibleError, PlanFileError

ROW = (0.25, 0.25, 0.5, 10, 4, 8, 8)


@pytest.fixture
def plan(profile_of, device):
    profile = profile_of({("a", 1): [ROW, ROW], ("a", 4): [ROW, ROW]})
    return plan_from_profile(profile, [device(), device()], batch_size=9, stages=2)


def test_round_trip_with_the_same_bytes_twice(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    loaded.save(tmp_path / "again.json")
    assert loaded == plan
    assert (tmp_path / "plan.json").read_bytes() == (tmp_path / "again.json").read_bytes()


@pytest.mark.parametrize("seconds_per_byte", [1e-9, 3.7, 3.7e8])
def test_an_optimizer_that_takes_nearly_all_of_a_step_is_no_contradiction(
    profile_of, device, tmp_path, seconds_per_byte
):
    """What the passes take is a difference then, of which few digits are left, and the file was refused."""
    rows = {("a", size): [(0.31 * size, 0.1, 0.73 * size, 10, 4, 8, 8)] * 3 for size in (1, 4)}
    profile = profile_of(rows, parameters=[(10**7, True)], readers=[[0], [], []], optimizer=(seconds_per_byte, 1.0))
    plan = plan_from_profile(profile, [device(), device()], batch_size=9, stages=2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[*HealthCheck])
def test_any_plan_is_what_is_read_back(profiles, device, tmp_path, data):
    """None contradicts itself."""
    profile = data.draw(profiles(most_layers=5))
    seconds_per_byte = data.draw(st.sampled_from((0.0, 1e-9, 3.7, 3.7e8)))
    optimizers = tuple(one.model_copy(update={"seconds_per_byte": seconds_per_byte}) for one in profile.optimizers)
    profile = profile.model_copy(update={"optimizers": optimizers})
    asked: SettingKeywords = {
        "micro_batches_per_stage": 1,
        "schedule": data.draw(st.sampled_from(("gpipe", "1f1b", "interleaved", "auto"))),
        "replicas": data.draw(st.sampled_from((1, "auto"))),
        "recompute": data.draw(st.sampled_from(("auto", "always"))),
    }
    if asked["schedule"] == "interleaved":
        asked["chunks"] = 2
    devices = [device(kind, 1500) for kind in data.draw(st.sampled_from(("aaaa", "aabb")))]
    try:
        plan = plan_from_profile(profile, devices, batch_size=data.draw(st.sampled_from((4, 8))), **asked)
    except InfeasibleError:
        return
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def change(path, value):
    def edit(record):
        *parents, last = path
        for part in parents:
            record = record[part]
        record[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(["colour"], "red"), r"\$\.colour: Extra inputs"),
        (change(["stages", 1, "colour"], "red"), r"\$\.stages\[1\]\.colour: Extra inputs"),
        (change(["batch_size"], "9"), r"\$\.batch_size: Input should be a valid integer"),
        (change(["prediction", "step_s"], float("nan")), r"\$\.prediction\.step_s: "),
        (change(["schema_version"], 1), r"\$\.schema_version: .* version 1 .* this release reads 2; make it anew"),
        (change(["stages", 0, "times", 0, "forward_s"], -1.0), r"\$\.stages\[0\]\.times\[0\]\.forward_s: "),
        (change(["batch_size"], 10), "do not make up a batch of 10"),
        (change(["stages", 1, "first_layer"], 0), "expected to start at 1"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_json_path(plan, tmp_path, edit, message):
    record = json.loads(plan.to_json())
    edit(record)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(record))
    with pytest.raises(PlanFileError, match=message):
        Plan.load(path)


def test_a_truncated_file_is_refused(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json()[:200])
    with pytest.raises(PlanFileError, match=r"plan\.json: \$: Invalid JSON"):
        Plan.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanFileError, match=r"cannot read the plan .*nowhere\.json"):
        Plan.load(tmp_path / "nowhere.json")


def test_a_frame_has_a_row_for_each_stage(plan):
    frame = plan.to_frame()
    assert frame["first_layer"].tolist() == [0, 1]
    assert frame["total_bytes"].tolist() == [stage.memory.total for stage in plan.stages]
    assert frame["micro_batch_size"].tolist() == [max(plan.micro_batch_sizes)] * 2


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(["stages", 1, "rank"], 10**9), r"\$\.stages\[1\]\.rank: "),
        (change(["stages", 1, "rank"], 1000), "the stages name 2 ranks, the highest of them 1000"),
        (change(["stages", 0, "memory", "activations"], 10**400), r"\$\.stages\[0\]\.memory\.activations: "),
        (change(["stages", 0, "memory", "activations"], float("inf")), r"\$\.stages\[0\]\.memory\.activations: "),
        (change(["stages", 0, "devices", 0, "memory_bytes"], 2**60), r"memory_bytes: Input should be less"),
        (change(["stages", 0, "devices", 0, "threads"], 10**6), r"threads: Input should be less"),
        (change(["stages", 0, "times", 0, "forward_s"], 1e300), r"forward_s: Input should be less"),
        (change(["stages", 0, "recompute"], [{"first": 0, "stop": 9}]), "which lie outside"),
        (change(["prediction", "gap"], 0.5), "gap is 0.5, but step_s / lower_bound_s - 1 is"),
        (change(["prediction", "lower_bound_s"], 1e6), "lower_bound_s is 1000000.0, and step_s is less"),
        (change(["prediction", "optimizer_s"], 1e6), "optimizer_s is 1000000.0, of a step of"),
        (change(["prediction", "step_s"], 1e-300), r"step_s: Input should be greater"),
        (change(["batch_size"], 10**20), r"\$\.batch_size: "),
        (change(["replicas"], 2), "do not make up a batch of 9"),
        (change(["sample", "batch_size"], 0), r"\$\.sample\.batch_size"),
        (change(["sample", "front_end"], "dynamo"), "front end 'dynamo' is none of export, static export"),
        (change(["sample", "front_end"], "export"), "is no structure of tuples, lists and dicts"),
        (change(["sample", "autocast"], "int8"), r"\$\.sample\.autocast"),
    ],
)
def test_numbers_that_cannot_be_or_do_not_belong_together_are_refused(plan, tmp_path, edit, message):
    """A rank of a milliard took all memory, 1e400 bytes and a thousand million threads were shown or run."""
    test_a_wrong_plan_is_refused_with_its_json_path(plan, tmp_path, edit, message)


@pytest.mark.parametrize(
    ("twice", "path"),
    [
        ('"batch_size": 9', r"\$\.batch_size"),
        ('"rank": 1', r"\$\.stages\[1\]\.rank"),
    ],
)
def test_a_key_that_stands_twice_is_refused(plan, tmp_path, twice, path):
    """Of two values for one key the last one counted without a word; other readers take the first."""
    text = plan.to_json()
    (tmp_path / "plan.json").write_text(text.replace(twice, f"{twice}, {twice}"))
    with pytest.raises(PlanFileError, match=f"{path}: stands twice"):
        Plan.load(tmp_path / "plan.json")


def test_an_unknown_key_cannot_command_the_terminal(plan, tmp_path):
    (tmp_path / "plan.json").write_text(plan.to_json().replace('"batch_size"', '"\\u001b[2J"'))
    with pytest.raises(PlanFileError) as caught:
        Plan.load(tmp_path / "plan.json")
    assert "\\x1b[2J" in str(caught.value) or "batch_size: Field required" in str(caught.value)
    assert str(caught.value).isprintable()
