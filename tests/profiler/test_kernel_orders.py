"""Fake tensors lie in memory as real ones do, whatever torch's fake kernels say."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from profiler.observe.kernel_orders import RealOrders, RealOrdersOnMeta, dim_order

Operation = Callable[[Tensor], Tensor]
BATCH, CHANNELS, LENGTH = 9, 6, 4

OPERATIONS: dict[str, Operation] = {
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "batch_norm of statistics": lambda x: functional.batch_norm(
        x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), torch.ones(x.shape[1]), torch.ones(x.shape[1])
    ),
    "instance_norm": functional.instance_norm,
    "group_norm": lambda x: functional.group_norm(x, 2),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "logsigmoid": functional.logsigmoid,
    "softplus": functional.softplus,
    "gelu": functional.gelu,
    "prelu": lambda x: functional.prelu(x, torch.ones(x.shape[1])),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "dropout": lambda x: functional.dropout(x, 0.3),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "randn_like": torch.randn_like,
    "normal": lambda x: torch.normal(x, x.exp()),
    "power": lambda x: 2**x,
    "copysign": lambda x: torch.copysign(x, torch.ones(x.shape[-1])),
    "floor_divide": lambda x: x // (1 + torch.ones(x.shape[-1])),
    "logaddexp": lambda x: torch.logaddexp(x, x[:1]),
    "product": lambda x: x * torch.ones(1).expand(x.shape[-1]),
    "roll": lambda x: x.roll(1, 1),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "max_pool": lambda x: functional.max_pool1d(x, 2) if x.dim() == 3 else functional.max_pool2d(x, 2),
    "products": lambda x: x @ x.mT,
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "stack": lambda x: torch.stack([x, 2 * x], 1),
}
LAYOUTS: dict[str, Operation] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "of one sample": lambda x: x[:1].transpose(1, 2),
    "half of a transposed one": lambda x: x.transpose(1, 2)[:, ::2],
    "expanded": lambda x: x[:1].transpose(1, 2).expand(4, -1, -1),
    "channels last": lambda x: x.unflatten(1, (2, 3)).movedim(1, -1).contiguous().movedim(-1, 1),
    "heads": lambda x: x.unflatten(2, (2, 2)).transpose(1, 2),
    "turned": lambda x: x.unflatten(2, (2, 2)).movedim(1, -1),
}


def strides(value: Tensor) -> list[int]:
    """Those that say where elements lie."""
    return [stride for stride, extent in zip(value.stride(), value.shape, strict=True) if extent > 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_tensors_lie_in_the_order_of_real_ones(layout: str) -> None:
    """Torch's own do not for 9 of these operations."""
    x = LAYOUTS[layout](torch.randn(BATCH, CHANNELS, LENGTH)).requires_grad_()
    for name, operation in OPERATIONS.items():
        with RealOrders(allow_non_fake_inputs=True) as mode:
            fake = operation(mode.from_tensor(x))
        assert strides(fake) == strides(operation(x)), name


def test_tensors_on_the_meta_device_do() -> None:
    x = torch.randn(BATCH, CHANNELS, LENGTH).transpose(1, 2)
    for name in ("batch_norm", "logsigmoid", "power", "roll", "rrelu"):
        with RealOrdersOnMeta():
            found = OPERATIONS[name](x.to("meta"))
        assert strides(found) == strides(OPERATIONS[name](x)), name


def test_to_ask_the_real_kernel_draws_no_number_that_others_would_have_drawn() -> None:
    x, generator = torch.randn(BATCH, 5, 7).transpose(1, 2), torch.Generator()
    before = [torch.get_rng_state(), generator.get_state()]
    with RealOrders(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        functional.rrelu(fake, training=True)
        torch.ops.aten.rrelu_with_noise(fake, torch.empty_like(fake), training=True, generator=generator)
    after = [torch.get_rng_state(), generator.get_state()]
    assert all(pytree.tree_map(torch.equal, before, after))


def test_the_order_of_what_has_gaps_or_repeats_is_unknown() -> None:
    x = torch.zeros(2, 3, 4).permute(2, 0, 1)
    assert dim_order(x) == (1, 2, 0)
    assert dim_order(x[::2]) is None
    assert dim_order(x[:1].expand(5, -1, -1)) is None
