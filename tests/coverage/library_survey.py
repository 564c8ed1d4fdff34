"""Plans and trains models of many libraries, each in a process of its own: `make libraries`.

A model is right (three stages train as one does and as the model itself), refused (by an error that says where, why
and what to do), wrong, crashed (by an error that is not ours, or with its process), or slow. What does not train as it
is, without us, is not counted.
"""

import datetime
import json
import multiprocessing
import os
import platform
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from profiler.errors import NotTraceableError, PlanError
from tests.coverage.library_fields import fields
from tests.coverage.library_more import more
from tests.coverage.library_others import others
from tests.coverage.library_parts import MINI_BATCH
from tests.coverage.library_series import series
from tests.coverage.library_texts import texts
from tests.coverage.library_vision import vision
from tests.coverage.model_list import Case
from tests.coverage.pipelined import STAGES, built, differences
from tests.coverage.rows import Row, known_rows
from tests.coverage.survey import (
    CLOSE,
    CLOSE_IN_FLOAT64,
    first_line,
    says_where_and_what_to_do,
    trains,
    without_folders,
)
from tests.coverage.survey_models import Candidate, mean_square
from tests.coverage.table import machine

CPU_SECONDS = 120
SLOW = f"more than {CPU_SECONDS} s of processor time"
WALL_SECONDS = 900  # of a process that waits, on a busy machine


class Outcome(StrEnum):
    """What came of a model."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "**wrong**"
    CRASHED = "**crashed**"
    SLOW = "slow"
    UNTRAINABLE = "does not train"


def candidates() -> Iterator[Candidate]:
    """All of them."""
    yield from vision()
    yield from texts()
    yield from series()
    yield from others()
    yield from more()
    yield from fields()


def tried(candidate: Candidate) -> Row:
    """Whether it trains by itself, and what came of planning and training it."""
    try:
        trains(built(candidate, double=False))
    except (Exception, _TooSlowError) as problem:
        return Row(candidate.library, candidate.name, Outcome.UNTRAINABLE, without_folders(first_line(problem)))
    start = time.process_time()
    outcome, detail = _outcome(candidate)
    return Row(candidate.library, candidate.name, outcome, detail, time.process_time() - start)


def _outcome(candidate: Candidate) -> tuple[Outcome, str]:
    try:
        apart = differences(candidate)
        if max(apart.values()) <= CLOSE:
            return Outcome.RIGHT, _text(apart)
    except _TooSlowError:
        return Outcome.SLOW, SLOW
    except NotTraceableError as problem:
        outcome = Outcome.REFUSED if says_where_and_what_to_do(str(problem)) else Outcome.CRASHED
        return outcome, without_folders(first_line(problem))
    except PlanError as problem:
        return Outcome.REFUSED, f"{type(problem).__name__}: {without_folders(first_line(problem))}"
    except Exception as problem:
        return Outcome.CRASHED, f"{type(problem).__name__}: {without_folders(first_line(problem))}"
    return _decided(candidate, apart)


def _decided(candidate: Candidate, single: Mapping[str, float]) -> tuple[Outcome, str]:
    """Of a model that is apart in float32: rounding only where float64 says so; where that cannot run, it is wrong."""
    try:
        apart = differences(candidate, double=True)
    except _TooSlowError:
        return Outcome.SLOW, SLOW
    except Exception as problem:
        why = f"{type(problem).__name__}: {without_folders(first_line(problem))}"
        return Outcome.WRONG, f"{_text(single)} in float32, and none in float64: {why}"
    close = max(apart.values()) <= CLOSE_IN_FLOAT64
    return Outcome.RIGHT if close else Outcome.WRONG, f"{_text(apart)} in float64"


def _text(apart: Mapping[str, float]) -> str:
    return ", ".join(f"{what}: {value:.0e}" if value else f"{what}: 0" for what, value in apart.items())


class _TooSlowError(BaseException):
    """No `Exception`, for what is tried catches those."""


def _in_child(candidate: Candidate, answers: Connection) -> None:
    """Try a model, say what came of it, and write nothing else anywhere."""
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silence, descriptor)

    def end(*_: object) -> None:
        raise _TooSlowError

    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (2 * CPU_SECONDS, 2 * CPU_SECONDS))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers.send(tried(candidate))


def in_process(candidate: Candidate) -> Row:
    """Try a model where it can end nothing but its own process."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(candidate, theirs))
    child.start()
    theirs.close()
    try:
        if mine.poll(WALL_SECONDS):
            return mine.recv()
        return Row(candidate.library, candidate.name, Outcome.SLOW, f"more than {WALL_SECONDS} s")
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGXCPU:  # what was tried has caught the end of its time
            return Row(candidate.library, candidate.name, Outcome.SLOW, SLOW)
        return Row(candidate.library, candidate.name, Outcome.CRASHED, f"the process ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()


def main(path: Path, names: list[str]) -> None:
    """Try every model, or those of the libraries or names given, and print the table of all that are known."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    differences(Candidate("", "", _smallest))  # what every process would load and compile first
    known = known_rows(path, Outcome)
    for candidate in tqdm(list(candidates()), disable=None):
        wanted = not names or {candidate.library, candidate.name} & set(names)
        if wanted and (candidate.library, candidate.name) not in known:
            row = in_process(candidate)
            known[row.library, row.name] = row
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    libraries = dict.fromkeys(row.library for row in known.values())
    print(f"`make libraries`, {datetime.datetime.now(datetime.UTC).date()}: {machine()};")
    print(f"Python {platform.python_version()}, torch {torch.__version__},")
    print(f"{', '.join(f'{library} {version(library)}' for library in libraries)}.\n")
    counts = Counter(row.outcome for row in known.values())
    trained = sum(counts.values()) - counts[Outcome.UNTRAINABLE]
    print(f"{len(known)} models of {len(libraries)} libraries, of which {trained} train;", end=" ")
    print(f"right: {counts[Outcome.RIGHT]} ({counts[Outcome.RIGHT] / max(trained, 1):.1%}), ", end="")
    print(", ".join(f"{outcome}: {counts[outcome]}" for outcome in list(Outcome)[1:]) + ".\n")
    print("| library | model | outcome | processor time | detail |\n|---|---|---|---:|---|")
    for row in known.values():
        print(row)


def _smallest() -> Case:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(STAGES)))
    return Case(model, torch.randn(MINI_BATCH, 4), mean_square, torch.zeros(MINI_BATCH))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
