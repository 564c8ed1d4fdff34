"""`autoplan export`: what goes to which stream, files, JSON, exit codes."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from executor import command
from executor.commands.export import TARGETS
from planner import plan_from_profile
from planner.export import export
from profiler import Cluster
from tests.planner.exported import BATCH, case

MODEL = "tests.planner.exported:build_plain"


def exported(*arguments: object) -> Result:
    return CliRunner().invoke(command.main, ["export", *map(str, arguments)])


def test_the_command_knows_every_target() -> None:
    assert [*export.TARGETS] == [*TARGETS]


def test_a_plan_is_exported(tmp_path: Path) -> None:
    known = case("plain")
    known.plan(stages=2, schedule="gpipe").save(tmp_path / "plan.json")
    known.profile.save(tmp_path / "profile.json")
    given = (tmp_path / "plan.json", MODEL, "--profile", tmp_path / "profile.json")
    shown = exported(*given, "--to", "torchgpipe")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("GPipe(model, balance=[")
    assert "a step takes" in shown.stderr or "nothing moved" in shown.stderr
    folder = tmp_path / "made"
    assert f"nothing was written to {folder}; paste" in exported(*given, "--to", "torchgpipe", "-o", folder).stderr
    assert not folder.exists()
    printed = exported(*given, "--to", "torch.distributed.pipelining", "-o", folder, "--json")
    told = json.loads(printed.stdout)
    assert told["files"] == [str(folder / "schedule.csv")]
    assert (folder / "schedule.csv").read_text() == told["text"]
    assert (told["cost_s"], told["moves"]) == (0.0, [])
    refused = exported(*given, "--to", "deepspeed")
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert "DeepSpeed has no schedule 'gpipe'; plan with schedule '1f1b'" in refused.stderr


def test_where_cuts_move_the_links_are_named(tmp_path: Path) -> None:
    known = case("decoder")
    hosts = Cluster.of("2x1xA100-40GB", link="nvlink3", between="10gbe")
    plan = plan_from_profile(
        known.profile, hosts, batch_size=BATCH, micro_batches=2, micro_batches_per_stage=1, schedule="1f1b",
        stages=2, cut_at=["layers.2.relu"],
    )  # fmt: skip
    plan.save(tmp_path / "plan.json")
    known.profile.save(tmp_path / "profile.json")
    model = "tests.planner.exported:build_decoder"
    given = (tmp_path / "plan.json", model, "--to", "deepspeed", "--profile", tmp_path / "profile.json")
    refused = exported(*given)
    assert refused.exit_code == 2
    assert "was made for other links; pass --devices" in refused.stderr
    assert exported(*given, "--link", "nvlink3").exit_code == 2
    made = exported(*given, "--devices", "2x1xA100-40GB", "--link", "nvlink3", "--between", "10gbe")
    assert made.exit_code == 0, made.output
    assert made.stdout == plan.export("deepspeed", known.model).text


def test_mistakes_are_found_before_the_model_is_built(tmp_path: Path) -> None:
    missing = exported(tmp_path / "none.json", MODEL, "--to", "torchgpipe")
    assert missing.exit_code == 2
    assert "none.json" in missing.stderr
    wrong = exported(tmp_path / "none.json", MODEL, "--to", "torch-gpipe")
    assert wrong.exit_code == 2
    assert "torchgpipe" in wrong.stderr
