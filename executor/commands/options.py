"""What the command's options take: numbers, sizes, places and files, refused before anything is measured."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from planner.plan.schedules import MOST_CHUNKS
from profiler.errors import ArgumentError
from profiler.precision import AUTOCAST_NAMES, precision_named
from profiler.quantities import (
    MOST_BYTES,
    MOST_DEVICES,
    MOST_LAYERS,
    MOST_MICRO_BATCHES,
    MOST_SAMPLES,
    MOST_SECONDS,
    MOST_THREADS,
    shown,
)

Asking: TypeAlias = click.Parameter | None
Within: TypeAlias = click.Context | None
if TYPE_CHECKING:
    ParamType: TypeAlias = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic only since click 8.4

_DIGITS = "[0-9]{1,20}"  # more than any bound; Python converts thousands of them slowly, or not at all
_WHOLE = re.compile(f"[+-]?{_DIGITS}")
_NUMBER = re.compile(rf"[+-]?{_DIGITS}(?:\.[0-9]{{0,20}})?(?:e[+-]?[0-9]{{1,3}})?", re.IGNORECASE)
_SIZE = re.compile(rf"({_DIGITS}(?:\.[0-9]{{1,20}})?) ?(?:([kmgt])(i?))?b?", re.IGNORECASE | re.ASCII)


class Whole(ParamType):
    """A whole number from `least` to `most`, in digits."""

    name = "integer"

    def __init__(self, most: int, *, least: int = 1) -> None:
        self.least, self.most = least, most

    def convert(self, value: Any, param: Asking, ctx: Within) -> int:
        """The number."""
        if isinstance(value, int):  # a default
            return value
        if not _WHOLE.fullmatch(value) or not self.least <= int(value) <= self.most:
            self.fail(f"{shown(value)} is no whole number from {self.least} to {self.most}", param, ctx)
        return int(value)


class SecondsOption(ParamType):
    """A number of seconds."""

    name = "float"

    def __init__(self, *, positive: bool) -> None:
        self.positive = positive

    def convert(self, value: Any, param: Asking, ctx: Within) -> float:
        """The number."""
        if isinstance(value, float):  # a default
            return value
        seconds = float(value) if _NUMBER.fullmatch(value) else -1.0
        if not 0 <= seconds <= MOST_SECONDS or (self.positive and not seconds):
            least = "more than 0" if self.positive else "0"
            self.fail(f"{shown(value)} is no number of seconds, {least} to {MOST_SECONDS:.0f}", param, ctx)
        return seconds


class Size(ParamType):
    """Bytes, with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: Asking, ctx: Within) -> int:
        """Whole bytes, exactly."""
        match = _SIZE.fullmatch(str(value))
        if match is None:
            self.fail(f"{shown(value)} is no size; write it as 8GiB, 500MB or 8589934592", param, ctx)
        number, prefix, binary = match.groups()
        power = " kmgt".index((prefix or " ").lower())
        size_bytes = int(Decimal(number) * (1024 if binary else 1000) ** power)
        if not 1 <= size_bytes <= MOST_BYTES:
            self.fail(f"{shown(value)} is no size from 1 byte to {MOST_BYTES}", param, ctx)
        return size_bytes


class MemoryLimit(ParamType):
    """One size for all devices, one for each with commas between them, or sizes by device name."""

    name = "memory limit"

    def convert(self, value: Any, param: Asking, ctx: Within) -> int | list[int | None] | dict[str, int]:
        """As `SettingKeywords.memory_limit` has it."""

        def size(text: str) -> int:
            return Size().convert(text.strip(), param, ctx)

        parts = str(value).split(",")
        if any("=" in part for part in parts):
            pairs = [_pair(part, "DEVICE=SIZE", self, param, ctx) for part in parts]
            return {device: size(text) for device, text in pairs}
        if len(parts) == 1:
            return size(parts[0])
        return [None if part.strip() == "none" else size(part) for part in parts]


class Assignment(ParamType):
    """What stands where: a name, `=`, and a number or a name."""

    name = "place"

    def __init__(self, form: str) -> None:
        self.form = form

    def convert(self, value: Any, param: Asking, ctx: Within) -> tuple[str, int | str]:
        """The name, and the number or name."""
        name, where = _pair(str(value), self.form, self, param, ctx)
        return name, int(where) if _WHOLE.fullmatch(where) else where


def _pair(text: str, form: str, kind: ParamType, param: Asking, ctx: Within) -> tuple[str, str]:
    """The two sides of `=`."""
    left, equals, right = (part.strip() for part in text.rpartition("="))
    if not equals or not left or not right:
        kind.fail(f"{shown(text)} is not of the form {form}", param, ctx)
    return left, right


