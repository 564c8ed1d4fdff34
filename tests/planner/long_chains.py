"""Long chains of layers, some of which take far more than others, and ways to restrict their problems."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.plan.schedules import SCHEDULES, ScheduleName
from profiler.device import Cluster, Device, Link
from tests.planner.made_up import build_profile
from tests.planner.restricted import Asked

SCHEDULES_OF_CHAINS: tuple[ScheduleName, ...] = ("zb", "zb-v", "zb-h1", "interleaved")
SIZES = (1, 64)


def long_chain(seed: int, *, fewest_layers: int = 30, most_layers: int = 80) -> Asked:
    """A problem whose cuts are too many to try all, on equal devices, M chosen or given."""
    chance = random.Random(seed)
    layers, spread = chance.randint(fewest_layers, most_layers), chance.choice([0.3, 1.0, 1.5, 2.0])

    def layer() -> list[float]:
        """What one takes for one sample: seconds forward, of recompute and backward, and bytes."""
        work_s = chance.lognormvariate(0, spread)
        kept, sent = (round(size * chance.lognormvariate(0, 1)) for size in (100, 50))
        return [work_s, work_s * chance.uniform(0.5, 1.2), work_s * chance.uniform(1.5, 2.5), kept, 0, sent, sent]

    base = [layer() for _ in range(layers)]
    rows = {("a", size): [[value * size for value in row] for row in base] for size in SIZES}
    for table in rows.values():
        table[-1][5:] = [0, 0]
    profile = build_profile(
        rows,
        links=(Link(latency_s=0.0, bytes_per_s=chance.choice([1e9, 500.0, 100.0])),),
        reserve_bytes=10,
        weights=[(chance.uniform(0.2, 0.5), chance.uniform(0.3, 1.0)) for _ in range(layers)],
    )
    count = chance.choice([8, 16, 32])
    whole_bytes = sum(row[3] + row[5] for row in base) * count
    device = Device(name="cpu", kind="a", memory_bytes=int(whole_bytes * chance.choice([10.0, 1.0, 0.5, 0.25])) + 500)
    schedule = chance.choice(SCHEDULES_OF_CHAINS)
    settings: dict[str, Any] = {"schedule": schedule, "micro_batches_per_stage": 1}
    if SCHEDULES[schedule].fewest_chunks < SCHEDULES[schedule].most_chunks:
        settings["chunks"] = "auto"
    if chance.random() < 0.5:
        settings["micro_batches"] = count
    devices = Cluster(devices=(device,) * chance.choice([4, 6, 8]))
    return Asked(profile, devices, count * chance.choice([1, 2]), settings)


def restrictions_of_chain(problem: Asked) -> Iterator[Asked]:
    """Fewer devices, fewer stages, or another number of micro-batches."""
    devices = problem.devices.devices
    for number in range(2, len(devices)):
        yield problem.on(devices[:number])
    for stages in range(4, 2 * len(devices) + 1, 2):
        yield replace(problem, settings=problem.settings | {"max_stages": stages})
    if "micro_batches" not in problem.settings:
        for count in (8, 12, 16, 24, 32):
            if count <= problem.batch_size:
                yield replace(problem, settings=problem.settings | {"micro_batches": count})
