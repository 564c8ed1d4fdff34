"""Real runs of stages under a watch on every tensor: what prediction of memory is held against."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from planner.cost.stage_bytes import StageBytes
from profiler import LayerSequence
from profiler.memory.in_stage import LayerMemory
from profiler.observe.storage_watch import StorageWatch
from profiler.record import LayerCost
from profiler.run.loss import LossFunction, loss_of, model_output
from profiler.run.parameter_pool import ParameterPool
from profiler.run.stage_function import KeptPass, Results, StageFunction, leaves_of, roots_of, run_backward

CPU = torch.device("cpu")


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Bytes that the allocator gave (positive) and took back (negative) inside, in order; filled at the end."""
    record: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as kineto:
        yield record
    events = [event for event in kineto.profiler.kineto_results.events() if event.name() == "[memory]"]
    record.extend(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))


def stage_bytes(memory: Sequence[LayerMemory]) -> StageBytes:
    """What the planner makes of the layers' memory."""
    nothing: dict[str, Any] = {"forward_s": 0.0, "recompute_s": 0.0, "backward_s": 0.0, "spread": 0.0}
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


class Allocator:
    """The allocator's count, which holds what kernels take for themselves, with the face of a `StorageWatch`."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._blocks = ExitStack()

    def __enter__(self) -> Self:
        self._record = self._blocks.enter_context(allocations())
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.close()
        self.peak_bytes = max(self.peak_bytes, *(self.live_bytes + sum_ for sum_ in accumulate(self._record)))
        self.live_bytes += sum(self._record)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.live_bytes


def run_stages(
    sequence: LayerSequence,
    bounds: Sequence[int],
    inputs: Mapping[str, Tensor],
    loss_fn: LossFunction | None,
    target: Any,
    *,
    has_loss: bool,
    meter: Callable[[], StorageWatch | Allocator] = StorageWatch,
) -> list[tuple[int, int]]:
    """Run stages of layers [bounds[k], bounds[k + 1]) forward and backward on one micro-batch, once before it counts.

    Returns:
        For each stage the bytes that it keeps between the two, and the most that it holds at any moment; what enters
        it and the gradients of what leaves it are not counted.
    """
    pool = ParameterPool(sequence, CPU)
    values: dict[str, Tensor] = {}
    found = []

    def forward(stage: StageFunction, *, is_last: bool) -> tuple[KeptPass, Results, dict[str, Tensor]]:
        leaves = leaves_of(values, stage.entering)
        results = stage.forward(leaves, inputs, sequence.buffers)
        leaving = dict(results.values)
        if is_last:
            leaving = {"loss": loss_of(model_output(sequence, leaving), target, loss_fn)}
        results.values.clear()
        return KeptPass(leaves, roots_of(leaving)), results, leaving

    for first, stop in pairwise(bounds):
        stage = StageFunction(sequence, first, stop, pool)
        is_last = stop == len(sequence) and has_loss
        behind = {name: value.detach().clone() for name, value in forward(stage, is_last=is_last)[2].items()}
        with meter() as watch:
            kept, results, leaving = forward(stage, is_last=is_last)
            gradients = [name for name, value in leaving.items() if value.requires_grad]
            del leaving
        kept_bytes, forward_bytes = watch.live_bytes, watch.peak_bytes
        given = {name: torch.ones_like(behind[name]) for name in gradients}
        with watch:
            watch.restart()
            run_backward(kept, given)
        found.append((kept_bytes, max(forward_bytes, watch.peak_bytes)))
        values = behind
        del results
    return found