class Numbers(ParamType):
    """Numbers of samples with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: Asking, ctx: Within) -> list[int]:
        """The numbers."""
        parts = [part.strip() for part in str(value).split(",")]
        if not all(map(_WHOLE.fullmatch, parts)):
            self.fail(f"{shown(value)} are no numbers; write them as 4,8", param, ctx)
        return [SAMPLES.convert(part, param, ctx) for part in parts]


class Devices(ParamType):
    """A count, or a text as `profiler.machine.local.local_devices` takes it."""

    name = "devices"

    def convert(self, value: Any, param: Asking, ctx: Within) -> int | str:
        """The count or the text."""
        if re.fullmatch("[+-]?[0-9]+", str(value)):
            return Whole(MOST_DEVICES).convert(value, param, ctx)
        return str(value)


class CountOrAuto(ParamType):
    """A count up to `most`, or `auto`."""

    name = "count"

    def __init__(self, what: str, most: int) -> None:
        self.what, self.most = what, most

    def convert(self, value: Any, param: Asking, ctx: Within) -> int | str:
        """The count, or `auto`."""
        if value == "auto":
            return "auto"
        if not isinstance(value, int) and not re.fullmatch("[+-]?[0-9]+", str(value)):
            self.fail(f"{shown(value)} is neither a number of {self.what} nor auto", param, ctx)
        return Whole(self.most).convert(value, param, ctx)


class FloatType(click.Choice[str]):
    """A floating-point type, by torch's name or the short one; by default one that autocast computes in."""

    def __init__(self, *names: str) -> None:
        super().__init__(names or AUTOCAST_NAMES)

    def convert(self, value: Any, param: Asking, ctx: Within) -> str:
        """Torch's name."""
        plain = str(value).lower()
        return super().convert(_FLOAT_TYPES.get(plain, plain), param, ctx)


_FLOAT_TYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


class Precision(ParamType):
    """A recipe of mixed precision, as people write it."""

    name = "recipe"

    def convert(self, value: Any, param: Asking, ctx: Within) -> str | None:
        """Its name in `profiler.precision`."""
        try:
            return precision_named(value)
        except ArgumentError as problem:
            self.fail(str(problem), param, ctx)


class Input(click.Path):
    """A file to be read: one that is not there is wrong usage, one that holds something else is a damaged file."""

    def __init__(self, *, exists: bool = True) -> None:
        super().__init__(exists=exists, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: Asking, ctx: Within) -> Any:
        """The path."""
        try:
            return super().convert(value, param, ctx)
        except ValueError as problem:  # a zero byte, or letters that no file system takes
            self.fail(f"{shown(str(value))} names no file: {problem}", param, ctx)


class Output(Input):
    """A file to be written: refused where it cannot be, before minutes of measuring and not after.

    Args:
        endings: that its name may have; any if there are none.
        folder_is_made: whether its folder comes with it; without, that must be there.
    """

    def __init__(self, endings: Sequence[str] = (), *, folder_is_made: bool = True) -> None:
        super().__init__(exists=False)
        self.endings, self.folder_is_made = tuple(endings), folder_is_made

    def convert(self, value: Any, param: Asking, ctx: Within) -> Any:
        """The path."""
        if self.endings and not str(value).endswith(self.endings):
            self.fail(f"{shown(value)} is no picture; let it end in one of {', '.join(self.endings)}", param, ctx)
        try:
            reason = _why_not_written(Path(value), self.folder_is_made)
        except (OSError, ValueError) as problem:  # ValueError: a zero byte in the path
            reason = getattr(problem, "strerror", None) or str(problem)
        if reason:
            self.fail(f"cannot write {str(value)!r}: {reason}; choose a file in a folder of yours", param, ctx)
        return super().convert(value, param, ctx)


def _why_not_written(path: Path, folder_is_made: bool) -> str:
    """Why a file cannot be written there; "" if it can, as far as can be known."""
    if not path.name:
        return "it names no file"
    if path.exists():
        if not stat.S_ISREG(path.stat().st_mode):
            return "a folder is there" if path.is_dir() else "it is no file but a pipe or a device"
    elif len(os.fsencode(path.name)) > _LONGEST_NAME:
        return "the name is too long"
    folder = path.parent
    if not folder_is_made and not folder.is_dir():
        return f"there is no folder {str(folder)!r}"
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{str(folder)!r} is no folder"
    with tempfile.TemporaryFile(dir=folder):  # rights alone do not say it: some file systems take no files
        return ""


_LONGEST_NAME = 255  # bytes, on the usual file systems
FILE = Input()
PICTURE = Output((".pdf", ".png", ".svg"), folder_is_made=False)
SAMPLES, STAGES, MICRO_BATCHES = Whole(MOST_SAMPLES), Whole(MOST_LAYERS), Whole(MOST_MICRO_BATCHES)
CHUNKS = CountOrAuto("stages", MOST_CHUNKS)
REPLICAS = CountOrAuto("pipelines", MOST_DEVICES)
THREADS = Whole(MOST_THREADS)
