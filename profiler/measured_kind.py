"""One kind of device: the costs of all layers and of the optimizer, measured or remembered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.cache import Cache, CachedCosts, digest_of_work
from profiler.device import Cluster, Device
from profiler.errors import ProfileError
from profiler.left_out_sizes import Refusals
from profiler.machine.allocator import keep_freed_memory
from profiler.machine.backend import backend_of
from profiler.machine.background_load import neighbours
from profiler.machine.local import torch_device
from profiler.machine.workers import usable_cores
from profiler.measured_workspace import with_measured_workspace
from profiler.memory.by_size import memory_by_size
from profiler.memory.capacity import Room
from profiler.memory.in_stage import LayerMemory
from profiler.record import LayerCost, OptimizerCost
from profiler.run.inputs import part_of, real_runner, resized_target
from profiler.run.layer_runner import LayerRunner
from profiler.run.parameter_pool import ParameterPool
from profiler.text import counted
from profiler.timing.optimizers import BuiltOptimizer, optimizer_cost
from profiler.timing.repeats import computing_with
from profiler.timing.sweeps import LayerTiming, TimedLayers, time_layers
from profiler.timing.weight_passes import as_stages, measured_weights
from profiler.tracing.computing_model import added_type, main_like, rounded_type
from profiler.tracing.sample import call_arguments
from profiler.tracing.sequence import LayerSequence
from profiler.workload import Workload

OPTIMIZER_SHARE = 0.05  # of the time budget
POOL_SHARE = 0.25  # of a device's memory, for parameters and gradients, of layers that are not run at the moment too


def is_host(device: Device) -> bool:
    """Whether a local device is the host's own cores."""
    return backend_of(torch_device(device)).is_host


def measured_kind(
    workload: Workload, device: Device, cluster: Cluster, remembered: Cache
) -> tuple[list[LayerCost], OptimizerCost]:
    """Everything about one kind of device.

    Args:
        workload: what is measured.
        device: one of that kind.
        cluster: what runs at the same time.
        remembered: earlier measurements.

    Raises:
        ProfileError: the device's memory holds not even the smallest micro-batch, or the model runs none.
    """
    neighbour_count = _neighbour_count(device, cluster)
    keys = {size: _key(workload, device, neighbour_count, size) for size in workload.sizes}
    known = {size: _known(workload, device, remembered, key, size) for size, key in keys.items()}
    optimizer_key = _optimizer_key(workload, device, neighbour_count)
    optimizer = remembered.get(optimizer_key, OptimizerCost)
    costs = [cost for entry in known.values() if entry is not None for cost in entry.costs]
    missing = tuple(size for size, entry in known.items() if entry is None)
    if not missing and optimizer is not None:
        return costs, optimizer
    place = torch_device(device)
    workload = replace(workload, sequence=workload.sequence.on(place), sizes=missing)
    refusals = Refusals()
    pool = ParameterPool(workload.sequence, place, int(POOL_SHARE * device.memory_bytes))
    room = Room(workload, pool, place, device.memory_bytes)
    with neighbours(neighbour_count, threads=max(1, device.threads)) as wait_until_busy:
        with _going_on_with(costs), computing_with(device.threads):
            memory = (
                _fitting(workload, memory_by_size(workload, pool, place, refusals, room), room, device)
                if missing
                else {}
            )
            wait_until_busy()
            keep_freed_memory()
            pool.timed = True
            timings = _timings(workload, pool, memory, room, device, refusals) if memory else {}
            memory = with_measured_workspace(memory, timings)
            costs.extend(layer_costs(workload.sequence, device.kind, memory, timings))
            for size in timings:
                found = tuple(cost for cost in costs if cost.micro_batch_size == size)
                remembered.put(keys[size], CachedCosts(costs=found))
        pool.clear()
        with computing_with(device.threads):
            if optimizer is None:
                workload.bar.now("optimizer")
                optimizer = _optimizer(workload, device, costs)
                remembered.put(optimizer_key, optimizer)
        workload.bar.update()
    if not costs:
        refusals.raise_first()
        raise ProfileError(
            f"device {device.name!r} has no memory for micro-batches of {counted(min(keys), 'sample')}; plan "
            "with smaller micro-batches, or with larger devices"
        )
    return costs, optimizer


