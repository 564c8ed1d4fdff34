"""What a terminal sees of the command: 80 columns, completion in its shell, codes that the page lists, no colours."""

import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from click.shell_completion import FishComplete, ZshComplete
from click.testing import CliRunner

from executor import command
from profiler import errors
from profiler.errors import ExecutionError, PlanError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "notebooks" / "command_line.md").read_text(encoding="utf-8")
COMMANDS = sorted(command.main.commands)
PLAN = str(ROOT / "tests" / "data" / "formats" / "plan-2.json")


def autoplan(*arguments: str, **variables: str) -> str:
    result = CliRunner().invoke(command.main, arguments, env={"COLUMNS": "80", **variables}, prog_name="autoplan")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_fits_80_columns(arguments: list[str]) -> None:
    assert max(map(len, autoplan(*arguments).splitlines())) <= 80


@pytest.mark.parametrize("arguments", [["show", PLAN], ["explain", PLAN], ["diff", PLAN, PLAN], ["env"]], ids=" ".join)
def test_tables_fit_80_columns_and_have_no_colours(arguments: list[str]) -> None:
    """Also where colours are asked for by force, `NO_COLOR` has the last word; a heading may be bold."""
    shown = autoplan(*arguments, NO_COLOR="1", FORCE_COLOR="1", TERM="xterm-256color")
    assert set(re.findall(r"\x1b\[([0-9;]*)m", shown)) <= {"0", "1"}
    if arguments != ["env"]:  # names and values of variables are as long as they are
        assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in shown.splitlines()) <= 80


def test_the_page_lists_every_command_and_exit_code() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == COMMANDS
    codes = {int(code) for code in re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)}
    ours = {one.exit_code for one in vars(errors).values() if isinstance(one, type) and issubclass(one, PlanError)}
    assert codes == {0, 1, 2} | ours
    told = " ".join(autoplan("--help").partition("Exit codes:")[2].partition("Options:")[0].split())
    assert all(f"{code} " in told for code in codes)


def test_the_page_says_how_each_shell_completes() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_AUTOPLAN_COMPLETE={shell}_source autoplan" in PAGE


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("autoplan pl", {"plan", "plot"}),
        ("autoplan plan --schedule zb", {"zb", "zb-h1", "zb-v"}),
        ("autoplan plot --what mem", {"memory", "memory-over-time"}),
        ("autoplan show --ti", {"--timeline"}),
    ],
)
def test_shells_are_offered_commands_options_and_values(words: str, offered: set[str]) -> None:
    *before, last = words.split()
    for shell in (ZshComplete, FishComplete):
        found = shell(command.main, {}, "autoplan", "_AUTOPLAN_COMPLETE").get_completions(before[1:], last)
        assert {item.value for item in found} == offered
        assert "autoplan" in shell(command.main, {}, "autoplan", "_AUTOPLAN_COMPLETE").source()


def test_bash_completes_as_the_page_says(tmp_path: Path) -> None:
    """The line of the page, in a real bash, which then asks for the words after `autoplan plan --recompute n`."""
    line = next(line.strip() for line in PAGE.splitlines() if "bash_source" in line)
    script = f"""{line}
COMP_WORDS=(autoplan plan --recompute n); COMP_CWORD=3
_autoplan_completion autoplan; echo "${{COMPREPLY[@]}}"; complete -p autoplan"""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.splitlines()[0] == "never", done.stderr
    assert "_autoplan_completion" in done.stdout.splitlines()[1]


@pytest.mark.parametrize("arguments", [["show", PLAN], ["--help"]], ids=" ".join)
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_is_one_line(arguments: list[str], buffered: bool) -> None:
    """It was our traceback."""
    done = shown(arguments, "/dev/full", buffered=buffered)
    assert (done.returncode, done.stderr.decode().splitlines()) == (
        1,
        ["autoplan: error: cannot write the output: No space left on device; make room there"],
    )


