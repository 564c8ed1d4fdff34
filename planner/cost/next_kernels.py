"""Room for kernels that change between two measured micro-batch sizes.

What a kernel allocates inside itself grows with the samples or is fixed: on a line through two sizes, the larger one
has no more than its share. Where it has more, another kernel took over on the way [measured, torch 2.13: convolutions
with 1 x 1 weights take none up to 15 samples on one thread, and 16 samples copies of input, output and weights; small
products in bfloat16 likewise]. Nothing says at which size, so it may be the next one:

    bytes        _x   high             from the smaller size on, that of the larger one
               _/
    x________x~       low
"""

from __future__ import annotations

from itertools import pairwise

from planner.cost.recurrent_workspace import Rows
from profiler.record import LayerCost


def with_next_kernels(rows: Rows) -> Rows:
    """The rows as they stand below sizes that were not measured: lines that begin there have room for any kernel.

    Args:
        rows: by device kind and micro-batch size, of all layers in their order. Lists of which nothing changes are
            the same ones in the result.
    """
    below = dict(rows)
    for kind in {kind for kind, _ in rows}:
        sizes = sorted(size for other, size in rows if other == kind)
        for small, large in pairwise(sizes):
            costs = [
                _with_next_kernel(low, high, large / small)
                for low, high in zip(rows[kind, small], rows[kind, large], strict=True)
            ]
            if any(new is not low for new, low in zip(costs, rows[kind, small], strict=True)):
                below[kind, small] = costs
    return below


def _with_next_kernel(low: LayerCost, high: LayerCost, times: float) -> LayerCost:
    if low.in_stage is None or high.in_stage is None:
        return low
    more_bytes = high.in_stage.workspace_bytes - low.in_stage.workspace_bytes
    if high.in_stage.workspace_bytes <= times * low.in_stage.workspace_bytes:
        return low
    return low.model_copy(
        update={
            "transient_bytes": low.transient_bytes + more_bytes,
            "in_stage": low.in_stage.model_copy(update={"workspace_bytes": high.in_stage.workspace_bytes}),
        }
    )
