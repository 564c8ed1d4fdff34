"""Cutting a mini-batch into micro-batches along the batch dimension."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError
from profiler.sample_spec import SampleSpec, TensorLeaf


def sizes_for(batch_size: int, planned: Sequence[int], only: int | None = None) -> tuple[int, ...]:
    """Micro-batch sizes for a batch: the planned ones, or for another batch as many nearly equal ones.

    A batch smaller than the planned number of micro-batches (the last of an epoch) gets micro-batches of one sample.

    Args:
        batch_size: samples of the batch.
        planned: sizes of the plan.
        only: the one size that the model was traced for, if there is but one.

    Raises:
        ArgumentError: the batch cannot be cut into micro-batches of that size.
    """
    if only is not None:
        if batch_size % only:
            raise ArgumentError(
                f"the batch has {batch_size} samples, and the model could only be traced with static shapes, for "
                f"micro-batches of {only}; pass a multiple of {only} (drop_last=True in a DataLoader)"
            )
        return (only,) * (batch_size // only)
    if batch_size == sum(planned):
        return tuple(planned)
    count = min(len(planned), batch_size)
    smaller, larger = divmod(batch_size, count)
    return (smaller + 1,) * larger + (smaller,) * (count - larger)


def shapes_of(tree: Any) -> str:
    """Shapes and dtypes of a tree's tensors and how many other leaves it has, in words for an error."""
    leaves = pytree.tree_leaves(tree)
    tensors = [f"{tuple(leaf.shape)} {str(leaf.dtype)[6:]}" for leaf in leaves if isinstance(leaf, Tensor)]
    others = len(leaves) - len(tensors)
    return ", ".join(tensors + ([f"{others} other values"] if others else [])) or "nothing"


def samples_of_replicas(batch_size: int, replicas: int) -> tuple[int, ...]:
    """How many samples each replica takes: contiguous slices of the batch, nearly equal.

    Raises:
        ArgumentError: there are fewer samples than replicas.
    """
    if batch_size < replicas:
        raise ArgumentError(
            f"the batch holds {batch_size} samples for {replicas} replicas; each needs at least one: drop the last "
            "batch of an epoch, or plan with fewer replicas"
        )
    smaller, larger = divmod(batch_size, replicas)
    return (smaller + 1,) * larger + (smaller,) * (replicas - larger)


def split_inputs(tensors: Sequence[Tensor], spec: SampleSpec, sizes: Sequence[int]) -> list[list[Tensor]]:
    """The model's tensor inputs for each micro-batch; inputs without a batch dimension go whole to each."""
    dims = [leaf.batch_dim for leaf in spec.leaves if isinstance(leaf, TensorLeaf)]
    parts = [
        list(tensor.split(list(sizes), dim)) if dim is not None else [tensor] * len(sizes)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    return [[part[index] for part in parts] for index in range(len(sizes))]


def split_target(target: Any, sizes: Sequence[int]) -> list[Any]:
    """The target for each micro-batch: tensors are cut along dimension 0, other leaves go whole to each.

    Raises:
        ArgumentError: a tensor has another batch extent than the inputs.
    """
    leaves, tree = pytree.tree_flatten(target)
    batch_size = sum(sizes)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] != batch_size:
            raise ArgumentError(f"the target holds {leaf.shape[0]} samples, the inputs {batch_size}")
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    return [pytree.tree_unflatten([_cut(leaf, first, stop) for leaf in leaves], tree) for first, stop in bounds]


def _cut(leaf: Any, first: int, stop: int) -> Any:
    return leaf[first:stop] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf
