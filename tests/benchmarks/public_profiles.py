"""Measured profiles of five networks as chains of layers, planned, evaluated and searched under equal conditions.

    layers = load_layers("gnmt", crossing=2)
    plan = our_plan(layers, K=4, link=LINK)
    step_s(layers, (0, 5, 9, 12, len(layers)), M=16, link=LINK)      # of any other cuts

The files say what each operation takes for one mini-batch on one GPU. That mini-batch is our micro-batch: it counts as
one sample, so M micro-batches are a batch of M samples, and no figure is scaled. Every stage recomputes, as in GPipe,
and recompute takes as long as forward. What the files do not say is left out: the optimizer, transients, reserves.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, TypedDict

from planner import Plan, plan_from_profile
from planner.plan.actions import make_schedule
from planner.plan.simulator import Durations, simulate
from profiler.device import Cluster, Device, Link
from profiler.record import LayerCost, LayerInfo, OptimizerCost, ParameterInfo, Profile
from profiler.sample_spec import SampleSpec

Cuts: TypeAlias = tuple[int, ...]
"""Layer positions 0, ..., L at which stages begin and end, strictly ascending."""

DATA = Path(__file__).parent.parent / "data" / "public_profiles"
MODELS = ("densenet121", "gnmt", "inception_v3", "resnet50", "vgg16")
CROSSINGS = (1, 2, 3, None)
"""How many tensors may cross a cut; None is any number."""

MICRO_BATCHES_PER_STAGE = 4
FREE = Link(latency_s=0.0, bytes_per_s=1e30)
"""No communication: the largest message takes less than the rounding of a sum."""
LINK = Link(latency_s=10e-6, bytes_per_s=12e9)
"""PCI Express 3.0 with 16 lanes, about."""

_DEVICE = Device(name="cuda", kind="profiled GPU", memory_bytes=2**53)


class Node(TypedDict):
    """One operation of a file."""

    id: int
    op: str
    forward_s: float
    backward_s: float
    output_bytes: int
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A run of operations between two neighbouring positions where a cut is allowed.

    Attributes:
        name: its first and last operation.
        forward_s: for one micro-batch.
        backward_s: for one micro-batch.
        parameter_bytes: of all its operations.
        kept_bytes: outputs of all its operations.
        crossing_bytes: what crosses the boundary after it; 0 for the last layer.
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int
    kept_bytes: int
    crossing_bytes: int


def load_layers(model: str, crossing: int | None) -> tuple[Layer, ...]:
    """The layers of a model whose cuts are crossed by at most that many tensors.

    A position of the file's topological order is a cut when something was computed before it, and no tuple is waiting
    there to be unpacked. Inputs of the model are at hand on every stage, and values of 0 bytes are no tensors: neither
    crosses anything.
    """
    content = json.loads((DATA / f"{model}.json").read_text(encoding="utf-8"))
    nodes: list[Node] = content["nodes"]
    place = {node["id"]: position for position, node in enumerate(nodes)}
    readers: dict[int, list[int]] = {position: [] for position in range(len(nodes))}
    for source, target in content["edges"]:
        readers[place[source]].append(place[target])
    starts, crossing_bytes = [0], []
    for position in range(1, len(nodes)):
        alive = [
            before
            for before in range(position)
            if nodes[before]["output_bytes"]
            and not nodes[before]["op"].startswith("Input")
            and max(readers[before], default=0) >= position
        ]
        unpacked = any(
            reader >= position and nodes[reader]["op"].startswith("__getitem__")
            for before in alive
            for reader in readers[before]
        )
        if alive and not unpacked and (crossing is None or len(alive) <= crossing):
            starts.append(position)
            crossing_bytes.append(sum(nodes[before]["output_bytes"] for before in alive))
    ranges = pairwise([*starts, len(nodes)])
    return tuple(
        _layer(nodes[first:stop], size) for (first, stop), size in zip(ranges, [*crossing_bytes, 0], strict=True)
    )


def _layer(nodes: list[Node], crossing_bytes: int) -> Layer:
    return Layer(
        name=f"{nodes[0]['op']} .. {nodes[-1]['op']}",
        forward_s=sum(node["forward_s"] for node in nodes),
        backward_s=sum(node["backward_s"] for node in nodes),
        parameter_bytes=sum(node["parameter_bytes"] for node in nodes),
        kept_bytes=sum(node["output_bytes"] for node in nodes),
        crossing_bytes=crossing_bytes,
    )


def profile_of_layers(layers: tuple[Layer, ...]) -> Profile:
    """The planner's profile of these layers, for micro-batches of one sample."""
    return Profile(
        fingerprint=hashlib.sha256(repr(layers).encode()).hexdigest(),
        sample=SampleSpec(batch_size=1, tree="", leaves=()),
        parameters=tuple(
            ParameterInfo(
                name=f"{index}.weight",
                elements=layer.parameter_bytes // 4,
                size_bytes=layer.parameter_bytes,
                trainable=True,
            )
            for index, layer in enumerate(layers)
        ),
        layers=tuple(
            LayerInfo(
                index=index,
                name=layer.name,
                signature=str(index),
                parameters=(f"{index}.weight",),
                buffers_bytes=0,
                module_paths=(str(index),),
            )
            for index, layer in enumerate(layers)
        ),
        costs=tuple(
            LayerCost(
                layer=index,
                micro_batch_size=1,
                device_kind=_DEVICE.kind,
                forward_s=layer.forward_s,
                recompute_s=layer.forward_s,
                backward_s=layer.backward_s,
                spread=0.0,
                kept_bytes=layer.kept_bytes,
                transient_bytes=0,
                output_bytes=layer.crossing_bytes,
                output_gradient_bytes=layer.crossing_bytes,
            )
            for index, layer in enumerate(layers)
        ),
        optimizers=(
            OptimizerCost(name="none", device_kind=_DEVICE.kind, seconds_per_byte=0.0, state_bytes_per_byte=0.0),
        ),
        input_bytes=0,
    )


