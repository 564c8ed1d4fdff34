"""Tables for notebooks, readable on light and dark pages; all text is escaped, for names are the user's.

table(["layer", "forward in ms"], [["blocks.0", "1.25"]])
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from profiler.text import one_line

MOST_ROWS = 60
"""Rows of a table in a notebook; of more the first and the last half are shown [chosen]."""
_CELL = "padding:2px 8px;border:none;border-bottom:1px solid rgba(128,128,128,.35);background:none;color:inherit"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[str] = frozenset()) -> str:
    """A table, numbers to the right.

    Args:
        heads: names of the columns.
        rows: as many cells each, as text.
        left: heads of columns of text, which are aligned to the left.
    """
    sides = ["left" if head in left else "right" for head in heads]
    lines = ["".join(_cell("th", head, side) for head, side in zip(heads, sides, strict=True))]
    for row in _first_and_last(rows):
        if row is None:
            remark = f"{len(rows) - MOST_ROWS} rows are left out; to_frame() has them all"
            lines.append(f'<td colspan="{len(heads)}" style="{_CELL};text-align:center">{remark}</td>')
        else:
            lines.append("".join(_cell("td", cell, side) for cell, side in zip(row, sides, strict=True)))
    body = "".join(f'<tr style="background:none">{line}</tr>' for line in lines)
    return f'<div style="overflow-x:auto"><table style="border-collapse:collapse;color:inherit">{body}</table></div>'


def paragraph(text: str) -> str:
    """A line of text."""
    return f'<p style="margin:4px 0">{escape(one_line(text))}</p>'


def block(*parts: str) -> str:
    """Parts of one value, in the page's own colour and a font with even digits."""
    style = "color:inherit;font-size:13px;font-variant-numeric:tabular-nums"
    return f'<div style="{style}">{"".join(parts)}</div>'


def _first_and_last(rows: Sequence[Sequence[str]]) -> list[Sequence[str] | None]:
    if len(rows) <= MOST_ROWS:
        return [*rows]
    half = MOST_ROWS // 2
    return [*rows[:half], None, *rows[-half:]]


def _cell(tag: str, text: str, side: str) -> str:
    return f'<{tag} style="{_CELL};text-align:{side}">{escape(one_line(text))}</{tag}>'
