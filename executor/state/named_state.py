"""The state of a process's stages under the model's own names, as `Module.state_dict` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from executor.state.placement import Placement
from profiler.tracing.sequence import LayerSequence


def named_state(
    model: nn.Module, sequence: LayerSequence, placement: Placement, unread: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Parameters and buffers under all their original names.

    Args:
        model: whose names they are.
        sequence: its layers, which know what a tensor is called besides.
        placement: the tensors of this process's stages.
        unread: those that no layer reads.
    """
    held: dict[str, Tensor] = dict(placement.named_parameters())
    for buffers in placement.buffers.values():
        held.update(buffers)
    whole = model.state_dict(keep_vars=True)
    named = {
        alias: tensor.detach()
        for name, tensor in held.items()
        for alias in sequence.aliases.get(name, ())
        if alias in whole
    }
    named.update({name: value.detach() for name, value in unread.items()})
    return named


def tensor_names(model: nn.Module) -> list[str]:
    """Names of all parameters and buffers that the state of a model holds, sorted."""
    return sorted(name for name, held in model.state_dict(keep_vars=True).items() if isinstance(held, Tensor))


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules keep in addition to tensors (`get_extra_state`)."""
    return {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}
