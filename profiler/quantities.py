"""What numbers and names from outside may be: one place for files, arguments and the command.

Bounds are far beyond what exists, and far inside what arithmetic with floats can do: sums and products of what is let
in stay finite, and what is listed one by one stays countable.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from profiler.errors import ArgumentError

MOST_SECONDS: Final = 1e9  # 30 years
MOST_BYTES: Final = 2**53  # 9 PB; whole numbers up to here are exact in float64
MOST_SAMPLES: Final = (
    2**24
)  # of a mini-batch: sizes up to a quarter of it are measured, which ends only if they are few
MOST_MICRO_BATCHES: Final = 2**14
"""Of a replica: the planner tries every M one by one, and a plan lists them."""
MOST_DEVICES: Final = 2**16
MOST_LAYERS: Final = 2**20
LEAST_STAGES: Final = 4
"""Layers are always fine enough for that many stages: with fewer, what is recomputed is chosen by layers too, and plans
for 1 to 4 devices share layers and measurements [chosen]."""
MOST_THREADS: Final = 1024  # torch ends the process with a segmentation fault where the system starts no more
MOST_PREDICTED_SECONDS: Final = 1e30  # of sums and products of the others
MOST_RELATIVE: Final = 1e12  # an error, as a share of what it is of
MOST_PREDICTED_BYTES: Final = 2**100
SHORTEST_WORK_S: Final = 1e-9  # of all layers for one micro-batch: nothing is faster, and shares of it stay finite
SHORTEST_STEP_S: Final = 1e-12  # what is left of that on the fastest of unlike devices, in a bound
MOST_SHOWN: Final = 60  # characters of a value in a message


def check_count(name: str, value: object, *, most: int) -> None:
    """Refuse what is no whole number from 1 to `most`.

    Raises:
        ArgumentError: with the name of the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{name} is {shown(value)}; give a whole number of at least 1")
    if value < 1:
        raise ArgumentError(f"{name} is {shown(value)}; give at least 1")
    if value > most:
        raise ArgumentError(f"{name} is {shown(value)}; give at most {most}")


def paths_of(name: str, value: object) -> tuple[str, ...]:
    """Paths of modules.

    Raises:
        ArgumentError: with the name of the argument.
    """
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(path, str) for path in value):
        raise ArgumentError(f"{name} is {shown(value)}; give a list of module paths")
    return tuple(value)


def check_seconds(name: str, value: object, *, positive: bool = True) -> None:
    """Refuse what is no time span: no number, not a finite one, negative, or zero where it must be positive.

    Raises:
        ArgumentError: with the name of the argument.
    """
    least = "more than 0" if positive else "at least 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{name} is {shown(value)}; give a number of seconds, {least}")
    if not (value > 0 or (value == 0 and not positive)):
        raise ArgumentError(f"{name} is {shown(value)}; give {least} seconds")
    if value > MOST_SECONDS:
        raise ArgumentError(f"{name} is {shown(value)}; give at most {MOST_SECONDS:.0f} seconds")


def shown(value: object) -> str:
    """A value in a message: as Python writes it, cut where it is long.

    >>> shown(-3), shown("x" * 100)[:5], shown(10**5000)
    ('-3', "'xxxx", 'a number of about 5000 digits')
    """
    if isinstance(value, int) and abs(value) >= 10**MOST_SHOWN:
        return f"a number of about {round(value.bit_length() * 0.30103)} digits"
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 10]}...{text[-7:]}"
