"""Fills `Tables`, the arrays that the compiled search reads, from a problem and a candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.cost.layer_costs import Floats, LayerSeconds, prefix_sums
from planner.cost.stage_sums import stage_sums
from planner.cost.time_ledger import end_s, layer_seconds
from planner.cost.transfers import copied_shares, copies_s
from planner.kernel.listed import PassSums
from planner.kernel.tables import ALWAYS, AUTO, NEVER, Tables
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import SCHEDULES, Objective
from planner.rules import FREE
from planner.solve.problem import Candidate, Problem

PRICES = 16
"""Prices of memory that are tried to bound recompute from below [fitted]."""
_SECONDS = ("forward_s", "backward_s", "recompute_s")
_MODES = {"auto": AUTO, "always": ALWAYS, "never": NEVER}


class _Sizes:
    """Sums over the layers of a large and of a small micro-batch, for each class of devices."""

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.split, self.kinds = candidate.split, [group.device.kind for group in problem.classes]
        sizes = self.split.largest, self.split.smallest
        self.of_kind = {
            kind: [layer_seconds(problem.costs, kind, size) for size in sizes] for kind in dict.fromkeys(self.kinds)
        }

    def sums(self, combine: Callable[[LayerSeconds, LayerSeconds], Floats]) -> Floats:
        """Prefix sums of what is made of the two, shape (C, N)."""
        return np.stack([prefix_sums(combine(*self.of_kind[kind])) for kind in self.kinds])

    def steady(self, kind: str, name: str) -> Floats:
        """Mean of a field over the first M - 1 micro-batches, shape (L,)."""
        large, small = self.of_kind[kind]
        return steady_mean(self.split, getattr(large, name), getattr(small, name))

    def steady_sums(self, name: str) -> Floats:
        """Prefix sums of that, shape (C, N)."""
        return np.stack([prefix_sums(self.steady(kind, name)) for kind in self.kinds])

    def after_first_sums(self, name: str) -> Floats:
        """Prefix sums of the mean over the last M - 1, shape (C, N)."""
        return self.sums(lambda more, less: after_first_mean(self.split, getattr(more, name), getattr(less, name)))

    def each(self, name: str) -> list[Floats]:
        """Prefix sums of a field for the large and for the small micro-batch, each of shape (C, N)."""
        return [self.sums(lambda more, _: getattr(more, name)), self.sums(lambda _, less: getattr(less, name))]


def make_tables(problem: Problem, candidate: Candidate) -> Tables:
    """The arrays for one schedule, R and M."""
    split, record = candidate.split, SCHEDULES[candidate.schedule]
    most = problem.most_stages(candidate.replicas, split.count)
    sizes, kinds = _Sizes(problem, candidate), [group.device.kind for group in problem.classes]
    numbers = range(1, 2 if record.keeps_all else most + 1)
    memory = stage_sums([problem.basis(kind, candidate) for kind in kinds], numbers)
    device_bytes = np.array([float(group.device.memory_bytes) for group in problem.classes])
    return Tables(
        objective=int(record.objective),
        by_number=not record.keeps_all,
        last_turns_around=record.last_turns_around,
        two_sizes=record.objective is Objective.FLOW_SHOPS and not split.equal,
        steady=split.count - 1,
        recompute=_MODES[problem.settings.recompute],
        least_stages=problem.settings.stages or 1,
        most_stages=most,
        more_large=float(split.number_largest - 1),
        more_small=float(split.count - split.number_largest - 1),
        large=np.full(2, split.number_largest),
        small=np.full(2, split.count - split.number_largest),
        memory=memory,
        prices=_prices(sizes, memory.kept_layers),
        trainable_bytes=problem.parameters.trainable,
        stepped_bytes=problem.parameters.stepped(problem.shares(candidate.replicas)),
        limit=device_bytes[:, None] - memory.always,
        capacity=np.array([min(most, group.capacity(candidate.replicas)) for group in problem.classes]),
        **pass_seconds(problem, candidate),
        **message_seconds(problem, candidate),
        **_end_seconds(problem, candidate, kinds),
        **_whole_stages(problem, candidate, kinds),
        **_rules(problem),
    )


def pass_sums(problem: Problem, candidate: Candidate) -> PassSums:
    """Sums of the layers' passes, as the schedule has them."""
    sizes, splits = _Sizes(problem, candidate), SCHEDULES[candidate.schedule].splits_backward
    forward, backward, weights, split = (
        np.stack(sizes.each(name)) for name in ("forward_s", "backward_s", "weight_s", "split_s")
    )
    if not splits:
        weights, split = np.zeros_like(weights), np.zeros_like(split)
    count = candidate.split
    return PassSums(forward, backward - weights, weights + split, count.number_largest, count.count)


