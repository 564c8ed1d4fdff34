"""Fake tensors whose dimensions lie in memory in the order that the real kernels give them.

A fake kernel promises the strides of the real one, and some break it where an input is transposed: of batch
normalization, `logsigmoid`, `roll`, `2 ** x`. What comes after would be traced for another order: dropout draws its
numbers in the order of memory, a `view` may be refused, an `is_contiguous` answered wrongly. So tiny tensors in the
same order go through both kernels, once for each operation and order; where they disagree the real one is right.

    with RealOrders(allow_non_fake_inputs=True):
        ...
    with FAKE_KERNELS.replaced_by(dispatch):  # the fake tensors that others make
        ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.machine.backend import HOST, WITHOUT_DATA
from profiler.observe.random_states import preserved
from profiler.observe.storage_watch import is_strided
from profiler.torch_private import FAKE_KERNELS, known_extent, schema_of, without_modes

_FITS_ANY_EXTENT = frozenset({torch.ops.aten.roll.default})
"""Operations that take whole numbers whatever the extents; for the numbers of others a tiny input may be too short."""
_GAP = 2  # the factor of what lies between elements that do not fill their memory

_Order = tuple[int, ...]


def dim_order(value: Tensor) -> _Order | None:
    """Dimensions from the outermost to the innermost in memory; None where elements do not fill it, or share it.

    >>> dim_order(torch.zeros(2, 3, 4).transpose(1, 2))
    (0, 2, 1)
    """
    strides = [int(stride) for stride in value.stride()]
    order = tuple(sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim)))
    expected = 1
    for dim in reversed(order):
        if value.shape[dim] > 1 and strides[dim] != expected:
            return None
        expected *= max(value.shape[dim], 1)
    return order


def dispatch(
    mode: FakeTensorMode,
    func: Any,
    types: Sequence[type],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> object:
    """`FakeTensorMode.dispatch` with the results in the real kernel's order."""
    given = kwargs or {}
    return _in_real_order(func, args, given, _as_torch_has_it(mode, func, types, args, given))


_as_torch_has_it: Any = FAKE_KERNELS.original


class _AsTorchHasThem(FakeTensorMode):
    """Fake tensors in the order that torch gives them, whatever stands in the place of its function."""

    dispatch = _as_torch_has_it


class RealOrders(FakeTensorMode):
    """Fake tensors in the order of the real kernels."""

    dispatch = dispatch


class RealOrdersOnMeta(TorchDispatchMode):
    """Within, results on the meta device lie in the order that the host's kernels give them."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry the operation out."""
        return _in_real_order(func, args, kwargs or {}, func(*args, **(kwargs or {})))


def _in_real_order(func: Any, args: Sequence[object], kwargs: Mapping[str, object], out: Any) -> Any:
    """What an operation has returned, or tensors like it in another order."""
    if not _can_be_asked(func):
        return out
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    call = _tiny(leaves)
    if call is None:
        return out
    results, structure = pytree.tree_flatten(out)
    orders = _real_orders(func, call, tree, len(results))
    if not any(orders):
        return out
    return pytree.tree_unflatten([_laid(*each) for each in zip(results, orders, strict=True)], structure)


def _laid(value: Any, order: _Order | None) -> Any:
    """A value without data, its dimensions in that order in memory."""
    if order is None:
        return value
    strides, reach = [1] * value.dim(), 1
    for dim in reversed(order):
        strides[dim] = reach
        reach *= value.shape[dim]
    laid: Tensor = value.new_empty_strided(value.shape, strides)
    return laid


@cache
def _can_be_asked(func: Any) -> bool:
    """Whether it makes tensors out of tensors, and no number says what extents these have."""
    schema = schema_of(func)
    if func.namespace != "aten" or not schema.returns or any(result.alias_info for result in schema.returns):
        return False
    kinds = [str(argument.real_type) for argument in schema.arguments]
    return func in _FITS_ANY_EXTENT or not any("int" in kind.lower() for kind in kinds)


@dataclass(frozen=True, slots=True)
class _TinyTensor:
    """A tensor of few elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> Tensor:
        """It, of zeros: a whole number may be an index."""
        reach = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return torch.zeros(reach + 1, dtype=self.dtype, device=self.device).as_strided(self.shape, self.strides)


def _tiny(leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """The arguments of a call with tiny tensors in the same order; None if no order is in question, or nobody knows it.

    Equal extents stay equal, and 1 stays 1.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(map(is_strided, tensors)):
        return None
    shapes = [[known_extent(extent) for extent in tensor.shape] for tensor in tensors]
    strides = [[known_extent(stride) for stride in tensor.stride()] for tensor in tensors]
    known = None not in chain(*shapes, *strides) and 0 not in chain(*shapes)
    if not known or not any(map(_is_permuted, shapes, strides)):
        return None
    extents = {extent: number for number, extent in enumerate(sorted({1, *chain(*shapes)}), start=1)}
    tiny = (
        _TinyTensor(
            tuple(extents[extent] for extent in shape),
            _tiny_strides(shape, stride, extents),
            tensor.dtype,
            HOST if tensor.device.type == WITHOUT_DATA else tensor.device,
        )
        for tensor, shape, stride in zip(tensors, shapes, strides, strict=True)
    )
    return tuple(next(tiny) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves)


def _is_permuted(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether dimensions lie in memory in another order than their own."""
    large = [stride for stride, extent in zip(strides, shape, strict=True) if extent > 1 and stride]
    return large != sorted(large, reverse=True)


def _tiny_strides(shape: Sequence[int], strides: Sequence[int], extents: Mapping[int, int]) -> tuple[int, ...]:
    """Strides of tiny extents: in the same order, with gaps and repeated elements where there were such."""
    found = [0] * len(shape)
    reach, tiny_reach = 1, 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim]:
            found[dim] = tiny_reach * (_GAP if strides[dim] > reach else 1)
            reach, tiny_reach = strides[dim] * shape[dim], found[dim] * extents[shape[dim]]
    return tuple(found)


def _plain(leaf: Any) -> Any:
    """A number that may be symbolic; a caller's generator is not drawn from."""
    return None if isinstance(leaf, torch.Generator) else known_extent(leaf)


@lru_cache(maxsize=4096)
def _real_orders(func: Any, call: tuple[Any, ...], tree: pytree.TreeSpec, results: int) -> tuple[_Order | None, ...]:
    """For each result the order of the real kernel, if it is not that of the fake one."""
    places = dict.fromkeys(leaf.device for leaf in call if isinstance(leaf, _TinyTensor))
    with without_modes(), preserved(places):
        args, kwargs = pytree.tree_unflatten([_made(leaf) for leaf in call], tree)
        try:
            real = pytree.tree_leaves(func(*args, **kwargs))
            with _AsTorchHasThem(allow_non_fake_inputs=True) as mode:
                args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
                fake = pytree.tree_leaves(func(*args, **kwargs))
        except (RuntimeError, IndexError, ValueError):  # of half precision, or zeros: the step itself would tell
            return (None,) * results
    return tuple(_order(*each) for each in zip(real, fake, strict=True))


def _made(leaf: Any) -> Any:
    return leaf.made() if isinstance(leaf, _TinyTensor) else leaf


def _order(real: Any, fake: Any) -> _Order | None:
    """The dimensions of the real one from the outermost to the innermost, if those of the fake one are others."""
    if not isinstance(real, Tensor) or real.shape != fake.shape:
        return None
    large = [dim for dim, extent in enumerate(real.shape) if extent > 1]
    if [real.stride(dim) for dim in large] == [fake.stride(dim) for dim in large]:
        return None
    return dim_order(real)
