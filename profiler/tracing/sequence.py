"""The layer sequence: what tracing yields, and what profiler, planner and executor share of a model.

A model is a list of layers. Each layer is a function of named tensors,

    outputs = layer.function(*parameters, *buffers, *values)

with the tensors that `layer.parameters`, `layer.buffers` and `layer.values` name, in that order, and returns those
that `layer.outputs` names. What the model writes in place (a buffer, running statistics) a layer returns instead;
random numbers are the one thing that it takes from outside, and `draws` says how often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.machine.backend import device_of_first
from profiler.sample_spec import SampleSpec
from profiler.text import counted
from profiler.tracing.batch_norm import BatchStatistics
from profiler.tracing.left_out import LeftOut
from profiler.tracing.retarget import function_on
from profiler.tracing.sites import Site

if TYPE_CHECKING:
    import networkx
    import pandas
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """One value that lives between two layers.

    Attributes:
        name: of the operation that computes it.
        dtype: element type.
        shape: extents as ints, or as sympy expressions of the micro-batch size `n`.
        dim_order: dimensions from the outermost to the innermost in memory. Results can depend on it in the last bit,
            so values and gradients travel in it.
        requires_grad: whether a gradient comes back for it.
        producer: index of the layer that computes it.
        consumers: indices of the layers that read it, ascending; the number of layers stands for the model's output.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Any, ...]
    dim_order: tuple[int, ...]
    requires_grad: bool
    producer: int
    consumers: tuple[int, ...]

    def shape_at(self, micro_batch_size: int) -> tuple[int, ...]:
        """The shape for a micro-batch of that size."""
        return tuple(
            extent if isinstance(extent, int) else _extent_at(extent, micro_batch_size) for extent in self.shape
        )

    def size_bytes(self, micro_batch_size: int) -> int:
        """Bytes of the value for a micro-batch of that size."""
        return prod(self.shape_at(micro_batch_size)) * self.dtype.itemsize


@lru_cache(maxsize=4096)
def _extent_at(extent: Any, micro_batch_size: int) -> int:
    """An extent of a dimension that grows with the batch; a model has few of them, and asks for each very often."""
    return int(extent.subs(dict.fromkeys(extent.free_symbols, micro_batch_size)))


