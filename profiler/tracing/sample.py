"""The sample that a model is traced with: from what the user passes to flat leaves, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler import sample_tree
from profiler.errors import ArgumentError
from profiler.quantities import shown
from profiler.sample_spec import ConstantLeaf, SampleSpec, TensorLeaf
from profiler.text import are, counted

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
TRACED_BATCH_SIZE_AT_LEAST = 2  # torch.export specializes extents 0 and 1, so a sample of 1 is traced as 2


def call_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `model(*args, **kwargs)` gets for a sample.

    A tuple holds positional arguments, a dict keyword arguments (in any order), anything else is the one positional
    argument.
    """
    if isinstance(sample, dict):
        return (), dict(sorted(sample.items()))
    if isinstance(sample, tuple) and not hasattr(sample, "_fields"):
        return sample, {}
    return (sample,), {}


BatchDims = Mapping[int | str, int | None]


def describe_sample(sample: Any, batch_dims: BatchDims | None = None) -> SampleSpec:
    """The spec of a sample.

    Args:
        sample: what the model is called with.
        batch_dims: for arguments, by position or keyword, the batch dimension of their tensors, or None for tensors
            that every micro-batch gets whole. Of the others it is dimension 0, if that has the batch's extent.

    Raises:
        ArgumentError: there is no tensor with a batch dimension, the batch is empty, a leaf is neither a tensor nor a
            plain constant, or `batch_dims` does not fit the sample.
    """
    args, kwargs = call_arguments(sample)
    if batch_dims is not None and not isinstance(batch_dims, Mapping):
        raise ArgumentError(
            f"batch_dims is {shown(batch_dims)}; give a dict of arguments, by position or keyword, and dimensions, "
            "such as {0: 1}"
        )
    chosen: dict[int | str, int | None] = {**(batch_dims or {})}
    unknown = chosen.keys() - {*range(len(args)), *kwargs}
    if unknown:
        known = [*range(len(args)), *kwargs]
        raise ArgumentError(f"batch_dims names the arguments {sorted(map(str, unknown))}; the sample has {known}")
    negative = {argument: dim for argument, dim in chosen.items() if dim is not None and dim < 0}
    if negative:
        raise ArgumentError(f"batch_dims holds negative dimensions {negative}; count from 0")
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_leaf)
    for leaf in leaves:
        _refuse_strange(leaf)
    try:
        structure = sample_tree.dumps((args, kwargs))
    except ValueError as problem:
        raise ArgumentError(f"the sample cannot be written to a plan: {problem}") from problem
    dims: list[int | None] = []
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for argument, value in arguments:
        dims.extend([chosen.get(argument, 0)] * len(pytree.tree_leaves(value, is_leaf=_is_leaf)))
    extents = [
        leaf.shape[dim]
        for leaf, dim in zip(leaves, dims, strict=True)
        if isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim
    ]
    if not extents:
        raise ArgumentError("the sample holds no tensor with a batch dimension; pass what the model is called with")
    if extents[0] < 1:
        raise ArgumentError("the sample's batch dimension has extent 0; pass at least one sample")
    return SampleSpec(
        batch_size=extents[0],
        tree=structure,
        leaves=tuple(_describe_leaf(leaf, dim, extents[0]) for leaf, dim in zip(leaves, dims, strict=True)),
    )


def _is_leaf(value: Any) -> bool:
    """Whether a plan cannot say what it holds; `_describe_leaf` refuses what is no plain constant."""
    return not sample_tree.is_container(value)


