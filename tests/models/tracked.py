"""Real runs of stages under a watch on every tensor: what prediction of memory is held against."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from planner.stage_bytes import StageBytes
from profiler import LayerSequence
from profiler.loss import LossFunction, loss_of, model_output
from profiler.memory import LayerMemory
from profiler.record import LayerCost
from profiler.stage_function import Pass, StageFunction, leaves_of, roots_of, run_backward
from profiler.stand_ins import parameter_aliases
from profiler.storage_watch import StorageWatch

CPU = torch.device("cpu")


def stage_bytes(memory: Sequence[LayerMemory]) -> StageBytes:
    """What the planner makes of the layers' memory."""
    nothing = {"forward_s": 0.0, "recompute_s": 0.0, "backward_s": 0.0, "spread": 0.0}
    return StageBytes.of(
        [
            LayerCost(
                layer=index,
                micro_batch_size=1,
                device_kind="",
                **nothing,
                kept_bytes=entry.kept_bytes,
                transient_bytes=entry.transient_bytes,
                in_stage=entry.in_stage,
                output_bytes=0,
                output_gradient_bytes=0,
            )
            for index, entry in enumerate(memory)
        ]
    )


def run_stages(
    sequence: LayerSequence,
    bounds: Sequence[int],
    inputs: Mapping[str, Tensor],
    loss_fn: LossFunction | None,
    target: Any,
    *,
    has_loss: bool,
) -> list[tuple[int, int]]:
    """Run stages of layers [bounds[k], bounds[k + 1]) forward and backward on one micro-batch.

    Returns:
        For each stage the bytes that it keeps between the two, and the most that it holds at any moment; what enters
        it and the gradients of what leaves it are not counted.
    """
    aliases = parameter_aliases(sequence, CPU)
    values: dict[str, Tensor] = {}
    found = []
    for first, stop in pairwise(bounds):
        stage = StageFunction(sequence, first, stop, aliases)
        leaves = leaves_of(values, stage.entering)
        with StorageWatch() as watch:
            results = stage.forward(leaves, inputs, sequence.buffers)
            leaving = dict(results.values)
            if stop == len(sequence) and has_loss:
                leaving = {"loss": loss_of(model_output(sequence, leaving), target, loss_fn)}
            kept = Pass(leaves, roots_of(leaving))
            results.values.clear()
        values = {name: value.detach().clone() for name, value in leaving.items()}
        gradients = {name: torch.ones_like(value) for name, value in leaving.items() if value.requires_grad}
        del leaving
        kept_bytes, forward_bytes = watch.live_bytes, watch.peak_bytes
        with watch:
            watch.restart()
            run_backward(kept, gradients)
        found.append((kept_bytes, max(forward_bytes, watch.peak_bytes)))
        del results
    return found
