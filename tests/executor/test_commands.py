"""The commands beside `plan`, `show` and `run`: each on a real file or model, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from matplotlib import pyplot
from torch import nn

import planner
from executor import command
from executor.commands.models import _configuration
from planner.explain import what_if
from planner.from_profile import plan_from_profile
from planner.plan.plan import Plan
from profiler.device import Cluster, Link
from profiler.machine.local import local_devices
from profiler.record import Profile
from tests.planner.made_up import build_profile

GPT = [
    *("--hf", "gpt2", "--set", "n_layer=2", "--set", "n_embd=32", "--set", "n_head=2", "--set", "vocab_size=64"),
    *("--set", "n_positions=16", "--sequence", "16"),
]

LINK = Link(latency_s=0.0, bytes_per_s=1e9)


def autoplan(*arguments: object) -> Result:
    return CliRunner().invoke(command.main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", sorted(command.main.commands))
def test_help_has_two_examples_and_json(name: str) -> None:
    shown = autoplan(name, "--help")
    assert shown.exit_code == 0
    assert "--json" in shown.stdout
    examples = shown.stdout.partition("Examples:")[2].partition("Options:")[0]
    assert examples.count(f"autoplan {name}") == 2


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A profile of a device that is here, and two plans from it."""
    row = (0.25, 0.25, 0.5, 10, 4, 8, 8)
    here = local_devices(2)
    profile = build_profile(
        {(here.devices[0].kind, size): [[v * size for v in row]] * 6 for size in (1, 8)}, links=(LINK,)
    )
    paths = {name: tmp_path / f"{name}.json" for name in ("profile", "gpipe", "one")}
    profile.save(paths["profile"])
    plan_from_profile(profile, here, batch_size=16, chunks=1).save(paths["gpipe"])
    plan_from_profile(profile, here, batch_size=16, stages=1).save(paths["one"])
    return paths


def test_explain(files: dict[str, Path]) -> None:
    assert "bottleneck" in autoplan("explain", files["gpipe"]).stdout
    rows = json.loads(autoplan("explain", files["gpipe"], "--profile", files["profile"], "--json").stdout)
    expected = Plan.load(files["gpipe"]).explain(Profile.load(files["profile"]))
    assert [row["cut_later_s"] for row in rows][:1] == list(expected["cut_later_s"])[:1]
    foreign = autoplan("explain", files["gpipe"], "--profile", files["one"])
    assert foreign.exit_code == 5


def test_explain_by_the_links_that_a_plan_was_made_for(files: dict[str, Path], tmp_path: Path) -> None:
    profile, path = Profile.load(files["profile"]), tmp_path / "hosts.json"
    plan = Plan.load(files["gpipe"])
    devices = tuple(stage.device for stage in plan.stages)
    slow = Cluster(devices=devices, link=profile.links[0].slowed(1e8))
    plan_from_profile(profile, slow, batch_size=16, stages=len(devices)).save(path)
    refused = autoplan("explain", path, "--profile", files["profile"])
    assert refused.exit_code == 2
    assert "it was made for other links; pass --devices" in refused.stderr
    assert autoplan("explain", path).exit_code == 0
    alone = autoplan("explain", files["gpipe"], "--link", "ndr")
    assert (alone.exit_code, "say which with --devices" in alone.stderr) == (2, True)


def test_explain_of_devices_that_are_not_here(tmp_path: Path) -> None:
    cluster = Cluster.of("2x2xA100-40GB", between="ndr")
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    plan = planner.autoplan(
        model, torch.zeros(8, 8), cluster, stages=4, micro_batches=8, micro_batches_per_stage=1, schedule="1f1b"
    )
    assert plan.profile is not None
    plan.profile.save(tmp_path / "profile.json")
    plan.save(tmp_path / "plan.json")
    told = autoplan(
        "explain",
        tmp_path / "plan.json",
        *("--profile", tmp_path / "profile.json", "--devices", "2x2xA100-40GB", "--between", "ndr", "--json"),
    )
    rows = json.loads(told.stdout)
    told_s = [row["cut_later_s"] for row in rows if row["cut_later_s"] is not None]
    assert told_s
    assert told_s == pytest.approx(list(plan.explain()["cut_later_s"].dropna()))


