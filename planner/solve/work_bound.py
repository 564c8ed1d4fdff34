"""What no plan of a schedule, R and M takes less than, from the layers' work alone: cheap, for all of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, prefix_sums
from planner.cost.ledger import Ledger, rows_of
from planner.cost.ledger_rows import Counts, Form, Of
from planner.cost.stage_sums import after_layers, always_bytes, moment_bytes, own_bytes, pooled_bytes
from planner.cost.time_ledger import layer_seconds
from planner.cost.transfers import copied_shares
from planner.kernel.bottleneck import ROUNDING, least_bottleneck, least_rounds_s
from planner.kernel.recompute_bounds import least_recompute_s
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import SCHEDULES, Objective
from planner.solve.problem import Candidate, Problem
from planner.solve.tables import after_first_mean, prices, steady_mean

SMALLEST_GAIN = 1e-9
"""Share of a layer's work below which nothing is saved: rounding is as large."""


class WorkBound(NamedTuple):
    """A step time that no plan of a candidate is below, in parts: what recompute adds takes longer to find.

    Attributes:
        passes_s: of a micro-batch through all stages.
        work_s: that stays at the stages, of all of them together.
        share: of that, what the slowest stage has at least.
        slowest_s: the same by the places where cuts may be.
        certainty: factor that leaves room for rounding.
    """

    passes_s: float
    work_s: float
    share: float
    slowest_s: float
    certainty: float

    def step_s(self, recompute_s: float = 0.0) -> float:
        """The step time if the stages recompute at least so long, all of them together."""
        return (self.passes_s + max((self.work_s + recompute_s) * self.share, self.slowest_s)) * self.certainty


def work_bound_s(problem: Problem, candidate: Candidate) -> float:
    """A step time that no plan of a candidate is below."""
    return work_bound(problem, candidate).step_s(pooled_recompute_s(problem, candidate))


def least_s(problem: Problem) -> float:
    """What no plan is below, of any schedule, R and M that there are; infinite where there is none."""
    least = np.inf
    of_others: dict[tuple[int, int, bool, Objective], WorkBound] = {}
    for candidate in problem.candidates():
        record = SCHEDULES[candidate.schedule]
        alike = candidate.replicas, candidate.split.count, record.splits_backward, record.objective
        bound = of_others[alike] = of_others.get(alike) or work_bound(problem, candidate)
        if bound.step_s() < least:
            least = min(least, bound.step_s(pooled_recompute_s(problem, candidate)))
    return least


