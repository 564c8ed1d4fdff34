"""The tensors that layers are run with: a micro-batch of any size, and fakes of parameters and buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError
from profiler.machine.backend import HOST
from profiler.observe.kernel_orders import RealOrders
from profiler.run.layer_runner import LayerRunner
from profiler.run.loss import LossFunction
from profiler.run.main_gradients import with_gradient
from profiler.run.parameter_pool import ParameterPool, valued_buffer
from profiler.sample_spec import SampleSpec, TensorLeaf
from profiler.tracing.computing_model import adding_dtype
from profiler.tracing.sample import tensor_leaves, torch_dtype
from profiler.tracing.sequence import LayerSequence


def made_up_leaves(spec: SampleSpec) -> list[Tensor]:
    """Tensors of the described kind: normal floats, integers 0 (an index that is always valid), booleans true."""
    leaves = []
    for leaf in spec.leaves:
        if not isinstance(leaf, TensorLeaf):
            continue
        dtype = torch_dtype(leaf.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            leaves.append(torch.randn(leaf.shape, dtype=dtype, device=HOST))
        else:
            leaves.append(torch.full(leaf.shape, dtype == torch.bool, dtype=dtype, device=HOST))
    return leaves


def resized(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor cut, or repeated, to an extent of `size` in `dim`, in the memory layout of a part of it.

    >>> resized(torch.tensor([1, 2, 3]), 0, 5)
    tensor([1, 2, 3, 1, 2])

    Raises:
        ArgumentError: there is nothing to repeat.
    """
    if not tensor.shape[dim]:
        raise ArgumentError("the sample or the target holds a tensor of 0 samples; pass at least one")
    if size <= tensor.shape[dim]:
        return tensor.narrow(dim, 0, size)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    rows = torch.arange(size, device=tensor.device) % tensor.shape[dim]
    repeated = tensor.permute(order).index_select(order.index(dim), rows)
    return repeated.permute([order.index(position) for position in range(tensor.dim())])


def micro_batch(sequence: LayerSequence, sample: Any | None, size: int, device: torch.device) -> dict[str, Tensor]:
    """Inputs by name for a micro-batch of `size` samples.

    Args:
        sequence: the layers.
        sample: whose values to take, cut or repeated along the batch; None for made-up values.
        size: samples.
        device: where the tensors go.

    Raises:
        ArgumentError: the sample is not of the kind that the model was traced with.
    """
    spec = sequence.sample
    tensors = [_valued(tensor) for tensor in (made_up_leaves(spec) if sample is None else tensor_leaves(sample, spec))]
    described = [leaf for leaf in spec.leaves if isinstance(leaf, TensorLeaf)]
    sized = [
        tensor if leaf.batch_dim is None else resized(tensor, leaf.batch_dim, size)
        for tensor, leaf in zip(tensors, described, strict=True)
    ]
    return {name: tensor.detach().to(device) for name, tensor in zip(sequence.inputs, sized, strict=True)}


def part_of(sequence: LayerSequence, inputs: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """The first `size` samples of a micro-batch's inputs, on the same memory."""
    leaves = [leaf for leaf in sequence.sample.leaves if isinstance(leaf, TensorLeaf)]
    return {
        name: inputs[name] if leaf.batch_dim is None else inputs[name].narrow(leaf.batch_dim, 0, size)
        for name, leaf in zip(sequence.inputs, leaves, strict=True)
    }


def _valued(tensor: Tensor) -> Tensor:
    """The tensor; where it is on the meta device and has no values, normal floats or zeros as made-up ones are.

    Of one from inference mode a copy, since autograd cannot keep it.
    """
    if not tensor.is_meta:
        return tensor.clone() if tensor.is_inference() else tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.randn_like(tensor, device=HOST)
    return torch.zeros_like(tensor, device=HOST)


def resized_target(target: Any, size: int, device: torch.device) -> Any:
    """The target for a micro-batch: tensors cut or repeated along dimension 0, other leaves as they are."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = _valued(leaf)
        return (resized(leaf.detach(), 0, size) if leaf.dim() else leaf.detach()).to(device)

    return pytree.tree_map(one, target)


def real_runner(
    sequence: LayerSequence,
    pool: ParameterPool,
    inputs: Mapping[str, Tensor],
    *,
    loss_fn: LossFunction | None,
    target: Any,
    has_loss: bool,
    device: torch.device,
) -> LayerRunner:
    """A runner on the model's own values, or on random ones where it is on the meta device."""
    buffers = {name: valued_buffer(buffer, device) for name, buffer in sequence.buffers.items()}
    return LayerRunner(sequence, pool, buffers, inputs, loss_fn=loss_fn, target=target, has_loss=has_loss)


@contextmanager
def fake_runner(
    sequence: LayerSequence,
    inputs: Mapping[str, Tensor],
    *,
    loss_fn: LossFunction | None,
    target: Any,
    has_loss: bool,
    device: torch.device,
) -> Iterator[LayerRunner]:
    """A runner on fake tensors shaped like the real ones, inside their mode."""
    with RealOrders(allow_non_fake_inputs=True):

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

        parameters = {}
        for layer in sequence.layers:
            for name in layer.parameters:
                parameter = sequence.parameters[name]
                alias = fake(parameter).requires_grad_(parameter.requires_grad)
                if parameter.requires_grad:
                    dtype = adding_dtype(sequence.sample.precision, parameter)
                    alias = with_gradient(alias, torch.empty_like(alias, dtype=dtype, requires_grad=False))
                parameters[layer.index, name] = alias
        yield LayerRunner(
            sequence,
            parameters,
            {name: fake(buffer) for name, buffer in sequence.buffers.items()},
            {name: fake(tensor) for name, tensor in inputs.items()},
            loss_fn=loss_fn,
            target=pytree.tree_map(fake, target),
            has_loss=has_loss,
        )


def input_bytes(spec: SampleSpec, target: Any) -> int:
    """Bytes of the model's inputs and of the target for one sample of the batch, rounded up.

    A tensor that every micro-batch gets whole is spread over the samples.
    """
    total = 0
    for leaf in spec.leaves:
        if isinstance(leaf, TensorLeaf):
            total += math.prod(leaf.shape) * torch_dtype(leaf.dtype).itemsize
    per_sample = -(-total // spec.batch_size)
    for leaf in pytree.tree_leaves(target):
        if isinstance(leaf, Tensor):
            per_sample += -(-leaf.nbytes // (leaf.shape[0] if leaf.dim() else spec.batch_size))
    return per_sample
