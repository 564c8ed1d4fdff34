"""FLOPs of operations: torch's own formulas, and those that torch lacks. A multiply-add counts as two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    conv_flop_count,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from profiler.observe.both_branches import sees_both_branches

aten = torch.ops.aten


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def _convolution_backward(
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """Each of both gradients multiplies as often as the forward pass; torch's own formula overlooks the groups."""
    forward = conv_flop_count([*inputs.shape], [*weight.shape], [*gradient.shape], transposed=transposed)
    return int(forward) * (output_mask[0] + output_mask[1])


def _rnn_layer(inputs: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    """One layer of an LSTM or GRU in one direction: both products, at each of T x B places."""
    return 2 * inputs.shape[0] * inputs.shape[1] * (input_weight.numel() + hidden_weight.numel())


def _rnn_layer_backward(inputs: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _rnn_layer(inputs, input_weight, hidden_weight)


def _matrix_vector(matrix: Tensor, vector: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _add_matrix_vector(bias: Tensor, matrix: Tensor, vector: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _dot(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return 2 * left.numel()


FLOP_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    aten.convolution_backward: _convolution_backward,
    aten.mkldnn_rnn_layer: _rnn_layer,
    aten.mkldnn_rnn_layer_backward: _rnn_layer_backward,
    aten.mv: _matrix_vector,
    aten.addmv: _add_matrix_vector,
    aten.dot: _dot,
    aten.vdot: _dot,
}
"""By operation: called with its arguments and `out_val`. Operations without an entry do no matrix arithmetic."""


@sees_both_branches
class FlopCounter(TorchDispatchMode):
    """Counts FLOPs and notices random operations below the level of composite operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.draws_random = False

    def reset(self) -> None:
        """Count from 0 again."""
        self.flops = 0
        self.draws_random = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.draws_random |= torch.Tag.nondeterministic_seeded in func.tags
        formula = FLOP_FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        return out