def even_share_s(problem: Problem) -> float:
    """The same where there is no time for more: all work of a step, shared evenly among the devices."""
    rough = RoughBounds(problem)
    least = np.inf
    for split, replicas in {(candidate.split, candidate.replicas) for candidate in problem.candidates()}:
        least = min(least, rough.step_work_s(split) / (len(problem.devices) // replicas))
    return least * (1 - ROUNDING)


class RoughBounds:
    """What no plan of a candidate is below, from the layers' sums alone: of a hundredth of `work_bound`'s time.

    The slowest stage has an even share of all work at least. On equal devices, with one chunk a rank and backward
    passes as a whole, and with Q of the layers for a micro-batch (of either size, the smaller time):

        GPipe    T >= Q + (M - 1) Q / K     one micro-batch passes all stages, the others stay at the slowest
        others   T >= Q / (1 - (1 - 1/M)^K)

    since with S(k) of the first k stages T >= S(k) + (M - 1) (S(k) - S(k-1)), see `_cut_bound`: S(K) is largest where
    each is an equality. Unequal stages may so be faster than equal ones, where T would be Q + (M - 1) Q / K.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._work: dict[int, float] = {}
        self._least: dict[tuple[int, int], float] = {}

    def step_s(self, candidate: Candidate) -> float:
        """Seconds."""
        problem, split = self._problem, candidate.split
        stages = max(1, problem.most_stages(candidate.replicas, split.count))
        work_s = self.step_work_s(split) / stages
        record = SCHEDULES[candidate.schedule]
        if record.splits_backward or problem.settings.chunks > 1 or len(problem.classes) > 1:
            return work_s * (1 - ROUNDING)
        share = -math.expm1(stages * math.log1p(-1 / split.count)) if split.count > 1 else 1.0
        times = 1 + (split.count - 1) / stages if record.objective is Objective.FLOW_SHOPS else 1 / share
        return max(work_s, self._least_s(split) * times) * (1 - ROUNDING)

    def step_work_s(self, split: MicroBatches) -> float:
        """Of all micro-batches, in all layers."""
        large, small = split.number_largest, split.count - split.number_largest
        return large * self._work_s(split.largest) + small * self._work_s(split.smallest)

    def _work_s(self, size: int) -> float:
        """Of one micro-batch of so many samples, in all layers; each on the device that is fastest for it."""
        if size not in self._work:
            kinds = [layer_seconds(self._problem.costs, group.device.kind, size) for group in self._problem.classes]
            self._work[size] = float(np.min([one.forward_s + one.backward_s for one in kinds], axis=0).sum())
        return self._work[size]

    def _least_s(self, split: MicroBatches) -> float:
        """Of one micro-batch of either size, in all layers, on equal devices: each pass what is less."""
        sizes = split.largest, split.smallest
        if sizes not in self._least:
            kind = self._problem.classes[0].device.kind
            more, less = (layer_seconds(self._problem.costs, kind, size) for size in sizes)
            backward_s = np.minimum(more.backward_s, less.backward_s)
            self._least[sizes] = float((np.minimum(more.forward_s, less.forward_s) + backward_s).sum())
        return self._least[sizes]


def work_bound(problem: Problem, candidate: Candidate) -> WorkBound:
    """Of the layers' work, without recompute.

    On unlike devices a micro-batch passes all layers with GPipe, and the others stay at the slowest stage, which has an
    even share of the work at least. On equal devices see `_cut_bound`.
    """
    split, classes = candidate.split, problem.classes
    if SCHEDULES[candidate.schedule].splits_backward:
        return _split_bound(problem, candidate)
    pairs = [
        [layer_seconds(problem.costs, group.device.kind, size) for group in classes]
        for size in (split.largest, split.smallest)
    ]
    large, small = ([costs.forward_s + costs.backward_s for costs in sized] for sized in pairs)
    mean = [steady_mean(split, *pair) for pair in zip(large, small, strict=True)]
    least = [
        np.minimum(more.forward_s, less.forward_s) + np.minimum(more.backward_s, less.backward_s)
        for more, less in zip(*pairs, strict=True)
    ]
    steady = split.count - 1
    flow_shops = SCHEDULES[candidate.schedule].objective is Objective.FLOW_SHOPS
    if len(classes) > 1:
        passes_s, stays_s = float(np.min(least, axis=0).sum()), steady * _bottleneck_s(problem, candidate, mean)
        if not flow_shops:
            passes_s, stays_s = 0.0, max(passes_s, stays_s)
        return WorkBound(passes_s, 0.0, 0.0, stays_s, 1.0)
    links = _link_seconds(problem, candidate, (large[0], small[0]))
    if SCHEDULES[candidate.schedule].objective is Objective.ROUNDS:
        (more,), (less,) = pairs
        passes = more.forward_s + np.minimum(more.backward_s, less.backward_s)
        work = steady * after_first_mean(split, more.forward_s, less.forward_s)
        work += steady * steady_mean(split, more.backward_s, less.backward_s)
        return _cut_bound(problem, candidate, passes, passes, work, links)
    if not flow_shops:
        return _cut_bound(problem, candidate, least[0], least[0], steady * mean[0], links)
    if split.equal:
        return _cut_bound(problem, candidate, large[0], 0 * large[0], steady * large[0], links)
    work = (split.number_largest - 1) * large[0] + (split.count - split.number_largest) * small[0]
    return _cut_bound(problem, candidate, large[0], large[0] - small[0], work, links)


def _split_bound(problem: Problem, candidate: Candidate) -> WorkBound:
    """Where the gradients of parameters may wait: a micro-batch goes forward to a stage, which then does all its work.

    That is path 1 of `planner.kernel.any_order` with the stage's weights at its end; links take no time here.
    """
    split = candidate.split
    sized = [
        [layer_seconds(problem.costs, group.device.kind, size) for group in problem.classes]
        for size in (split.largest, split.smallest)
    ]
    forward = np.min([costs.forward_s for costs in sized[0]], axis=0)
    large, small = (np.min([costs.forward_s + costs.backward_s for costs in one], axis=0) for one in sized)
    work = split.number_largest * large + (split.count - split.number_largest) * small
    return _cut_bound(problem, candidate, forward, forward, work - forward, np.zeros(problem.layers + 1))


def _link_seconds(problem: Problem, candidate: Candidate, passes: tuple[Floats, Floats]) -> Floats:
    """What a cut takes at each position for all but one micro-batch, shape (L + 1,).

    The link carries all outputs, and all gradients as well; with flow shops one after the other. With 1F1B the
    stage before the cut is the n-th from the end and waits, each n micro-batches, until one has been to the end and
    back over all cuts that follow: those of number n, 2 n, ..., the large ones first. It holds the layer before the cut
    at least.

    Args:
        problem: whose boundaries.
        candidate: schedule, R and M.
        passes: seconds of a large and of a small micro-batch in each layer, shape (L,).
    """
    split = candidate.split
    larger, smaller = (problem.messages_s(size) for size in (split.largest, split.smallest))
    there, back = (
        (split.number_largest - 1) * more + (split.count - split.number_largest) * less
        for more, less in zip(larger, smaller, strict=True)
    )
    under_way = 1 - sum(copied_shares(problem.link))
    if SCHEDULES[candidate.schedule].objective is Objective.FLOW_SHOPS:
        return under_way * (there + back)
    longer: Floats = under_way * np.maximum(there, back)
    if SCHEDULES[candidate.schedule].objective is Objective.ROUNDS:
        messages = np.array([sized[0] + sized[1] for sized in (larger, smaller)])
        around = messages + [own.sum() - np.append(0.0, prefix_sums(own)[:-1]) for own in passes]
        most = problem.most_stages(candidate.replicas, split.count)
        in_flight = np.maximum(1, np.arange(most + 1))
        rounds, of_large = ((number - 1) // in_flight for number in (split.count, split.number_largest))
        waits_s = least_rounds_s(problem.rules.allowed, around, messages, most, np.array([of_large, rounds - of_large]))
        longer = np.maximum(longer, waits_s)
    longer[[0, -1]] = 0.0
    return longer


def _cut_bound(
    problem: Problem, candidate: Candidate, passes: Floats, saved: Floats, work: Floats, links: Floats
) -> WorkBound:
    """On equal devices, whatever the cuts.

    A path passes each stage up to stage k with some micro-batch and stays there for work w and recompute; after it
    saves something:

        T >= sum of all passes - sum of what is saved after k + (w + recompute of M - 1) of stage k

    for each k. With GPipe and n large and m small micro-batches it passes with a large one, stays for n - 1 large and m
    small ones, and goes on with a small one. With 1F1B the first one, which is large, passes there and the last one
    back, M - 1 stay at stage k, and nothing is left. So with d such that no layer saves more than d w, and g = T
    less all passes, the stages from the last one on hold at most g, g (1 + d), g (1 + d)^2, ...: K of them
    g ((1 + d)^K - 1) / d. The link after stage k holds no more than that stage may, by the same path.

    Args:
        problem: whose cuts.
        candidate: schedule, R and M.
        passes: seconds of each layer, shape (L,).
        saved: seconds of each layer.
        work: seconds of each layer.
        links: seconds of the link at each position.
    """
    counted = work > 0
    gain = float(np.max(saved[counted] / work[counted], initial=0.0))
    most = problem.most_stages(candidate.replicas, candidate.split.count)
    share = 1 / most if gain < SMALLEST_GAIN else gain / math.expm1(most * math.log1p(gain))
    allowed = problem.rules.allowed
    slowest_s = least_bottleneck(prefix_sums(work)[allowed], links[allowed], most, gain)
    return WorkBound(float(passes.sum()), float(work.sum()), share, slowest_s, 1 - ROUNDING)


def _bottleneck_s(problem: Problem, candidate: Candidate, work: list[Floats]) -> float:
    """What the slowest stage takes for a micro-batch at least.

    Devices are at least ratio times as slow as the first class on every layer, so their shares weigh by 1 / ratio.
    """
    classes = problem.classes
    most = problem.most_stages(candidate.replicas, candidate.split.count)
    largest = float(np.min(work, axis=0).max())
    counted = work[0] > 0
    shares: list[float] = []
    for group, seconds in zip(classes, work, strict=True):
        ratio = float(np.min(seconds[counted] / work[0][counted], initial=np.inf))
        shares += [1 / ratio if ratio else np.inf] * group.capacity(candidate.replicas)
    return max(largest, float(work[0].sum() / sum(sorted(shares, reverse=True)[:most])))


def pooled_recompute_s(problem: Problem, candidate: Candidate) -> float:
    """Recompute of the steady micro-batches on all stages, at least: what it were if the stages shared their memory.

    Each has what any stage has and the temporaries of some layer, and all but the first what lies at some boundary,
    messages under way left out. Nothing on unlike devices.
    """
    record = SCHEDULES[candidate.schedule]
    if record.objective is not Objective.FLOW_SHOPS or problem.settings.recompute != "auto" or len(problem.classes) > 1:
        return 0.0
    stages = problem.most_stages(candidate.replicas, candidate.split.count)
    split, group = candidate.split, problem.classes[0]
    basis = problem.basis(group.device.kind, candidate)
    ledger = Ledger(basis)
    moments = moment_bytes(ledger, Of.LAYERS, Form.IN_PARTS)
    stage_bytes = group.device.memory_bytes - float(always_bytes(ledger)[0] + moments.min())
    first_rows = [row for row in rows_of(Of.FIRST_BOUNDARY) if row.counts is not Counts.UNDER_WAY]
    inputs = sum((ledger.counted(row)[0] for row in first_rows), start=np.zeros(ledger.layers))
    inputs_bytes = float(inputs[:-1][problem.rules.allowed[1:-1]].min(initial=np.inf)) if stages > 1 else 0.0
    if stage_bytes <= inputs_bytes:
        return 0.0
    room = stages * stage_bytes - (stages - 1) * inputs_bytes - pooled_bytes(basis)
    room -= sum(float(ledger.counted(row).sum()) for row in rows_of(Of.LAYERS))
    held = own_bytes(ledger, Of.KEPT_LAYERS, form=Form.IN_PARTS)[0]
    if held.sum() <= room:
        return 0.0
    large, small = (layer_seconds(problem.costs, group.device.kind, size) for size in (split.largest, split.smallest))
    recompute = steady_mean(split, large.recompute_s, small.recompute_s)
    edges = after_layers(own_bytes(ledger, Of.SEGMENT_EDGES, form=Form.IN_PARTS)[0])
    return (split.count - 1) * least_recompute_s(held, edges, recompute, prices(held, recompute), room)
