"""Pareto sets of many small groups at once."""

from __future__ import annotations

import numpy as np

from planner.costs import Floats, Indices, Mask


def undominated(values: Floats, group: Indices) -> Indices:
    """Indices of the rows that no other row of their group dominates, ascending.

    A row dominates another when none of its values is larger; of equal rows the first stays.

    Args:
        values: shape (n, d).
        group: shape (n,), ascending.
    """
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    stops = np.append(starts, len(group))[1:]
    kept = [start + _undominated_rows(values[start:stop]) for start, stop in zip(starts, stops, strict=True)]
    return np.concatenate(kept) if kept else np.zeros(0, dtype=np.intp)


def _undominated_rows(values: Floats) -> Indices:
    """Indices of the undominated rows: the smallest row left is undominated, and strikes what it dominates."""
    if len(values) == 1:
        return np.zeros(1, dtype=np.intp)
    order = np.lexsort(values.T[::-1])
    rows = values[order]
    kept = []
    left = np.arange(len(rows))
    while len(left):
        head = left[0]
        kept.append(order[head])
        beaten: Mask = (rows[left] >= rows[head]).all(axis=1)
        left = left[~beaten]
    return np.sort(np.array(kept, dtype=np.intp))


def best_of_each_place(value: Floats, group: Indices, width: int) -> tuple[Indices, Indices]:
    """Split rows into the `width` smallest of each group and the rest; both ascending, ties to the earlier row.

    Args:
        value: shape (n,).
        group: shape (n,), ascending.
        width: rows to keep in each group.
    """
    order = np.lexsort((value, group))
    starts = np.searchsorted(group, group)
    rank = np.arange(len(group)) - starts
    return np.sort(order[rank < width]), np.sort(order[rank >= width])