def our_plan(layers: tuple[Layer, ...], K: int, link: Link) -> Plan:
    """What the planner makes of up to K devices and M = 4K micro-batches."""
    count = K * MICRO_BATCHES_PER_STAGE
    return plan_from_profile(
        profile_of_layers(layers),
        Cluster(devices=(_DEVICE,) * K, link=link),
        batch_size=count,
        micro_batches=count,
        recompute="always",
        schedule="gpipe",
    )


def cuts_of(plan: Plan) -> Cuts:
    """Where the plan cuts."""
    return (0, *(stage.stop_layer for stage in plan.stages))


def step_s(layers: tuple[Layer, ...], cuts: Cuts, M: int, link: Link) -> float:
    """Seconds of a step with these cuts, straight from the layers through the simulator."""
    stages = [layers[first:stop] for first, stop in pairwise(cuts)]
    forward_s = [sum(layer.forward_s for layer in stage) for stage in stages]
    backward_s = [sum(layer.backward_s for layer in stage) for stage in stages]
    behind_s = [link.transfer_s(stage[-1].crossing_bytes) for stage in stages]

    def every(seconds: list[float]) -> tuple[tuple[float, ...], ...]:
        return tuple((value,) * M for value in seconds)

    durations = Durations(
        forward_s=every(forward_s),
        recompute_s=every(forward_s),
        backward_s=every(backward_s),
        send_forward_s=every(behind_s),
        send_backward_s=every([0.0, *behind_s[:-1]]),
    )
    schedule = make_schedule("gpipe", stages=len(stages), micro_batches=M, recompute=(True,) * len(stages))
    return simulate(schedule, durations).makespan_s


def searched_step_s(layers: tuple[Layer, ...], K: int, M: int, link: Link) -> float:
    """The smallest step time of all cuts into 1 to K stages, by trying them; slow, and nothing of the balancer's.

    Cuts are tried in order, stage by stage. Every complete choice is simulated, unless a path through its step is no
    shorter than the best step so far. Such a path takes one micro-batch through everything, and the M - 1 others
    through one machine, stage or link, forward and one backward. Of the stages that are left, one takes at least the
    mean of the layers that are left.
    """
    best_s = math.inf
    forward_s = [layer.forward_s for layer in layers]
    again_s = [layer.forward_s + layer.backward_s for layer in layers]

    def search(cuts: Cuts, crossed_s: float, forward_machine_s: float, backward_machine_s: float) -> None:
        nonlocal best_s
        first, left = cuts[-1], K - len(cuts) + 1
        if first == len(layers):
            best_s = min(best_s, step_s(layers, cuts, M, link))
            return
        for stop in range(first + 1, len(layers) + 1) if left > 1 else (len(layers),):
            behind_s = link.transfer_s(layers[stop - 1].crossing_bytes)
            forward = max(forward_machine_s, sum(forward_s[first:stop]), behind_s)
            backward = max(backward_machine_s, sum(again_s[first:stop]), behind_s)
            mean_forward_s, mean_backward_s = (
                sum(seconds[stop:]) / max(1, left - 1) for seconds in (forward_s, again_s)
            )
            steady_s = max(forward, mean_forward_s) + max(backward, mean_backward_s)
            path_s = sum(again_s) + 2 * (crossed_s + behind_s) + (M - 1) * steady_s
            if path_s < best_s:
                search((*cuts, stop), crossed_s + behind_s, forward, backward)

    search((0,), 0.0, 0.0, 0.0)
    return best_s
