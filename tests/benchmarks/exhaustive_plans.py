"""Every plan of a schedule whose order is given: cuts, orders of devices, recompute, M and ranks, none left out.

    least_s(asked)                    # the fastest plan that fits; infinite if none does
    step_s(asked, plan)               # one plan, priced again

Nothing of the search is used. Seconds come from the profile's rows, and the time of a step is the longest path through
the lists of actions: an action comes after the one before it on its rank, a message after the one before it on its
link, and a RECV after its SEND. Plans that share their lists are priced at once, as arrays. Bytes are those of the
report (`planner.cost.stage_memory`), which has tests of its own.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from graphlib import TopologicalSorter
from typing import Any

import numpy as np

from planner import Plan
from planner.cost.stage_memory import stage_memory
from planner.plan.actions import COMPUTING, Action, ActionKind, Schedule, make_schedule
from planner.plan.held import Held
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import SCHEDULES, Ring
from planner.plan.stage import Segment, StageMemory
from planner.solve.problem import Problem
from profiler import Device, Profile

SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)
Path = tuple[tuple[Action, tuple[int, ...]], ...]
"""All actions, each with the places of those that it waits for, which come before it."""


@dataclass(frozen=True)
class Asked:
    """A problem: the profile has one link and one optimizer, and no parameter that two layers read."""

    profile: Profile
    devices: tuple[Device, ...]
    schedule: str
    chunks: int
    batch_size: int
    counts: tuple[int, ...]
    recompute: str
    problem: Problem
    """The same as the planner has it, for the bytes of stages."""

    @cached_property
    def seconds(self) -> dict[tuple[str, int], Any]:
        """Of F, R, the whole backward pass and W by kind of device and size, sums over layers, shape (4, L + 1)."""
        layers = len(self.profile.layers)
        found = {(cost.device_kind, cost.micro_batch_size): np.zeros((4, layers + 1)) for cost in self.profile.costs}
        for cost in self.profile.costs:
            row = cost.forward_s, cost.recompute_s, cost.backward_s, cost.weight_s
            found[cost.device_kind, cost.micro_batch_size][:, cost.layer + 1] = row
        return {key: rows.cumsum(axis=1) for key, rows in found.items()}

    @cached_property
    def optimizer_s(self) -> dict[str, Any]:
        """Of the optimizer's step by kind of device, sums over layers."""
        sizes = {parameter.name: parameter.size_bytes * parameter.trainable for parameter in self.profile.parameters}
        own = [0.0, *(sum(sizes[name] for name in layer.parameters) for layer in self.profile.layers)]
        return {one.device_kind: np.cumsum(own) * one.seconds_per_byte for one in self.profile.optimizers}

    def message_s(self, layer: int, size: int, kind: ActionKind) -> float:
        """Of what goes over the boundary after a layer."""
        (link,) = self.profile.links
        for cost in self.profile.costs:
            if (cost.layer, cost.micro_batch_size) == (layer, size):
                sent = cost.output_bytes if kind is ActionKind.SEND_F else cost.output_gradient_bytes
                return link.latency_s + sent / link.bytes_per_s if sent else 0.0
        raise KeyError((layer, size))

    def ring(self, ranks: int) -> Ring:
        """Which rank runs which stages."""
        return SCHEDULES[self.schedule].ring(ranks, self.chunks)

    @cached_property
    def messages(self) -> dict[tuple[ActionKind, int], Any]:
        """The same after all layers by kind and size, shape (L + 1,) for the index after a layer."""
        sizes = {cost.micro_batch_size for cost in self.profile.costs}
        layers = range(len(self.profile.layers))
        return {
            (kind, size): np.array([0.0, *(self.message_s(layer, size, kind) for layer in layers)])
            for kind in SENDS
            for size in sizes
        }


@dataclass(frozen=True)
class Plans:
    """Plans with the same lists of actions: of each the cuts, the kinds of devices and what is recomputed.

    Attributes:
        edges: layer indices at which stages begin and end, shape (N, K + 1).
        kinds: device kinds as positions in `kind_names`, shape (N, ranks).
        again: whether stages are recomputed, shape (N, K).
    """

    edges: Any
    kinds: Any
    again: Any
    kind_names: tuple[str, ...]


def least_s(asked: Asked) -> float:
    """Seconds of the fastest plan that fits; infinite if none does."""
    best_s = np.inf
    for count in asked.counts:
        for ranks in range(1 if asked.chunks == 1 else 2, min(len(asked.devices), count) + 1):
            if ranks * asked.chunks > len(asked.profile.layers):
                break
            plans = _that_fit(asked, ranks, count)
            if len(plans.edges):
                path = _path(asked.schedule, ranks * asked.chunks, asked.chunks, count)
                best_s = min(best_s, float(_steps_s(asked, plans, path, count).min()))
    return best_s


