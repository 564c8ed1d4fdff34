"""What the command's options refuse, each before anything is built or measured."""

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from executor import command
from planner.plan.plan import Plan
from tests.fuzzing.subjects import good_plan, workplace

DIGITS = "9" * 5000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    workplace(tmp_path, monkeypatch)

    def built(*_: Any) -> Any:
        raise AssertionError("the model was built before the options were looked at")

    monkeypatch.setattr("executor.commands.models.built_by", built)
    return tmp_path


def autoplan(*arguments: str) -> Result:
    return CliRunner().invoke(command.main, arguments)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[
            ("--batch-size", value)
            for value in ("99999999999999999999", DIGITS, "0", "-1", "1e3", "٣", "1_0", "nan", "")
        ],
        *[("--devices", value) for value in (DIGITS, "70000", "-" + DIGITS, "0")],
        *[("--memory-limit", value) for value in (DIGITS, DIGITS + "GiB", "0", "٣GiB", "9999999TiB", "1GiB," + DIGITS)],
        *[("--replicas", value) for value in (DIGITS, "0", "-1", "٣")],
        *[("--micro-batches", value) for value in (DIGITS, "16385", "0")],
        *[("--stages", value) for value in (DIGITS, "0")],
        *[("--max-stages", value) for value in (DIGITS, "-1")],
        *[("--micro-batch-sizes", value) for value in (DIGITS, "1,0", "4,٣")],
        *[("--time-limit", value) for value in ("nan", "inf", "-inf", "0", "-1", "1e400", "٣", DIGITS)],
        *[("--time-budget", value) for value in ("nan", "inf", "-1", "1e400")],
        *[("--threads", value) for value in (DIGITS, "0", "1025")],
    ],
)
def test_a_number_that_cannot_be_is_a_usage_error(folder: Path, option: str, value: str) -> None:
    """`--batch-size 99999999999999999999` was still running after two minutes; hundreds of digits ended `--devices`
    and `--memory-limit` in a traceback (Python refuses to convert more than 4300)."""
    result = autoplan("plan", "shop_model.py:build", option, value)
    assert result.exit_code == 2, result.output
    assert option in result.stderr
    assert len(result.stderr) < 400


@pytest.mark.parametrize("path", ["nowhere/x.png", "/dev/null/x.png", "a\x1b[2Jb/x.png", "x.txt", "folder.png"])
@pytest.mark.parametrize("subcommand", [("show", "plan.json"), ("plan", "shop_model.py:build")])
def test_a_picture_that_cannot_be_written_is_said_first(folder: Path, subcommand: tuple[str, ...], path: str) -> None:
    """`--timeline` to a folder that does not exist ended in a traceback of matplotlib's, after all measuring."""
    (folder / "folder.png").mkdir()
    result = autoplan(*subcommand, "--timeline", path)
    assert result.exit_code == 2, result.output
    assert "--timeline" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize("path", ["folder", "plan.json/x.json", "/proc/x/y.json", "pipe", "/dev/null", "x" * 300, "/"])
@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_a_file_that_cannot_be_written_is_said_first(folder: Path, option: str, path: str) -> None:
    """What `-o` named was found out to be a folder, or in a folder without rights, when all was measured."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    result = autoplan("plan", "shop_model.py:build", option, path)
    assert result.exit_code == 2, result.output
    assert option in result.stderr


def test_trying_whether_a_file_can_be_written_leaves_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert autoplan("show", "plan.json", "--trace", "a/b/trace.json", "--batch").exit_code == 2
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "reference", ["..:x", ".:x", "a..b:c", ".a:b", "a.:b", ".py:x", "..py:x", "a b:c", "a\0.py:x", "x" * 400 + ".py:f"]
)
@pytest.mark.parametrize("subcommand", [("run", "plan.json"), ("plan",)])
def test_a_reference_that_names_no_module_is_a_usage_error(
    folder: Path, subcommand: tuple[str, ...], reference: str
) -> None:
    """`run plan.json ..:x` ended in a TypeError of the import system's."""
    for name in (".py", "..py"):
        (folder / name).write_text("")
    result = autoplan(*subcommand, reference)
    assert result.exit_code == 2, result.output


def test_a_function_that_needs_arguments_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace(tmp_path, monkeypatch)
    result = autoplan("plan", "shop_model.py:train")
    assert result.exit_code == 2
    assert "shop_model.py:train is called without arguments" in result.stderr


def test_names_do_not_reach_the_terminal_as_commands(folder: Path) -> None:
    """A module path with an escape sequence cleared the screen, or named the window, of who looked at the plan."""
    text = (
        good_plan()
        .to_json()
        .replace('"blocks.0.in"', '"\\u001b[2J\\nstage 9"')
        .replace('"AdamW"', '"\\u001b]0;x\\u0007"')
    )
    (folder / "plan.json").write_text(text.replace('"name": "cpu"', '"name": "\\u202e\\u0007"'))
    shown = autoplan("show", "plan.json")
    assert shown.exit_code == 0, shown.output
    assert all(letter.isprintable() or letter == "\n" for letter in shown.output)
    assert len(shown.output.splitlines()) == len(str(good_plan()).splitlines())
    assert "\\x1b]0;x\\x07" in shown.output
    for line in (("run", "plan.json", "shop_model.py:train"), ("show", "\x1b[2J"), ("\x1b[2J",), ("show", "--\x1b[2J")):
        refused = autoplan(*line)
        assert refused.exit_code in (2, 5)
        assert all(letter.isprintable() or letter == "\n" for letter in refused.output), refused.output


def test_every_plan_is_shown_as_it_was(folder: Path) -> None:
    assert autoplan("show", "plan.json").stdout == f"{Plan.load('plan.json')}\n"
