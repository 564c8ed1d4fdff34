"""Sizes for people: bytes, seconds and counts with a unit and three significant digits, and the width of lines."""

import math

WIDTH = 110
"""Columns of the widest line of a report, where nobody says how many there are."""


def bytes_text(size_bytes: float) -> str:
    """A size in the largest binary unit that it fills, such as `"1.50 GiB"`; whole bytes below 1 KiB.

    >>> bytes_text(1536), bytes_text(12), bytes_text(-3 * 2**30)
    ('1.50 KiB', '12 B', '-3.00 GiB')
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= scale:
            return f"{_three_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """A duration in s, ms or us, such as `"12.3 ms"`.

    >>> seconds_text(1.5), seconds_text(0.0123), seconds_text(0)
    ('1.50 s', '12.3 ms', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us"


def count_text(count: float) -> str:
    """A count such as `"1.20 M"`; whole below 1000.

    >>> count_text(1_200_000), count_text(8e9), count_text(12)
    ('1.20 M', '8.00 B', '12')
    """
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f}"


def rate_text(per_s: float) -> str:
    """How many a second, such as `"414.4"`, and from 10,000 on `"12.7 K"`.

    >>> rate_text(414.44), rate_text(0.0123), rate_text(12730)
    ('414.4', '0.0123', '12.7 K')
    """
    return f"{per_s:.4g}" if per_s < 1e4 else count_text(per_s)


def flops_text(flops_per_s: float) -> str:
    """A rate such as `"12.3 TFLOP/s"`.

    >>> flops_text(1.234e13), flops_text(2e8)
    ('12.3 TFLOP/s', '200 MFLOP/s')
    """
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if flops_per_s >= scale:
            return f"{_three_digits(flops_per_s / scale)} {unit}FLOP/s"
    return f"{_three_digits(flops_per_s)} FLOP/s"


def _three_digits(value: float) -> str:
    """At least three significant digits, no exponent."""
    if value == 0:
        return "0"
    return f"{value:.{max(0, min(6, 2 - math.floor(math.log10(abs(value)))))}f}"