def step_s(asked: Asked, plan: Plan) -> float:
    """Seconds of one plan."""
    edges = np.array([[0, *(stage.stop_layer for stage in plan.stages)]])
    names = tuple(sorted({device.kind for device in asked.devices}))
    kinds = np.array([[names.index(stage.device.kind) for stage in plan.stages[: plan.ranks]]])
    again = np.array([[bool(stage.recompute) for stage in plan.stages]])
    path = _path_of(plan.actions())
    return float(_steps_s(asked, Plans(edges, kinds, again, names), path, plan.M)[0])


def _steps_s(asked: Asked, plans: Plans, path: Path, count: int) -> Any:
    """The longest path of each plan, and the slowest rank's optimizer."""
    ranks = plans.kinds.shape[1]
    ring = asked.ring(ranks)
    sizes = MicroBatches(asked.batch_size, count).sizes
    of: dict[tuple[int, ActionKind, int], Any] = {}
    done: list[Any] = []
    for action, waits_for in path:
        start_s = np.max([done[place] for place in waits_for], axis=0) if waits_for else np.zeros(len(plans.edges))
        key = action.stage, action.kind, sizes[action.micro_batch]
        if action.kind in RECEIVES:
            done.append(start_s)
            continue
        if key not in of:
            of[key] = _seconds(asked, plans, *key)
        done.append(start_s + of[key])
    ends = np.zeros((len(plans.edges), ranks))
    for stage in range(plans.again.shape[1]):
        for position, name in enumerate(plans.kind_names):
            sums = asked.optimizer_s[name]
            spent = sums[plans.edges[:, stage + 1]] - sums[plans.edges[:, stage]]
            ends[:, ring.rank_of(stage)] += spent * (plans.kinds[:, ring.rank_of(stage)] == position)
    return np.max(done, axis=0) + ends.max(axis=1)


def _seconds(asked: Asked, plans: Plans, stage: int, kind: ActionKind, size: int) -> Any:
    """Of one action in each plan."""
    first, stop = plans.edges[:, stage], plans.edges[:, stage + 1]
    (link,) = asked.profile.links
    leaving, coming = link.sender_share, link.receiver_share
    ring = asked.ring(plans.kinds.shape[1])
    rank = ring.rank_of(stage)
    before = stage > 0 and ring.rank_of(stage - 1) != rank  # whether messages cross the boundary there
    after = stage < ring.stages - 1 and ring.rank_of(stage + 1) != rank
    if kind in SENDS:
        crosses, place = (after, stop) if kind is ActionKind.SEND_F else (before, first)
        return (1 - leaving - coming) * asked.messages[kind, size][place] * crosses
    outputs, gradients = (asked.messages[sent, size] for sent in SENDS)
    found = np.zeros(len(first))
    for position, name in enumerate(plans.kind_names):
        forward, again, backward, weights = (rows[stop] - rows[first] for rows in asked.seconds[name, size])
        by_kind = {
            ActionKind.F: forward,
            ActionKind.R: again * plans.again[:, stage],
            ActionKind.B: backward,
            ActionKind.I: backward - weights,
            ActionKind.W: weights,
        }
        found += by_kind[kind] * (plans.kinds[:, rank] == position)
    if kind is ActionKind.F:
        found += before * coming * outputs[first] + after * leaving * outputs[stop]
    if kind in {ActionKind.B, ActionKind.I}:
        found += before * leaving * gradients[first] + after * coming * gradients[stop]
    return found


@lru_cache(maxsize=256)
def _path(schedule: str, stages: int, chunks: int, count: int) -> Path:
    lists = make_schedule(schedule, stages=stages, micro_batches=count, recompute=(True,) * stages, chunks=chunks)
    return _path_of(lists)


def _path_of(lists: Schedule) -> Path:
    """What waits for what, in an order in which all can be done."""
    rank_of = {action.stage: rank for rank, own in enumerate(lists) for action in own}
    sent = {action: (rank, place) for rank, own in enumerate(lists) for place, action in enumerate(own)}
    waits: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, own in enumerate(lists):
        before: list[tuple[int, int]] = []
        on_link: dict[Any, list[tuple[int, int]]] = {}
        for place, action in enumerate(own):
            node = rank, place
            waits[node] = list(before)
            if action.kind in SENDS:
                to = rank_of[action.other_end.stage]
                if to != rank:
                    waits[node] += on_link.get(to, [])
                    on_link[to] = [node]
                continue
            if action.kind in RECEIVES:
                waits[node].append(sent[action.other_end])
            before = [node]
    ordered = list(TopologicalSorter(waits).static_order())
    place_of = {node: place for place, node in enumerate(ordered)}
    return tuple((lists[rank][place], tuple(place_of[one] for one in waits[rank, place])) for rank, place in ordered)


