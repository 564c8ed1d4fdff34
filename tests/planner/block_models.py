"""Models of equal blocks with an embedding and a head, on more devices than every M and K can be searched for."""

import random
from collections.abc import Iterator
from dataclasses import replace

from profiler.device import Cluster, Device, Link
from tests.planner.made_up import build_profile
from tests.planner.restricted import Asked

SIZES = (1, 2, 4, 8)


def block_model(seed: int) -> Asked:
    """A problem whose search of all M ends with a gap: layers fall into few kinds, and memory is tight."""
    chance = random.Random(seed)
    blocks, fine = chance.choice([12, 24, 32, 48]), chance.randint(1, 6)
    fixed = chance.choice([0.0, 0.1, 0.3])

    def layer(work_s: float, kept: float, sent: float) -> list[float]:
        return [work_s, work_s * chance.choice([1.0, 1.1]), 2 * work_s, kept, 0, sent, sent]

    in_block = [layer(chance.uniform(0.5, 3.0), chance.uniform(20, 200), chance.uniform(10, 60)) for _ in range(fine)]
    first = layer(chance.uniform(0.1, 3.0), 10, in_block[-1][5])
    last = layer(chance.uniform(1.0, 6.0) * fine, chance.uniform(50, 500), 0)
    base = [first, *in_block * blocks, last]
    weights = [
        chance.randint(100, 2000),
        *[chance.randint(50, 400) for _ in range(fine)] * blocks,
        chance.randint(100, 2000),
    ]
    devices, batch = chance.choice([16, 32, 64]), chance.choice([64, 96, 256, 512])
    profile = build_profile(
        {
            ("a", size): [[v * (size + fixed) for v in row[:3]] + [v * size for v in row[3:]] for row in base]
            for size in SIZES
        },
        parameters=[(4 * (one // 4), True) for one in weights],
        readers=[[place] for place in range(len(base))],
        optimizer=(0.0, 2.0),
        links=(Link(latency_s=chance.choice([0.0, 0.05]), bytes_per_s=chance.choice([1e6, 1000.0, 200.0])),),
    )
    whole_bytes = 4 * sum(weights) + sum(row[3] + row[5] for row in base) * chance.choice([4, 16, 64])
    memory_bytes = int(whole_bytes / devices * chance.choice([0.5, 0.8, 1.2, 2.0])) + max(4 * one for one in weights)
    cluster = Cluster(devices=(Device(name="cpu", kind="a", memory_bytes=memory_bytes),) * devices)
    return Asked(
        profile,
        cluster,
        batch,
        {"schedule": "1f1b"} | chance.choice([{}, {}, {"replicas": "auto"}, {"recompute": "never"}]),
    )


def restrictions_of_blocks(problem: Asked) -> Iterator[Asked]:
    """So many stages, or at most, and sizes of micro-batches."""
    most = len(problem.devices.devices)
    for count in (most // 4, most // 2, 5 * most // 8, most):
        for name in ("stages", "max_stages"):
            yield replace(problem, settings=problem.settings | {name: count})
    for size in SIZES[:3]:
        yield replace(problem, settings=problem.settings | {"micro_batch_sizes": [size]})
