"""What messages between neighbours take, at every boundary at once."""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats, LayerArrays
from planner.cost.time_ledger import message_s
from profiler.device import Link


def boundary_s(link: Link | None, layers: LayerArrays) -> tuple[Floats, Floats]:
    """Seconds that outputs and their gradients take across boundary i, two arrays of shape (L + 1,)."""
    return _transfer_s(link, layers.output_bytes), _transfer_s(link, layers.output_gradient_bytes)


def _transfer_s(link: Link | None, layer_bytes: Floats) -> Floats:
    seconds = np.zeros(len(layer_bytes) + 1)
    seconds[1:-1] = message_s(link, layer_bytes[:-1])
    return seconds
