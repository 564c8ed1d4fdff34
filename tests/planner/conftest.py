"""Small made-up profiles, and an oracle that plans them by trying everything."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import hypothesis.strategies as st
import pytest

from planner.plan.actions import ActionKind, make_schedule
from planner.plan.schedules import SCHEDULES
from planner.plan.simulator import Durations, simulate
from profiler.device import Device, Link
from profiler.record import Profile
from profiler.skip_value import SkipValue
from tests.planner.made_up import COPIED, FIELDS, build_profile, copying


@st.composite
def small_profiles(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = ("a", "b"),
    sizes: Sequence[int] = (1, 5, 14),
    most_layers: int = 7,
    fewest_layers: int = 1,
) -> Profile:
    """Profiles of at most `most_layers` layers with tied parameters, transfers, and costs that grow with the
    micro-batch."""
    layers = draw(st.integers(fewest_layers, most_layers))
    seconds = st.integers(0, 20).map(lambda number: number / 16)
    size_bytes = st.integers(0, 40)
    rows = {}
    for kind in kinds:
        base = [
            [draw(seconds) + 1 / 16 for _ in range(3)] + [draw(size_bytes) for _ in range(4)] for _ in range(layers)
        ]
        fixed = draw(seconds)
        for size in sizes:
            table = [[fixed + value * size for value in row[:3]] + [value * size for value in row[3:]] for row in base]
            for row in table:
                row[6] = min(row[5], row[6])
            table[-1][5:] = [0, 0]
            rows[kind, size] = table
    parameters = draw(st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=4))
    reads = st.lists(st.integers(0, len(parameters) - 1), max_size=2, unique=True)
    return build_profile(
        rows,
        parameters=parameters,
        readers=[draw(reads) for _ in range(layers)],
        buffers=[draw(st.integers(0, 5)) for _ in range(layers)],
        optimizer=(draw(st.sampled_from([0.0, 1 / 64])), draw(st.sampled_from([0.0, 1.0, 2.0]))),
        links=(
            copying(
                Link(latency_s=draw(seconds), bytes_per_s=draw(st.sampled_from([8.0, 64.0]))),
                draw(st.sampled_from(COPIED)),
            ),
        ),
        input_bytes=draw(st.integers(0, 3)),
        reserve_bytes=draw(st.integers(0, 10)),
    )


WHOLE = [name for name, record in SCHEDULES.items() if not record.splits_backward]
"""Schedules whose backward pass is one, which any profile is enough for."""


def most_in_flight(schedule: str, stage: int, stages: int, count: int) -> int:
    """Counted in the lists of actions."""
    actions = make_schedule(schedule, stages=stages, micro_batches=count, recompute=(False,) * stages)[stage]
    change = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}
    passes = [change.get(action.kind, 0) for action in actions]
    return max(itertools.accumulate(passes))


@dataclass(frozen=True)
class Oracle:
    """Plans by brute force, straight from the rules, one number at a time."""

    profile: Profile
    devices: tuple[Device, ...]
    batch_size: int
    recompute: str = "auto"
    micro_batches_per_stage: int = 4
    schedules: tuple[str, ...] = ("gpipe",)
    replicas: tuple[int, ...] = (1,)
    skips: str = "relayed"

    def best_step_s(self, counts: Sequence[int] | None = None) -> float | None:
        """The smallest simulated step time over all schedules, R, M, K, cuts, devices and segments; None if none
        fits."""
        layers = len(self.profile.layers)
        steps = [
            self.step_s((0, *inner, layers), count, order, schedule, replicas)
            for replicas in self.replicas
            if self.batch_size % replicas == 0
            for count in counts or range(1, self.batch_size // replicas + 1)
            for stages in range(
                1, min(len(self.devices) // replicas, layers, count // self.micro_batches_per_stage) + 1
            )
            for order in self._orders(stages, replicas)
            for inner in itertools.combinations(range(1, layers), stages - 1)
            for schedule in self.schedules
        ]
        return min((step for step in steps if step is not None), default=None)

    def step_s(
        self,
        cuts: tuple[int, ...],
        count: int,
        order: Sequence[Device] | None = None,
        schedule: Any = "gpipe",
        replicas: int = 1,
    ) -> float | None:
        """The step time of these cuts with the best segments; None when a stage does not fit."""
        order = order or self.devices
        sizes = self.sizes(count, replicas)
        ranges = list(itertools.pairwise(cuts))
        choices: list[list[Any]] = []
        for stage, (first, stop) in enumerate(ranges):
            held = sizes[: most_in_flight(schedule, stage, len(ranges), count)]
            before = most_in_flight(schedule, stage - 1, len(ranges), count) if stage else None
            limit = order[stage].memory_bytes
            fitting = [
                segments
                for segments in self.patterns(first, stop)
                if self.memory(order[stage].kind, first, stop, sizes, held, segments, before) <= limit
            ]
            if not fitting:
                return None
            kind = order[stage].kind
            choices.append(self._worth_having(kind, fitting, sizes))
        rates = {cost.device_kind: cost.seconds_per_byte for cost in self.profile.optimizers}
        end_s = 0.0
        for stage, (first, stop) in enumerate(ranges):
            trainable = self._unique(first, stop, trainable_only=True)
            reduce_s = 0.0
            if replicas > 1 and trainable:
                link = self.profile.links[0]
                reduce_s = 2 * (replicas - 1) * (link.latency_s + trainable / replicas / link.bytes_per_s)
            end_s = max(end_s, rates[order[stage].kind] * trainable + reduce_s)
        kinds = [device.kind for device in order]
        return end_s + min(
            self._makespan_s(ranges, sizes, kinds, schedule, chosen) for chosen in itertools.product(*choices)
        )

    def patterns(self, first: int, stop: int) -> list[tuple[tuple[int, int], ...]]:
        """Every choice of segments of a stage that the mode allows."""
        if self.recompute == "always":
            return [((first, stop),)]
        if self.recompute == "never":
            return [()]
        found: list[tuple[tuple[int, int], ...]] = [()]
        for marks in itertools.product("kis", repeat=stop - first):  # kept, inside a segment, start of one
            segments: list[list[int]] = []
            for layer, mark in enumerate(marks, start=first):
                if mark == "s":
                    segments.append([layer, layer + 1])
                elif mark == "i":
                    if not segments or segments[-1][1] != layer:
                        break
                    segments[-1][1] += 1
            else:
                if segments:
                    found.append(tuple((begin, end) for begin, end in segments))
        return found

    def _worth_having(self, kind: str, patterns: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Patterns without those that another is no slower than, for each size."""

        def seconds(segments: Any) -> tuple[float, ...]:
            again = [
                [sum(self.cost(kind, layer, size, "recompute_s") for layer in range(*segment)) for segment in segments]
                for size in sorted(set(sizes))
            ]
            return tuple(x for row in again for x in (sum(row), sum(row[:-1])))

        best: dict[tuple[float, ...], Any] = {}
        for segments in patterns:
            best.setdefault(seconds(segments), segments)
        return [
            segments
            for mine, segments in best.items()
            if not any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in best)
        ]

    def _orders(self, stages: int, replicas: int) -> set[tuple[Device, ...]]:
        """Every order of devices for the stages, for each the one with least memory of R of its kind."""

        def orders(left: tuple[Device, ...], stages: int) -> set[tuple[Device, ...]]:
            if not stages:
                return {()}
            found: set[tuple[Device, ...]] = set()
            for places in itertools.combinations(range(len(left)), replicas):
                group = [left[place] for place in places]
                if len({device.kind for device in group}) == 1:
                    least = min(group, key=lambda device: device.memory_bytes)
                    rest = tuple(device for place, device in enumerate(left) if place not in places)
                    found |= {(least, *others) for others in orders(rest, stages - 1)}
            return found

        return orders(tuple(sorted(self.devices, key=lambda device: (device.kind, device.memory_bytes))), stages)

    def sizes(self, count: int, replicas: int = 1) -> list[int]:
        many, extra = divmod(self.batch_size // replicas, count)
        return [many + 1] * extra + [many] * (count - extra)

    def _makespan_s(
        self,
        ranges: Sequence[tuple[int, int]],
        sizes: Sequence[int],
        kinds: Sequence[str],
        schedule: Any,
        chosen: Sequence[Any],
    ) -> float:
        def sums(name: str, spans: Sequence[Sequence[tuple[int, int]]]) -> tuple[tuple[float, ...], ...]:
            return tuple(
                tuple(sum(self.cost(kinds[k], i, s, name) for span in spans[k] for i in range(*span)) for s in sizes)
                for k in range(len(ranges))
            )

        whole = [[span] for span in ranges]
        back, inside = sums("backward_s", whole), sums("recompute_s", [segments[:-1] for segments in chosen])
        link = self.profile.links[0]
        under_way = 1 - link.sender_share - link.receiver_share
        outputs = [[self._send("output_bytes", stop - 1, s, ranges) for s in sizes] for _, stop in ranges]
        gradients = [[self._send("output_gradient_bytes", first - 1, s, ranges) for s in sizes] for first, _ in ranges]
        hops = {
            ends: [
                [self._link_s(sum(self._value_bytes(value, s) for value in values)) for s in sizes],
                [
                    self._link_s(sum(self._value_bytes(value, s) for value in values if value.has_gradient))
                    for s in sizes
                ],
            ]
            for ends, values in self._hops(ranges).items()
        }
        # of every stage and micro-batch what it copies forward and backward: what comes in, and what goes out
        copied = [[[0.0] * len(sizes) for _ in ranges] for _ in range(2)]
        sent: list[Any] = [(k, k + 1, outputs[k], gradients[k + 1]) for k in range(len(ranges) - 1)]
        sent += [(*ends, *messages) for ends, messages in hops.items()]
        for sender, receiver, there, back_there in sent:
            for batch in range(len(sizes)):
                copied[0][sender][batch] += link.sender_share * there[batch]
                copied[0][receiver][batch] += link.receiver_share * there[batch]
                copied[1][receiver][batch] += link.sender_share * back_there[batch]
                copied[1][sender][batch] += link.receiver_share * back_there[batch]

        def added(*tables: Any) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*tables, strict=True))

        def rest(rows: Any) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(under_way * one for one in row) for row in rows)

        return simulate(
            make_schedule(
                schedule,
                stages=len(ranges),
                micro_batches=len(sizes),
                recompute=[bool(one) for one in chosen],
                skips=sorted(self._hops(ranges)),
            ),
            Durations(
                forward_s=added(sums("forward_s", whole), copied[0]),
                recompute_s=sums("recompute_s", [segments[-1:] for segments in chosen]),
                backward_s=added(back, inside, copied[1]),
                send_forward_s=rest(outputs),
                send_backward_s=rest(gradients),
                skips={ends: (rest(messages)[0], rest(messages)[1]) for ends, messages in hops.items()},
            ),
        ).makespan_s

    def memory(
        self,
        kind: str,
        first: int,
        stop: int,
        sizes: Sequence[int],
        held: Sequence[int],
        segments: Sequence[tuple[int, int]],
        held_before: int | None = None,
    ) -> float:
        """Peak bytes of a stage; `sizes` are those of all micro-batches, `held` of those in flight at most.

        Of the stage before as many more are in flight as there are stages more, one, unless `held_before` says so.
        """
        users = {
            p.name: [x.index for x in self.profile.layers if p.name in x.parameters] for p in self.profile.parameters
        }
        state = next(cost.state_bytes_per_byte for cost in self.profile.optimizers if cost.device_kind == kind)
        inside = self.profile.layers[first:stop]
        gradients = sum(
            p.size_bytes * sum(first <= user < stop for user in users[p.name])
            for p in self.profile.parameters
            if p.trainable
        )

        def kept(layers: Any) -> float:
            return sum(max(self.cost(kind, layer, s, "kept_bytes") for s in sizes) for layer in layers)

        def temporary(layers: Any) -> float:
            return max(self.cost(kind, layer, s, "transient_bytes") for layer in layers for s in sizes)

        def most(size: int) -> float:
            return max(
                sum(self.cost(kind, before, size, "kept_bytes") for before in range(first, layer + 1))
                + self.cost(kind, layer, size, "transient_bytes")
                for layer in range(first, stop)
            )

        again = {layer for segment in segments for layer in range(*segment)}
        edges = {edge for segment in segments for edge in segment if first < edge < stop}
        peaks = [temporary(range(first, stop))]
        for segment in segments:
            behind = stop if segment == segments[-1] else segment[1]
            peaks.append(kept(range(*segment)) + temporary(range(segment[0], behind)))
        if not segments:
            whole = range(first, stop)
            peaks = [most(s) - sum(self.cost(kind, layer, s, "kept_bytes") for layer in whole) for s in sizes]
        elif not edges and len(segments) == 1 and len(again) == stop - first:
            peaks = [most(s) for s in sizes]
        # messages as short as these are all under way at once, of micro-batches in flight at the earlier stage; and one
        # gradient is read
        before = min(len(held) + 1, len(sizes)) if held_before is None else held_before
        ends = [
            (stop - 1, "output_gradient_bytes", min(len(held) + 1, len(sizes))),
            (stop - 1, "output_bytes", len(held)),
            (first - 1, "output_gradient_bytes", before),
        ]
        buffers = sum(
            many * max(self._there(kind, layer, s, name, first, stop) for s in sizes)
            for layer, name, many in ends
            if 0 <= layer < len(self.profile.layers) - 1
        )
        if first > 0:  # inputs whose receives are posted ahead of those in flight
            posted = sizes[len(held) : len(held) + before]
            buffers += sum(self._there(kind, first - 1, s, "output_bytes", first, stop) for s in posted)
        return (
            self._unique(first, stop)
            + sum(layer.buffers_bytes for layer in inside)
            + gradients
            + state * self._unique(first, stop, trainable_only=True)
            + sum(
                self._there(kind, edge - 1, s, "output_bytes", first, stop)
                for s in held
                for edge in {first, *edges}
                if edge > 0
            )
            + sum(
                self.cost(kind, layer, s, "kept_bytes")
                for s in held
                for layer in range(first, stop)
                if layer not in again
            )
            + sum(sizes) * self.profile.input_bytes
            + max(peaks)
            + buffers
            + self.profile.reserve_bytes
        )

    def cost(self, kind: str, layer: int, size: int, name: str) -> float:
        """One figure of one layer, on the line between the measured sizes around it."""
        points = self._points[kind, layer, name]
        if size in points:
            return points[size]
        below, above = max(p for p in points if p < size), min(p for p in points if p > size)
        return points[below] + (points[above] - points[below]) * (size - below) / (above - below)

    @cached_property
    def _points(self) -> dict[tuple[str, int, str], dict[int, float]]:
        points: dict[tuple[str, int, str], dict[int, float]] = {}
        for row in self.profile.costs:
            for name in FIELDS:
                points.setdefault((row.device_kind, row.layer, name), {})[row.micro_batch_size] = getattr(row, name)
        return points

    def _send(self, name: str, layer: int, size: int, ranges: Sequence[tuple[int, int]]) -> float:
        if layer < 0 or layer == len(self.profile.layers) - 1:
            return 0.0
        boundary = 1 + next(stage for stage, (_, stop) in enumerate(ranges) if stop == layer + 1)
        skipping = [
            value
            for (sender, receiver), values in self._hops(ranges).items()
            for value in values
            if sender < boundary <= receiver and (value.has_gradient or name == "output_bytes")
        ]
        crossing = self.cost(self.devices[0].kind, layer, size, name)
        return self._link_s(crossing - sum(self._value_bytes(value, size) for value in skipping))

    def _link_s(self, size_bytes: float) -> float:
        return self.profile.links[0].transfer_s(size_bytes) if size_bytes else 0.0

    def _hops(self, ranges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[SkipValue]]:
        """What goes past stages, by the stages at both ends."""
        hops: dict[tuple[int, int], list[SkipValue]] = {}
        for value in (self.profile.skips or ()) if self.skips == "direct" else ():
            users = [k for k, span in enumerate(ranges) for user in value.users if user in range(*span)]
            for sender, receiver in itertools.pairwise(users):
                if receiver > sender + 1:
                    hops.setdefault((sender, receiver), []).append(value)
        return hops

    def _there(self, kind: str, layer: int, size: int, name: str, first: int, stop: int) -> float:
        """Bytes after a layer of a stage, or before its first, without what goes past the stage."""
        crossing = self.cost(kind, layer, size, name)
        for value in (self.profile.skips or ()) if self.skips == "direct" else ():
            goes_past = value.users[0] < first and value.users[-1] >= stop
            if goes_past and not any(first <= user < stop for user in value.users):
                crossing -= self._value_bytes(value, size) * (value.has_gradient or name == "output_bytes")
        return crossing

    @staticmethod
    def _value_bytes(value: SkipValue, size: int) -> int:
        """Every value has as many bytes a sample."""
        return dict(value.size_bytes)[1] * size

    def _unique(self, first: int, stop: int, *, trainable_only: bool = False) -> int:
        names = {name for layer in self.profile.layers[first:stop] for name in layer.parameters}
        return sum(
            p.size_bytes for p in self.profile.parameters if p.name in names and (p.trainable or not trainable_only)
        )


@pytest.fixture(scope="session")
def profile_of() -> Callable[..., Profile]:
    """See `build_profile`."""
    return build_profile


@pytest.fixture(scope="session")
def profiles() -> Callable[..., st.SearchStrategy[Profile]]:
    """See `small_profiles`."""
    return small_profiles


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    """See `Oracle`."""
    return Oracle


@pytest.fixture(scope="session")
def device() -> Callable[..., Device]:
    """`device("a", 100)`: a device of that kind and memory."""

    def build(kind: str = "a", memory_bytes: int = 10**9, **more: Any) -> Device:
        return Device(**{"name": "cpu", "kind": kind, "memory_bytes": memory_bytes, **more})

    return build