def test_diff(files: dict[str, Path]) -> None:
    table = autoplan("diff", files["gpipe"], files["one"])
    assert table.exit_code == 0
    assert "B/A" in table.stdout
    rows = {row["quantity"]: row for row in json.loads(autoplan("diff", files["gpipe"], files["one"], "--json").stdout)}
    assert (rows["K"]["this"], rows["K"]["other"]) == (2, 1)


def test_validate(files: dict[str, Path], tmp_path: Path) -> None:
    result = autoplan("validate", *files.values())
    assert result.exit_code == 0, result.output
    assert [line.partition(": ")[2][:15] for line in result.stdout.splitlines()] == [
        "a sound profile",
        *["a sound plan; K"] * 2,
    ]
    for text in ("", "[]", '{"costs": 1}', '{"costs": [', "7"):
        (tmp_path / "damaged.json").write_text(text)
        result = autoplan("validate", tmp_path / "damaged.json")
        assert (result.exit_code, result.stdout) == (5, ""), text
        assert result.stderr.startswith("autoplan: error: "), text


def test_one_damaged_file_leaves_what_the_others_hold(files: dict[str, Path], tmp_path: Path) -> None:
    """The first damaged one was all that was said, and in pydantic's words, "Value error, ..."."""
    plan = json.loads(files["gpipe"].read_text())
    plan["stages"][0]["stop_layer"] += 1
    (tmp_path / "shifted.json").write_text(json.dumps(plan))
    (tmp_path / "empty.json").write_text("")
    given = [tmp_path / "empty.json", files["profile"], tmp_path / "shifted.json", files["one"]]
    result = autoplan("validate", *given)
    assert result.exit_code == 5
    assert [line.partition(": ")[0] for line in result.stdout.splitlines()] == [str(given[1]), str(given[3])]
    wrong = result.stderr.splitlines()
    assert [line.startswith("autoplan: error: ") for line in wrong] == [True, True]
    assert "shifted.json: $: stage 1 holds layers" in wrong[1]
    entries = json.loads(autoplan("validate", *given, "--json").stdout)
    assert [entry["file"] for entry in entries] == [str(given[1]), str(given[3])]


def test_validate_as_json_and_its_schema(files: dict[str, Path]) -> None:
    printed = autoplan("validate", files["gpipe"], files["profile"], "--json").stdout
    found = json.loads(printed)
    assert [entry["file"] for entry in found] == [str(files["gpipe"]), str(files["profile"])]
    assert found[0]["holds"].startswith("a sound plan; K = ")
    assert json.loads(autoplan("validate", "--schema").stdout)["additionalProperties"] is False
    assert autoplan("validate").exit_code == autoplan("validate", "--schema", files["gpipe"]).exit_code == 2


@pytest.mark.parametrize("what", ["timeline", "memory", "memory-over-time", "balance", "layers"])
def test_plot(files: dict[str, Path], tmp_path: Path, what: str) -> None:
    profile = ("--profile", files["profile"])
    arguments = ("plot", files["gpipe"], "--what", what, "-o", tmp_path / "picture.png")
    needed, wrong = (profile, ()) if what == "layers" else ((), profile)
    assert autoplan(*arguments, *wrong).exit_code == 2
    assert autoplan(*arguments, *needed).exit_code == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(autoplan("plot", files["gpipe"], "--what", what, "--json", *needed).stdout)
    plan = Plan.load(files["gpipe"])
    expected = {
        "timeline": lambda: max(row["end_s"] for row in rows) + plan.prediction.optimizer_s,
        "memory": lambda: rows[0]["total_bytes"],
        "memory-over-time": lambda: max(row["bytes"] for row in rows if row["stage"] == 0),
        "balance": lambda: [row["forward_s"] for row in rows],
        "layers": lambda: [row["layer"] for row in rows if row["cut_after"]],
    }[what]()
    size = max(plan.micro_batch_sizes)
    assert expected == pytest.approx(
        {
            "timeline": plan.prediction.step_s,
            "memory": plan.stages[0].memory.total,
            "memory-over-time": plan.stages[0].memory.total,
            "balance": [stage.times_at(size).forward_s for stage in plan.stages],
            "layers": [stage.stop_layer - 1 for stage in plan.stages[:-1]],
        }[what]
    )
    assert autoplan("plot", files["gpipe"], "--what", what, *needed).exit_code == 2  # neither picture nor data


