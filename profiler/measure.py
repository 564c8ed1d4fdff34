"""`profile`: measure what every layer costs on the devices at hand.

links -> memory of every layer on fake tensors -> times of every layer, among busy neighbours -> optimizer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from profiler.arguments import fits_its_arguments
from profiler.cache import Cache, CacheSetting
from profiler.conditions.check import values_made_up
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError
from profiler.machine.backend import HOST
from profiler.machine.links import measure_link
from profiler.machine.local import Devices, context_bytes, local_devices, torch_device
from profiler.machine.workers import usable_cores
from profiler.measured_kind import layer_costs, measured_kind
from profiler.measured_sizes import MICRO_BATCHES_PER_STAGE, by_importance, measured_sizes
from profiler.observe.ambient import as_in_training
from profiler.observe.random_states import preserved
from profiler.progress_line import ProgressLine
from profiler.quantities import MOST_SECONDS, shown
from profiler.record import Estimate, LayerCost, LayerInfo, OptimizerCost, ParameterInfo, Profile
from profiler.run.inputs import fake_runner, input_bytes, micro_batch
from profiler.run.loss import LossFunction, loss_of
from profiler.timing.estimate import CONTEXT_BYTES, PLACE, estimated, is_listed
from profiler.timing.optimizers import OptimizerChoice, named_optimizer
from profiler.timing.sweeps import MOST_SWEEPS
from profiler.tracing.dataflow import skip_values
from profiler.tracing.sequence import LayerSequence
from profiler.work import Work
from profiler.workload import Workload


@fits_its_arguments
@as_in_training()
def profile(
    sequence: LayerSequence,
    devices: Devices = None,
    *,
    sample: Any = None,
    batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    optimizer: OptimizerChoice = "AdamW",
    time_budget_s: float = 60.0,
    threads: int = 1,
    progress: bool = True,
    links: bool = True,
    cache: CacheSetting = None,
) -> Profile:
    """Measure every layer of a traced model.

        measured = profile(trace(model, x), 2, sample=x, loss_fn=cross_entropy, target=y)
        measured.to_frame()

    The model is not changed: its gradients, buffers and the random number generators stay as they are. It may be larger
    than the device, which holds a few layers at a time, and it may be on the meta device: then layers are timed with
    random values. It is measured as it trains, whatever `torch.no_grad`, `torch.inference_mode` or `torch.autocast`
    the call stands in.

    Args:
        sequence: the traced model.
        devices: see `local_devices`. One device of each kind is measured, the one with the least memory. Devices from
            data sheets (`Cluster.of`) are not: their times are estimated, see `profiler.timing.roofline`.
        sample: real values for the model's inputs; made-up ones can be unlike them (integers are 0).
        batch_size: samples of a mini-batch; the traced sample's by default.
        micro_batch_sizes: sizes to measure. By default powers of two up to a quarter of the batch, and the largest
            size for each number of stages. Between 1 and a larger size 2 is added: one sample is unlike more.
        loss_fn: `loss_fn(output, target)`; None if the model returns its loss. A model without loss is measured with
            gradients of ones for all that it returns.
        target: for `loss_fn`; tensors have the batch as dimension 0.
        optimizer: name of a class in `torch.optim`, or what builds an optimizer of parameters, such as
            `functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)`.
        time_budget_s: seconds that timing may take; fewer repeats when it is short, but nothing is left out.
        threads: threads of a CPU worker.
        progress: show a progress bar on a terminal.
        links: measure the link between the first two devices, unless the cluster knows it.
        cache: folder of earlier measurements; None for the user's cache folder, False for none. See `profiler.cache`.

    Interrupted from the keyboard, it keeps what was measured, now or earlier: micro-batch sizes by importance. If that
    is none, the interrupt goes on.

    Raises:
        ArgumentError: an argument means nothing, `loss_fn` fails, or its loss depends on no trainable parameter.
        ProfileError: no micro-batch size can be measured.
    """
    if not isinstance(sequence, LayerSequence):
        raise ArgumentError(
            f"the sequence is a {type(sequence).__name__}; call trace first: profile(trace(model, sample), ...)"
        )
    cluster = local_devices(devices, threads=threads)
    optimizer = named_optimizer(optimizer)
    only = sequence.sample.only_micro_batch_size
    batch = sequence.sample.batch_size if batch_size is None else batch_size
    sizes = measured_sizes(batch, micro_batch_sizes, cluster, only)
    if not (isinstance(time_budget_s, int | float) and 0 <= time_budget_s <= MOST_SECONDS):
        raise ArgumentError(f"time_budget_s={shown(time_budget_s)}; pass seconds, 0 for as few repeats as can be")
    check_loss(loss_fn, target)
    kinds, listed = _least_of_each_kind(cluster), is_listed(cluster)
    if listed:
        sequence, place = sequence.on(PLACE), PLACE
        most = 2 + 2 * len({min(sizes), max(sizes)}) + len(kinds)  # loss, memory, operations, optimizers, rows
    else:
        remembered, place = Cache.of(cache), torch_device(cluster.devices[0])
        sizes = by_importance(sizes, max(sizes) * MICRO_BATCHES_PER_STAGE, len(cluster.devices))
        most = 1 + (1 + len(sizes) * (2 + MOST_SWEEPS)) * len(kinds)  # link, optimizers, memory and sweeps
    drawn_on = [HOST, *([] if listed else map(torch_device, kinds.values()))]
    with ProgressLine("profile", total=most, wanted=progress) as bar, preserved(drawn_on), values_made_up():
        bar.now("loss")
        has_loss = loss_fn is not None or _returns_loss(sequence, place)
        workload = Workload(
            sequence, sample, loss_fn, target, has_loss, sizes, optimizer, time_budget_s / len(kinds), bar
        )
        if listed:
            return _estimated(workload, cluster)
        bar.now("link")
        found_links = _links(cluster, remembered, wanted=links)
        bar.update()
        return _measured(workload, cluster, kinds.values(), remembered, found_links)


def _measured(
    workload: Workload, cluster: Cluster, devices: Collection[Device], remembered: Cache, links: tuple[Link, ...]
) -> Profile:
    """The profile, measured on these devices, one of each kind."""
    measured = [measured_kind(workload, device, cluster, remembered) for device in devices]
    workload.bar.reached(workload.bar.total)  # short of time there were fewer sweeps
    costs = [cost for costs, _ in measured for cost in costs]
    reserve_bytes = max(context_bytes(device, len(workload.sequence.operations)) for device in devices)
    return _profile_of(workload, costs, [optimizer for _, optimizer in measured], links, reserve_bytes)


def _estimated(workload: Workload, cluster: Cluster) -> Profile:
    """The profile for devices that are not here, from their data sheets."""
    memory, timings, optimizers, estimates = estimated(workload, cluster)
    workload.bar.now("rows")
    workload.bar.update()
    costs = [cost for kind in timings for cost in layer_costs(workload.sequence, kind, memory, timings[kind])]
    links = () if cluster.link is None else (cluster.link,)
    found = _profile_of(workload, costs, optimizers, links, CONTEXT_BYTES, estimates)
    workload.bar.reached(workload.bar.total)
    return found


def _profile_of(
    workload: Workload,
    costs: Iterable[LayerCost],
    optimizers: Iterable[OptimizerCost],
    links: tuple[Link, ...],
    reserve_bytes: int,
    estimates: Iterable[Estimate] = (),
) -> Profile:
    """A profile of these costs, with what the traced model says by itself."""
    sequence, costs = workload.sequence, tuple(costs)
    return Profile(
        fingerprint=sequence.fingerprint,
        sample=sequence.sample,
        parameters=_parameters(sequence),
        layers=_layers(sequence),
        costs=costs,
        skips=skip_values(sequence, {cost.micro_batch_size for cost in costs}),
        optimizers=tuple(optimizers),
        links=links,
        input_bytes=input_bytes(sequence.sample, workload.target),
        reserve_bytes=reserve_bytes,
        estimates=tuple(estimates),
        work=_work(sequence),
        whole=sequence.whole,
    )


def _work(sequence: LayerSequence) -> Work | None:
    """What the model computes, without its loss function; None where no operation's FLOPs are known."""
    flops = sum(layer.flops for layer in sequence.layers) / sequence.sample.batch_size
    elements: Counter[str] = Counter()
    for parameter in sequence.parameters.values():
        elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    most = max(elements, key=lambda dtype: elements[dtype], default="float32")
    return Work(forward_flops=flops, dtype=sequence.sample.autocast or most) if flops else None