def _optimizer(workload: Workload, device: Device, costs: Sequence[LayerCost]) -> OptimizerCost:
    """What the optimizer costs; after an interrupt that must not take the layers' costs along, with fewest repeats."""
    precision = workload.sequence.sample.precision
    measure = partial(
        optimizer_cost,
        workload.optimizer,
        _stepped(workload),
        device,
        computing=rounded_type(precision),
        adding=added_type(precision),
    )
    with _going_on_with(costs):
        return measure(budget_s=OPTIMIZER_SHARE * workload.time_budget_s)
    return measure(budget_s=0.0)


@contextmanager
def _going_on_with(costs: Sequence[LayerCost]) -> Iterator[None]:
    """Within, an interrupt from the keyboard is a warning if there are costs of some size."""
    try:
        yield
    except KeyboardInterrupt:
        if not costs:
            raise
        sizes = sorted({cost.micro_batch_size for cost in costs})
        warnings.warn(f"interrupted: the profile holds micro-batches of {sizes} samples alone", stacklevel=4)


def _known(workload: Workload, device: Device, remembered: Cache, key: dict[str, Any], size: int) -> CachedCosts | None:
    """What was measured at that size; None if there is nothing, or not each layer once."""
    entry = remembered.get(key, CachedCosts)
    if entry is None:
        return None
    held = sorted((cost.layer, cost.micro_batch_size, cost.device_kind) for cost in entry.costs)
    if held == [(index, size, device.kind) for index in range(len(workload.sequence))]:
        return entry
    warnings.warn(
        f"a cached measurement of micro-batches of {counted(size, 'sample')} does not hold each of "
        f"{len(workload.sequence)} layers once; it is not used",
        stacklevel=2,
    )
    return None


def _key(workload: Workload, device: Device, neighbour_count: int, size: int) -> dict[str, Any]:
    """All that the costs of a micro-batch size depend on."""
    leaves = pytree.tree_leaves((call_arguments(workload.sample), workload.target))
    return {
        "what": "layers",
        "model": workload.sequence.fingerprint,
        "layers": [layer.signature for layer in workload.sequence.layers],
        "sample": workload.sequence.sample.model_dump(mode="json"),
        "strides": [leaf.stride() for leaf in leaves if isinstance(leaf, Tensor)],
        "trained": [tensor.requires_grad for tensor in workload.sequence.parameters.values()],
        "loss": digest_of_work((workload.loss_fn, workload.target)),
        "size": size,
        **_place(device, neighbour_count),
    }


def _optimizer_key(workload: Workload, device: Device, neighbour_count: int) -> dict[str, Any]:
    tensors = [tensor for tensor in _stepped(workload) if tensor.requires_grad]
    precision = workload.sequence.sample.precision
    casts = {"rounded": rounded_type(precision), "added": added_type(precision)}
    built = workload.optimizer.build if isinstance(workload.optimizer, BuiltOptimizer) else None
    return {
        "what": "optimizer",
        "name": workload.optimizer,
        "built": digest_of_work(built),  # the name says nothing of groups for which other settings hold
        "parameters": [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors],
        **{name: str(dtype) for name, dtype in casts.items() if dtype is not None},
        **_place(device, neighbour_count),
    }


def _stepped(workload: Workload) -> list[Tensor]:
    """What the optimizer steps: shapes and types of the parameters, or of their master weights."""
    sequence = workload.sequence
    return [main_like(sequence.sample.precision, parameter) for parameter in sequence.parameters.values()]


def _place(device: Device, neighbour_count: int) -> dict[str, Any]:
    return {
        "device": device.kind,
        "memory": device.memory_bytes,
        "threads": device.threads,
        "neighbours": neighbour_count,
        "cores": len(usable_cores()),
    }


