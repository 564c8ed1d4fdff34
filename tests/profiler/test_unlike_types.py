"""What no kernel multiplies is refused where it stands, and nothing that runs in plain eager is."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from profiler import NotTraceableError, trace
from profiler.precision import autocast_named
from profiler.sample_spec import SampleSpec
from profiler.tracing.unlike_types import PRODUCTS, refuse_unlike_types

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
_IMAGE, _KERNEL = (2, 3, 4, 4, 4), (3, 3, 2, 2, 2)
SHAPES: dict[str, list[tuple[tuple[int, ...], ...]]] = {
    "linear": [((2, 4), (3, 4), (3,)), ((4,), (3, 4), (3,)), ((2, 3, 4), (3, 4), (3,)), ((2, 1, 2, 4), (1, 4), (1,))],
    "matmul": [((4,), (4,)), ((2, 4), (4,)), ((4,), (4, 3)), ((2, 3, 4), (2, 4, 1)), ((2, 3, 4), (4, 3))],
    "mm": [((2, 4), (4, 3)), ((1, 4), (4, 1))],
    "mv": [((3, 4), (4,))],
    "dot": [((4,), (4,))],
    "addmm": [((3,), (2, 4), (4, 3)), ((2, 3), (2, 4), (4, 3)), ((), (2, 4), (4, 3))],
    "bmm": [((2, 3, 4), (2, 4, 3))],
    "baddbmm": [((2, 3, 3), (2, 3, 4), (2, 4, 3)), ((3,), (2, 3, 4), (2, 4, 3))],
    "convolution": [(_IMAGE[:4], _KERNEL[:4], (3,))],
    "scaled_dot_product_attention": [((2, 2, 4, 8),) * 3, ((2, 4, 8),) * 3],
    **{f"conv{dims}d": [(_IMAGE[: 2 + dims], _KERNEL[: 2 + dims], (3,))] for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": [(_IMAGE[: 2 + dims], _KERNEL[: 2 + dims], (3,))] for dims in (1, 2, 3)},
}
"""Of the operands of each product."""
MORE = {"convolution": ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)}
"""What it is given besides."""


def refused(target: Any, operands: list[Tensor], autocast: str | None = None) -> bool:
    """Whether a graph of this one operation is."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"operand_{place}") for place, _ in enumerate(operands)]
    for node, operand in zip(nodes, operands, strict=True):
        node.meta["val"] = operand.to("meta")
    graph.call_function(target, tuple(nodes))
    try:
        refuse_unlike_types(graph, SampleSpec(batch_size=1, tree="", leaves=(), autocast=autocast_named(autocast)))
    except NotTraceableError:
        return True
    return False


def runs(call: Callable[[], Any], autocast: str | None = None) -> bool:
    """Whether plain torch computes it."""
    dtype = torch.bfloat16 if autocast is None else getattr(torch, autocast)
    try:
        with torch.autocast("cpu", dtype, enabled=autocast is not None):
            call()
    except (RuntimeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("target", PRODUCTS, ids=str)
def test_a_product_that_runs_is_not_refused_and_one_of_unlike_factors_is(target: Any) -> None:
    chance = random.Random(str(target))
    name = target.overloadpacket.__name__
    for shapes, autocast in itertools.product(SHAPES[name], (None, "bfloat16", "float16")):
        trials = [*itertools.product(DTYPES, repeat=len(shapes))]
        for dtypes in chance.sample(trials, min(len(trials), 60)):
            operands = [_tensor(shape, dtype, chance) for shape, dtype in zip(shapes, dtypes, strict=True)]
            extra = MORE.get(name, ()) if target._overloadname != "padding" else ([1], "valid")
            does = runs(lambda o=operands, m=extra: target(*o, *m), autocast)  # type: ignore[misc]
            is_refused = refused(target, operands, autocast)
            assert not (does and is_refused), (shapes, dtypes, autocast)
            assert is_refused or autocast is not None or len({*dtypes[: PRODUCTS[target]]}) == 1, (shapes, dtypes)


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, chance: random.Random) -> Tensor:
    """Of that shape, in one of the orders of dimensions that memory may have."""
    dims = chance.sample(range(len(shape)), len(shape))
    made = torch.ones([shape[dim] for dim in dims], dtype=torch.uint8).to(dtype)
    return made.permute([dims.index(dim) for dim in range(len(shape))])


def test_of_nothing_there_is_no_type() -> None:
    """Some kernels look no further."""
    empty = [torch.zeros(2, 3, 0), torch.zeros(2, 0, 3, dtype=torch.int64)]
    assert runs(lambda: torch.bmm(*empty))
    assert not refused(torch.ops.aten.bmm.default, empty)


class Masked(nn.Module):
    """Attention under a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.inner(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_may_have_a_type_of_its_own(dtype: torch.dtype) -> None:
    model, sample = Masked().bfloat16(), (torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.ones(2, 1, 3, 3).to(dtype))
    assert runs(lambda: model(*sample))
    assert len(trace(model, sample))
    assert len(trace(model.float(), (sample[0].float(), sample[1]), precision="bf16-mixed"))


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool])
def test_a_sample_is_traced_where_the_model_runs_on_it(dtype: torch.dtype, device: str, autocast: str | None) -> None:
    """From data sheets there was a plan for a model that fails on its own sample."""
    model, sample = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4).to(dtype)
    does = runs(lambda: model(sample), autocast)
    asked = {} if autocast is None else {"autocast": getattr(torch, autocast)}
    if does:
        assert len(trace(model.to(device), sample.to(device), **asked))
    else:
        with pytest.raises(NotTraceableError, match=r"linear.default with values in .* give the sample in the type"):
            trace(model.to(device), sample.to(device), **asked)
