"""What any plan costs at least that begins, continues or ends in some way: the bounds that the search prunes with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs import Floats, Indices, Mask
from planner.objective import Prefix, StageTerms

_THROUGH, _BOTH = 0, 3


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """What one stage number could run.

    Attributes:
        fits: whether stage [i, j) is possible, at [i, j], shape (L + 1, L + 1).
        terms: what it adds to the objective; matrices of that shape.
    """

    fits: Mask
    terms: StageTerms


def quick_bound_s(choices: list[Choices], steady: int, *, exact_stages: bool) -> float:
    """No cuts have a T below this; infinite when none fit. Cheap: two of the five numbers of `Bounds`."""
    stacks = {
        id(choice): _stack(choice.fits, (choice.terms.through, choice.terms.forward + choice.terms.backward))
        for choice in choices
    }
    through, both = _after([stacks[id(choice)] for choice in choices], exact_stages)[:, 0, 0]
    return float(through + steady * both) if np.isfinite(both) else np.inf


class Bounds:
    """For each stage number k and position i, what the stages before and after cost at least.

    Five numbers bound a plan: the sum of `through`, the maxima of `forward`, `backward`, `forward + backward` (both
    at one stage) and `optimizer`. For each the cheapest way from the start (`before`) and to the end (`after`) is a
    dynamic program of its own; together they bound T, though the five ways may differ.

    Attributes:
        before: shape (5, K + 1, L + 1); infinite where no stages that fit lead.
        after: the same to the end of the model.
        root_s: no plan's T is below this; infinite when nothing fits.
    """

    def __init__(self, choices: list[Choices], steady: int, exact_stages: bool) -> None:
        self.choices = choices
        self.steady = steady
        self.stages = len(choices)
        self.last = choices[0].fits.shape[0] - 1
        stacks = {id(choice): _stack(choice.fits, _five(choice.terms)) for choice in choices}
        self._steps = [stacks[id(choice)] for choice in choices]
        self.after = _after(self._steps, exact_stages)
        self.root_s = float(self.total_s(*self.after[:, 0, 0]))
        self._before: Floats | None = None

    def total_s(self, through: Floats, forward: Floats, backward: Floats, both: Floats, optimizer: Floats) -> Floats:
        """T of a plan with these five numbers, when no recompute turns around early."""
        if not self.steady:  # infinity times 0 is no number
            return through + optimizer
        total_s: Floats = through + self.steady * np.maximum(forward + backward, both) + optimizer
        return total_s

    @property
    def before(self) -> Floats:
        """See the class; made on first use, for many M end at `root_s`."""
        if self._before is None:
            self._before = np.full_like(self.after, np.inf)
            self._before[:, 0, 0] = 0.0
            for stage in range(self.stages):
                self._before[:, stage + 1] = _join(self._steps[stage], self._before[:, stage, :, None]).min(axis=1)
        return self._before

    def promising(self, stage: int, below_s: float) -> tuple[Indices, Indices]:
        """First and stop layers of every stage `stage` that a plan with T below `below_s` may have."""
        steps, before, after = self._steps[stage], self.before[:, stage], self.after[:, stage + 1]
        rough_s = steps[_THROUGH] + before[_THROUGH][:, None] + after[_THROUGH][None, :]
        if self.steady:
            both = np.maximum(np.maximum(steps[_BOTH], before[_BOTH][:, None]), after[_BOTH][None, :])
            rough_s += self.steady * both
        first, stop = np.nonzero(rough_s < below_s)
        whole = _join(_join(steps[:, first, stop], before[:, first]), after[:, stop])
        kept = self.total_s(*whole) < below_s
        return first[kept], stop[kept]

    def completed_s(self, stage: int, position: Indices, prefix: Prefix) -> tuple[Floats, Floats]:
        """What T is at least for plans that begin with `stage` stages up to `position`.

        Returns:
            The bound, and the part of it that does not look at early turn-arounds and the optimizer.
        """
        through, forward, backward, both, optimizer = self.after[:, stage, position]
        path_s = (
            prefix.through
            + through
            + self.steady
            * np.maximum(np.maximum(prefix.forward, forward) + np.maximum(prefix.backward, backward), both)
        )
        return np.maximum(path_s, prefix.turned) + np.maximum(prefix.optimizer, optimizer), path_s


def _five(terms: StageTerms) -> tuple[Floats, ...]:
    return terms.through, terms.forward, terms.backward, terms.forward + terms.backward, terms.optimizer


def _stack(fits: Mask, numbers: tuple[Floats, ...]) -> Floats:
    """The numbers of every stage, shape (len(numbers), L + 1, L + 1), infinite where it does not fit."""
    stack = np.full((len(numbers), *fits.shape), np.inf)
    for row, values in zip(stack, numbers, strict=True):
        np.copyto(row, values, where=fits)
    return stack


def _after(steps: list[Floats], exact_stages: bool) -> Floats:
    """See `Bounds.after`."""
    stages, last = len(steps), steps[0].shape[-1] - 1
    after = np.full((len(steps[0]), stages + 1, last + 1), np.inf)
    after[:, stages if exact_stages else slice(1, None), last] = 0.0
    for stage in reversed(range(stages)):
        ways = _join(steps[stage], after[:, stage + 1, None, :])
        np.minimum(after[:, stage], ways.min(axis=2), out=after[:, stage])
    return after


def _join(left: Floats, right: Floats) -> Floats:
    """The numbers of two parts of a plan together: the first is a sum, the others are maxima."""
    joined = np.maximum(left, right)
    joined[0] = left[0] + right[0]
    return joined