def _neighbour_count(device: Device, cluster: Cluster) -> int:
    """Processes that keep other cores as busy as training does, as far as there are cores."""
    if not is_host(device):
        return 0
    workers = sum(is_host(other) for other in cluster.devices)
    return max(0, min(workers, len(usable_cores()) // max(1, device.threads)) - 1)


def _fitting(
    workload: Workload, memory: Mapping[int, list[LayerMemory]], room: Room, device: Device
) -> dict[int, list[LayerMemory]]:
    """The sizes at which the device holds each layer by itself."""
    fitting = {}
    for size, layers in memory.items():
        needs = room.sweep_bytes(size, layers)
        if max(needs) <= device.memory_bytes:
            fitting[size] = layers
            continue
        largest = needs.index(max(needs))
        warnings.warn(
            f"micro-batches of {counted(size, 'sample')} are left out: layer {largest} "
            f"({workload.sequence.layers[largest].name}) "
            f"needs {max(needs)} bytes by itself, device {device.name!r} has {device.memory_bytes}",
            stacklevel=2,
        )
    return fitting


def _timings(
    workload: Workload,
    pool: ParameterPool,
    memory: Mapping[int, Sequence[LayerMemory]],
    room: Room,
    device: Device,
    refusals: Refusals,
) -> dict[int, list[LayerTiming]]:
    """Times of all layers by micro-batch size."""
    place = torch_device(device)
    runners: dict[int, LayerRunner] = {}
    for size in sorted(memory, reverse=True):
        with refusals.noting(size):
            if not runners:
                inputs, about = workload.micro_batch(size, place)
                whole = runners[size] = real_runner(workload.sequence, pool, inputs, **about)
            else:
                part = part_of(workload.sequence, inputs, size)
                runners[size] = whole.on_part(part, resized_target(about["target"], size, place))
    layers = TimedLayers(
        workload.sequence,
        pool,
        {size: runners[size] for size in workload.sizes if size in runners},
        {size: [entry.kept_bytes for entry in entries] for size, entries in memory.items()},
        place,
        min(room.window_bytes(size, entries) for size, entries in memory.items()),
    )
    budget_s = (1 - OPTIMIZER_SHARE) * workload.time_budget_s
    workload.bar.now("times of layers")
    workload.bar.ends_within(workload.time_budget_s)
    timings = time_layers(layers, refusals, budget_s=budget_s, sweep_done=workload.bar.update)
    watch = backend_of(place).stopwatch(place)
    for size, of_layers in timings.items():
        in_haste = not workload.time_budget_s
        layer_s = [timing.forward_s + timing.backward_s for timing in of_layers]
        parts = measured_weights(workload.sequence, runners[size], size, watch, layer_s, in_haste=in_haste)
        if not in_haste:
            kept_bytes = [entry.kept_bytes + part.kept_bytes for entry, part in zip(memory[size], parts, strict=True)]
            passes = [(timing.forward_s, timing.backward_s) for timing in of_layers]
            runs = layers.runs(kept_bytes)
            parts = as_stages(workload.sequence, runners[size], size, watch, passes, parts, runs)
        timings[size] = [
            replace(
                timing,
                weight_s=part.share * timing.backward_s,
                split_s=part.more * timing.backward_s,
                weight_kept_bytes=part.kept_bytes,
            )
            for timing, part in zip(of_layers, parts, strict=True)
        ]
    return timings


def layer_costs(
    sequence: LayerSequence,
    kind: str,
    memory: Mapping[int, Sequence[LayerMemory]],
    timings: Mapping[int, Sequence[LayerTiming]],
) -> list[LayerCost]:
    """The rows of a profile, of every size that was timed."""
    costs = []
    for size, of_layers in timings.items():
        for index, timing in enumerate(of_layers):
            leaving = sequence.boundaries[index + 1]
            costs.append(
                LayerCost(
                    layer=index,
                    micro_batch_size=size,
                    device_kind=kind,
                    forward_s=timing.forward_s,
                    recompute_s=timing.forward_s,  # the same calls once more
                    backward_s=timing.backward_s,
                    weight_s=timing.weight_s,
                    split_s=timing.split_s,
                    weight_kept_bytes=timing.weight_kept_bytes,
                    spread=timing.spread,
                    slowdown=timing.slowdown,
                    drift=timing.drift,
                    kept_bytes=memory[size][index].kept_bytes,
                    transient_bytes=memory[size][index].transient_bytes,
                    in_stage=memory[size][index].in_stage,
                    output_bytes=sum(value.size_bytes(size) for value in leaving),
                    output_gradient_bytes=sum(value.size_bytes(size) for value in leaving if value.requires_grad),
                )
            )
    return costs
