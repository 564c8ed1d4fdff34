"""The layer sequence: what tracing yields, and what profiler, planner and executor share of a model.

A model is a list of layers. Each layer is a pure function of named values:

    outputs = layer.function(*[values[name] for name in layer.reads])

where a name is a parameter or buffer (original name), a model input, or a value that an earlier layer produced. What
a layer would write in place (a buffer, running statistics) it returns instead; random numbers are the one thing that
it takes from outside, and `draws_random` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from profiler.sample_spec import SampleSpec

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """One value that lives between two layers.

    Attributes:
        name: of the node that computes it.
        dtype: element type.
        shape: at the sample's batch size; the batch dimension is `batch_dim`.
        batch_dim: dimension that grows with the micro-batch, or None.
        requires_grad: whether a gradient comes back for it.
        producer: index of the layer that computes it.
        consumers: indices of the layers that read it, ascending; `len(layers)` stands for the model's output.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    batch_dim: int | None
    requires_grad: bool
    producer: int
    consumers: tuple[int, ...]
    bytes_per_sample: int
    fixed_bytes: int

    def size_bytes(self, micro_batch_size: int) -> int:
        """Bytes of the value for a micro-batch of that size."""
        return self.bytes_per_sample * micro_batch_size + self.fixed_bytes


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Running statistics that a layer returns instead of writing them (batch normalization).

    The layer's outputs `mean` and `variance` are the micro-batch's mean and *unbiased* variance per channel over
    `count` elements; the executor moves the buffers once per mini-batch.

    Attributes:
        running_mean: name of the buffer.
        running_var: name of the buffer.
        num_batches_tracked: name of the counter buffer, if the module has one.
        momentum: of the exponential average; None for a cumulative one.
        mean: name of the layer output with the mean.
        variance: name of the layer output with the unbiased variance.
        count: name of the layer output with the number of elements per channel (an int).
    """

    running_mean: str
    running_var: str
    num_batches_tracked: str | None
    momentum: float | None
    mean: str
    variance: str
    count: str


@dataclass(frozen=True, slots=True)
class Layer:
    """A contiguous run of graph nodes that the planner never cuts.

    Attributes:
        index: position in the sequence.
        name: module path of its first and last operation.
        operations: names of its operations in order (`"aten.linear.default"`).
        module_paths: modules that they come from, in order of first use.
        source: file and line of the first operation in the user's code, or "".
        parameters: names of the parameters that it reads.
        buffers: names of the buffers that it reads.
        written_buffers: buffer name -> name of the output that holds its new value.
        statistics: batch-normalization statistics among its outputs.
        reads: names of the arguments of `function`, in order.
        outputs: names of the results of `function`, in order (always a tuple, also for one).
        in_place_reads: those of `reads` that the layer writes in place (itself or through a view); a leaf must not be
            passed for them.
        draws_random: whether it draws random numbers.
        flops: of its forward pass at the sample's batch size.
        signature: equal for layers that do the same operations on the same shapes.
        function: the compiled layer.
    """

    index: int
    name: str
    operations: tuple[str, ...]
    module_paths: tuple[str, ...]
    source: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    written_buffers: tuple[tuple[str, str], ...]
    statistics: tuple[BatchStatistics, ...]
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    in_place_reads: frozenset[str]
    draws_random: bool
    flops: int
    signature: str
    function: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class LayerSequence:
    """A model as a sequence of layers.

    Attributes:
        layers: in execution order.
        boundaries: `boundaries[i]` are the values alive between layer i - 1 and layer i, for i in 0..L; the first
            and the last are empty (inputs are available everywhere, outputs belong to the last layer).
        inputs: names of the model's tensor inputs, in the order of the sample's tensor leaves.
        prelude: names of values that depend on inputs alone and are computed on every stage that reads them.
        prelude_function: `prelude_function(*inputs) -> tuple` of all `prelude` values.
        output_names: names of the values that the model returns, in the flattened order of its output; None where
            the output holds a constant.
        parameters: original name -> parameter (shared with the model, not copied), each tied parameter once.
        buffers: original name -> buffer.
        aliases: name that the graph uses -> all names that the model has for the same parameter or buffer.
        tied: parameters read by more than one layer -> indices of those layers, ascending.
        sample: how to call the model.
        fingerprint: equal exactly when the traced graphs and parameter shapes are equal.
    """

    layers: tuple[Layer, ...]
    boundaries: tuple[tuple[BoundaryValue, ...], ...]
    inputs: tuple[str, ...]
    prelude: tuple[str, ...]
    prelude_function: Callable[..., tuple[Any, ...]]
    output_names: tuple[str | None, ...]
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, Tensor]
    aliases: dict[str, tuple[str, ...]]
    tied: dict[str, tuple[int, ...]]
    sample: SampleSpec
    fingerprint: str