def test_what_if(files: dict[str, Path], tmp_path: Path) -> None:
    options = ("--devices", "1..3", "--batch-size", "16,24", "--link", "10gbe,NVLink4")
    result = autoplan("what-if", files["profile"], *options, "--json", "--chart", tmp_path / "chart.svg")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    asked = [(row["devices"], row["link"], row["batch_size"]) for row in rows]
    assert asked == [(n, link, batch) for n in (1, 2, 3) for link in ("10gbe", "NVLink4") for batch in (16, 24)]
    assert all(row["K"] <= row["chunks"] * row["devices"] for row in rows)
    assert max(row["chunks"] for row in rows) > 1
    assert "<svg" in (tmp_path / "chart.svg").read_text()
    assert "samples" in autoplan("what-if", files["profile"], "--devices", "2", "--batch-size", "16").stdout


def test_what_goes_on_below_still_says_which_case_it_is(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two batch sizes two rows of the second table were called 2."""
    monkeypatch.setenv("COLUMNS", "80")
    options = ("--devices", "1,2", "--batch-size", "8,16")
    lines = autoplan("what-if", files["profile"], *options).stdout.splitlines()
    rows = [tuple(line.split()[:2]) for line in lines if line.split() and line.split()[0] in "12"]
    assert len(rows) > 4
    assert rows == [("1", "8"), ("1", "16"), ("2", "8"), ("2", "16")] * (len(rows) // 4)
    assert not any("per" in line.split() for line in lines)


def test_the_chart_names_cases_as_people_write_them(files: dict[str, Path], tmp_path: Path) -> None:
    """Memory limits were bytes without a unit, and lines had names such as batch_size."""
    chart = tmp_path / "chart.svg"
    options = ("--devices", "2", "--batch-size", "16,24", "--memory-limit", "1GiB,2GiB", "--chart", chart)
    with pyplot.rc_context({"svg.fonttype": "none"}):  # letters, and not their outlines
        assert autoplan("what-if", files["profile"], *options).exit_code == 0
    drawn = chart.read_text(encoding="utf-8")
    for words in ("batch size", "memory limit 1.00 GiB", "memory limit 2.00 GiB", ">16<", ">24<"):
        assert words in drawn
    assert "_size" not in drawn


def test_what_if_ends_with_the_lines_so_far(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited for nine of ten lines had none of them."""
    asked = ("what-if", files["profile"], "--devices", "1,2,1", "--batch-size", "16", "--replicas", "1", "--json")
    expected = json.loads(autoplan(*asked).stdout)[:2]
    done = []

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        done.append(settings)
        if len(done) == 3:
            raise KeyboardInterrupt
        return what_if(*arguments, **settings)

    monkeypatch.setitem(planner.__dict__, "what_if", interrupted)
    result = autoplan(*asked, "--time-limit", "3.5")
    assert (result.exit_code, json.loads(result.stdout)) == (0, expected)
    assert result.stderr.strip() == "interrupted: 2 of 3 cases"
    assert all((one["replicas"], one["time_limit_s"]) == (1, 3.5) for one in done)
    done[:] = [{}, {}]
    nothing = autoplan(*asked)
    assert (nothing.exit_code, nothing.stdout) == (130, "")


def test_what_if_names_why_there_is_no_plan(files: dict[str, Path]) -> None:
    (row,) = json.loads(
        autoplan(
            "what-if", files["profile"], "--devices", 1, "--batch-size", 16, "--memory-limit", "8B", "--json"
        ).stdout
    )
    assert "memory" in row["reason"]


def test_a_language_model_from_its_configuration(tmp_path: Path) -> None:
    """Estimated for devices that are not here; its profile serves what-if."""
    saved = tmp_path / "gpt.json"
    where = ("--devices", "2xA100-40GB:pcie4", "--batch-size", 32)
    result = autoplan("estimate", *GPT, *where, "--save-profile", saved, "-o", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    for words in (
        "fits on ",
        "tokens/s",
        "MFU",
        "FLOP/s a device",
        "A100-40GB: from its data sheet, times may be off",
    ):
        assert words in result.stdout
    assert Plan.load(tmp_path / "plan.json").batch_size == 32
    rows = json.loads(
        autoplan("what-if", saved, "--devices", "2", "--batch-size", "32", "--between", "ndr", "--json").stdout
    )
    assert rows[0]["step_s"] > 0
    layers = json.loads(autoplan("trace", *GPT, "--json").stdout)
    assert sum(layer["parameters"] for layer in layers) > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "gone.json"),
        ("explain", "gone.json"),
        ("run", "gone.json", "train.py:train"),
        ("diff", "gone.json", "gone.json"),
        ("plot", "gone.json", "-o", "a.png"),
        ("validate", "gone.json"),
        ("export", "gone.json", "model.py:build", "--to", "torchgpipe"),
        ("what-if", "gone.json", "--devices", "2", "--batch-size", "8"),
    ],
    ids=" ".join,
)
def test_a_file_that_is_not_there_is_wrong_usage_and_no_damaged_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """It ended with 5, which scripts take for a plan that must be made again."""
    monkeypatch.chdir(tmp_path)
    result = autoplan(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'gone.json' does not exist" in result.stderr


def test_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64}))
    result = autoplan("trace", "--hf", file, "--sequence", 8)
    assert result.exit_code == 0, result.output
    assert "h.2" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trace"], 2, "name the model: either a function as MODEL, or a configuration with --hf"),
        (["trace", "a.py:b", "--hf", "gpt2"], 2, "name the model"),
        (["trace", "a.py:b", "--sequence", "8"], 2, "--sequence goes with --hf"),
        (["trace", "--hf", "lama"], 2, "'lama' is no JSON file and no model type of transformers; did you mean llama"),
        (["trace", "--hf", "gpt2", "--set", "n_layers=2"], 2, "has no such value; did you mean n_layer"),
        (["trace", "--hf", "gpt2", "--set", "n_layer=two"], 2, "gpt2 with --set n_layer=two is no configuration"),
        (["trace", "--hf", "gpt2", "--sequence", "9999"], 2, "--sequence is 9999, and max_position_embeddings"),
        (["trace", "--hf", "vit"], 2, "is no language model with its own loss"),
        (["trace", "--hf", "gone.json"], 2, "gone.json"),
        (["estimate", "--hf", "gpt2", "--devices", "8xA100", "--batch-size", "8"], 2, "which A100"),
        (["estimate", "--hf", "gpt2", "--devices", "2", "--batch-size", "8"], 2, "'2' says how many devices"),
        (["estimate", "--hf", "gpt2", "--devices", "2x8xT4", "--batch-size", "8"], 2, "2 hosts, with 0 links between"),
        (
            ["estimate", "--hf", "gpt2", "--devices", "T4", "--batch-size", "8", "--between", "wire"],
            2,
            "no data sheet of a link 'wire'",
        ),
    ],
)
def test_what_no_model_can_be_built_from(arguments: list[str], code: int, message: str) -> None:
    result = autoplan(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert message in " ".join(result.stderr.split())


NO_MODELS = {
    "gpt2": ("n_embd=7", "n_head=5", "resid_pdrop=2", "activation_function=foo", "n_inner=-3", "n_embd=0"),
    "llama": ("intermediate_size=-1", "hidden_act=foo", "vocab_size=-1"),
    "bert": ("hidden_size=7", "hidden_act=foo", "hidden_dropout_prob=2", "vocab_size=-1", "type_vocab_size=-1"),
}
SMALL = {"gpt2": "n_layer=1", "llama": "num_hidden_layers=1", "bert": "num_hidden_layers=1"}


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind in NO_MODELS for value in NO_MODELS[kind]])
def test_values_that_transformers_builds_no_model_of_are_wrong_usage(kind: str, value: str) -> None:
    """They ended in its traceback, with the code of an unexpected error."""
    result = autoplan("trace", "--hf", kind, "--set", SMALL[kind], "--set", value)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    said = " ".join(result.stderr.split())
    assert f"builds no model of {kind} with --set {SMALL[kind]} --set {value} (" in said
    assert "Error: " in said
    assert "change these values" in said


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("gpt2", "n_layer=0", "n_layer of gpt2 is 0; give at least 1"),
        ("gpt2", "n_head=-2", "n_head of gpt2 is -2; give at least 1"),
        ("llama", "num_hidden_layers=-2", "num_hidden_layers of llama is -2; give at least 1"),
        ("t5", "num_decoder_layers=0", "num_decoder_layers of t5 is 0; give at least 1"),
        ("gpt2", f"n_layer={10**20}", f"n_layer of gpt2 is {10**20}; give at most 1048576"),
        ("mixtral", f"num_local_experts={10**9}", f"num_local_experts of mixtral is {10**9}; give at most 1048576"),
    ],
)
def test_counts_of_a_configuration_that_no_plan_is_made_of(kind: str, value: str, message: str) -> None:
    """Without blocks there was a plan of nothing; of very many there was no end."""
    result = autoplan("trace", "--hf", kind, "--set", value)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in result.stderr


