"""What segments that fit cost at least, whatever they are: from below by prices of memory.

Segments are explained in `planner.kernel.segments`. What layers keep for all micro-batches in flight, and what lies at
the edges of segments, must fit into the bytes available; the peak of segments is left out.
"""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats
from planner.kernel.compiled import compiled


@compiled
def price_layer(
    own_bytes: float, edge_bytes: float, recompute_s: float, prices: Floats, kept: Floats, recomputed: Floats
) -> None:
    """Put a layer before those whose least e + price * bytes held are `kept` and `recomputed`, for each price.

    A stage's segments cost at least min(e + price * bytes held) - price * bytes available, whatever the price
    (Lagrange); the minimum is a shortest path over its layers with two states: the first layer is kept, or recomputed.

    Args:
        own_bytes: of the layer, if it is kept.
        edge_bytes: at the boundary after it, if it lies next to a segment.
        recompute_s: of the layer.
        prices: seconds per byte.
        kept: of the layers so far if the first is kept.
        recomputed: of the layers so far if the first is recomputed.
    """
    for index in range(len(prices)):
        one, other = kept[index], recomputed[index]
        edge = prices[index] * edge_bytes
        kept[index] = min(one, other + edge) + prices[index] * own_bytes
        recomputed[index] = min(other, one + edge) + recompute_s


@compiled
def least_at(prices: Floats, kept: Floats, recomputed: Floats, room: float) -> float:
    """The largest of the least seconds that these prices give for so many bytes."""
    least = 0.0
    for index in range(len(prices)):
        least = max(least, min(kept[index], recomputed[index]) - prices[index] * room)
    return least


@compiled
def least_recompute_s(held: Floats, entering: Floats, recompute_s: Floats, prices: Floats, room: float) -> float:
    """Seconds of recompute at least when all layers together have `room` bytes; see `price_layer`.

    Args:
        held: bytes that each layer keeps, shape (L,).
        entering: bytes at each boundary, shape (L + 1,).
        recompute_s: of each layer, shape (L,).
        prices: seconds per byte to try.
        room: bytes.
    """
    kept, recomputed = np.zeros(len(prices)), np.zeros(len(prices))
    for layer in range(len(held) - 1, -1, -1):
        price_layer(held[layer], entering[layer + 1], recompute_s[layer], prices, kept, recomputed)
    return least_at(prices, kept, recomputed, room)
