"""Text that may come from strangers, on its way to a terminal."""

from __future__ import annotations

_KEPT = frozenset("\n\t")


def printable(text: str) -> str:
    r"""The text with everything that a terminal would obey or hide written as an escape; lines stay lines.

    >>> print(printable("blocks\x1b[2J.0"))
    blocks\x1b[2J.0
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in _KEPT else ascii(letter)[1:-1] for letter in text)


def one_line(text: str) -> str:
    """The same where a line break would be taken for the end, as in a table."""
    return printable(text).replace("\n", r"\n").replace("\t", r"\t")
