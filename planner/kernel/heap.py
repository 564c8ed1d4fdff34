"""The largest of some keys, where the largest is replaced again and again: a binary heap of their places.

The keys stay where they are. No place is above another whose key is larger, and the two below place i are 2 i + 1 and
2 i + 2, so the largest is at the top.
"""

from __future__ import annotations

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled


@compiled
def order_heap(heap: Indices, keys: Floats) -> None:
    """Fill the heap with the places of all keys."""
    for place in range(len(keys)):
        heap[place] = place
    for place in range(len(keys) // 2 - 1, -1, -1):
        sift_down(heap, keys, place)


@compiled
def sift_down(heap: Indices, keys: Floats, place: int) -> None:
    """Put in order what is below a place whose key became smaller."""
    own = heap[place]
    while True:
        below = 2 * place + 1
        if below + 1 < len(heap) and keys[heap[below + 1]] > keys[heap[below]]:
            below += 1
        if below >= len(heap) or keys[heap[below]] <= keys[own]:
            break
        heap[place] = heap[below]
        place = below
    heap[place] = own
