"""Where the layers and the model itself begin to compute different things.

The model runs under a watch that notes the sums of whatever its operations return; then the layers run one by one, and
the first that returns what the model never had is the place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.run.stage_function import StageFunction, leaves_of
from profiler.tracing.sequence import Layer, LayerSequence

ALIKE = 1e-3  # sums of two tensors that count as the same, relative to the sum of magnitudes [chosen]
_TINY = torch.finfo(torch.float32).tiny


class Seen(TorchDispatchMode):
    """The sums of all tensors of floating-point numbers that operations return while it is at work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums: dict[tuple[torch.Size, torch.dtype], list[tuple[float, float]]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry the operation out, and note what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._sums[tensor.shape, tensor.dtype].append(_sums(tensor))
        return result

    def holds(self, tensor: Tensor) -> bool:
        """Whether one like it was returned."""
        total, magnitude = _sums(tensor)
        return any(
            total == other or abs(total - other) <= ALIKE * max(magnitude, _TINY)
            for other, _ in self._sums[tensor.shape, tensor.dtype]
        ) or bool(tensor.isnan().any())


def _sums(tensor: Tensor) -> tuple[float, float]:
    """Sum of the elements, each weighted by its place, and of their magnitudes."""
    flat = tensor.detach().double().reshape(-1)
    weights = torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64, device=flat.device)
    return float(flat @ weights), float(flat.abs() @ weights)


def first_unseen(
    sequence: LayerSequence, parameters: Mapping[tuple[int, str], Tensor], inputs: Mapping[str, Tensor], seen: Seen
) -> Layer | None:
    """The first layer that returns what the model did not compute."""
    values: Mapping[str, Tensor] = {}
    current = dict(sequence.buffers)
    for layer in sequence.layers:
        stage = StageFunction(sequence, layer.index, layer.index + 1, parameters, device=sequence.device)
        entering = {name: leaf.detach() for name, leaf in leaves_of(values, stage.entering).items()}
        results = stage.forward(entering, inputs, current)
        current |= results.buffers
        values = results.values
        own = (values[name] for name in layer.outputs if name in values)
        if any(isinstance(value, Tensor) and value.is_floating_point() and not seen.holds(value) for value in own):
            return layer
    return None
