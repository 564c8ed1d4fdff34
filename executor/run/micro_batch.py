"""Cutting a mini-batch into micro-batches along the batch dimension, and the mean over its samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError
from profiler.machine.ring import ALIGNMENT
from profiler.text import counted


def sizes_for(
    batch_size: int, planned: Sequence[int], only: int | None = None, *, at_least: int = 1
) -> tuple[int, ...]:
    """Micro-batch sizes for a batch: the planned ones, or for another batch as many nearly equal ones.

    A batch too small for the planned number of micro-batches (the last of an epoch) gets fewer.

    Args:
        batch_size: samples of the batch.
        planned: sizes of the plan.
        only: the one size that the model was traced for, if there is but one.
        at_least: samples of each micro-batch of another batch than planned, if it has as many.

    Raises:
        ArgumentError: the batch cannot be cut into micro-batches of that size.
    """
    if only is not None:
        if batch_size % only:
            raise ArgumentError(
                f"the batch has {counted(batch_size, 'sample')}, and the model could only be traced with static "
                f"shapes, for micro-batches of {only}; pass a multiple of {only} (drop_last=True in a DataLoader)"
            )
        return (only,) * (batch_size // only)
    if batch_size == sum(planned):
        return tuple(planned)
    count = min(len(planned), max(1, batch_size // at_least))
    smaller, larger = divmod(batch_size, count)
    return (smaller + 1,) * larger + (smaller,) * (count - larger)


def shapes_of(leaves: Sequence[Any]) -> str:
    """Shapes and dtypes of the tensors among a tree's leaves and how many others it has, in words for an error."""
    tensors = tuple([(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)])
    return _in_words(tensors, len(leaves) - len(tensors))


@lru_cache(maxsize=16)
def _in_words(tensors: tuple[tuple[torch.Size, torch.dtype], ...], others: int) -> str:
    words = [f"{tuple(shape)} {str(dtype)[6:]}" for shape, dtype in tensors]
    return ", ".join(words + ([f"{others} other values"] if others else [])) or "nothing"


def samples_of_replicas(batch_size: int, replicas: int) -> tuple[int, ...]:
    """How many samples each replica takes: contiguous slices of the batch, nearly equal.

    Raises:
        ArgumentError: there are fewer samples than replicas.
    """
    if batch_size < replicas:
        raise ArgumentError(
            f"the batch holds {counted(batch_size, 'sample')} for {counted(replicas, 'replica')}; each needs at "
            "least one: drop the last batch of an epoch, or plan with fewer replicas"
        )
    smaller, larger = divmod(batch_size, replicas)
    return (smaller + 1,) * larger + (smaller,) * (replicas - larger)


def some_samples(tensor: Tensor, batch_dim: int | None, samples: range) -> Tensor:
    """Some samples of an input of the model; one without a batch dimension stays whole."""
    if batch_dim is None or len(samples) == tensor.shape[batch_dim]:
        return tensor
    return tensor.narrow(batch_dim, samples.start, len(samples))


def target_of(target: Any, samples: range) -> Any:
    """The target of some samples: tensors along dimension 0, other leaves whole."""

    def some(leaf: Tensor) -> Tensor:
        return some_samples(leaf, 0 if leaf.dim() > 0 else None, samples)

    return some(target) if isinstance(target, Tensor) else pytree.tree_map_only(Tensor, some, target)


def split_input(tensor: Tensor, batch_dim: int | None, sizes: Sequence[int]) -> Sequence[Tensor]:
    """An input of the model for each micro-batch; one without a batch dimension goes whole to each."""
    return [in_order(tensor)] * len(sizes) if batch_dim is None else _cut(tensor, sizes, batch_dim)


def in_order(tensor: Tensor) -> Tensor:
    """The tensor as it was traced: its elements in the order of its dimensions, aligned in memory; else a copy.

    Sums over another order round otherwise, and so do kernels that begin elsewhere; what crosses to another process is
    in the order that was traced, and begins where memory does.
    """
    if tensor.layout is not torch.strided:
        return tensor
    with torch.inference_mode(mode=False):  # a copy that is made in the caller's region could not be trained with
        ordered = tensor.resolve_conj().resolve_neg().contiguous()
        return ordered.clone() if ordered.data_ptr() % ALIGNMENT else ordered


def _cut(tensor: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    return [in_order(part) for part in tensor.split(list(sizes), dim)]


def check_target(target: Any, batch_size: int) -> None:
    """Refuse a target for another batch.

    Raises:
        ArgumentError: a tensor has another batch extent than the inputs.
    """
    for leaf in (target,) if isinstance(target, Tensor) else pytree.tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] != batch_size:
            raise ArgumentError(f"the target holds {counted(leaf.shape[0], 'sample')}, the inputs {batch_size}")


def split_target(target: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """The target for each micro-batch: tensors are cut along dimension 0, other leaves go whole to each.

    Raises:
        ArgumentError: a tensor has another batch extent than the inputs.
    """
    check_target(target, sum(sizes))
    if target is None or isinstance(target, Tensor):  # the usual case, which need not cost a tree for each micro-batch
        return _parts(target, sizes)
    leaves, tree = pytree.tree_flatten(target)
    parts = [_parts(leaf, sizes) for leaf in leaves]
    return [pytree.tree_unflatten([part[index] for part in parts], tree) for index in range(len(sizes))]


def mean_over_samples(scalars: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of micro-batches' means in float64, each weighted by its share of the samples."""
    means = torch.stack(list(scalars)).double()
    return (means * _as_tensor(tuple(weights), means.device)).sum()


@lru_cache(maxsize=16)
def _as_tensor(weights: tuple[float, ...], device: torch.device) -> Tensor:
    """The same in each step; to make it takes as long as the sum."""
    with torch.inference_mode(mode=False):
        return torch.tensor(weights, dtype=torch.float64, device=device)


def _parts(leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if not isinstance(leaf, Tensor):
        return [leaf] * len(sizes)
    return _cut(leaf, sizes, 0) if leaf.dim() > 0 else [in_order(leaf)] * len(sizes)