def _refuse_strange(leaf: Any) -> None:
    """Refuse what is neither a tensor nor a plain constant; a dataclass, say, or a container of another kind."""
    if isinstance(leaf, float) and not math.isfinite(leaf):
        raise ArgumentError(f"the sample holds the number {leaf}; constants must be finite")
    if isinstance(leaf, Tensor) and leaf.is_nested:
        raise ArgumentError("the sample holds a nested tensor; pass padded tensors and a mask, or lengths, instead")
    if leaf is None or isinstance(leaf, Tensor | bool | int | float | str):
        return
    kind = type(leaf).__name__
    is_container = is_dataclass(leaf) or isinstance(leaf, Mapping | tuple | list) or len(pytree.tree_leaves(leaf)) != 1
    raise ArgumentError(
        f"the sample holds a container that cannot be written to a plan ({kind}); let the model take tuples, named "
        "tuples, lists or dicts instead"
        if is_container
        else f"the sample holds a {kind}; tensors, numbers, strings and None can be traced"
    )


def _describe_leaf(leaf: Any, dim: int | None, batch_size: int) -> TensorLeaf | ConstantLeaf:
    if isinstance(leaf, Tensor):
        batched = dim is not None and leaf.dim() > dim and leaf.shape[dim] == batch_size
        dtype = str(leaf.dtype).removeprefix("torch.")
        return TensorLeaf(shape=tuple(leaf.shape), dtype=dtype, batch_dim=dim if batched else None)
    return ConstantLeaf(value=leaf)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def example_arguments(spec: SampleSpec, batch_size: int, device: torch.device) -> Arguments:
    """Arguments of the described kind, filled with zeros.

    Args:
        spec: what to build.
        batch_size: extent of every batch dimension.
        device: where the tensors live (the meta device costs nothing).
    """
    leaves: list[Any] = []
    for leaf in spec.leaves:
        if isinstance(leaf, TensorLeaf):
            shape = list(leaf.shape)
            if leaf.batch_dim is not None:
                shape[leaf.batch_dim] = batch_size
            leaves.append(torch.zeros(shape, dtype=torch_dtype(leaf.dtype), device=device))
        else:
            leaves.append(leaf.value)
    return arguments_of(spec, leaves)


def made_up_arguments(spec: SampleSpec, batch_size: int, device: torch.device, seed: int) -> Arguments:
    """Arguments like `example_arguments`, of random numbers, of the integers 0 and 1, and of true flags."""
    generator = torch.Generator().manual_seed(seed)

    def made_up(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator).to(device)
        if leaf.dtype == torch.bool:
            return torch.ones_like(leaf)
        return torch.randint(2, leaf.shape, dtype=leaf.dtype, generator=generator).to(device)

    call = example_arguments(spec, batch_size, device)
    args, kwargs = pytree.tree_map(made_up, (call.args, call.kwargs))
    return Arguments(args, kwargs)


def arguments_of(spec: SampleSpec, leaves: Iterable[Any]) -> Arguments:
    """Arguments of the described structure with other leaves."""
    args, kwargs = pytree.tree_unflatten(leaves, _structure(spec.tree))
    return Arguments(args, kwargs)


def torch_dtype(name: str) -> torch.dtype:
    """`torch.float32` for `"float32"`."""
    if name not in DTYPES:
        raise ArgumentError(f"unknown dtype {name!r}")
    return DTYPES[name]


def tensor_leaves(sample: Any, spec: SampleSpec) -> list[Tensor]:
    """The tensor leaves of a sample, after checking it against the spec.

    The batch may have any extent; everything else must be as traced.

    Raises:
        ArgumentError: the structure, a constant, a dtype or a shape differs from the traced sample.
    """
    leaves: Sequence[Any]
    if type(sample) is tuple and {type(leaf) for leaf in sample} == {Tensor} and len(sample) == _alone(spec.tree):
        leaves = sample  # the usual call, whose tree takes as long as a small layer
    else:
        given = call_arguments(sample)
        found = _leaves_as_traced(given, spec.tree)
        if found is None:
            raise ArgumentError(_difference(given, sample_tree.loads(spec.tree)))
        leaves = found
    tensors: list[Tensor] = []
    for position, (leaf, expected) in enumerate(zip(leaves, spec.leaves, strict=True)):
        if isinstance(expected, ConstantLeaf):
            if isinstance(leaf, Tensor) or type(leaf) is not type(expected.value) or leaf != expected.value:
                this = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else shown(leaf)
                raise ArgumentError(
                    f"argument {_place(sample, position)} is {this}; the model was traced with "
                    f"{shown(expected.value)}, and a plan is for this value: pass it, or plan with the other"
                )
            continue
        _check_tensor(leaf, expected, partial(_place, sample, position))
        tensors.append(leaf)
    return tensors


