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


def narrow_blocks(seed: int) -> Asked:
    """Unlike layers in each block, between some of which messages take long, in little memory: good cuts are few."""
    chance = random.Random(seed)

    def layer() -> list[float]:
        work_s, kept, sent = chance.lognormvariate(0, 1.2), chance.uniform(5, 50), chance.choice([10, 10, 20, 60, 100])
        return [work_s, work_s, 2 * work_s, kept, 0, sent, sent]

    blocks, in_block = chance.choice([8, 12, 24, 32]), [layer() for _ in range(chance.randint(4, 16))]
    base = [layer(), *in_block * blocks, layer()]
    base[-1][5:] = [0, 0]
    weights = [50, *[chance.randint(12, 100) for _ in in_block] * blocks, 75]
    count, devices = chance.choice([64, 128]), chance.choice([12, 16, 24])
    even_s = sum(3 * row[0] for row in base) / devices
    profile = build_profile(
        {
            ("a", size): [[v * (size + 0.1) for v in row[:3]] + [v * size for v in row[3:]] for row in base]
            for size in SIZES
        },
        parameters=[(4 * one, True) for one in weights],
        readers=[[place] for place in range(len(base))],
        optimizer=(0.0, 2.0),
        links=(Link(latency_s=0.0, bytes_per_s=chance.choice([300, 1200, 6000]) / even_s),),
    )
    even_bytes = 16 * sum(weights) / devices + sum(row[3] for row in base)
    memory_bytes = int(even_bytes * chance.choice([0.8, 1.0, 1.3, 2.0]))
    cluster = Cluster(devices=(Device(name="cpu", kind="a", memory_bytes=memory_bytes),) * devices)
    settings = {"schedule": "1f1b", "micro_batches": count, "stages": devices, "micro_batches_per_stage": 2}
    return Asked(profile, cluster, count, settings)


def restrictions_of_blocks(problem: Asked) -> Iterator[Asked]:
    """So many stages, or at most, and sizes of micro-batches."""
    most = len(problem.devices.devices)
    for count in (most // 4, most // 2, 5 * most // 8, most):
        for name in ("stages", "max_stages"):
            yield replace(problem, settings=problem.settings | {name: count})
    for size in SIZES[:3]:
        yield replace(problem, settings=problem.settings | {"micro_batch_sizes": [size]})
