"""Computing without data: on fake tensors, or on the meta device for what is there already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from profiler.observe.kernel_orders import RealOrders, RealOrdersOnMeta


def without_data(
    values: Iterable[Any],
) -> tuple[contextlib.AbstractContextManager[Any], Callable[[Tensor], Tensor]]:
    """A region in which operations on these values compute shapes only, and how a tensor gets there.

    Args:
        values: all tensors that take part, and anything else. If they are on the meta device they stay there: that is
            several times as fast as fake tensors.
    """
    if all(value.is_meta for value in values if isinstance(value, Tensor)):
        on_meta = RealOrdersOnMeta()  # type: ignore[no-untyped-call]
        return on_meta, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad)
    mode = RealOrders(allow_non_fake_inputs=True)
    return mode, partial(mode.from_tensor, static_shapes=True)
