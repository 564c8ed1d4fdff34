"""Batch normalization without side effects.

A traced batch normalization moves its running statistics whenever it runs: once per micro-batch, and again when it is
recomputed. GPipe (section 2.2 of the paper) normalizes by micro-batch and tracks the statistics over the mini-batch.
So a layer works on scratch buffers and *returns* the micro-batch's mean and variance; who runs the layers moves the
buffers once per mini-batch, see `executor.state.buffers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from profiler.moments import WHOLE_MOMENTUM, elements_per_channel
from profiler.tracing.writes import moves_statistics


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Names of what one batch normalization moves and of the layer outputs that it is moved by.

    Attributes:
        running_mean: buffer.
        running_var: buffer.
        num_batches_tracked: counter buffer, if the module has one.
        momentum: weight of the new mini-batch.
        mean: layer output, mean per channel of the micro-batch.
        variance: layer output, unbiased variance per channel of the micro-batch.
        count: layer output, elements per channel of the micro-batch (a tensor with one number).
    """

    running_mean: str
    running_var: str
    num_batches_tracked: str | None
    momentum: float
    mean: str
    variance: str
    count: str


def take_out_counters(graph: fx.Graph) -> set[str]:
    """Remove the counting of batches that goes with batch normalizations; returns the names of the counters."""
    counters = set()
    for node in list(graph.nodes):
        if moves_statistics(node):
            running_mean = node.args[3]
            assert isinstance(running_mean, fx.Node)
            counters.add(str(running_mean.target).removesuffix("running_mean") + "num_batches_tracked")
    found = set()
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.add_.Tensor or not isinstance(node.args[0], fx.Node):
            continue
        counter = node.args[0]
        if counter.target in counters:
            found.add(str(counter.target))
            node.replace_all_uses_with(counter)  # a module used twice counts on from its own result
            graph.erase_node(node)
    return found


def use_scratch_buffers(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Let a batch normalization write scratch buffers; returns the nodes of mean, variance and count."""
    arguments = list(node.args)
    source, running_mean, running_var = arguments[0], arguments[3], arguments[4]
    assert isinstance(running_mean, fx.Node)
    with graph.inserting_before(node):
        mean = graph.call_function(torch.zeros_like, (running_mean,))
        variance = graph.call_function(torch.zeros_like, (running_var,))
        count = graph.call_function(elements_per_channel, (source,))
    arguments[3:5] = [mean, variance]
    arguments[6] = WHOLE_MOMENTUM
    node.args = tuple(arguments)
    return mean, variance, count
