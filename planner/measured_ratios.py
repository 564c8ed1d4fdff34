"""What `Pipeline.measured()` saw of a plan, as ratios to what was predicted.

    stage  what         predicted  measured  ratio          of a layer of stage 0 and its gradients

        0  forward_s          2.0       3.0    1.5          forward    1.5
        0  backward_s         4.0       5.0    1.25         other      1.5 = (5.0 - 2.0) / (4.0 - 2.0)
        0  weight_s           2.0       2.0    1.0          weight     1.0

`other` is for all in a backward pass but gradients of parameters. With it in place of the ratio of the whole, what
layers take adds up to what their stage took, though in some layers there is nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isclose
from numbers import Real
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from planner.plan.plan import Plan
from planner.plan.stage import Skip, Stage
from profiler.errors import ArgumentError, ForeignPlanError
from profiler.text import counted

if TYPE_CHECKING:
    import pandas

Seen: TypeAlias = Mapping[tuple[int, str], tuple[float, float]]
"""By stage and quantity the measured and the predicted seconds, of the whole step as that of stage -1."""
COLUMNS = ("stage", "what", "predicted", "measured")
PASSES = ("forward_s", "recompute_s", "backward_s", "weight_s")
SENDS = ("send_forward_s", "send_backward_s")
WHOLE = "makespan_s"
SAME = 1e-6
"""Relative difference of a prediction in a table from the plan's, at most."""
LEAST_RATIO, MOST_RATIO = 1e-9, 1e9
"""Of measured to predicted seconds; others do not come from measuring [chosen]."""
LEAST_OTHER = 0.1
"""Share of a backward pass beside gradients of parameters that is enough to tell its ratio from theirs [chosen]."""
PASS_OURS = "pass what Pipeline.measured() returns"


@dataclass(frozen=True, slots=True)
class PassRatios:
    """Measured by predicted, of the passes of a stage, or of all on a kind of device.

    Attributes:
        forward: of forward passes.
        recompute: of recomputing a stage's last recomputed segment.
        other: of all in a backward pass but gradients of parameters: those of inputs, and recomputing other segments.
        weight: of gradients of parameters.
    """

    forward: float
    recompute: float
    other: float
    weight: float

    @classmethod
    def of(cls, seen: Sequence[Mapping[str, float]], backward_s: float, weight_s: float) -> PassRatios:
        """From ratios of `PASSES`; of a pass that was not seen that of the most alike.

        Args:
            seen: what counts first comes first.
            backward_s: predicted, of a backward pass.
            weight_s: of the part of it that is gradients of parameters, which takes no longer than the whole.
        """
        forward, recompute, backward, weight = (
            next((found[name] for found in seen for name in (what, *_ALIKE[what]) if name in found), 1.0)
            for what in PASSES
        )
        other_s = backward_s - weight_s
        if not weight_s or other_s < LEAST_OTHER * backward_s:
            return cls(forward, recompute, backward, backward)
        weight = min(weight, backward * backward_s / weight_s)
        return cls(forward, recompute, max(0.0, backward * backward_s - weight * weight_s) / other_s, weight)

    @classmethod
    def alike(cls, ratio: float) -> PassRatios:
        """The same of all passes."""
        return cls(ratio, ratio, ratio, ratio)

    def times(self, factor: float) -> PassRatios:
        """All of them so many times as large."""
        return PassRatios(*(factor * ratio for ratio in (self.forward, self.recompute, self.other, self.weight)))


_ALIKE = {
    "forward_s": ("backward_s",),
    "recompute_s": ("forward_s", "backward_s"),
    "backward_s": ("forward_s",),
    "weight_s": ("backward_s", "forward_s"),
}


@dataclass(frozen=True, slots=True)
class Ratios:
    """Measured by predicted.

    Attributes:
        stages: of each stage.
        kinds: of all stages on a kind of device, for each that something was seen on.
        link: of all messages.
        sent: whether any of them was seen.
    """

    stages: tuple[PassRatios, ...]
    kinds: dict[str, PassRatios]
    link: float
    sent: bool

    @classmethod
    def of(cls, plan: Plan, seen: Seen) -> Ratios:
        """From what was seen of a plan.

        Raises:
            ArgumentError: that was no pass.
        """
        predicted = _predictions(plan)
        stages: list[dict[str, float]] = [{} for _ in plan.stages]
        pairs: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for (stage, what), pair in seen.items():
            if what in PASSES:
                stages[stage][what] = _ratio([pair])
                pairs[plan.stages[stage].device.kind][what].append(pair)
        if not pairs:
            raise ArgumentError("measured holds no pass of any stage; train a step before Pipeline.measured() is asked")
        kinds = {kind: {what: _ratio(found) for what, found in passes.items()} for kind, passes in pairs.items()}

        def ratios(numbers: Sequence[int], *found: Mapping[str, float]) -> PassRatios:
            whole_s, weight_s = (sum(predicted[k, what] for k in numbers) for what in ("backward_s", "weight_s"))
            return PassRatios.of(found, whole_s, weight_s)

        sent = [pair for (_, what), pair in seen.items() if what.endswith(SENDS)]
        runs_on = [stage.device.kind for stage in plan.stages]
        return cls(
            tuple(ratios([k], stages[k], kinds.get(kind, {})) for k, kind in enumerate(runs_on)),
            {kind: ratios([k for k, one in enumerate(runs_on) if one == kind], kinds[kind]) for kind in kinds},
            _ratio(sent),
            bool(sent),
        )

    def times(self, factor: float) -> Ratios:
        """All of them so many times as large."""
        stages = tuple(one.times(factor) for one in self.stages)
        kinds = {kind: one.times(factor) for kind, one in self.kinds.items()}
        return replace(self, stages=stages, kinds=kinds, link=self.link * factor)


