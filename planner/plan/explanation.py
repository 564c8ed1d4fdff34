"""A plan's explanation: a table with sentences before it."""

from __future__ import annotations

from html import escape

import pandas

MOST_ROWS = 16
"""Stages that are all shown [chosen]."""
AT_MOST = 2
"""Stages that are shown for each reason [chosen]."""


class Explanation(pandas.DataFrame):
    """The table of `planner.explain.explain`, with its sentences before it where it is shown.

    Attributes:
        sentences: what a person would say.
    """

    _metadata = ["sentences"]  # noqa: RUF012  # as pandas has it
    sentences: tuple[str, ...] = ()

    @property
    def _constructor(self) -> type[pandas.DataFrame]:
        return pandas.DataFrame

    def in_short(self) -> tuple[pandas.DataFrame, str]:
        """The stages that matter, and a remark on the others: all of few.

        Of more than `MOST_ROWS` these are the first and the last two, those that hold up the others, the fullest, and
        those with a cut that would cost least to move.
        """
        whole = pandas.DataFrame(self)
        if len(whole) <= MOST_ROWS:
            return whole, ""
        kept = {0, 1, len(whole) - 2, len(whole) - 1}
        kept |= {*whole.index[whole["bottleneck"] != ""][:AT_MOST]}
        kept |= {*whole["memory_share"].nlargest(AT_MOST).index, *whole["busy"].nlargest(AT_MOST).index}
        for column in ("cut_earlier_s", "cut_later_s"):
            if column in whole:
                kept |= {*whole[column].nsmallest(AT_MOST).index}
        short = whole.loc[sorted(kept)]
        return short, f"{len(whole) - len(short)} of {len(whole)} stages are left out; the table itself has all"

    def __repr__(self) -> str:
        short, remark = self.in_short()
        return "\n".join([*self.sentences, "", repr(short), *([remark] if remark else [])])

    def _repr_html_(self) -> str:
        short, remark = self.in_short()
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return f"{said}{short.to_html()}{f'<p>{escape(remark)}</p>' if remark else ''}"
