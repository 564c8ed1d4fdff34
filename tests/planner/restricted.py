"""Random problems, all ways to restrict them, and searches that are cut off early."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest

from planner.from_profile import plan_from_profile
from planner.plan.plan import Plan
from planner.solve import balancer, deadline, limits, segment_choices
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError, InfeasibleError
from profiler.record import Profile
from tests.planner.made_up import COPIED, build_profile, copying

CLOSE = 1e-8
SIZES = (1, 5, 14)
ONE_CHUNK = ("gpipe", "1f1b", "zb-h1", "zb")
"""Schedules of one stage for each rank."""
SEVERAL = ("interleaved", "interleaved-lean")
"""Schedules of several, of which any number may be chosen."""
IN_A_V = "zb-v"
"""The schedule of two."""
LONG_S, SHORT_S = 1000.0, 1e-4
"""Limits of time: one that is over after some looks at the clock alone, and one that leaves next to no labels."""


@dataclass(frozen=True)
class Asked:
    """A problem.

    Attributes:
        profile: its profile.
        devices: its devices, on several hosts or with one link between all.
        batch_size: its batch.
        settings: keywords of `plan_from_profile`.
    """

    profile: Profile
    devices: Cluster
    batch_size: int
    settings: dict[str, Any]

    def on(self, devices: tuple[Device, ...]) -> "Asked":
        """The problem with other devices."""
        return replace(self, devices=self.devices.model_copy(update={"devices": devices}))


@contextmanager
def cut_short(seed: int | None) -> Iterator[None]:
    """Searches with limits so small that small problems hit them; None leaves them."""
    with pytest.MonkeyPatch.context() as patch:
        if seed is not None:
            draw = random.Random(seed)
            patch.setattr(limits, "BEAM_LABELS", draw.choice([1, 2]))
            patch.setattr(limits, "MOST_LABELS", draw.choice([1, 3]))
            # one plan alone is searched for in another way: the best, and not a list
            patch.setattr(limits, "LISTED", ((1, 2), (draw.choice([1, 2]), draw.choice([2, 4]))))
            patch.setattr(limits, "MOST_PLANS", draw.choice([1, 2]))
            patch.setattr(limits, "WIDER_LABELS", draw.choice([1, 2]))
            patch.setattr(limits, "FEW_STAGES", draw.choice([0, 10]))
            patch.setattr(limits, "MOST_WORK", draw.choice([3, 100, 10_000]))
            patch.setattr(limits, "LARGER", draw.choice([1, 2]))
            patch.setattr(balancer, "CLIMB_S", draw.choice([0.0, 1.0]))
            patch.setattr(segment_choices, "STAGE_WORK", draw.choice([0, 10]))
            patch.setattr(segment_choices, "ALL_WORK", draw.choice([0, 100]))
        yield


@contextmanager
def few_looks(number: int, limit_s: float, most_s: float) -> Iterator[None]:
    """Searches with that limit are out of time after so many looks at the clock: equal inputs give equal plans.

    What has no plan yet goes on past the limit until it has one, or ends before, after so much in vain.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balancer, "LATE_S", 1e9)
        patch.setattr(balancer, "MOST_S", most_s)
        patch.setattr(deadline, "_now_s", itertools.count(step=limit_s / number).__next__)
        yield


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    most_layers: int,
    most_devices: int,
    hosts: bool = False,
    chunks: bool = False,
    tight: bool = False,
) -> Asked:
    """Equal and unlike devices, memory that binds or does not, all schedules, recompute, replicas; on hosts or not.

    With chunks, several stages for each rank may be chosen, of all schedules or of one that has them. Where memory is
    tight hardly anything fits, devices differ in it more, and messages may need most of it.
    """
    kinds = ("a", "b")[: draw(st.integers(1, 2))]
    layers = draw(st.integers(2, most_layers))
    pick = random.Random(draw(st.integers(0, 2**32)))
    longer = pick.choice([1, 8, 40]) if tight else 1  # messages: then ranks between others need most
    rows = {}
    for kind in kinds:
        base = [[pick.randint(1, 20) / 16 for _ in range(3)] + [pick.randint(0, 40) for _ in range(4)]
                for _ in range(layers)]  # fmt: skip
        fixed = pick.randint(0, 10) / 16
        for size in SIZES:
            table = [[fixed + value * size for value in row[:3]] + [value * size for value in row[3:]] for row in base]
            for row in table:
                row[5] *= longer
                row[6] = min(row[5], row[6])
            table[-1][5:] = [0, 0]
            rows[kind, size] = table
    parameters = pick.randint(1, 3)
    profile = build_profile(
        rows,
        parameters=[(pick.randint(0, 60), pick.random() < 0.8) for _ in range(parameters)],
        readers=[sorted({pick.randrange(parameters)}) for _ in range(layers)],
        optimizer=(pick.choice([0.0, 1 / 64]), pick.choice([0.0, 2.0])),
        links=(
            copying(
                Link(latency_s=pick.randint(0, 8) / 16, bytes_per_s=pick.choice([8.0, 64.0, 1024.0])),
                pick.choice(COPIED),
            ),
        ),
        input_bytes=pick.randint(0, 3),
        reserve_bytes=pick.randint(0, 10),
        weights=[(pick.uniform(0, 0.6), pick.uniform(0, 1.2)) for _ in range(layers)],
    )
    whole_bytes = sum(cost.kept_bytes + cost.output_bytes for cost in profile.costs if cost.micro_batch_size == 1)
    alike = draw(st.booleans())
    shares = [pick.uniform(0.05, 0.4) if tight else pick.uniform(0.2, 3.0) for _ in range(most_devices)]
    devices = tuple(
        Device(
            name="cpu",
            kind=kinds[0] if alike else pick.choice(kinds),
            memory_bytes=int(whole_bytes * shares[0 if alike else pick.randrange(4 if tight else 2)]) + 200,
        )
        for _ in range(draw(st.integers(2, most_devices)))
    )
    per_stage = draw(st.sampled_from([1, 1, 2, 4]))
    far = copying(
        Link(latency_s=pick.randint(0, 16) / 16, bytes_per_s=pick.choice([4.0, 16.0, 64.0])), pick.choice(COPIED)
    )
    cluster = Cluster(devices=devices)
    if hosts:
        near = profile.links[0]  # where it is the slower one, another order of equal devices may be faster
        slower = {
            "latency_s": max(near.latency_s, far.latency_s),
            "bytes_per_s": min(near.bytes_per_s, far.bytes_per_s),
        }
        far = far.model_copy(update=slower)
        per_host = draw(st.integers(1, max(1, len(devices) - 1)))
        cluster = Cluster(devices=devices, link=profile.links[0], between=far, devices_per_host=per_host)
    schedules = [*SEVERAL, IN_A_V] if chunks else [*ONE_CHUNK]
    settings: dict[str, Any] = {
        "schedule": draw(st.sampled_from(schedules + ["auto"] * (not tight))),
        "recompute": draw(st.sampled_from(["auto", "auto", "never"])),
        "micro_batches_per_stage": per_stage,
        "replicas": draw(st.sampled_from([1, "auto"])),
    }
    if chunks:
        settings["chunks"] = "auto"
    return Asked(profile, cluster, draw(st.integers(max(2, per_stage), 12)), settings)