def pass_seconds(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """The fields of `Tables` with prefix sums of what layers take."""
    sizes = _Sizes(problem, candidate)
    forward_head, backward_head = _heads(problem, candidate, sizes)
    rounds = SCHEDULES[candidate.schedule].objective is Objective.ROUNDS
    passing_least = sizes.sums(
        lambda more, less: np.minimum(more.forward_s, less.forward_s) + np.minimum(more.backward_s, less.backward_s)
    )
    passing_first = sizes.sums(lambda more, less: more.forward_s + np.minimum(more.backward_s, less.backward_s))
    steady_recompute = sizes.after_first_sums("recompute_s") if rounds else sizes.steady_sums("recompute_s")
    sized = np.stack([sums for name in _SECONDS for sums in sizes.each(name)])
    forward, backward, recompute = np.diff(sized.reshape(3, 2, *sized.shape[1:]))
    return {
        "around": np.stack([prefix_sums(one) for one in (forward + backward).min(axis=1)]),
        "first_back": prefix_sums((backward[0] - backward.min(axis=0)).min(axis=0)),
        "first_back_most": prefix_sums((backward[0] - backward.min(axis=0)).max(axis=0)),
        "small_back": prefix_sums(backward[1].min(axis=0)),
        "recompute_share": recompute_share(recompute, steady_recompute),
        "passing": passing_first if rounds else passing_least,
        "passing_least": passing_least,
        "forward": sizes.after_first_sums("forward_s") if rounds else sizes.steady_sums("forward_s"),
        "backward": sizes.steady_sums("backward_s"),
        "steady_recompute": steady_recompute,
        "passing_recompute": sizes.sums(lambda more, less: np.minimum(more.recompute_s, less.recompute_s)),
        "forward_most": sizes.sums(lambda more, less: np.maximum(more.forward_s, less.forward_s)),
        "forward_head": forward_head,
        "backward_head": backward_head,
        "sized": sized,
    }


def message_seconds(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """Those of what crosses boundaries."""
    split, shares = candidate.split, copied_shares(problem.link)
    under_way = 1 - sum(shares)
    out_large, back_large = problem.messages_s(split.largest)
    out_small, back_small = problem.messages_s(split.smallest)
    rounds = SCHEDULES[candidate.schedule].objective is Objective.ROUNDS
    crossing_least = np.minimum(out_large, out_small) + np.minimum(back_large, back_small)
    inside = problem.rules.allowed.copy()
    inside[[0, -1]] = False
    both = np.stack([out_large + back_large, out_small + back_small])
    steady = (after_first_mean if rounds else steady_mean)(split, out_large, out_small)
    steady_back = steady_mean(split, back_large, back_small)
    outputs = np.stack([out_large, out_small, steady, np.maximum(out_large, out_small)])
    gradients = np.stack([back_large, back_small, steady_back])
    return {
        "crossing": out_large + np.minimum(back_large, back_small) if rounds else crossing_least,
        "crossing_least": crossing_least,
        "around_crossing": both[:, inside].min(axis=1, initial=np.inf) if inside.any() else np.zeros(2),
        "forward_link": under_way * steady,
        "backward_link": under_way * steady_back,
        "sized_links": under_way * np.stack([out_large, out_small, back_large, back_small]),
        "copies": copies_s(shares, outputs, gradients),
    }


def _end_seconds(problem: Problem, candidate: Candidate, kinds: Sequence[str]) -> dict[str, Any]:
    """Those of the end of a step."""
    ends = [end_s(problem.end_figures(kind, candidate.replicas)) for kind in kinds]
    return {
        "optimizer_fixed": np.array([sum(fixed_s for fixed_s, _ in terms.values()) for terms in ends]),
        "reduce_rate": np.array([terms["all_reduce_s"][1] for terms in ends]),
        "optimizer_rate": np.array([terms["optimizer_s"][1] for terms in ends]),
    }


def _whole_stages(problem: Problem, candidate: Candidate, kinds: Sequence[str]) -> dict[str, Any]:
    """Those of stages that are measured as a whole."""
    stack, sizes = problem.costs.stage_stack, (candidate.split.largest, candidate.split.smallest)
    around = [[stack.around(kind, size) for size in sizes] for kind in kinds]
    return {
        "stage_kept": stack.kept,
        "stage_most": stack.most,
        "stage_at": np.array([[place[:2] for place in places] for places in around]),
        "stage_share": np.array([[place[2] for place in places] for places in around]),
    }


def _rules(problem: Problem) -> dict[str, Any]:
    """Those of where cuts may be and what runs where."""
    class_of = {member: number for number, group in enumerate(problem.classes) for member in group.members}
    pinned = [FREE if device == FREE else class_of[int(device)] for device in problem.rules.pinned]
    return {
        "allowed": problem.rules.allowed,
        "demanded": np.cumsum(problem.rules.demanded),
        "pinned": np.array(pinned),
    }


def _prices(sizes: _Sizes, kept_layers: Floats) -> Floats:
    """Seconds of recompute per byte held, for each class and number from the end."""
    return np.stack(
        [
            np.stack([prices(row, sizes.steady(kind, "recompute_s")) for row in np.diff(held)])
            for kind, held in zip(sizes.kinds, kept_layers, strict=True)
        ]
    )


def steady_mean(split: MicroBatches, large: Floats, small: Floats) -> Floats:
    """Mean over the first M - 1 micro-batches of what takes `large` and `small` for the two sizes."""
    if split.equal:
        return large
    return (split.number_largest * large + (split.count - split.number_largest - 1) * small) / (split.count - 1)


def after_first_mean(split: MicroBatches, large: Floats, small: Floats) -> Floats:
    """Mean over the last M - 1 micro-batches of what takes `large` and `small` for the two sizes."""
    if split.equal:
        return large
    return ((split.number_largest - 1) * large + (split.count - split.number_largest) * small) / (split.count - 1)


def recompute_share(sized: Floats, steady_sums: Floats) -> float:
    """The least that recompute of a layer is of its steady one, `sized` of shape (2, C, L), the other prefix sums."""
    steady = np.broadcast_to(np.diff(steady_sums), sized.shape)
    return float(np.min(sized[steady > 0] / steady[steady > 0], initial=1.0))


def prices(held_bytes: Floats, seconds: Floats) -> Floats:
    """Seconds per byte of some layers, spread over all, shape (PRICES,)."""
    per_byte = np.sort(seconds[held_bytes > 0] / held_bytes[held_bytes > 0])
    if not len(per_byte):
        return np.zeros(PRICES)
    some: Floats = per_byte[np.linspace(0, len(per_byte) - 1, PRICES).round().astype(int)]
    return some * np.linspace(0.9, 1.1, PRICES)


def _heads(problem: Problem, candidate: Candidate, sizes: _Sizes) -> tuple[Floats, Floats]:
    """What layers 0 to i - 1 take longer with a large micro-batch than with a small one, at least, two (L + 1,) arrays.

    Zero for equal micro-batches.
    """
    if candidate.split.equal or SCHEDULES[candidate.schedule].objective is not Objective.FLOW_SHOPS:
        return np.zeros(problem.layers + 1), np.zeros(problem.layers + 1)

    def least(name: str) -> Floats:
        more = [np.maximum(getattr(large, name) - getattr(small, name), 0.0) for large, small in sizes.of_kind.values()]
        smallest: Floats = np.min(more, axis=0)
        return smallest

    return prefix_sums(least("forward_s")), prefix_sums(least("backward_s"))
