"""`profile` for devices that are not here: memory from fake tensors, times from data sheets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from profiler.datasheets import DATA_SHEETS, ERROR
from profiler.device import Cluster
from profiler.errors import ArgumentError
from profiler.left_out_sizes import Refusals
from profiler.machine.backend import HOST
from profiler.memory.by_size import memory_between
from profiler.memory.in_stage import LayerMemory, layer_memory
from profiler.record import Estimate, OptimizerCost
from profiler.run.inputs import fake_runner
from profiler.text import counted
from profiler.timing.accelerator_kernels import AcceleratorKernels
from profiler.timing.counted_work import LayerWork, work_between, work_of_layers
from profiler.timing.roofline import Rates, estimate_of, estimated_optimizer, seconds_of
from profiler.timing.sweeps import LayerTiming
from profiler.tracing.computing_model import added_type, main_like
from profiler.workload import Workload

PLACE = HOST  # of fake tensors: a build of torch without CUDA cannot hold fake CUDA tensors
CONTEXT_BYTES = 600 * 10**6
"""Memory of a process on an accelerator before any tensor is there: context, kernels, libraries [assumed]."""


def is_listed(cluster: Cluster) -> bool:
    """Whether the cluster's devices are planned for from data sheets.

    Raises:
        ArgumentError: some are and some are not.
    """
    listed = {device.kind: device.kind in DATA_SHEETS for device in cluster.devices}
    if len(set(listed.values())) > 1:
        here = [kind for kind, is_listed in listed.items() if not is_listed]
        raise ArgumentError(
            f"the cluster mixes devices from data sheets with {', '.join(here)}, which would be measured; profile "
            "both kinds apart, or take all from data sheets"
        )
    return all(listed.values())


def estimated(
    workload: Workload, cluster: Cluster
) -> tuple[dict[int, list[LayerMemory]], dict[str, dict[int, list[LayerTiming]]], list[OptimizerCost], list[Estimate]]:
    """Everything that measuring would tell.

    Args:
        workload: its sequence is on the CPU; parameters may be on the meta device.
        cluster: of listed devices.

    Returns:
        Memory of the layers by size; by kind of device their times by size; by kind optimizer and estimate.

    Raises:
        ProfileError: the model runs no size.
    """
    refusals = Refusals()
    memory = _at_sizes(workload, _memory, memory_between, refusals)
    work = _at_sizes(replace(workload, sizes=tuple(memory)), _work, work_between, refusals)
    if not work:
        refusals.raise_first()
    timings, optimizers, estimates = {}, [], []
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        rates = Rates.of(kind)
        timings[kind] = {size: _timings(layers, rates) for size, layers in work.items()}
        optimizers.append(_optimizer(workload, kind, rates))
        estimates.append(estimate_of(kind, work[max(work)], rates, ERROR))
    return memory, timings, optimizers, estimates


def _optimizer(workload: Workload, kind: str, rates: Rates) -> OptimizerCost:
    _says(workload, "optimizer")
    precision, computing = workload.sequence.sample.precision, workload.sequence.parameters.values()
    stepped = [main_like(precision, parameter) for parameter in computing]
    pairs = zip(computing, stepped, strict=True)
    rounded_bytes = sum(parameter.nbytes for parameter, main in pairs if main is not parameter)
    added_bytes = 0 if added_type(precision) is None else rounded_bytes
    return estimated_optimizer(
        workload.optimizer, kind, stepped, rates, rounded_bytes=rounded_bytes, added_bytes=added_bytes
    )


Found = TypeVar("Found")


def _at_sizes(
    workload: Workload,
    observe: Callable[[Workload, int], list[Found]],
    between: Callable[[Found, Found, float], Found | None],
    refusals: Refusals,
) -> dict[int, list[Found]]:
    """What every layer shows at every size: seen at the smallest and the largest, and on the line between them.

    FLOPs and bytes grow linearly with the micro-batch; the largest moment of memory is the largest of several lines,
    so that the line between two sizes lies above it. Where a layer does other operations at the two sizes, each size
    is looked at.
    """
    sizes, found = list(workload.sizes), {}
    for end in (0, -1):
        while sizes and sizes[end] not in found:
            with refusals.noting(sizes[end]):
                found[sizes[end]] = observe(workload, sizes[end])
            if sizes[end] not in found:
                del sizes[end]
    if not sizes:
        return {}
    smallest, largest = sizes[0], sizes[-1]
    for size in sizes[1:-1]:
        share = (size - smallest) / (largest - smallest)
        cache: dict[tuple[int, int], Found | None] = {}  # equal layers share what was found
        line = []
        for pair in zip(found[smallest], found[largest], strict=True):
            key = (id(pair[0]), id(pair[1]))
            if key not in cache:
                cache[key] = between(*pair, share)
            line.append(cache[key])
        whole = [entry for entry in line if entry is not None]
        with refusals.noting(size):
            found[size] = whole if len(whole) == len(line) else observe(workload, size)
    return dict(sorted(found.items()))


def _work(workload: Workload, size: int) -> list[LayerWork]:
    _says(workload, f"operations of {counted(size, 'sample')}")
    inputs, about = workload.micro_batch(size, PLACE)
    with fake_runner(workload.sequence, inputs, **about) as runner, AcceleratorKernels():
        return work_of_layers(workload.sequence, runner, size)


def _memory(workload: Workload, size: int) -> list[LayerMemory]:
    _says(workload, f"memory of {counted(size, 'sample')}")
    inputs, about = workload.micro_batch(size, PLACE)
    with fake_runner(workload.sequence, inputs, **about) as runner, AcceleratorKernels():
        return layer_memory(workload.sequence, runner, share=True)


def _says(workload: Workload, part: str) -> None:
    """The part before is done, and this is begun."""
    workload.bar.update()
    workload.bar.now(part)


def _timings(work: Sequence[LayerWork], rates: Rates) -> list[LayerTiming]:
    return [
        LayerTiming(forward_s, backward_s, spread=0.0, weight_s=weight_s, weight_kept_bytes=layer.weight_kept_bytes)
        for layer, (forward_s, backward_s, weight_s) in zip(work, seconds_of(work, rates), strict=True)
    ]