def _leaves_as_traced(given: tuple[tuple[Any, ...], dict[str, Any]], tree: str) -> list[Any] | None:
    """The leaves of a call's arguments; None if they differ in structure from those that the model was traced with."""
    leaves, found = pytree.tree_flatten(given)
    if found == _structure(tree):
        return leaves
    if sample_tree.alike(given, sample_tree.loads(tree)):  # but for the classes of named tuples
        return pytree.tree_leaves(given, is_leaf=_is_leaf)
    return None


def _difference(given: tuple[tuple[Any, ...], dict[str, Any]], traced: Any) -> str:
    """In what the arguments of a call differ in structure from those that the model was traced with."""
    (args, kwargs), (traced_args, traced_kwargs) = given, traced
    known = ", ".join(map(str, traced_kwargs))
    missing = [name for name in traced_kwargs if name not in kwargs]
    unknown = [name for name in kwargs if name not in traced_kwargs]
    if bool(args) != bool(traced_args) and len(args) + len(kwargs):
        how = f"by keyword ({known})" if traced_kwargs else "by position"
        return f"the model was traced with arguments {how}; pass them so"
    if missing:
        named = ", ".join(map(repr, missing))
        return f"the argument {named} is missing; the model was traced with {known}: pass all of them"
    if unknown:
        return f"the argument {unknown[0]!r} is not one that the model was traced with; these are {known}"
    if len(args) != len(traced_args):
        more = "missing" if len(args) < len(traced_args) else "too many"
        return (
            f"{counted(len(args), 'argument')} {are(len(args))} given, and the model was traced with "
            f"{len(traced_args)}: argument {min(len(args), len(traced_args))} is {more}"
        )
    pairs = [*zip(range(len(args)), args, traced_args, strict=True)]
    named_pairs = [(name, kwargs[name], traced_kwargs[name]) for name in kwargs]
    for name, mine, planned in (*pairs, *named_pairs):
        if not sample_tree.alike(mine, planned):
            return _unlike(repr(name), mine, planned)
    raise AssertionError("the structures differ")


def _unlike(name: str, mine: Any, planned: Any) -> str:
    """The same of one argument, or of what differs inside of it."""
    if _held(mine) == _held(planned):
        keys = [*mine] if isinstance(mine, dict) else range(len(mine))
        for key, one, other in zip(keys, *(_inside(each) for each in (mine, planned)), strict=True):
            if not sample_tree.alike(one, other):
                return _unlike(f"{name}[{key!r}]", one, other)
    return f"argument {name} holds {_held(mine)}; the model was traced with {_held(planned)}"


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _held(value: Any) -> str:
    """What kind of container, with its size or keys."""
    if isinstance(value, dict):
        return f"a {type(value).__name__} of {', '.join(map(repr, value)) or 'nothing'}"
    if sample_tree.is_named_tuple(type(value)):
        return f"a named tuple of {', '.join(value._fields)}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else "a tensor or constant"


def without_arguments(sample: Any, spec: SampleSpec) -> SampleSpec | None:
    """The spec of a sample that lacks arguments, such as labels; None if it lacks none, or differs in more.

    By keyword any may be left out, by position the last ones.
    """
    args, kwargs = call_arguments(sample)
    planned_args, planned_kwargs = pytree.tree_unflatten(spec.leaves, _structure(spec.tree))
    is_less = 0 < len(args) + len(kwargs) < len(planned_args) + len(planned_kwargs)
    if not is_less or len(args) > len(planned_args) or not kwargs.keys() <= planned_kwargs.keys():
        return None
    kept = planned_args[: len(args)], {name: planned_kwargs[name] for name in kwargs}
    smaller = {"tree": sample_tree.dumps(kept), "leaves": tuple(pytree.tree_leaves(kept))}
    return of_other_shapes(sample, spec.model_copy(update=smaller))


