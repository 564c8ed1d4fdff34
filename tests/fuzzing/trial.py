"""One hostile input: what becomes of it, and whether that is what we promise.

What is read is refused with an error from our tree, or is a value that says what the file says, survives a trip, can
be shown and, if it is a profile, planned by; and either way within seconds of processor time.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from numba.core.event import install_timer

from executor import command
from planner import plan_from_profile
from planner.plan.plan import Plan
from planner.plan.timeline import save_timeline_json
from profiler.device import Cluster, Device
from profiler.errors import PlanError
from profiler.record import Profile
from profiler.value import Value

LIMIT_S = 5.0  # of processor time; usual is a hundredth


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an input.

    Attributes:
        what: in a word or two.
        seconds: of processor time.
        wrong: what we do not promise; "" if all is well.
    """

    what: str
    seconds: float
    wrong: str = ""


def tried(action: Callable[[], str]) -> Outcome:
    """What an action says, or the error that it ends with."""
    begun = time.process_time()
    compiled_s: list[float] = []  # of the search, which the first plans after an installation wait for
    wrong = ""
    try:
        with install_timer("numba:compile", compiled_s.append):
            what = action()
    except PlanError as problem:
        what = type(problem).__name__
        if any(not (letter.isprintable() or letter in "\n\t") for letter in str(problem)):
            wrong = f"a control character in: {problem!r}"
    except Exception as problem:
        what, wrong = type(problem).__name__, traceback.format_exc()
    seconds = time.process_time() - begun - sum(compiled_s)
    if not wrong and seconds > LIMIT_S:
        wrong = f"{what} took {seconds:.1f} s of processor time"
    return Outcome(what, seconds, wrong)


def plan_file(path: Path) -> str:
    """Read a plan; one that is read must survive a trip and be shown."""
    plan = Plan.load(path)
    assert not list(said_otherwise(json.loads(path.read_bytes()), json.loads(plan.to_json())))
    try:
        _look_at(plan, path)
    except PlanError as problem:
        raise AssertionError("a plan that was accepted cannot be looked at") from problem
    return "accepted"


def _look_at(plan: Plan, path: Path) -> None:
    again = Plan.parse_json(plan.to_json(), source="again", error=PlanError)
    assert again == plan
    assert again.to_json() == plan.to_json()
    _only_printable(str(plan))
    plan.to_frame()
    plan.explain()
    plan.compare(again)
    plan.memory_over_time()
    save_timeline_json(plan, path.with_suffix(".trace"))


def said_otherwise(written: Any, read: Any, place: str = "$") -> Iterator[str]:
    """Where the value that was read says something else than the file, or more than the file without a default."""
    if isinstance(written, dict) and isinstance(read, dict):
        yield from (
            f"{place}.{name} is lost" for name in written.keys() - read.keys() if not _is_default(name, written)
        )
        yield from (
            f"{place}.{name} is made up" for name in read.keys() - written.keys() if not _is_default(name, read)
        )
        for name in written.keys() & read.keys():
            yield from said_otherwise(written[name], read[name], f"{place}.{name}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from said_otherwise(one, other, f"{place}[{number}]")
    elif _as_read(written, read) != read or isinstance(written, bool) != isinstance(read, bool):
        yield f"{place} is {written!r} in the file and {read!r} in the value"


def _as_read(written: Any, read: Any) -> Any:
    """A large integer that stands for seconds is the nearest float."""
    return float(written) if isinstance(read, float) and isinstance(written, int) else written


def _is_default(name: str, fields: dict[str, Any]) -> bool:
    return any(type(fields[name]) is type(value) and fields[name] == value for value in _defaults().get(name, ()))


@cache
def _defaults() -> dict[str, list[Any]]:
    """What a file may leave out, by the field's name, as JSON."""
    found: dict[str, list[Any]] = {}
    classes = [Value]
    while classes:
        one = classes.pop()
        classes += one.__subclasses__()
        for name, field in one.model_fields.items():
            if not field.is_required():
                default = field.get_default(call_default_factory=True, validated_data={})
                found.setdefault(name, []).append(json.loads(json.dumps(default)))
    return found


def profile_file(path: Path) -> str:
    """Read a profile; one that is read must survive a trip, as a frame too, and be planned by, or say why not."""
    profile = Profile.load(path)
    assert not list(said_otherwise(json.loads(path.read_bytes()), json.loads(profile.to_json())))
    assert Profile.parse_json(profile.to_json(), source="again", error=PlanError) == profile
    assert profile.from_frame(profile.to_frame()) == profile
    kinds = sorted({cost.device_kind for cost in profile.costs})
    devices = tuple(Device(name="cpu", kind=kinds[place % len(kinds)], memory_bytes=2**40) for place in range(2))
    try:
        plan = plan_from_profile(
            profile, Cluster(devices=devices), batch_size=profile.sample.batch_size * 2, time_limit_s=0.1
        )
    except PlanError as problem:
        return f"accepted, then {type(problem).__name__}"
    _only_printable(str(plan))
    assert Plan.parse_json(plan.to_json(), source="again", error=PlanError) == plan
    return "accepted and planned"


def command_line(line: list[str]) -> str:
    """Carry out a command line in this process."""
    result = CliRunner().invoke(command.main, line)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    _only_printable(result.output)
    assert result.exit_code in range(6), result.output
    return f"exit code {result.exit_code}"


def options_of_commands() -> dict[str, list[str]]:
    """The options of each command."""
    named: dict[str, list[str]] = {}
    for name, one in command.main.commands.items():
        named[name] = [option for parameter in one.params for option in parameter.opts if option.startswith("-")]
    return named


def _only_printable(text: Any) -> None:
    assert all(letter.isprintable() or letter in "\n\t" for letter in text), repr(text)
