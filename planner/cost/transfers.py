"""What messages between neighbours take, at every boundary at once, and what of that their ends spend on copies.

A message of c seconds over a link with the shares s and r keeps its sender from computing for s c seconds, is under way
for (1 - s - r) c, and then keeps its receiver from computing for r c. The pass that makes it ends with the first copy,
and the one that reads it begins with the second:

    stage k      | F          |copy|
    link                            |under way|
    stage k + 1                               |copy| F         |
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from planner.cost.layer_costs import Floats, LayerArrays
from planner.cost.time_ledger import message_s
from profiler.device import Link

Shares: TypeAlias = tuple[float, float]
"""Of a message's seconds those in which its sender and its receiver copy it."""


def boundary_s(link: Link | None, layers: LayerArrays) -> tuple[Floats, Floats]:
    """Seconds that outputs and their gradients take across boundary i, two arrays of shape (L + 1,)."""
    return _transfer_s(link, layers.output_bytes), _transfer_s(link, layers.output_gradient_bytes)


def copied_shares(link: Link | None) -> Shares:
    """Of what goes over a link."""
    return (0.0, 0.0) if link is None else link.copied


def copies_s(shares: Shares, outputs_s: Floats, gradients_s: Floats) -> Floats:
    """Seconds in which a stage copies messages, at each place where it may begin and end, shape (2, F + B, places).

    Args:
        shares: of the link.
        outputs_s: seconds of messages there, several rows of them, shape (F, places): copies of forward passes.
        gradients_s: the same of backward passes, shape (B, places).
    """
    sender, receiver = shares
    at_first = np.concatenate((receiver * outputs_s, sender * gradients_s))
    at_last = np.concatenate((sender * outputs_s, receiver * gradients_s))
    return np.array((at_first, at_last))


def _transfer_s(link: Link | None, layer_bytes: Floats) -> Floats:
    seconds = np.zeros(len(layer_bytes) + 1)
    seconds[1:-1] = message_s(link, layer_bytes[:-1])
    return seconds