def _least_of_each_kind(cluster: Cluster) -> dict[str, Device]:
    """By kind the device with the least memory: a size that is measured fits every one."""
    kinds: dict[str, Device] = {}
    for device in cluster.devices:
        kinds[device.kind] = min(kinds.get(device.kind, device), device, key=lambda one: one.memory_bytes)
    return kinds


def check_loss(loss_fn: LossFunction | None, target: Any) -> None:
    """Refuse a function that cannot be called, and a target without one or the other way round.

    Raises:
        ArgumentError: naming what is missing.
    """
    if loss_fn is not None and not callable(loss_fn):
        raise ArgumentError(f"loss_fn={loss_fn!r} cannot be called; pass a function of the output and the target")
    if (loss_fn is None) != (target is None):
        given, missing = ("target", "loss_fn") if loss_fn is None else ("loss_fn", "target")
        raise ArgumentError(f"{given} without {missing}; the loss is loss_fn(output, target): pass both or neither")


def _returns_loss(sequence: LayerSequence, place: torch.device) -> bool:
    """Whether the model's own output is or holds a loss."""
    size = sequence.sample.only_micro_batch_size or 2  # with one sample, an output per sample looks like a scalar
    inputs = micro_batch(sequence, None, size, place)
    with fake_runner(sequence.on(place), inputs, loss_fn=None, target=None, has_loss=False, device=place) as runner:
        output = runner.run_all()
    try:
        loss_of(output, None, None)
    except ArgumentError:
        return False
    return True


def _links(cluster: Cluster, remembered: Cache, *, wanted: bool) -> tuple[Link, ...]:
    if cluster.link is not None:
        return (cluster.link,)
    if not wanted or len(cluster.devices) < 2:
        return ()
    key = {
        "what": "link and its copies",
        "devices": [device.model_dump() for device in cluster.devices],
        "cores": len(usable_cores()),
    }
    link = remembered.get(key, Link)
    if link is None:
        link = measure_link(cluster)
        remembered.put(key, link)
    return (link,)


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
