"""Text on its way to people: numbers of things, and what may come from strangers."""

from __future__ import annotations

_KEPT = frozenset("\n\t")


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "sample"), counted(0, "micro-batch"), counted(2, "entry")
    ('1 sample', '0 micro-batches', '2 entries')
    """
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def are(count: int) -> str:
    """The verb before or after a number of things.

    >>> f"there {are(1)} {counted(1, 'device')}"
    'there is 1 device'
    """
    return "is" if count == 1 else "are"


def raised_text(problem: BaseException) -> str:
    """Class and text of somebody's exception, which may fail to say what it is.

    >>> raised_text(ValueError("no such thing"))
    'ValueError: no such thing'
    """
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception as other:
        return f"{type(problem).__name__} (which raises {type(other).__name__} where its text is asked for)"


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