def test_layers_that_may_be_left_out() -> None:
    """Those with experts; and any configuration may say what a decoder begins with."""
    taken = _configuration("switch_transformers", {"num_sparse_encoder_layers": 0, "decoder_start_token_id": 3})
    assert (taken.num_sparse_encoder_layers, taken.decoder_start_token_id) == (0, 3)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"n_layer": ' + "1" * 5000 + "}"], ids=["deep", "many digits"])
def test_a_configuration_file_that_is_no_json(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    result = autoplan("trace", "--hf", file)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "no JSON: " in result.stderr


@pytest.mark.parametrize("kind", ["t5", "longt5"])
def test_a_sequence_to_sequence_model_whose_configuration_names_no_first_token(kind: str) -> None:
    sizes = {"num_layers": 1, "d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 8, "vocab_size": 16}
    changes = [word for name, size in sizes.items() for word in ("--set", f"{name}={size}")]
    result = autoplan("trace", "--hf", kind, "--sequence", 8, *changes)
    assert result.exit_code == 0, result.output
    assert "cross_entropy_loss" in result.stdout


@pytest.mark.parametrize("places", [-5, 0])
def test_a_model_without_places_has_no_sample(places: int) -> None:
    result = autoplan("trace", "--hf", "gpt2", "--set", "n_layer=1", "--set", f"n_positions={places}")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert f"max_position_embeddings of gpt2 is {places}, so no sample has a token" in result.stderr


def test_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_AUTOPLAN_TIMEOUT_S", "77")
    shown = dict(line.split(maxsplit=1) for line in autoplan("env").stdout.splitlines())
    assert shown["GPIPE_AUTOPLAN_TIMEOUT_S"] == "77"
    assert shown["torch"][0].isdigit()
    facts = json.loads(autoplan("env", "--json").stdout)
    assert facts["torch"] == shown["torch"].strip()
    assert any(name.startswith("device ") and "GiB" in fact for name, fact in facts.items())
