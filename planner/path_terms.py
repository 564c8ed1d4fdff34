"""What each possible stage adds to the objective of `planner.objective`.

For equal micro-batches the objective is the step time. For unequal ones, the larger first, no closed form of a few
prefix quantities is exact, but the length of any path through the step is a lower bound, and two families of paths
are nearly tight:

- paths that stay: pass the stages before some bottleneck with the first, large micro-batch, stay there for the M - 1
  others, and pass the rest with a small one (`staying_terms`);
- paths that turn with the large ones: take only the large micro-batches through both phases, and between the phases
  run all small ones on the last stage (`turning_terms`).

Any mean of two lower bounds is one, too, and `mixed_terms` is the mean as one more set of terms: cuts that are good
for one family and bad for the other do not get away with it.
"""

from __future__ import annotations

import numpy as np

from planner.costs import Floats, prefix_sums, range_sums
from planner.micro_batches import MicroBatches
from planner.objective import StageTerms
from planner.problem import Problem
from planner.stage_options import StageOptions
from profiler.device import Link


def staying_terms(problem: Problem, split: MicroBatches, option: StageOptions) -> StageTerms:
    """Terms, for M - 1 steady micro-batches, that are exact for equal and a lower bound for unequal micro-batches."""
    large, small = (problem.costs.layers(option.device.kind, size) for size in (split.largest, split.smallest))
    out_large, back_large = boundary_s(problem, split.largest)
    out_small, back_small = boundary_s(problem, split.smallest)

    passing = range_sums(np.minimum(large.forward_s, small.forward_s) + np.minimum(large.backward_s, small.backward_s))
    crossing = np.minimum(out_large, out_small) + np.minimum(back_large, back_small)
    forward = range_sums(steady_mean(split, large.forward_s, small.forward_s))
    backward = range_sums(steady_mean(split, large.backward_s, small.backward_s))
    again = np.where(option.recomputed, range_sums(steady_mean(split, large.recompute_s, small.recompute_s)), 0.0)
    forward_head, backward_head = head_start(problem, split)
    return StageTerms(
        through=passing + crossing[:, None],
        forward=np.maximum(forward, steady_mean(split, out_large, out_small)[:, None]) + forward_head[:, None],
        backward=np.maximum(backward + again, steady_mean(split, back_large, back_small)[:, None])
        + backward_head[:, None],
        first_recompute=np.zeros_like(passing),
        optimizer=_optimizer_s(problem, option),
    )


def turning_terms(problem: Problem, split: MicroBatches, option: StageOptions) -> StageTerms:
    """Terms of a lower bound for unequal micro-batches, with one steady micro-batch less than there are large ones."""
    large, small = (problem.costs.layers(option.device.kind, size) for size in (split.largest, split.smallest))
    out, back = boundary_s(problem, split.largest)
    number_small = split.count - split.number_largest

    forward, backward = range_sums(large.forward_s), range_sums(large.backward_s)
    again = np.where(option.recomputed, range_sums(large.recompute_s), 0.0)
    through = forward + backward + (out + back)[:, None]
    small_again = np.where(option.recomputed, range_sums(small.recompute_s), 0.0)
    at_the_turn = number_small * range_sums(small.forward_s + small.backward_s) + (number_small - 1) * small_again
    through[:, -1] += (at_the_turn + again)[:, -1]
    return StageTerms(
        through=through,
        forward=np.maximum(forward, out[:, None]),
        backward=np.maximum(backward + again, back[:, None]),
        first_recompute=np.zeros_like(forward),
        optimizer=_optimizer_s(problem, option),
    )


def mixed_terms(staying: StageTerms, turning: StageTerms, split: MicroBatches, share: float) -> StageTerms:
    """Terms, for 1 steady micro-batch, of the mean of both lower bounds; `share` is the weight of `staying`."""
    stay, turn = share * (split.count - 1), (1 - share) * (split.number_largest - 1)
    return StageTerms(
        through=share * staying.through + (1 - share) * turning.through,
        forward=stay * staying.forward + turn * turning.forward,
        backward=stay * staying.backward + turn * turning.backward,
        first_recompute=share * staying.first_recompute,
        optimizer=staying.optimizer,
    )


def boundary_s(problem: Problem, size: int) -> tuple[Floats, Floats]:
    """Seconds that outputs and their gradients take across boundary i, two arrays of shape (L + 1,).

    What crosses a boundary does not depend on the device; the first device's rows of the profile say it.
    """
    costs = problem.costs.layers(problem.devices[0].kind, size)
    return _transfer_s(problem.link, costs.output_bytes), _transfer_s(problem.link, costs.output_gradient_bytes)


def steady_mean(split: MicroBatches, large: Floats, small: Floats) -> Floats:
    """Mean over the first M - 1 micro-batches of what takes `large` and `small` for the two sizes."""
    if split.equal:
        return large
    return (split.number_largest * large + (split.count - split.number_largest - 1) * small) / (split.count - 1)


def head_start(problem: Problem, split: MicroBatches) -> tuple[Floats, Floats]:
    """What layers 0 to i - 1 take longer with a large micro-batch than with a small one, at least, over M - 1.

    Divided by M - 1 because the objective counts the time at the bottleneck that often.

    Returns:
        For forward and backward, two arrays of shape (L + 1,); zero for equal micro-batches.
    """
    if split.equal:
        return np.zeros(problem.layers + 1), np.zeros(problem.layers + 1)
    kinds = {device.kind for device in problem.devices[: problem.stage_numbers(split.count)[-1]]}
    large = [problem.costs.layers(kind, split.largest) for kind in sorted(kinds)]
    small = [problem.costs.layers(kind, split.smallest) for kind in sorted(kinds)]
    pairs = list(zip(large, small, strict=True))
    forward = np.min([np.maximum(more.forward_s - less.forward_s, 0.0) for more, less in pairs], axis=0)
    backward = np.min([np.maximum(more.backward_s - less.backward_s, 0.0) for more, less in pairs], axis=0)
    return prefix_sums(forward) / (split.count - 1), prefix_sums(backward) / (split.count - 1)


def _optimizer_s(problem: Problem, option: StageOptions) -> Floats:
    cost = problem.costs.optimizer(option.device.kind, problem.optimizer)
    return cost.seconds_per_byte * problem.parameters.trainable


def _transfer_s(link: Link | None, layer_bytes: Floats) -> Floats:
    seconds = np.zeros(len(layer_bytes) + 1)
    if link is not None:
        seconds[1:-1] = [link.transfer_s(size_bytes) for size_bytes in layer_bytes[:-1]]
    return seconds