def restrictions(problem: Asked) -> list[Asked]:
    """Each way to restrict it, one at a time; or other ones, with which there is no problem."""
    devices = problem.devices.devices
    most = len(devices)
    chosen, schedule = "chunks" in problem.settings, problem.settings["schedule"]
    fewest = 2 if schedule == IN_A_V else 1  # ranks
    changes: list[dict[str, Any]] = [
        {"stages": number} for number in range(1, min(most, len(problem.profile.layers)) + 1) if not chosen
    ]
    changes += [{"max_stages": number} for number in range(1, most) if not chosen]
    changes += [{"chunks": number} for number in (1, 2, 3) if schedule in SEVERAL]
    changes += [
        {"schedule": name, "chunks": number}
        for name in (*SEVERAL, IN_A_V)
        for number in ("auto", 2)
        if schedule == "auto" and (chosen or problem.devices.between is None)
    ]
    changes += [{"micro_batch_sizes": sizes} for sizes in ([1], [2], [1, 2], [3, 4])]
    changes += [
        {"micro_batches": number}
        for number in range(fewest * problem.settings["micro_batches_per_stage"], problem.batch_size + 1)
    ]
    changes += [{"replicas": 1}, {"recompute": "never"}]
    changes += [{"recompute": "always"}] if problem.settings["recompute"] == "auto" else []
    changes += [{"micro_batches_per_stage": problem.settings["micro_batches_per_stage"] + more} for more in (1, 2)]
    changes += [
        {"memory_limit": [int(share * device.memory_bytes) for device in devices]} for share in (0.5, 0.75, 0.9)
    ]
    changes += [{"memory_limit": [device.memory_bytes // (1 + (place == 0)) for place, device in enumerate(devices)]}]
    all_alike = [min(device.memory_bytes for device in devices)] * most  # where R may be chosen they may be replicas
    changes += [{"memory_limit": all_alike}]
    if problem.settings["replicas"] == "auto" and problem.batch_size % 2 == 0:
        changes += [{"memory_limit": all_alike, "replicas": 2}]
    changes += [{"cut_at": [f"blocks.{layer}"]} for layer in range(1, len(problem.profile.layers))]
    if schedule == "auto":
        changes += [{"schedule": name, "chunks": 1} for name in ONE_CHUNK]
    found = [replace(problem, settings=problem.settings | one) for one in changes]
    # The first one stays: its kind says what crosses boundaries. On hosts those behind one that goes would move.
    leaving = range(1 if problem.devices.between is None else most - 1, most if most > fewest else 0)
    found += [problem.on(devices[:place] + devices[place + 1 :]) for place in leaving]
    return found + [problem.on(host) for host in later_hosts(problem.devices)]


def later_hosts(cluster: Cluster) -> list[tuple[Device, ...]]:
    """The devices of each host but the first, where its first device says the same of what crosses boundaries."""
    devices, per_host = cluster.devices, cluster.devices_per_host or len(cluster.devices)
    hosts = [devices[first : first + per_host] for first in range(per_host, len(devices), per_host)]
    return [host for host in hosts if host[0].kind == devices[0].kind]


def planned(problem: Asked) -> Plan | None:
    """Its plan; None where there is none."""
    try:
        return plan_from_profile(problem.profile, problem.devices, batch_size=problem.batch_size, **problem.settings)
    except InfeasibleError:
        return None


def check_restrictions(problem: Asked, data: st.DataObject) -> None:
    """One of its restrictions has no better plan than the problem, and its bound holds for that plan, too."""
    check_against(problem, data.draw(st.sampled_from(restrictions(problem))))


def check_against(problem: Asked, restricted: Asked) -> None:
    """The same of one restriction."""
    own, other = planned(problem), planned(restricted)
    if other is None:
        return
    said = f"{len(restricted.devices.devices)} of {len(problem.devices.devices)} devices, {restricted.settings}"
    assert own is not None, said
    assert own.prediction.step_s <= other.prediction.step_s * (1 + CLOSE), said
    assert own.prediction.lower_bound_s <= other.prediction.step_s * (1 + CLOSE), said


def check_refusal(problem: Asked, data: st.DataObject) -> bool:
    """Whether it is refused; then it is with fewer ranks and with M given, and so are some other restrictions."""
    if planned(problem) is not None:
        return False
    ranks = range(1, len(problem.devices.devices) + 1)
    of_each = (1, 2) if "chunks" in problem.settings else (1,)
    fewer = [{"chunks": chunks, "stages": number * chunks} for chunks in of_each for number in ranks]
    sizes = [{"micro_batches": number} for number in {4, problem.batch_size // 2, problem.batch_size}]
    tried = [replace(problem, settings=problem.settings | one) for one in fewer + sizes]
    for restricted in (*tried, *data.draw(st.lists(st.sampled_from(restrictions(problem)), min_size=2, max_size=2))):
        with suppress(ArgumentError):  # too many stages, or too few micro-batches
            other = planned(restricted)
            found = None if other is None else (other.schedule, other.K, other.M, other.replicas)
            assert found is None, f"{len(restricted.devices.devices)} devices, {restricted.settings}"
    return True


def check_short_limit(problem: Asked, data: st.DataObject) -> None:
    """A search that is out of time says of no plan that there is none such, whoever finds it: in time, restricted."""
    limit_s = data.draw(st.sampled_from([LONG_S, SHORT_S]))
    looks = data.draw(st.sampled_from([1, 2, 3, 5, 10, 30, 100, 300]))
    with few_looks(looks, limit_s, data.draw(st.sampled_from([balancer.MOST_S, 1e-9]))):
        late = planned(replace(problem, settings=problem.settings | {"time_limit_s": limit_s}))
    other = None
    with suppress(ArgumentError):  # replicas for which there are too few devices
        other = planned(data.draw(st.sampled_from([problem, *restrictions(problem)])))
    if other is None:
        return
    assert late is not None
    assert late.prediction.lower_bound_s <= other.prediction.step_s * (1 + CLOSE)
    assert late.prediction.lower_bound_s <= late.prediction.step_s