@dataclass(frozen=True, slots=True)
class Layer:
    """A contiguous run of operations that the planner never cuts.

    Attributes:
        index: position in the sequence.
        name: module path of its first and last operation.
        operations: names of its operations in order (`"aten.linear.default"`).
        module_paths: modules that they come from, in order of first use.
        source: `file:line` of the first operation in the user's code, or "".
        parameters: names of the parameters that it reads.
        buffers: names of the buffers and tensor constants that it reads.
        values: names of the inputs, prelude values and earlier layers' outputs that it reads.
        outputs: names of what it returns.
        written_buffers: pairs (buffer, output that holds its new value).
        statistics: batch normalizations whose running statistics are to be moved by its outputs.
        in_place: those of `values` that it writes in place, itself or through a view.
        views: pairs (output, one of `values`) that lie in the same memory, so that a later layer can write that value.
        draws: operations that draw random numbers, each after a call of `profiler.observe.draws.before_draw`.
        earlier_draws: such operations of earlier layers.
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
    values: tuple[str, ...]
    outputs: tuple[str, ...]
    written_buffers: tuple[tuple[str, str], ...]
    statistics: tuple[BatchStatistics, ...]
    in_place: frozenset[str]
    views: tuple[tuple[str, str], ...]
    draws: int
    earlier_draws: int
    flops: int
    signature: str
    function: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Prelude:
    """Values that depend on inputs and constant buffers alone; every stage computes those that it reads.

    Attributes:
        names: what it computes.
        buffers: names of the buffers that it reads.
        inputs: names of the model inputs that it reads.
        function: `function(*buffers, *inputs)` returns the values of `names`.
    """

    names: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    function: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class LayerSequence:
    """A model as a sequence of layers.

    Attributes:
        layers: in execution order.
        boundaries: `boundaries[i]` are the values alive between layer i - 1 and layer i, in the order in which they
            are computed; the first is empty (inputs are available everywhere) and so is the last.
        free_values: inputs and prelude values that layers read, which never travel; their producer is -1.
        inputs: names of the model's tensor inputs, in the order of the sample's tensor leaves.
        prelude_of: compiles the prelude for a set of names that layers read.
        prelude_names: all names that a prelude can compute.
        operations: all operations of the graph in order, those of the prelude included.
        prelude_positions: positions among `operations` of those of the prelude.
        sites: finds where each of `operations` is in the model, and what it reads.
        outputs: leaves of the model's output in flattened order: the name of a value, or a constant in a tuple.
        output_shapes: name of a value in `outputs` -> its extents, as of a `BoundaryValue`; None if it is a number.
        output_tree: structure of the model's output.
        parameters: original name -> the model's own parameter, each tied parameter once.
        buffers: original name -> the model's own buffer, or a constant of the graph.
        aliases: name that the graph uses -> all names that the model has for that parameter or buffer.
        calls: path of a module -> how often the model calls it; one without operations is not there. Of a module with
            several paths each stands for its own calls, or one of them for all.
        tied: parameter read by more than one layer -> indices of those layers, ascending.
        sample: how to call the model, and what traced it (`sample.front_end`).
        refusals: front end -> why it did not serve; empty if the first did, or if the sample said which to take.
        fingerprint: equal when graph, layers and shapes are.
        whole: of a model that is one layer, why it cannot be cut; else empty.
    """

    layers: tuple[Layer, ...]
    boundaries: tuple[tuple[BoundaryValue, ...], ...]
    free_values: tuple[BoundaryValue, ...]
    inputs: tuple[str, ...]
    prelude_of: Callable[[Sequence[str]], Prelude] = field(repr=False)
    prelude_names: frozenset[str]
    operations: tuple[str, ...] = field(repr=False)
    prelude_positions: frozenset[int] = field(repr=False)
    sites: Callable[[], tuple[Site, ...]] = field(repr=False)
    outputs: tuple[str | tuple[Any], ...]
    output_shapes: Mapping[str, tuple[Any, ...] | None] = field(repr=False)
    output_tree: pytree.TreeSpec
    parameters: Mapping[str, torch.nn.Parameter] = field(repr=False)
    buffers: Mapping[str, Tensor] = field(repr=False)
    aliases: Mapping[str, tuple[str, ...]]
    calls: Mapping[str, int] = field(repr=False)
    tied: Mapping[str, tuple[int, ...]]
    sample: SampleSpec
    refusals: Mapping[str, str]
    fingerprint: str
    whole: str = ""

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def names_read(self, layers: range) -> set[str]:
        """Names of all parameters, buffers and constants that these layers read or write."""
        names: set[str] = set()
        for layer in self.layers[layers.start : layers.stop]:
            names.update(layer.parameters, layer.buffers)
            for entry in layer.statistics:
                names |= {entry.running_mean, entry.running_var}
                names |= {entry.num_batches_tracked} if entry.num_batches_tracked else set()
        return names

    @property
    def device(self) -> torch.device:
        """Where the model was when it was traced."""
        return device_of_first(self.parameters.values())

    def on(self, device: torch.device) -> LayerSequence:
        """The same layers, compiled to run on another device; parameters and buffers stay where they are."""
        if device == self.device:
            return self
        traced = self.device

        def prelude_of(wanted: Sequence[str]) -> Prelude:
            prelude = self.prelude_of(wanted)
            return replace(prelude, function=function_on(prelude.function, traced, device))

        moved = {function: function_on(function, traced, device) for function in {x.function for x in self.layers}}
        layers = tuple(replace(layer, function=moved[layer.function]) for layer in self.layers)
        return replace(self, layers=layers, prelude_of=prelude_of)

    def __repr__(self) -> str:
        """One line: how many layers, parameters and distinct layers, and what traced them."""
        elements = sum(parameter.numel() for parameter in self.parameters.values())
        distinct = len({layer.signature for layer in self.layers})
        foreign = sorted({leaf[0].kind for leaf in self.outputs if isinstance(leaf[0], LeftOut)})
        return (
            f"LayerSequence({counted(len(self), 'layer')}, {distinct} distinct, {elements:,} parameters, "
            f"{self.fingerprint}, "
            f"{self.sample.means}{'; left out of its output: ' * bool(foreign)}{', '.join(foreign)}"
            f"{f'; one layer, since {self.whole}' if self.whole else ''})"
        )

    def to_frame(self) -> pandas.DataFrame:
        """One row a layer: name, operations, parameter elements, FLOPs, and bytes that cross the boundary after it."""
        import pandas

        size = self.sample.batch_size
        return pandas.DataFrame(
            {
                "layer": [layer.index for layer in self.layers],
                "name": [layer.name for layer in self.layers],
                "operations": [len(layer.operations) for layer in self.layers],
                "parameters": [sum(self.parameters[p].numel() for p in layer.parameters) for layer in self.layers],
                "flops": [layer.flops for layer in self.layers],
                "boundary_values": [len(values) for values in self.boundaries[1:]],
                "boundary_bytes": [sum(v.size_bytes(size) for v in values) for values in self.boundaries[1:]],
                "signature": [layer.signature for layer in self.layers],
                "source": [layer.source for layer in self.layers],
            }
        )

    def _repr_html_(self) -> str:
        from profiler.views import sequence_html

        return sequence_html(self)

    def travel_frame(self) -> pandas.DataFrame:
        """What travels and why: one row for each boundary and value that is read after it.

        Columns: the boundary (number of the layer after it), value, dtype, symbolic shape, bytes at the sample's batch
        size, name of the layer that computes it, names of the layers that read it, requires_grad, and the reason: it is
        sent, or each stage computes it or has it as an input.
        """
        from profiler.tracing.dataflow import travel_frame

        return travel_frame(self)

    def dataflow(self) -> networkx.MultiDiGraph[int]:
        """Layers as nodes and the values between them as edges with their bytes."""
        from profiler.tracing.dataflow import dataflow

        return dataflow(self)

    def plot(self, axes: Axes | None = None) -> Axes:
        """A picture of the dataflow of a small model.

        Raises:
            ArgumentError: the model has too many layers for a picture.
        """
        from profiler.tracing.dataflow import plot_dataflow

        return plot_dataflow(self, axes)
