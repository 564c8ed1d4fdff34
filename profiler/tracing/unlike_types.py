"""Products of values in unlike types, which a recipe of mixed precision can leave in a model."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from profiler.errors import NotTraceableError
from profiler.tracing.node_text import source_line

PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in (
        "linear",
        "matmul",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "scaled_dot_product_attention",
    )
}
"""Operations of which all floating-point operands have one type."""


def refuse_unlike_types(graph: fx.Graph, precision: str | None) -> None:
    """Refuse products of values in unlike types: shapes say nothing of them, and no kernel computes them.

    Args:
        graph: of a twin.
        precision: its recipe; nothing is refused without one.

    Raises:
        NotTraceableError: naming the operation, its types and its place.
    """
    if precision is None:
        return
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) not in PRODUCTS:
            continue
        values = [entry.meta.get("val") for entry in node.all_input_nodes]
        types = {str(value.dtype) for value in values if isinstance(value, Tensor) and value.is_floating_point()}
        if len(types) > 1:
            names = " and ".join(sorted(name.removeprefix("torch.") for name in types))
            raise NotTraceableError(
                f"precision={precision!r} leaves {node.target} with values in {names}, in "
                f"{source_line(node) or node.name}; buffers that no state holds, and tensors that the forward pass "
                "makes, keep their types: cast them there to the type of the module's weight, as "
                "x.to(self.weight.dtype), or register the buffer as persistent"
            )
