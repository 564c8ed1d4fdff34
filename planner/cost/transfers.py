"""What messages between stages and between replicas take."""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats, LayerArrays
from profiler.device import Link


def boundary_s(link: Link | None, layers: LayerArrays) -> tuple[Floats, Floats]:
    """Seconds that outputs and their gradients take across boundary i, two arrays of shape (L + 1,)."""
    return _transfer_s(link, layers.output_bytes), _transfer_s(link, layers.output_gradient_bytes)


def all_reduce_s(link: Link | None, replicas: int) -> tuple[float, float]:
    """Seconds of averaging gradients over R replicas, as (fixed, for each byte).

    A ring moves 2 (R - 1) / R of the bytes over each link, in 2 (R - 1) messages (Patarasuk and Yuan, JPDC 2009).
    """
    if replicas == 1 or link is None:
        return 0.0, 0.0
    return 2 * (replicas - 1) * link.latency_s, 2 * (replicas - 1) / replicas / link.bytes_per_s


def message_s(link: Link | None, size_bytes: Floats) -> Floats:
    """Seconds of messages of so many bytes; an empty one is not sent."""
    if link is None:
        return np.zeros_like(size_bytes)
    seconds: Floats = np.where(size_bytes > 0, link.latency_s + size_bytes / link.bytes_per_s, 0.0)
    return seconds


def _transfer_s(link: Link | None, layer_bytes: Floats) -> Floats:
    seconds = np.zeros(len(layer_bytes) + 1)
    seconds[1:-1] = message_s(link, layer_bytes[:-1])
    return seconds
