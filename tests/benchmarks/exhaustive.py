"""Every plan of a small problem, one after another: cuts, devices, segments; each walked through its action lists.

It shares with the planner the schedule's lists of actions and nothing else: bytes and seconds are summed here layer by
layer, and the walk is an event simulation of its own, compiled to try millions of plans. The planner's simulator
agrees with it (`tests/planner/test_brute_force.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planner.kernel.compiled import compiled
from planner.plan.actions import ActionKind, make_schedule
from profiler.device import Device
from profiler.record import Profile
from tests.planner.made_up import FIELDS

F, R, B, SEND_F, RECV_F, SEND_B, RECV_B = range(7)
_KINDS = {kind: number for number, kind in enumerate((
    ActionKind.F, ActionKind.R, ActionKind.B, ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B
))}  # fmt: skip
FORWARD, AGAIN, BACKWARD, KEPT, TRANSIENT, OUTPUT, GRADIENT = range(7)


class Small(NamedTuple):
    """A problem with M fixed, as arrays; C kinds of devices, two sizes of micro-batches, L layers.

    Attributes:
        costs: shape (C, 2, 7, L), by kind, size (the larger first) and field.
        sizes: of each micro-batch, 0 for the larger and 1 for the smaller, shape (M,).
        always: bytes of layers [i, j) on a device of a kind whatever is recomputed, shape (C, L + 1, L + 1).
        end_s: optimizer step of layers [i, j), shape (C, L + 1, L + 1).
        kind: of each device, shape (D,).
        limit: bytes of each device, shape (D,).
        link: latency and bytes per second, and of a message's seconds the shares that sender and receiver copy.
        one_f_one_b: whether the schedule is 1F1B.
        mode: 0 to choose segments, 1 to recompute all, 2 to recompute nothing.
    """

    costs: Any
    sizes: Any
    always: Any
    end_s: Any
    kind: Any
    limit: Any
    link: tuple[float, float, float, float]
    one_f_one_b: bool
    mode: int


@dataclass(frozen=True)
class Best:
    """The fastest plan.

    Attributes:
        step_s: its seconds; None when nothing fits.
        plans: how many were walked through.
    """

    step_s: float | None
    plans: int


def best_of_all(
    profile: Profile,
    devices: Sequence[Device],
    batch_size: int,
    counts: Sequence[int],
    *,
    schedule: Any = "gpipe",
    recompute: str = "auto",
    micro_batches_per_stage: int = 1,
) -> Best:
    """The best plan over all M of `counts`, K, cuts, devices and segments."""
    assert all(cost.in_stage is None for cost in profile.costs), "bytes add up layer by layer"
    best_s, plans = np.inf, 0
    for count in counts:
        small = _small(profile, devices, batch_size, count, schedule, recompute)
        options = _options(small)
        layers = len(profile.layers)
        for stages in range(1, min(len(devices), layers, count // micro_batches_per_stage) + 1):
            actions = action_table(schedule, stages, count)
            found_s, tried = _all_plans(small, stages, actions, *options)
            best_s, plans = min(best_s, found_s), plans + tried
    return Best(float(best_s) if np.isfinite(best_s) else None, int(plans))


def _small(
    profile: Profile, devices: Sequence[Device], batch_size: int, count: int, schedule: str, recompute: str
) -> Small:
    layers = len(profile.layers)
    many, extra = divmod(batch_size, count)
    sizes = [many + 1] * extra + [many] * (count - extra)
    kinds = sorted({device.kind for device in devices})
    points = {(row.device_kind, row.layer, row.micro_batch_size): row for row in profile.costs}
    measured = sorted({row.micro_batch_size for row in profile.costs})
    costs = np.zeros((len(kinds), 2, len(FIELDS), layers))
    for c, kind in enumerate(kinds):
        for position, size in enumerate((sizes[0], sizes[-1])):
            below, above = max(m for m in measured if m <= size), min(m for m in measured if m >= size)
            share = (size - below) / (above - below) if above > below else 0.0
            for field, name in enumerate(FIELDS):
                for layer in range(layers):
                    low, high = (getattr(points[kind, layer, m], name) for m in (below, above))
                    costs[c, position, field, layer] = low + (high - low) * share
    always, end_s = np.zeros((2, len(kinds), layers + 1, layers + 1))
    users: dict[str, list[int]] = {}
    for info in profile.layers:
        for name in set(info.parameters):
            users.setdefault(name, []).append(info.index)
    for c, kind in enumerate(kinds):
        optimizer = next(entry for entry in profile.optimizers if entry.device_kind == kind)
        for first in range(layers):
            for stop in range(first + 1, layers + 1):
                held = float(sum(info.buffers_bytes for info in profile.layers[first:stop]))
                trainable = 0
                for parameter in profile.parameters:
                    inside = sum(first <= layer < stop for layer in users.get(parameter.name, ()))
                    held += parameter.size_bytes * (inside > 0)
                    held += parameter.size_bytes * inside * parameter.trainable
                    trainable += parameter.size_bytes * (inside > 0) * parameter.trainable
                held += optimizer.state_bytes_per_byte * trainable
                always[c, first, stop] = held + batch_size * profile.input_bytes + profile.reserve_bytes
                end_s[c, first, stop] = optimizer.seconds_per_byte * trainable
    link = profile.links[0]
    return Small(
        costs,
        np.array([int(size != sizes[0]) for size in sizes]),
        always,
        end_s,
        np.array([kinds.index(device.kind) for device in devices]),
        np.array([float(device.memory_bytes) for device in devices]),
        (link.latency_s, link.bytes_per_s, link.sender_share, link.receiver_share),
        schedule == "1f1b",
        ("auto", "always", "never").index(recompute),
    )


def action_table(schedule: Any, stages: int, count: int) -> Any:
    """Action lists for every choice of stages that recompute, shape (2**K, K, longest, 2); kind -1 after the end."""
    lists = [
        make_schedule(
            schedule,
            stages=stages,
            micro_batches=count,
            recompute=[bool(which >> stage & 1) for stage in range(stages)],
        )
        for which in range(2**stages)
    ]
    longest = max(len(actions) for one in lists for actions in one)
    table = np.full((len(lists), stages, longest, 2), -1)
    for which, one in enumerate(lists):
        for stage, actions in enumerate(one):
            for position, action in enumerate(actions):
                table[which, stage, position] = _KINDS[action.kind], action.micro_batch
    return table


def _options(small: Small) -> tuple[Any, Any]:
    """Worthwhile choices of segments: seconds, and where those of (device, number from the end, first, stop) lie."""
    layers = small.costs.shape[3]
    devices = len(small.kind)
    seconds: list[Any] = []
    places = np.zeros((devices, devices + 1, layers + 1, layers + 1, 2), dtype=np.int64)
    for device in range(devices):
        for number in range(1, devices + 1):
            for first in range(layers):
                for stop in [layers] if number == 1 else range(first + 1, layers - number + 2):
                    known = number > 2 and not small.one_f_one_b  # GPipe has all micro-batches in flight everywhere
                    if known:
                        places[device, number, first, stop] = places[device, 2, first, stop]
                        continue
                    found = _stage_options(small, device, number, first, stop)
                    places[device, number, first, stop] = len(seconds), len(seconds) + len(found)
                    seconds.extend(found)
    return np.array(seconds).reshape(-1, 4), places


@compiled
def _stage_options(small: Small, device: int, number: int, first: int, stop: int) -> Any:
    """Of all patterns of segments that fit, (recompute before the gradient, and inside B) for both sizes.

    Patterns that another one is no slower than for both sizes, in all and inside B, are left out.
    """
    length = stop - first
    kept_patterns = np.zeros((64, 4))
    kept = 0
    pattern = np.zeros(length, dtype=np.int64)  # 0 kept, 1 inside a segment, 2 start of one
    for code in range(3**length):
        rest, valid = code, True
        for layer in range(length):
            pattern[layer] = rest % 3
            rest //= 3
        for layer in range(length):
            if pattern[layer] == 1 and (layer == 0 or pattern[layer - 1] == 0):
                valid = False
        if not valid or (small.mode == 2 and code) or (small.mode == 1 and not _is_whole(pattern)):
            continue
        if _bytes(small, device, number, first, stop, pattern) > small.limit[device]:
            continue
        if kept == len(kept_patterns):
            kept_patterns = np.concatenate((kept_patterns, np.zeros_like(kept_patterns)))
        kept = _with(kept_patterns, kept, _again(small, small.kind[device], first, pattern))
    return kept_patterns[:kept].copy()


@compiled
def _with(patterns: Any, kept: int, new: Any) -> int:
    """How many are left with a new one; there is room for it."""
    other = 0
    while other < kept:
        old = patterns[other]
        less, more = True, True
        for size in range(2):
            whole, old_whole = new[2 * size] + new[2 * size + 1], old[2 * size] + old[2 * size + 1]
            less &= old_whole <= whole and old[2 * size + 1] <= new[2 * size + 1]
            more &= whole <= old_whole and new[2 * size + 1] <= old[2 * size + 1]
        if less:
            return kept
        if more:
            kept -= 1
            patterns[other] = patterns[kept]
        else:
            other += 1
    patterns[kept] = new
    return kept + 1


@compiled
def _is_whole(pattern: Any) -> bool:
    whole = pattern[0] == 2
    for layer in range(1, len(pattern)):
        whole &= pattern[layer] == 1
    return bool(whole)


@compiled
def _again(small: Small, kind: int, first: int, pattern: Any) -> Any:
    """Seconds of the last segment and of all others, for the larger and the smaller size."""
    seconds = np.zeros(4)
    for size in range(2):
        last = True
        for layer in range(len(pattern) - 1, -1, -1):
            if pattern[layer] != 0:
                seconds[2 * size + (0 if last else 1)] += small.costs[kind, size, AGAIN, first + layer]
            if pattern[layer] == 2:
                last = False
    return seconds


@compiled
def _bytes(small: Small, device: int, number: int, first: int, stop: int, pattern: Any) -> float:
    """Peak bytes of a stage."""
    costs = small.costs[small.kind[device]]
    flying = min(number, len(small.sizes)) if small.one_f_one_b else len(small.sizes)
    total = small.always[small.kind[device], first, stop]
    for batch in range(flying):
        cost = costs[small.sizes[batch]]
        if first > 0:
            total += cost[OUTPUT, first - 1]
        for layer in range(first, stop):
            mark = pattern[layer - first]
            if mark == 0:
                total += cost[KEPT, layer]
            before = pattern[layer - 1 - first] if layer > first else -1
            if layer > first and (mark == 2 or (mark == 0 and before != 0)):
                total += cost[OUTPUT, layer - 1]
    return float(total + _peak(costs, first, stop, pattern) + _messages(small, costs, flying, first, stop))


@compiled
def _peak(costs: Any, first: int, stop: int, pattern: Any) -> float:
    """Bytes at a moment in addition to what is kept."""
    marked = pattern.max() > 0
    if not marked or _is_whole(pattern):
        peak = -np.inf
        for size in range(2):
            kept, most = 0.0, 0.0
            for layer in range(first, stop):
                kept += costs[size, KEPT, layer]
                most = max(most, kept + costs[size, TRANSIENT, layer])
            peak = max(peak, most - (0.0 if marked else kept))
        return float(peak)
    peak = costs[:, TRANSIENT, first:stop].max()
    end = stop
    after_it = stop  # the last segment's values are there while the layers after it go back
    for layer in range(stop - 1, first - 1, -1):
        if pattern[layer - first] == 0:
            end = layer
        if pattern[layer - first] == 2:
            held = 0.0
            for inside in range(layer, end):
                held += max(costs[0, KEPT, inside], costs[1, KEPT, inside])
            peak = max(peak, held + costs[:, TRANSIENT, layer : max(after_it, end)].max())
            end, after_it = layer, 0
    return float(peak)


@compiled
def _messages(small: Small, costs: Any, flying: int, first: int, stop: int) -> float:
    """Bytes of messages under way: as short as these are, all of the micro-batches in flight at the earlier stage.

    That has at most one more in flight than the later one. One gradient is read.
    """
    count, total = len(small.sizes), 0.0
    before = min(flying + 1, count)
    if stop < costs.shape[2]:
        total += before * costs[:, GRADIENT, stop - 1].max()
        total += flying * costs[:, OUTPUT, stop - 1].max()
    if first > 0:
        total += before * costs[:, GRADIENT, first - 1].max()
        for batch in range(flying, min(flying + before, count)):
            total += costs[small.sizes[batch], OUTPUT, first - 1]
    return total


@compiled
def _all_plans(small: Small, stages: int, actions: Any, seconds: Any, places: Any) -> tuple[float, int]:
    """The step time of the best plan with that many stages, and how many plans there are."""
    layers = small.costs.shape[3]
    cuts, order, option = np.zeros(stages + 1, np.int64), np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    busy = np.zeros((5, stages, 2))
    best_s, plans = np.inf, 0
    stage = 0
    cuts[1], order[0], option[0] = (layers if stages == 1 else 1), 0, -1
    while stage >= 0:  # depth first: option, then device, then cut of each stage
        first, stop = cuts[stage], cuts[stage + 1]
        number = stages - stage
        option[stage] += 1
        low, high = places[order[stage], number, first, stop, 0], places[order[stage], number, first, stop, 1]
        taken = False
        for before in range(stage):
            taken |= order[before] == order[stage]
        if taken or low + option[stage] >= high:
            option[stage] = -1
            order[stage] += 1
            if order[stage] == len(small.kind):
                order[stage] = 0
                cuts[stage + 1] += 1
                if cuts[stage + 1] > layers - (number - 1):
                    stage -= 1
            continue
        if stage < stages - 1:
            stage += 1
            cuts[stage + 1] = layers if stage == stages - 1 else cuts[stage] + 1
            order[stage], option[stage] = 0, -1
            continue
        plans += 1
        best_s = min(best_s, _step_s(small, cuts, order, option, actions, seconds, places, busy))
    return best_s, plans


@compiled
def _step_s(
    small: Small, cuts: Any, order: Any, option: Any, actions: Any, seconds: Any, places: Any, busy: Any
) -> float:
    """Seconds of one plan."""
    stages = len(order)
    which, end_s = 0, 0.0
    for stage in range(stages):
        first, stop = cuts[stage], cuts[stage + 1]
        kind = small.kind[order[stage]]
        again = seconds[places[order[stage], stages - stage, first, stop, 0] + option[stage]]
        end_s = max(end_s, small.end_s[kind, first, stop])
        if again[0] + again[1] + again[2] + again[3] > 0:
            which += 1 << stage
        for size in range(2):
            cost = small.costs[kind, size]
            busy[F, stage, size], busy[B, stage, size] = 0.0, again[2 * size + 1]
            for layer in range(first, stop):
                busy[F, stage, size] += cost[FORWARD, layer]
                busy[B, stage, size] += cost[BACKWARD, layer]
            busy[R, stage, size] = again[2 * size]
            # what crosses does not depend on the device: the first one's costs say it
            sent = small.costs[small.kind[0], size]
            leaving, coming = small.link[2], small.link[3]
            under_way = 1 - leaving - coming
            busy[SEND_F, stage, size], busy[4, stage, size] = 0.0, 0.0
            if stage < stages - 1:
                output_s = _message_s(small.link, sent[OUTPUT, stop - 1])
                busy[SEND_F, stage, size] = under_way * output_s
                busy[F, stage, size] += leaving * output_s
                busy[B, stage, size] += coming * _message_s(small.link, sent[GRADIENT, stop - 1])
            if stage > 0:
                gradient_s = _message_s(small.link, sent[GRADIENT, first - 1])
                busy[4, stage, size] = under_way * gradient_s
                busy[B, stage, size] += leaving * gradient_s
                busy[F, stage, size] += coming * _message_s(small.link, sent[OUTPUT, first - 1])
    return walk_s(actions[which], busy, small.sizes) + end_s


@compiled
def _message_s(link: tuple[float, float, float, float], size_bytes: float) -> float:
    return link[0] + size_bytes / link[1] if size_bytes > 0 else 0.0


@compiled
def walk_s(actions: Any, busy: Any, sizes: Any) -> float:
    """Seconds until every stage is at the end of its list.

    Args:
        actions: (kind, micro-batch) of each stage, shape (K, longest, 2).
        busy: seconds of F, R, B, SEND_F and SEND_B of each stage and size, shape (5, K, 2).
        sizes: 0 or 1 for each micro-batch.
    """
    stages, longest, _ = actions.shape
    clock, at = np.zeros(stages), np.zeros(stages, dtype=np.int64)
    free = np.zeros((2, stages))
    there = np.full((2, stages, len(sizes)), -1.0)  # outputs that have come to a stage, and gradients
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while at[stage] < longest and actions[stage, at[stage], 0] >= 0:
                kind, batch = actions[stage, at[stage], 0], actions[stage, at[stage], 1]
                size = sizes[batch]
                if kind in (RECV_F, RECV_B):
                    arrived = there[0 if kind == RECV_F else 1, stage, batch]
                    if arrived < 0:
                        break
                    clock[stage] = max(clock[stage], arrived)
                elif kind == SEND_F:
                    free[0, stage] = max(free[0, stage], clock[stage]) + busy[SEND_F, stage, size]
                    there[0, stage + 1, batch] = free[0, stage]
                elif kind == SEND_B:
                    free[1, stage] = max(free[1, stage], clock[stage]) + busy[4, stage, size]
                    there[1, stage - 1, batch] = free[1, stage]
                else:
                    clock[stage] += busy[kind, stage, size]
                at[stage] += 1
                moved = True
    return float(clock.max())
