"""`profile`: measure what every layer costs on the devices at hand.

links -> memory of every layer on fake tensors -> times of every layer, beside busy neighbours -> optimizer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm

from profiler.allocator import keep_freed_memory
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError
from profiler.estimate import CONTEXT_BYTES, PLACE, estimated, is_listed
from profiler.links import measure_link
from profiler.local import Devices, context_bytes, local_devices, torch_device
from profiler.loss import LossFunction, loss_of
from profiler.measured_sizes import measured_sizes
from profiler.memory import LayerMemory
from profiler.memory_by_size import memory_by_size
from profiler.neighbours import neighbours
from profiler.optimizers import check_optimizer, optimizer_cost
from profiler.record import LayerCost, LayerInfo, OptimizerCost, ParameterInfo, Profile
from profiler.sequence import LayerSequence
from profiler.stand_ins import fake_runner, input_bytes, micro_batch, parameter_aliases, real_runner
from profiler.sweeps import MOST_SWEEPS, LayerTiming, time_layers
from profiler.task import Task
from profiler.timing import computing_with
from profiler.workers import usable_cores

OPTIMIZER_SHARE = 0.05  # of the time budget
SWEEP_MEMORY_SHARE = 0.5  # of a device's memory: the rest holds the model, its gradients and what is passed on


def profile(
    sequence: LayerSequence,
    devices: Devices = None,
    *,
    sample: Any = None,
    batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    optimizer: str = "AdamW",
    time_budget_s: float = 60.0,
    threads: int = 1,
    progress: bool = True,
    links: bool = True,
) -> Profile:
    """Measure every layer of a traced model.

        measured = profile(trace(model, x), 2, sample=x, loss_fn=cross_entropy, target=y)
        measured.to_frame()

    The model is not changed: its gradients, buffers and the random number generators stay as they are.

    Args:
        sequence: the traced model.
        devices: see `local_devices`. One device of each kind is measured. Devices from data sheets (`Cluster.of`) are
            not: their times are estimated, see `profiler.analytic`, and the model may be on the meta device.
        sample: real values for the model's inputs; made-up ones can be unlike them (integers are 0).
        batch_size: samples of a mini-batch; the traced sample's by default.
        micro_batch_sizes: sizes to measure. By default powers of two up to a quarter of the batch, and the largest
            size for each number of stages.
        loss_fn: `loss_fn(output, target)`; None if the model returns its loss. A model without loss is measured with
            gradients of ones for all that it returns.
        target: for `loss_fn`; tensors have the batch as dimension 0.
        optimizer: name of a class in `torch.optim`.
        time_budget_s: seconds that timing may take; fewer repeats when it is short, but nothing is left out.
        threads: threads of a CPU worker.
        progress: show a progress bar on a terminal.
        links: measure the link between the first two devices, unless the cluster knows it.

    Raises:
        ArgumentError: an argument means nothing, or the model has no values yet.
    """
    cluster = local_devices(devices, threads=threads)
    check_optimizer(optimizer)
    sizes = measured_sizes(sequence.sample.batch_size if batch_size is None else batch_size, micro_batch_sizes, cluster)
    _check(loss_fn, target, time_budget_s)
    if is_listed(cluster):
        return _from_data_sheets(sequence, cluster, sizes, sample, loss_fn, target, optimizer, progress)
    _check_values(sequence)
    kinds = {device.kind: device for device in reversed(cluster.devices)}
    most = 1 + (1 + len(sizes) * (2 + MOST_SWEEPS)) * len(kinds)  # link, optimizers, memory and sweeps
    bar = tqdm(total=most, desc="profile", unit="measurement", disable=None if progress else True)
    with bar, torch.random.fork_rng(devices=[torch_device(device) for device in kinds.values() if _is_cuda(device)]):
        has_loss = loss_fn is not None or _returns_loss(sequence, torch_device(cluster.devices[0]))
        task = Task(sequence, sample, loss_fn, target, has_loss, sizes, optimizer, time_budget_s / len(kinds), bar)
        found_links = _links(cluster, links)
        bar.update()
        measured = [_measured(task, device, _neighbour_count(device, cluster)) for device in kinds.values()]
        bar.total = bar.n  # short of time there were fewer sweeps
        bar.refresh()
    return Profile(
        fingerprint=sequence.fingerprint,
        sample=sequence.sample,
        parameters=_parameters(sequence),
        layers=_layers(sequence),
        costs=tuple(cost for costs, _ in measured for cost in costs),
        optimizers=tuple(entry for _, entry in measured),
        links=found_links,
        input_bytes=input_bytes(sequence.sample, target),
        reserve_bytes=max(context_bytes(device) for device in kinds.values()),
    )


def _from_data_sheets(
    sequence: LayerSequence,
    cluster: Cluster,
    sizes: tuple[int, ...],
    sample: Any,
    loss_fn: LossFunction | None,
    target: Any,
    optimizer: str,
    progress: bool,
) -> Profile:
    """The profile for devices that are not here."""
    sequence = sequence.on(PLACE)
    with tqdm(total=2, desc="profile", unit="estimate", disable=None if progress else True) as bar:
        has_loss = loss_fn is not None or _returns_loss(sequence, PLACE)
        task = Task(sequence, sample, loss_fn, target, has_loss, sizes, optimizer, 0.0, bar)
        memory, timings, optimizers, estimates = estimated(task, cluster)
    return Profile(
        fingerprint=sequence.fingerprint,
        sample=sequence.sample,
        parameters=_parameters(sequence),
        layers=_layers(sequence),
        costs=tuple(cost for kind in timings for cost in _costs(sequence, kind, memory, timings[kind])),
        optimizers=tuple(optimizers),
        links=() if cluster.link is None else (cluster.link,),
        input_bytes=input_bytes(sequence.sample, target),
        reserve_bytes=CONTEXT_BYTES,
        estimates=tuple(estimates),
    )


def _check(loss_fn: LossFunction | None, target: Any, time_budget_s: float) -> None:
    if not (isinstance(time_budget_s, int | float) and 0 <= time_budget_s < float("inf")):
        raise ArgumentError(f"time_budget_s={time_budget_s!r}; pass seconds, 0 for as few repeats as can be")
    if (loss_fn is None) != (target is None):
        given, missing = ("target", "loss_fn") if loss_fn is None else ("loss_fn", "target")
        raise ArgumentError(f"{given} without {missing}; the loss is loss_fn(output, target): pass both or neither")


def _check_values(sequence: LayerSequence) -> None:
    places = {tensor.device.type for tensor in (*sequence.parameters.values(), *sequence.buffers.values())}
    if "meta" in places:
        raise ArgumentError(
            "the model is on the meta device, and layers without values cannot be timed; materialize it first: "
            "model.to_empty(device='cpu'), then load or initialize its parameters; or pass devices from data sheets: "
            "Cluster.of('8xA100-40GB', link='nvlink3')"
        )


def _returns_loss(sequence: LayerSequence, place: torch.device) -> bool:
    """Whether the model's own output is or holds a loss."""
    inputs = micro_batch(sequence, None, 2, place)  # with one sample, an output per sample looks like a scalar
    with fake_runner(sequence.on(place), inputs, loss_fn=None, target=None, has_loss=False, device=place) as runner:
        output = runner.run_all()
    try:
        loss_of(output, None, None)
    except ArgumentError:
        return False
    return True


