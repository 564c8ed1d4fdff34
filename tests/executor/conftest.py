"""Plans with made-up predictions, for tests of what runs them."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from planner.plan import Plan, Prediction, Segment, Stage, StageMemory, StageTimes
from profiler.device import Device
from profiler.sequence import LayerSequence

PlanFor = Callable[..., Plan]
CPU = Device(name="cpu", kind="cpu", memory_bytes=2**30, threads=1)
NO_MEMORY = StageMemory(
    parameters=0, gradients=0, optimizer=0, activations=0, transient=0, receive_buffers=0, reserve=0
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As many threads as a worker has: the order of additions depends on their number."""
    torch.set_num_threads(1)


@pytest.fixture
def plan_for() -> PlanFor:
    """Builds a plan from cuts: `plan_for(sequence, [3, 5], batch_size=10, micro_batches=4, recompute=True)`."""
    return _plan


def _plan(
    sequence: LayerSequence,
    cuts: Sequence[int] = (),
    *,
    batch_size: int,
    micro_batches: int,
    recompute: bool | Sequence[bool] = False,
) -> Plan:
    bounds = [0, *cuts, len(sequence)]
    smaller, larger = divmod(batch_size, micro_batches)
    sizes = (smaller + 1,) * larger + (smaller,) * (micro_batches - larger)
    again = [recompute] * (len(bounds) - 1) if isinstance(recompute, bool) else recompute
    times = tuple(
        StageTimes(
            micro_batch_size=size,
            forward_s=1.0,
            recompute_s=0.0,
            backward_s=1.0,
            send_forward_s=0.0,
            send_backward_s=0.0,
        )
        for size in sorted(set(sizes))
    )
    stages = tuple(
        Stage(
            first_layer=first,
            stop_layer=stop,
            module_paths=(sequence.layers[first].name, sequence.layers[stop - 1].name),
            devices=(CPU,),
            rank=index,
            parameters=(),
            parameter_count=0,
            recompute=(Segment(first=first, stop=stop),) if again[index] else (),
            times=times,
            optimizer_s=0.0,
            memory=NO_MEMORY,
        )
        for index, (first, stop) in enumerate(itertools.pairwise(bounds))
    )
    return Plan(
        model_fingerprint=sequence.fingerprint,
        profile_fingerprint="0",
        sample=sequence.sample,
        batch_size=batch_size,
        micro_batch_sizes=sizes,
        optimizer="AdamW",
        stages=stages,
        prediction=Prediction(
            step_s=1.0, optimizer_s=0.0, bubble=0.0, samples_per_s=1.0, lower_bound_s=1.0, gap=0.0, one_device_s=1.0
        ),
    )
