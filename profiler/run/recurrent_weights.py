"""The weights of recurrent networks one after the other in memory, in the order in which cuDNN computes with them.

Weights that lie apart are packed by cuDNN at each call: a copy that every micro-batch keeps until its backward pass,
and a warning. `nn.RNNBase.flatten_parameters` lays those of a module together; here it is done for copies of weights,
by what a layer's graph calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from profiler.run.separable import graph_of
from profiler.torch_private import flatten_for_cudnn, schema_of
from profiler.tracing.sequence import Layer

_aten = torch.ops.aten
_NETWORKS: Final[Mapping[Any, tuple[str, int]]] = {  # operation -> cuDNN's name of it, matrices in one weight
    _aten.rnn_relu: ("RNN_RELU", 1),
    _aten.rnn_tanh: ("RNN_TANH", 1),
    _aten.lstm: ("LSTM", 4),
    _aten.gru: ("GRU", 3),
}


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """Those of one call.

    Attributes:
        names: of the parameters, as the call has them: layer by layer, of each first one direction and then the other.
        mode: cuDNN's name of the network.
        gates: how many matrices lie over each other in one weight.
        per_layer: weights of one direction of a layer: two, biases and a projection.
        layers: of the network.
        batch_first: whether its input is (samples, steps, features); packed ones count as not.
        bidirectional: whether it goes both ways.
    """

    names: tuple[str, ...]
    mode: str
    gates: int
    per_layer: int
    layers: int
    batch_first: bool
    bidirectional: bool


def recurrent_weights(layer: Layer) -> Iterator[RecurrentWeights]:
    """Of each call of a layer whose weights are parameters as they are."""
    graph = graph_of(layer.function)
    if graph is None:
        return
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    name_of = dict(zip(placeholders, layer.parameters, strict=False))
    for node in graph.nodes:
        network = _NETWORKS.get(getattr(node.target, "overloadpacket", node.target))
        if network is None:
            continue
        arguments = _arguments(node)
        weights = arguments["params"]
        if not all(weight in name_of for weight in weights):
            continue
        layers, bidirectional = arguments["num_layers"], arguments["bidirectional"]
        yield RecurrentWeights(
            names=tuple(name_of[weight] for weight in weights),
            mode=network[0],
            gates=network[1],
            per_layer=len(weights) // (layers * (2 if bidirectional else 1)),
            layers=layers,
            batch_first=arguments.get("batch_first", False),
            bidirectional=bidirectional,
        )


def lay_together(layers: Iterable[Layer], tensors: Mapping[str, Tensor]) -> None:
    """Give the weights of each recurrent network new memory in one block, where cuDNN computes with them.

    Args:
        layers: that read them.
        tensors: by name; networks of which one is missing are left as they are. Nothing else may lie in their memory.
    """
    for weights in {weights for layer in layers for weights in recurrent_weights(layer)}:
        if all(name in tensors for name in weights.names):
            _lay_together(weights, [tensors[name] for name in weights.names])


@torch.no_grad()
def _lay_together(weights: RecurrentWeights, tensors: list[Tensor]) -> None:
    first = tensors[0]
    alike = all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors)
    if not alike or len(set(weights.names)) < len(tensors) or not torch.backends.cudnn.is_acceptable(first):
        return
    rows, features = first.shape
    is_projected = weights.per_layer % 2 == 1  # two or four, and the projection
    flatten_for_cudnn(
        tensors,
        weights.per_layer,
        features,
        weights.mode,
        rows // weights.gates,
        tensors[weights.per_layer - 1].shape[0] if is_projected else 0,
        weights.layers,
        weights.batch_first,
        weights.bidirectional,
    )


def _arguments(node: fx.Node) -> dict[str, Any]:
    """By their names in the operation's schema."""
    schema = schema_of(node.target)
    return {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