def _predictions(plan: Plan) -> dict[tuple[int, str], float]:
    """By stage and quantity, as `Pipeline.measured()` names them, the mean seconds over the micro-batches."""

    def mean(of: Stage | Skip, what: str) -> float:
        return fmean(getattr(of.times_at(size), what) for size in plan.micro_batch_sizes)

    found = {(number, what): mean(stage, what) for number, stage in enumerate(plan.stages) for what in PASSES + SENDS}
    for skip in plan.skips:
        for what, (sender, receiver) in zip(SENDS, (skip.ends, skip.ends[::-1]), strict=True):
            found[sender, f"skip_to_{receiver}_{what}"] = mean(skip, what)
    return found


def seen_of(plan: Plan, measured: pandas.DataFrame) -> Seen:
    """What took time.

    Raises:
        ArgumentError: the table is none of `Pipeline.measured()`.
        ForeignPlanError: it is that of another plan.
    """
    _check_columns(measured)
    known, rows, seen = _predictions(plan), set(), {}
    names = {WHOLE, *(what for _, what in known)}
    for stage, what, predicted_s, seconds in measured[list(COLUMNS)].itertuples(index=False):
        if not isinstance(what, str):
            raise ArgumentError(f"measured has a row of {what!r}, which is no text; {PASS_OURS}")
        if what not in names:
            continue
        numbers = (stage, predicted_s, seconds)
        if (
            not all(map(_is_number, numbers))
            or stage != stage // 1
            or not (stage == -1 if what == WHOLE else stage >= 0)
        ):
            raise ArgumentError(
                f"measured has a row of stage {stage!r}, {what}, {predicted_s!r}, {seconds!r}; stages are counted from "
                f"0, of {WHOLE} it is -1, and the others are seconds: {PASS_OURS}"
            )
        row = int(stage), what
        if row in rows:
            raise ArgumentError(f"measured has two rows of {what} of stage {stage}; {PASS_OURS}, of one call")
        rows.add(row)
        if what != WHOLE and row not in known:
            raise ForeignPlanError(
                f"measured has {what} of stage {stage}, and the plan has {counted(plan.K, 'stage')}; pass what a "
                "Pipeline of this plan measured"
            )
        pair = _float(seconds), _float(predicted_s)
        if not all(0 < one < inf for one in pair):
            continue
        if what != WHOLE:
            if not isclose(pair[1], known[row], rel_tol=SAME):
                raise ForeignPlanError(
                    f"measured says that {what} of stage {stage} was predicted to be {pair[1]:.6g}, and the plan "
                    f"predicts {known[row]:.6g}; pass what a Pipeline of this plan measured"
                )
            check_ratio(*pair, f"{what} of stage {stage}")
        seen[row] = pair
    return seen


def _check_columns(measured: pandas.DataFrame) -> None:
    columns = list(getattr(measured, "columns", ()))
    for name in COLUMNS:
        if columns.count(name) != 1:
            found = f"{columns.count(name)} columns" if name in columns else "no column"
            raise ArgumentError(f"measured has {found} {name!r}; {PASS_OURS}")


def check_ratio(seconds: float, predicted_s: float, what: str) -> None:
    """Refuse with an ArgumentError what cannot come from measuring."""
    if not LEAST_RATIO <= seconds / predicted_s <= MOST_RATIO:
        raise ArgumentError(
            f"measured says that {what} took {seconds:.6g} seconds, where {predicted_s:.6g} are predicted: the one by "
            f"the other is {seconds / predicted_s:.3g}, and may be from {LEAST_RATIO:g} to {MOST_RATIO:g}; {PASS_OURS}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


def _float(number: Real) -> float:
    """The number, infinite if it is more than a float may hold."""
    try:
        return float(number)
    except OverflowError:
        return inf


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs) if pairs else 1.0
