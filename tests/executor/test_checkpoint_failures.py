"""A checkpoint that cannot be read or written for want of something is not called damaged, and is said what to do."""

import errno
import io
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.checkpoints.manifest import MANIFEST, Manifest
from planner import ExecutionError, Plan
from tests.executor.rich_training import Training, plans_of, same

CASES = 30
ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "16777216 bytes. Error code 12 (Cannot allocate memory)"
)
MEMORY, DESCRIPTORS, DISK = "have more memory", r"ulimit -n", "see to its disk"
SAVE_ELSEWHERE, MAKE_ROOM = "save into a folder of yours", "make room, or keep fewer"


def system(code: int) -> Callable[[], BaseException]:
    return lambda: OSError(code, os.strerror(code))


# What is raised, and what to do where it is raised by reading, and by writing.
FAULTS: list[tuple[Callable[[], BaseException], str, str]] = [
    (system(errno.EMFILE), DESCRIPTORS, DESCRIPTORS),
    (system(errno.ENFILE), DESCRIPTORS, DESCRIPTORS),
    (system(errno.ENOMEM), MEMORY, MEMORY),
    (MemoryError, MEMORY, MEMORY),
    (lambda: RuntimeError(ALLOCATOR), MEMORY, MEMORY),
    (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB"), MEMORY, MEMORY),
    (system(errno.EACCES), "let this user read it", SAVE_ELSEWHERE),
    (system(errno.EPERM), "let this user read it", SAVE_ELSEWHERE),
    (system(errno.EIO), DISK, DISK),
    (system(errno.ESTALE), DISK, DISK),
    (system(errno.ETIMEDOUT), DISK, DISK),
    (system(errno.EROFS), DISK, SAVE_ELSEWHERE),
    (system(errno.ENOSPC), DISK, MAKE_ROOM),
    (system(errno.EDQUOT), DISK, MAKE_ROOM),
    (system(errno.EFBIG), DISK, r"ulimit -f"),
]


class Points:
    """Where something is asked of the machine; at one of them it raises."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failing = -1
        self.fault: Callable[[], BaseException] = MemoryError

    def at(self, name: str) -> None:
        self.passed.append(name)
        if len(self.passed) == self.failing:
            raise self.fault()

    def choose(self, fault: Callable[[], BaseException], named: list[str], chance: random.Random) -> str:
        """Let one of these points fail; torch's allocators do in torch alone."""
        fit = [
            number for number, name in enumerate(named) if isinstance(fault(), OSError | MemoryError) or "torch" in name
        ]
        self.failing, self.fault = 1 + chance.choice(fit), fault
        self.passed.clear()
        return f"{self.failing}: {named[self.failing - 1]}"

    def patch(self, patched: pytest.MonkeyPatch, module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.at(f"{module.__name__}.{name}")
            return function(*arguments, **named)

        patched.setattr(module, name, call)

    def raw(self, file: Any, mode: str) -> io.FileIO:
        points = self

        class Raw(io.FileIO):
            def readinto(self, buffer: Any) -> Any:
                points.at("read")
                return super().readinto(buffer)

            def readall(self) -> bytes:
                points.at("read")
                return super().readall()

            def write(self, data: Any) -> Any:
                points.at("write")
                return super().write(data)

        return Raw(file, mode)


@contextmanager
def points_of_reading() -> Iterator[Points]:
    points = Points()
    with pytest.MonkeyPatch.context() as patched:
        for module, name in ((os, "open"), (os, "fstat"), (torch, "load")):
            points.patch(patched, module, name)
        patched.setattr(os, "fdopen", lambda file, mode: io.BufferedReader(points.raw(file, mode)))
        yield points


@contextmanager
def points_of_writing() -> Iterator[Points]:
    points, opened = Points(), io.open

    def to_write(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        points.at("io.open")
        return io.BufferedWriter(points.raw(file, mode)) if mode in {"wb", "xb"} else opened(file, mode, *rest, **named)

    with pytest.MonkeyPatch.context() as patched:
        for module, name in (
            (os, "open"),
            (os, "fsync"),
            (os, "mkdir"),
            (os, "rename"),
            (os, "replace"),
            (torch, "save"),
        ):
            points.patch(patched, module, name)
        patched.setattr(io, "open", to_write)
        yield points


def said(points: Points, act: Callable[[], Any]) -> str:
    try:
        act()
    except ExecutionError as problem:
        return str(problem)
    finally:
        points.failing = -1
    return ""


def test_what_cannot_be_read_is_not_called_damaged(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """It was, and "load another": someone threw the only good checkpoint away."""
    training = Training(plans_of(plan_for)[1])
    training.steps(1)
    training.save(tmp_path)
    state, chance = training.state(), random.Random(0)
    with points_of_reading() as points:
        training.load(tmp_path)
        named = [*points.passed]
        training.spoil()
        before = training.state()
        for case in range(CASES):
            fault, advice, _ = FAULTS[case % len(FAULTS)]
            where = points.choose(fault, named, chance)
            text = said(points, lambda: training.load(tmp_path))
            assert text.startswith(f"cannot load {tmp_path}"), (where, text)
            assert advice in text, (where, text)
            assert "damaged" not in text, (where, text)
            assert same(training.state(), before)
    training.load(tmp_path)
    assert same(training.state(), state)


def test_what_cannot_be_written_says_what_to_do(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """Without descriptors it was to be saved into a folder of one's own; without memory torch's words stood alone."""
    training = Training(plans_of(plan_for)[1])
    chance = random.Random(0)
    with points_of_writing() as points, warnings.catch_warnings(action="ignore"):
        for _ in range(2):  # the first one locks the folder
            points.passed.clear()
            training.save(tmp_path)
        named = [*points.passed]
        for case in range(CASES):
            fault, _, advice = FAULTS[case % len(FAULTS)]
            where, held = points.choose(fault, named, chance), {path.name for path in tmp_path.iterdir()}
            text = said(points, lambda: training.save(tmp_path))
            new = {path.name for path in tmp_path.iterdir()} - held
            if not text:  # a folder that nobody may list need not be flushed, and `latest` is worth a warning
                assert len(new) == 1, where
                continue
            assert text.startswith(f"cannot write {tmp_path}"), (where, text)
            assert advice in text, (where, text)
            assert not new, (where, text)
    assert training.load(tmp_path) == 0


@pytest.mark.parametrize("length", [0, 30])
def test_a_manifest_that_is_cut_off_is_named_once(length: int, tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    path.write_text(Manifest(run="a", inherits={}, step=3, files={}).to_json()[:length])
    with pytest.raises(ExecutionError, match=r"^cannot load [^ ]*: \$: Invalid JSON: EOF .*; it is damaged"):
        Manifest.of(tmp_path)
