"""The norm of all stages' gradients, the same for every number of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.state.placement import Placement
from profiler.machine.backend import device_of_first


def global_norm(
    placement: Placement, names: Sequence[str], layout: Layout, owners: Mapping[str, int] = MappingProxyType({})
) -> Tensor:
    """Euclidean norm of the gradients of all processes' parameters.

    Each parameter's squared norm is computed where it lies, once if it is tied, and the sum runs over the model's
    parameters in their order: neither depends on the cuts.

    Args:
        placement: of this process.
        names: all parameters of the model in order.
        layout: of this process.
        owners: the replica that has a parameter's gradient, where that is one; the first one counts otherwise.

    Returns:
        A float64 scalar on this process's first device.
    """
    elsewhere = {tied.name for tied in placement.tied if layout.process != tied.users[0]}
    parameters = placement.named_parameters()
    device = device_of_first(parameters.values())
    squares = torch.zeros(len(names), dtype=torch.float64, device=device)
    parameters = {name: own for name, own in parameters.items() if owners.get(name, 0) == layout.replica}
    for position, name in enumerate(names):
        gradient = parameters[name].grad if name in parameters and name not in elsewhere else None
        if gradient is not None:
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()
            real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
            squares[position] = torch.linalg.vector_norm(real, dtype=torch.float64).square()
    if not layout.alone:
        dist.all_reduce(squares)
    return squares.sum().sqrt()
