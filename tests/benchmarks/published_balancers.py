"""How published planners cut a chain of layers, each from its source or paper, in our own words.

    cuts = BALANCERS["min-max f+b"](layers, 4)      # (0, ..., L)

None of them looks at communication. They may use fewer than K stages: stages without a layer are left out, and no
planner is asked for more stages than there are layers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TypeAlias

from tests.benchmarks.public_profiles import Cuts, Layer

Balancer: TypeAlias = Callable[[Sequence[Layer], int], Cuts]


def uniform(layers: Sequence[Layer], K: int) -> Cuts:
    """As many layers on every stage, the first ones getting one more (DeepSpeed's `partition_uniform`)."""
    many, extra = divmod(len(layers), K)
    return _cuts(many + (stage < extra) for stage in range(K))


def parameters_min_max(layers: Sequence[Layer], K: int) -> Cuts:
    """The largest stage has the fewest parameter bytes; what DeepSpeed's default, `parameters`, is meant to do."""
    return min_max([layer.parameter_bytes for layer in layers], K)


def parameters_deepspeed(layers: Sequence[Layer], K: int) -> Cuts:
    """What DeepSpeed's default does (`deepspeed.runtime.utils.partition_balanced`).

    Its dynamic program minimizes the largest less the smallest stage, which has no optimal substructure, and takes the
    last of equally good cuts; so layers without parameters go with those before them.
    """
    sums = _sums([layer.parameter_bytes for layer in layers])
    count = len(layers)
    best: list[list[tuple[float, float, float, int]]] = [[(0.0, 0.0, math.inf, 0)] + [_NOTHING] * count]
    for _ in range(K):
        row = [_NOTHING] * (count + 1)
        for stop in range(1, count + 1):
            for first in range(stop):
                difference, largest, smallest, _ = best[-1][first]
                if math.isinf(difference):
                    continue
                size = sums[stop] - sums[first]
                largest, smallest = max(largest, size), min(smallest, size)
                if largest - smallest <= row[stop][0]:
                    row[stop] = (largest - smallest, largest, smallest, first)
        best.append(row)
    return _backwards([[entry[3] for entry in row] for row in best], count, K)


_NOTHING = (math.inf, math.inf, math.inf, 0)


def parameters_greedy(layers: Sequence[Layer], K: int) -> Cuts:
    """Fill a stage up to a K-th of the parameter bytes, then the next (PiPPy's `split_into_equal_size`).

    Layers without parameters go with those before them. A layer that is larger than a stage may be, and comes first in
    it, ends its stage. Stages beyond the K-th are not opened.
    """
    threshold = sum(layer.parameter_bytes for layer in layers) // K
    starts: list[int] = []
    filled = 0
    for position, layer in enumerate(layers):
        size = layer.parameter_bytes
        if filled + size <= threshold:
            filled += size
        elif filled == 0:
            starts.append(position + 1)
        else:
            starts.append(position)
            filled = size
    return tuple(sorted({0, *starts[: K - 1], len(layers)}))


def flops_histogram(layers: Sequence[Layer], K: int) -> Cuts:
    """Layer i goes to stage int(K * share of the cost up to and with i) (Lingvo's `PartitionSequentialLayers`).

    Lingvo, GPipe's own implementation, counts FLOPs; forward seconds stand in for them. A stage may stay empty.
    """
    reached = list(accumulate(layer.forward_s for layer in layers))
    stages = [min(int(seconds / reached[-1] * K), K - 1) for seconds in reached]
    return _cuts(stages.count(stage) for stage in range(K))


def block_partition(layers: Sequence[Layer], K: int) -> Cuts:
    """`torchgpipe.balance.balance_by_time`: forward and backward together, in whole microseconds.

    Raises:
        ImportError: torchgpipe is not installed.
    """
    blockpartition = importlib.import_module("torchgpipe.balance.blockpartition")
    costs = [int((layer.forward_s + layer.backward_s) * 1_000_000) for layer in layers]
    return _cuts(len(block) for block in blockpartition.solve(costs, K))


def min_max_times(layers: Sequence[Layer], K: int) -> Cuts:
    """The slowest stage is as fast as possible, forward and backward together (PipeDream without replication)."""
    return min_max([layer.forward_s + layer.backward_s for layer in layers], K)


def min_max_times_recomputed(layers: Sequence[Layer], K: int) -> Cuts:
    """The same for a planner that knows that every stage recomputes."""
    return min_max([2 * layer.forward_s + layer.backward_s for layer in layers], K)


def min_max(costs: Sequence[float], K: int) -> Cuts:
    """Contiguous parts whose largest sum is as small as possible, by dynamic programming in O(K L^2).

    Equally good cuts: the earliest for the last stage, then for the one before it.
    """
    sums = _sums(costs)
    count = len(costs)
    best = [0.0] + [math.inf] * count
    origins = [[0] * (count + 1)]
    for _ in range(K):
        row, origin = [math.inf] * (count + 1), [0] * (count + 1)
        for stop in range(1, count + 1):
            for first in range(stop):
                largest = max(best[first], sums[stop] - sums[first])
                if largest < row[stop]:
                    row[stop], origin[stop] = largest, first
        best = row
        origins.append(origin)
    return _backwards(origins, count, K)


def _sums(costs: Sequence[float]) -> list[float]:
    return list(accumulate(costs, initial=0.0))


def _backwards(origins: Sequence[Sequence[int]], count: int, K: int) -> Cuts:
    """The cuts that a dynamic program noted: `origins[k][stop]` is where stage k - 1 of a best plan begins."""
    cuts = [count]
    for stage in range(K, 0, -1):
        cuts.append(origins[stage][cuts[-1]])
    return tuple(reversed(cuts))


def _cuts(numbers: Iterable[int]) -> Cuts:
    """The cuts between stages of so many layers each; empty stages are left out."""
    return (0, *accumulate(number for number in numbers if number))


def _capped(balancer: Balancer) -> Balancer:
    return lambda layers, K: balancer(layers, min(K, len(layers)))


BALANCERS: Mapping[str, Balancer] = MappingProxyType(
    {
        name: _capped(balancer)
        for name, balancer in {
            "uniform": uniform,
            "parameters, min-max": parameters_min_max,
            "parameters, DeepSpeed": parameters_deepspeed,
            "parameters, greedy": parameters_greedy,
            "FLOPs histogram": flops_histogram,
            "block partition": block_partition,
            "min-max f+b": min_max_times,
            "min-max f+r+b": min_max_times_recomputed,
        }.items()
    }
)
"""By the name under which a table shows them."""
