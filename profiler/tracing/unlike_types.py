"""Products of values in unlike types, which no kernel computes and a trace, of shapes alone, says nothing of.

A sample may have another type than the weights, and a recipe of mixed precision leaves the types of some values.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, fx

from profiler.errors import NotTraceableError
from profiler.observe.source_place import place_of_node
from profiler.sample_spec import SampleSpec
from profiler.tracing.sample import torch_dtype

_aten = torch.ops.aten
PRODUCTS: Mapping[object, int] = MappingProxyType(
    {
        _aten.linear.default: 2,
        _aten.matmul.default: 2,
        _aten.mm.default: 2,
        _aten.mv.default: 2,
        _aten.dot.default: 2,
        _aten.addmm.default: 3,
        _aten.bmm.default: 2,
        _aten.baddbmm.default: 3,
        _aten.conv1d.default: 2,
        _aten.conv1d.padding: 2,
        _aten.conv2d.default: 2,
        _aten.conv2d.padding: 2,
        _aten.conv3d.default: 2,
        _aten.conv3d.padding: 2,
        _aten.convolution.default: 2,
        _aten.conv_transpose1d.default: 2,
        _aten.conv_transpose2d.input: 2,
        _aten.conv_transpose3d.input: 2,
        _aten.scaled_dot_product_attention.default: 3,
    }
)
"""Operations, and how many of their first operands must have one type [measured on a CPU]. A mask may have another; so
may a bias, of transposed and padded convolutions, and of a linear layer whose input is not contiguous."""


def refuse_unlike_types(graph: fx.Graph, spec: SampleSpec) -> None:
    """Refuse products of values in unlike types: shapes say nothing of them, and no kernel computes them.

    Args:
        graph: of a model, or of its twin under a recipe of mixed precision.
        spec: what it was traced with. Under autocast, types are those after its casts.

    Raises:
        NotTraceableError: naming the operation, its types and its place.
    """
    for node in graph.nodes:
        operands = _operands(node)
        types = {_computed(value.dtype, spec.autocast) for value in operands}
        if len(types) < 2 or any(map(_is_empty, operands)):
            continue
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
        product = f"{node.target} with values in {names}, in {place_of_node(node)}"
        if spec.precision is not None and all(dtype.is_floating_point for dtype in types):
            raise NotTraceableError(
                f"precision={spec.precision!r} leaves {product}; buffers that no state holds, and tensors that the "
                "forward pass makes, keep their types: cast them there to the type of the module's weight, as "
                "x.to(self.weight.dtype), or register the buffer as persistent"
            )
        casts = "" if spec.autocast is None else f" after the casts of autocast=torch.{spec.autocast}"
        raise NotTraceableError(
            f"the model calls {product}{casts}, and no kernel multiplies unlike types; give the sample in the type of "
            "the module's weight, or cast it there, as x.to(self.weight.dtype)"
        )


def _operands(node: fx.Node) -> list[Tensor]:
    """Those that must have one type."""
    operands = node.args[: PRODUCTS.get(node.target, 0)]
    values = [operand.meta.get("val") for operand in operands if isinstance(operand, fx.Node)]
    return [value for value in values if isinstance(value, Tensor)]


def _computed(dtype: torch.dtype, autocast: str | None) -> torch.dtype:
    """The type that an operand of a product has after the casts of an autocast region."""
    if autocast is None or not dtype.is_floating_point or dtype == torch.float64:
        return dtype
    return torch_dtype(autocast)


def _is_empty(operand: Tensor) -> bool:
    """Whether it has no elements, so that some kernels look no further."""
    return any(isinstance(extent, int) and extent == 0 for extent in operand.shape)