def _that_fit(asked: Asked, ranks: int, count: int) -> Plans:
    """All plans with so many ranks whose ranks all fit."""
    stages, layers = ranks * asked.chunks, len(asked.profile.layers)
    names = tuple(sorted({device.kind for device in asked.devices}))
    flags = {"always": (True,), "never": (False,), "auto": (False, True)}[asked.recompute]
    again = np.array([*itertools.product(flags, repeat=stages)])
    bytes_of = _Bytes(asked, ranks, count)
    found: list[tuple[Any, Any, Any]] = []
    for inner in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *inner, layers)
        for order in _orders(asked.devices, ranks):
            fit = np.ones(len(again), dtype=bool)
            for rank, device in enumerate(order):
                both = [
                    np.array([bytes_of.stage(stage, edges[stage], edges[stage + 1], device, flag) for flag in flags])
                    for stage in range(rank, stages, ranks)
                ]
                own = again[:, rank::ranks] * (len(flags) - 1)
                each = np.stack([table[own[:, chunk].astype(int)] for chunk, table in enumerate(both)])
                fit &= each.sum(axis=0).max(axis=-1) <= device.memory_bytes
            fitting = again[fit]
            if len(fitting):
                kinds = [names.index(device.kind) for device in order]
                many = len(fitting)
                found.append((np.tile(edges, (many, 1)), np.tile(kinds, (many, 1)), fitting))
    if not found:
        return Plans(np.zeros((0, stages + 1)), np.zeros((0, ranks)), np.zeros((0, stages)), names)
    edges_of, kinds_of, again_of = (np.concatenate(part) for part in zip(*found, strict=True))
    return Plans(edges_of, kinds_of, again_of, names)


def _orders(devices: tuple[Device, ...], ranks: int) -> Iterator[tuple[Device, ...]]:
    """Orders of devices that differ in kind or memory."""
    seen = set()
    for order in itertools.permutations(devices, ranks):
        key = tuple((device.kind, device.memory_bytes) for device in order)
        if key not in seen:
            seen.add(key)
            yield order


@lru_cache(maxsize=256)
def _states(schedule: str, ring: Ring, count: int, rank: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The stage of each pass of a rank, and the micro-batches in flight of each of its stages meanwhile."""
    stages, chunks = ring.stages, ring.chunks
    lists = make_schedule(schedule, stages=stages, micro_batches=count, recompute=(False,) * stages, chunks=chunks)
    now, seen = [0] * stages, set()
    for action in lists[rank]:
        now[action.stage] += action.kind is ActionKind.F
        if action.kind in COMPUTING:
            seen.add((action.stage, tuple(now)))
        now[action.stage] -= action.kind in {ActionKind.B, ActionKind.I}
    return tuple(sorted(seen))


class _Bytes:
    """What a stage holds during each pass of its rank, with what passes in its own passes alone."""

    def __init__(self, asked: Asked, ranks: int, count: int) -> None:
        self._asked, self._ring = asked, Ring(ranks, asked.chunks)
        self._split = MicroBatches(asked.batch_size, count)
        self._known: dict[Any, Any] = {}

    def stage(self, stage: int, first: int, stop: int, device: Device, again: bool) -> Any:
        key = stage, first, stop, device.kind, again
        if key not in self._known:
            if SCHEDULES[self._asked.schedule].made_for_plan:
                raise ValueError(f"{self._asked.schedule} has no order of its own")
            if self._asked.chunks == 1:
                self._known[key] = np.array([self._memory(stage, first, stop, device, again).total])
                return self._known[key]
            states = _states(self._asked.schedule, self._ring, self._split.count, stage % self._ring.ranks)
            with_many = {
                many: self._memory(stage, first, stop, device, again, many)
                for many in {flying[stage] for _, flying in states}
            }
            self._known[key] = np.array(
                [
                    with_many[flying[stage]].total - (stage != at) * with_many[flying[stage]].transient
                    for at, flying in states
                ]
            )
        return self._known[key]

    def _memory(
        self, stage: int, first: int, stop: int, device: Device, again: bool, many: int | None = None
    ) -> StageMemory:
        problem = self._asked.problem
        return stage_memory(
            problem.costs,
            problem.parameters,
            device,
            self._asked.schedule,
            self._split,
            problem.costs.optimizer(device.kind, problem.optimizer),
            number=self._ring.ranks * self._ring.chunks - stage,
            first=first,
            stop=stop,
            segments=(Segment(first=first, stop=stop),) if again else (),
            ring=self._ring,
            held=() if many is None else (Held(many),),
        )