@pytest.mark.parametrize("buffered", [True, False])
def test_what_there_is_no_room_for_is_not_left_out_in_silence(buffered: bool, tmp_path: Path) -> None:
    """Without a buffer Python writes what there is room for, and says nothing of the rest."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
    done = shown(["show", PLAN, "--json"], tmp_path / "plan.json", buffered=buffered, first=limited)
    assert (tmp_path / "plan.json").stat().st_size <= 1000
    assert (done.returncode, done.stderr.decode().splitlines()) == (
        1,
        ["autoplan: error: cannot write the output: File too large; allow larger files (ulimit -f)"],
    )


def shown(
    arguments: list[str], to: str | Path, *, buffered: bool, first: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own, whose output goes there."""
    code = f"{first}from executor.command import main; main({arguments!r})"
    words = [sys.executable, *([] if buffered else ["-u"]), "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path(to).open("w") as output:
        return subprocess.run(
            words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.PIPE, check=False, timeout=120
        )


@pytest.mark.parametrize(
    "arguments", [["show", PLAN], ["show", PLAN, "--json"], ["env"], ["plan", "--help"]], ids=" ".join
)
def test_who_closes_the_output_hears_nothing(arguments: list[str]) -> None:
    """`autoplan env | head -1` ended with code 1; other tools end by the signal, which a shell knows as 141."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"from executor.command import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_rank_that_prints_into_a_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ExecutionError("rank 1 of 2 failed: BrokenPipeError: [Errno 32] Broken pipe")

    monkeypatch.setattr("executor.launching.launch", fails)
    monkeypatch.setattr("executor.commands.running._check_devices", fails)
    for closed, code in ((True, 141), (False, 1)):
        monkeypatch.setattr(command, "_output_is_closed", lambda closed=closed: closed)
        done = CliRunner().invoke(command.main, ["run", PLAN, "train.py:train"])
        assert (done.exit_code, "BrokenPipeError" in done.stderr) == (code, not closed)


def test_an_interrupt_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.plan.plan.Plan.load", interrupted)
    done = CliRunner().invoke(command.main, ["show", PLAN])
    assert (done.exit_code, done.stderr) == (130, "autoplan: interrupted\n")


READS_A_FILE = [
    ["show", "{}"],
    ["explain", "{}"],
    ["diff", "{}", PLAN],
    ["validate", "{}"],
    ["plot", "{}", "--json"],
    ["what-if", "{}", "--devices", "2", "--batch-size", "8"],
    ["run", "{}", f"{__file__}:autoplan"],
    ["export", "{}", f"{__file__}:autoplan", "--to", "torchgpipe"],
]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("arguments", READS_A_FILE, ids=lambda arguments: str(arguments[0]))
def test_which_signal_ends_which_command(arguments: list[str], number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C with 130, as the page says; the others as they end any program, at once and without a word.

    The command sleeps in parts: a signal that comes just before a sleep does not end it.
    """
    (tmp_path / "plan.json").write_text("{}")
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    code = f"""
import signal, time
from profiler import value
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what a shell starts in the background ignores some
    signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
value._bytes_of = lambda path: (open({str(begun)!r}, "w"), [time.sleep(0.1) for _ in range(6000)])  # a slow disk
from executor.command import main
main({[argument.format(tmp_path / "plan.json") for argument in arguments]!r})"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with begun.open():  # returns when the command reads
        process.send_signal(number)
        output, errors = process.communicate(timeout=120)
    assert output == ""
    told = (130, "autoplan: interrupted\n") if number == signal.SIGINT else (-number, "")
    assert (process.returncode, errors) == told


def test_warnings_of_ours_come_without_our_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(*_: object) -> None:
        for file in (command.__file__, "train.py"):
            warnings.warn_explicit("slow\x1b[2J", UserWarning, file, 7)
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.plan.plan.Plan.load", warns)
    others: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *what: others.append(what[2]))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        told = CliRunner().invoke(command.main, ["show", PLAN]).stderr
    assert told == "autoplan: warning: slow\\x1b[2J\nautoplan: interrupted\n"
    assert others == ["train.py"]
