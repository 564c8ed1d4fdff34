"""Small made-up profiles, and an oracle that plans them by trying everything."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest

from planner.schedule import gpipe_schedule
from planner.simulator import Durations, simulate
from profiler.device import Device, Link
from profiler.record import LayerCost, LayerInfo, OptimizerCost, ParameterInfo, Profile
from profiler.sample_spec import SampleSpec

FIELDS = (
    "forward_s",
    "recompute_s",
    "backward_s",
    "kept_bytes",
    "transient_bytes",
    "output_bytes",
    "output_gradient_bytes",
)


def build_profile(
    rows: dict[tuple[str, int], Any],
    *,
    parameters: Sequence[tuple[int, bool]] = (),
    readers: Sequence[Sequence[int]] | None = None,
    buffers: Sequence[int] | None = None,
    optimizer: tuple[float, float] = (0.0, 0.0),
    links: tuple[Link, ...] = (Link(latency_s=0.0, bytes_per_s=1.0),),
    input_bytes: int = 0,
    reserve_bytes: int = 0,
) -> Profile:
    """A profile from plain numbers.

    `rows[kind, size][layer]` are the values of `FIELDS`; `parameters` are (bytes, trainable), and `readers[layer]` the
    positions of the parameters that the layer reads.
    """
    layers = len(next(iter(rows.values())))
    readers = readers or [()] * layers
    costs = [
        LayerCost.model_validate(
            {
                "layer": layer,
                "micro_batch_size": size,
                "device_kind": kind,
                "spread": 0.0,
                **{name: (float if name.endswith("_s") else int)(v) for name, v in zip(FIELDS, row, strict=True)},
            }
        )
        for (kind, size), table in rows.items()
        for layer, row in enumerate(table)
    ]
    return Profile(
        fingerprint="made up",
        sample=SampleSpec(batch_size=1, tree="", leaves=()),
        parameters=tuple(
            ParameterInfo(name=f"p{index}", elements=size // 4, size_bytes=size, trainable=trainable)
            for index, (size, trainable) in enumerate(parameters)
        ),
        layers=tuple(
            LayerInfo(
                index=layer,
                name=f"layer{layer}",
                signature=str(layer),
                parameters=tuple(f"p{index}" for index in readers[layer]),
                buffers_bytes=buffers[layer] if buffers else 0,
                module_paths=(f"blocks.{layer}.in", f"blocks.{layer}.out"),
            )
            for layer in range(layers)
        ),
        costs=tuple(costs),
        optimizers=tuple(
            OptimizerCost(
                name="AdamW", device_kind=kind, seconds_per_byte=optimizer[0], state_bytes_per_byte=optimizer[1]
            )
            for kind in sorted({kind for kind, _ in rows})
        ),
        links=links,
        input_bytes=input_bytes,
        reserve_bytes=reserve_bytes,
    )


@st.composite
def small_profiles(draw: st.DrawFn, *, kinds: Sequence[str] = ("a", "b"), sizes: Sequence[int] = (1, 5, 14)) -> Profile:
    """Profiles of at most 7 layers with tied parameters, transfers, and costs that grow with the micro-batch."""
    layers = draw(st.integers(1, 7))
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
        links=(Link(latency_s=draw(seconds), bytes_per_s=draw(st.sampled_from([8.0, 64.0]))),),
        input_bytes=draw(st.integers(0, 3)),
        reserve_bytes=draw(st.integers(0, 10)),
    )


@dataclass(frozen=True)
class Oracle:
    """Plans by brute force, straight from the rules, one number at a time."""

    profile: Profile
    devices: tuple[Device, ...]
    batch_size: int
    recompute: str = "auto"
    micro_batches_per_stage: int = 4

    def best_step_s(self, counts: Sequence[int] | None = None) -> float | None:
        """The smallest simulated step time over all cuts, K and M; None when nothing fits."""
        layers = len(self.profile.layers)
        steps = [
            self.step_s((0, *inner, layers), count)
            for count in counts or range(1, self.batch_size + 1)
            for stages in range(1, min(len(self.devices), layers, count // self.micro_batches_per_stage) + 1)
            for inner in itertools.combinations(range(1, layers), stages - 1)
        ]
        return min((step for step in steps if step is not None), default=None)

    def step_s(self, cuts: tuple[int, ...], count: int) -> float | None:
        """The step time of these cuts; None when a stage does not fit."""
        many, extra = divmod(self.batch_size, count)
        sizes = [many + 1] * extra + [many] * (count - extra)
        ranges = list(itertools.pairwise(cuts))
        recomputed = []
        for stage, (first, stop) in enumerate(ranges):
            modes = {"auto": (False, True), "always": (True,), "never": (False,)}[self.recompute]
            limit = self.devices[stage].memory_bytes
            fitting = [mode for mode in modes if self.memory(stage, first, stop, sizes, recompute=mode) <= limit]
            if not fitting:
                return None
            recomputed.append(fitting[0])
        timeline = simulate(
            gpipe_schedule(stages=len(ranges), micro_batches=count, recompute=tuple(recomputed)),
            Durations(
                forward_s=self._sums("forward_s", ranges, sizes),
                recompute_s=self._sums("recompute_s", ranges, sizes),
                backward_s=self._sums("backward_s", ranges, sizes),
                send_forward_s=tuple(
                    tuple(self._send("output_bytes", stop - 1, s) for s in sizes) for _, stop in ranges
                ),
                send_backward_s=tuple(
                    tuple(self._send("output_gradient_bytes", first - 1, s) for s in sizes) for first, _ in ranges
                ),
            ),
        )
        rates = {cost.device_kind: cost.seconds_per_byte for cost in self.profile.optimizers}
        return timeline.makespan_s + max(
            rates[self.devices[stage].kind] * self._unique(first, stop, trainable_only=True)
            for stage, (first, stop) in enumerate(ranges)
        )

    def memory(self, stage: int, first: int, stop: int, sizes: Sequence[int], *, recompute: bool) -> float:
        """Peak bytes of a stage."""
        kind = self.devices[stage].kind
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
        kept = {s: sum(self.cost(kind, layer, s, "kept_bytes") for layer in range(first, stop)) for s in sizes}
        most = {
            s: max(
                sum(self.cost(kind, before, s, "kept_bytes") for before in range(first, layer + 1))
                + self.cost(kind, layer, s, "transient_bytes")
                for layer in range(first, stop)
            )
            for s in sizes
        }
        inputs = sum(self.cost(kind, first - 1, s, "output_bytes") for s in sizes) if first else 0
        ends = [(stop - 1, "output_gradient_bytes"), (stop - 1, "output_bytes"), (first - 1, "output_gradient_bytes")]
        buffers = sum(
            2 * max(self.cost(kind, layer, s, name) for s in sizes)
            for layer, name in ends
            if 0 <= layer < len(self.profile.layers) - 1
        )
        return (
            self._unique(first, stop)
            + sum(layer.buffers_bytes for layer in inside)
            + gradients
            + state * self._unique(first, stop, trainable_only=True)
            + inputs
            + (0 if recompute else sum(kept[s] for s in sizes))
            + self.batch_size * self.profile.input_bytes
            + max(most[s] - (0 if recompute else kept[s]) for s in sizes)
            + buffers
            + self.profile.reserve_bytes
        )

    def cost(self, kind: str, layer: int, size: int, name: str) -> float:
        """One figure of one layer, on the line between the measured sizes around it."""
        points = {
            c.micro_batch_size: getattr(c, name)
            for c in self.profile.costs
            if (c.device_kind, c.layer) == (kind, layer)
        }
        if size in points:
            return points[size]
        below, above = max(p for p in points if p < size), min(p for p in points if p > size)
        return points[below] + (points[above] - points[below]) * (size - below) / (above - below)

    def _sums(
        self, name: str, ranges: Sequence[tuple[int, int]], sizes: Sequence[int]
    ) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(sum(self.cost(self.devices[k].kind, layer, s, name) for layer in range(*ranges[k])) for s in sizes)
            for k in range(len(ranges))
        )

    def _send(self, name: str, layer: int, size: int) -> float:
        if layer < 0 or layer == len(self.profile.layers) - 1:
            return 0.0
        return self.profile.links[0].transfer_s(self.cost(self.devices[0].kind, layer, size, name))

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
