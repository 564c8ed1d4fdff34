"""What an optimizer step costs: time and state, measured on tensors shaped like the model's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.device import Device
from profiler.errors import ArgumentError
from profiler.local import torch_device
from profiler.record import OptimizerCost
from profiler.timing import computing_with, time_call

COPIED_BYTES_AT_MOST = 64 * 2**20  # enough to leave any cache, little enough to be measured in a second
UNUSABLE = ("Optimizer", "LBFGS", "SparseAdam")  # the base; needs a closure; needs sparse gradients


def optimizer_names() -> list[str]:
    """Names of the optimizers in `torch.optim` that a plan can assume."""
    found = inspect.getmembers(torch.optim, inspect.isclass)
    return sorted(name for name, kind in found if issubclass(kind, torch.optim.Optimizer) and name not in UNUSABLE)


def check_optimizer(name: str) -> None:
    """Refuse what is not the name of a usable optimizer.

    Raises:
        ArgumentError: with the names that are.
    """
    if name not in optimizer_names():
        raise ArgumentError(f"optimizer={name!r}; choose one of torch.optim: {', '.join(optimizer_names())}")


def optimizer_cost(name: str, parameters: Iterable[Tensor], device: Device, *, budget_s: float = 2.0) -> OptimizerCost:
    """Measure `step()` and `zero_grad()` of an optimizer with its default settings.

    Args:
        name: of a class in `torch.optim`.
        parameters: those of the model; only shape, dtype and `requires_grad` matter. At most `COPIED_BYTES_AT_MOST`
            of copies are made of them.
        device: where the step runs.
        budget_s: seconds that measuring may take.

    Raises:
        ArgumentError: there is no such optimizer, or it cannot train these parameters.
    """
    check_optimizer(name)
    place = torch_device(device)
    copies = _copies([parameter for parameter in parameters if parameter.requires_grad], place)
    size_bytes = sum(copy.nbytes for copy in copies)
    if not size_bytes:
        return OptimizerCost(name=name, device_kind=device.kind, seconds_per_byte=0.0, state_bytes_per_byte=0.0)
    gradients = [torch.full_like(copy, 1e-3) for copy in copies]
    try:
        optimizer = getattr(torch.optim, name)(copies)
    except (TypeError, ValueError) as problem:
        raise ArgumentError(f"optimizer={name!r} cannot train this model: {problem}") from problem

    def prepare() -> None:
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with computing_with(device.threads):
        timing = time_call(step, place, prepare=prepare, budget_s=budget_s)
    return OptimizerCost(
        name=name,
        device_kind=device.kind,
        seconds_per_byte=timing.median_s / size_bytes,
        state_bytes_per_byte=_state_bytes(optimizer) / size_bytes,
    )


def _copies(parameters: Sequence[Tensor], place: torch.device) -> list[Tensor]:
    """Tensors shaped like the parameters, the last one cut in dimension 0 to stay within the limit."""
    copies: list[Tensor] = []
    left = COPIED_BYTES_AT_MOST
    for parameter in parameters:
        shape = list(parameter.shape)
        if parameter.nbytes > left:
            rows = left // (parameter.nbytes // shape[0]) if shape else 0
            if not rows:
                continue
            shape[0] = rows
        copies.append(torch.full(shape, 1e-2, dtype=parameter.dtype, device=place).requires_grad_())
        left -= copies[-1].nbytes
    return copies


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the distinct storages in an optimizer's state, scalars such as a step counter left out."""
    tensors = [leaf for leaf in pytree.tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor) and leaf.dim()]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())