@cache
def _structure(tree: str) -> pytree.TreeSpec:
    """The structure that a spec holds as text; reading it takes longer than a small step's other checks."""
    try:
        return pytree.tree_structure(sample_tree.loads(tree))
    except ValueError as problem:
        raise ArgumentError(f"the sample's structure {problem}") from problem


@cache
def _alone(tree: str) -> int:
    """How many arguments a call has by position, if each is a leaf and there are no others; else -1."""
    structure = _structure(tree)
    count = structure.num_leaves
    return count if structure == pytree.tree_structure(((0,) * count, {})) else -1


def keywords_of(spec: SampleSpec) -> frozenset[str]:
    """Names of the arguments that the model is given by keyword."""
    return frozenset(sample_tree.loads(spec.tree)[1])


def of_other_shapes(sample: Any, spec: SampleSpec) -> SampleSpec | None:
    """The spec of a sample that differs in extents alone (a longer sequence, say); None if it differs in more."""
    leaves = _leaves_as_traced(call_arguments(sample), spec.tree)
    if leaves is None:
        return None
    found: list[TensorLeaf | ConstantLeaf] = []
    for leaf, expected in zip(leaves, spec.leaves, strict=True):
        if isinstance(expected, ConstantLeaf):
            found.append(expected)
            continue
        if not isinstance(leaf, Tensor) or leaf.dim() != len(expected.shape) or 0 in leaf.shape:
            return None
        shape = [
            want if dim == expected.batch_dim else have
            for dim, (have, want) in enumerate(zip(leaf.shape, expected.shape, strict=True))
        ]
        found.append(expected.model_copy(update={"shape": tuple(shape)}))
    return spec.model_copy(update={"leaves": tuple(found)})


def _place(sample: Any, position: int) -> str:
    """Which of the arguments a leaf is in, and where: 0, 'mask', 'past'[0]."""
    path, _ = pytree.tree_flatten_with_path(call_arguments(sample))[0][position]
    keys = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", ""))) for key in path[1:]]
    return repr(keys[0]) + "".join(f"[{key!r}]" for key in keys[1:])


def _check_tensor(leaf: Any, expected: TensorLeaf, place: Callable[[], str]) -> None:
    if not isinstance(leaf, Tensor):
        raise ArgumentError(f"argument {place()} is a {type(leaf).__name__}; the model was traced with a tensor")
    if leaf.dtype != torch_dtype(expected.dtype):
        raise ArgumentError(
            f"argument {place()} has dtype {leaf.dtype}; the model was traced with {expected.dtype}: "
            "convert it, or plan with a sample of this dtype"
        )
    fits = leaf.dim() == len(expected.shape) and all(
        dim == expected.batch_dim or have == want
        for dim, (have, want) in enumerate(zip(leaf.shape, expected.shape, strict=False))
    )
    if not fits:
        raise ArgumentError(
            f"argument {place()} has shape {list(leaf.shape)}; the model was traced with {list(expected.shape)} "
            f"(dimension {expected.batch_dim} may vary): give it such a shape, or plan with a sample of the other"
        )


def batch_extent(tensors: Sequence[Tensor], spec: SampleSpec) -> int:
    """Extent of the batch dimensions, which must agree.

    Raises:
        ArgumentError: two batched inputs differ in their extent.
    """
    described = [leaf for leaf in spec.leaves if isinstance(leaf, TensorLeaf)]
    extents = {
        tensor.shape[leaf.batch_dim]
        for tensor, leaf in zip(tensors, described, strict=True)
        if leaf.batch_dim is not None
    }
    if len(extents) != 1:
        raise ArgumentError(f"the inputs have batches of {sorted(extents)} samples; all must have the same")
    batch_size = int(extents.pop())
    if batch_size < 1:
        raise ArgumentError("the batch holds 0 samples; pass at least one")
    return batch_size