def _is_cuda(device: Device) -> bool:
    return torch_device(device).type == "cuda"


def _neighbour_count(device: Device, cluster: Cluster) -> int:
    """Processes that keep other cores as busy as training does, as far as there are cores."""
    if _is_cuda(device):
        return 0
    workers = sum(not _is_cuda(other) for other in cluster.devices)
    return max(0, min(workers, len(usable_cores()) // max(1, device.threads)) - 1)


def _links(cluster: Cluster, wanted: bool) -> tuple[Link, ...]:
    if cluster.link is not None:
        return (cluster.link,)
    return (measure_link(cluster),) if wanted and len(cluster.devices) > 1 else ()


def _measured(task: Task, device: Device, neighbour_count: int) -> tuple[list[LayerCost], OptimizerCost]:
    """Everything about one kind of device."""
    place = torch_device(device)
    task = replace(task, sequence=task.sequence.on(place))
    with neighbours(neighbour_count, threads=max(1, device.threads)) as wait_until_busy:
        with computing_with(device.threads):
            memory = memory_by_size(task, place)
        wait_until_busy()
        keep_freed_memory()
        with computing_with(device.threads):
            timings = _timings(task, memory, device)
            optimizer = optimizer_cost(
                task.optimizer,
                task.sequence.parameters.values(),
                device,
                budget_s=OPTIMIZER_SHARE * task.time_budget_s,
            )
        task.bar.update()
    return _costs(task.sequence, device.kind, memory, timings), optimizer


def _timings(task: Task, memory: Mapping[int, Sequence[LayerMemory]], device: Device) -> dict[int, list[LayerTiming]]:
    """Times of all layers by micro-batch size."""
    place = torch_device(device)
    parameters = parameter_aliases(task.sequence, place)
    runners = {}
    for size in task.sizes:
        inputs, about = task.micro_batch(size, place)
        runners[size] = real_runner(task.sequence, parameters, inputs, **about)
    return time_layers(
        task.sequence,
        runners,
        {size: [entry.kept_bytes for entry in layers] for size, layers in memory.items()},
        place,
        memory_bytes=int(SWEEP_MEMORY_SHARE * device.memory_bytes),
        budget_s=(1 - OPTIMIZER_SHARE) * task.time_budget_s,
        sweep_done=task.bar.update,
    )


def _costs(
    sequence: LayerSequence,
    kind: str,
    memory: Mapping[int, Sequence[LayerMemory]],
    timings: Mapping[int, Sequence[LayerTiming]],
) -> list[LayerCost]:
    costs = []
    for size, of_layers in timings.items():
        for index, timing in enumerate(of_layers):
            behind = sequence.boundaries[index + 1]
            costs.append(
                LayerCost(
                    layer=index,
                    micro_batch_size=size,
                    device_kind=kind,
                    forward_s=timing.forward_s,
                    recompute_s=timing.forward_s,  # the same calls once more
                    backward_s=timing.backward_s,
                    spread=timing.spread,
                    kept_bytes=memory[size][index].kept_bytes,
                    transient_bytes=memory[size][index].transient_bytes,
                    in_stage=memory[size][index].in_stage,
                    output_bytes=sum(value.size_bytes(size) for value in behind),
                    output_gradient_bytes=sum(value.size_bytes(size) for value in behind if value.requires_grad),
                )
            )
    return costs


def _parameters(sequence: LayerSequence) -> tuple[ParameterInfo, ...]:
    return tuple(
        ParameterInfo(name=name, elements=tensor.numel(), size_bytes=tensor.nbytes, trainable=tensor.requires_grad)
        for name, tensor in sequence.parameters.items()
    )


def _layers(sequence: LayerSequence) -> tuple[LayerInfo, ...]:
    return tuple(
        LayerInfo(
            index=layer.index,
            name=layer.name,
            signature=layer.signature,
            parameters=layer.parameters,
            buffers_bytes=sum(sequence.buffers[name].nbytes for name in layer.buffers),
            module_paths=layer.module_paths,
        )
        for layer in sequence.layers
    )
