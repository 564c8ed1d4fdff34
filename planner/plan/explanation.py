"""A plan's explanation: a table with sentences before it."""

from __future__ import annotations

from html import escape

import pandas


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

    def __repr__(self) -> str:
        return "\n".join([*self.sentences, "", super().__repr__()])

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return f"{said}{pandas.DataFrame(self).to_html()}"
