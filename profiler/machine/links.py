"""Latency and bandwidth of the link between two ranks, measured with the calls that the executor sends with.

Rank 0 sends a message, rank 1 returns one of the same size. What two processes share memory for goes through it
(`profiler.machine.ring`), copied by the thread that else computes. Each end computes before it sends, as a stage does,
so that caches hold layers and neither the message nor the code that moves it: 64 KiB take 0.17 ms then, and 0.03 ms in
a loop that does nothing else [measured]. One transfer is from there to when the other end has it, by the clock of both:

    rank 0   | layers | send >|                      | layers | send >|
    rank 1   |                |> has it | layers | send >|

What either end spends on its copy is time in which a stage computes nothing: of a transfer of 64 KiB 0.45 at the sender
and 0.3 at the receiver [measured].

Anything else is carried by threads of its own, or by the device; then half a round trip is one transfer, and both ends
compute meanwhile, as they do in training: on a machine of two cores that halves the bandwidth of sockets between its
processes [measured]. A thread of its own computes here, which never waits as one that trains would; so gloo's threads
keep their priority, which the executor lowers (`channel.push_nobody_off`).

    rank 0   | send ----------> |                | send ----
             | layers without end ...
    rank 1   |                  | send --------> |
             | layers without end ...
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from scipy.optimize import nnls

from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError
from profiler.machine.backend import HOST, backend_of
from profiler.machine.busy_work import busy_work
from profiler.machine.channel import finish, start_receive, start_send
from profiler.machine.local import torch_device
from profiler.machine.ring import Incoming, Outgoing
from profiler.machine.ring_meeting import Wanted, meet
from profiler.machine.workers import run_workers


class Lap(NamedTuple):
    """Seconds of a transfer, or what makes them with the other end's.

    Attributes:
        transfer_s: until the other end has the message.
        sending_s: in which the thread of its sender copies it; 0 where something else does.
        receiving_s: the same of its receiver.
    """

    transfer_s: float
    sending_s: float = 0.0
    receiving_s: float = 0.0


Turn: TypeAlias = Callable[[int], Lap]
"""Sends and receives so many bytes."""

SIZES_BYTES = tuple(2**power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
SLOTS_AT_LEAST, SLOTS_BYTES = 4, 4 * 2**20
"""Of a ring between neighbours as the executor makes it: messages go through all slots, which no cache may hold."""
ROWS_BETWEEN = 64
"""Of the work before a message: its 8 MiB leave nothing else in the caches of a core [chosen: 4 ms]."""
WARM_UPS = 2
MOST_ROUNDS = 20
FEWEST_ROUNDS = 3
WORST_LINE = 0.2
"""A line that is further from a measured size is not used [chosen]."""
MOST_COPIED = 0.95
"""Of a transfer, at both ends together [chosen]: what wakes the receiver takes a while."""
BYTES_OF_A_SIZE = 32 * 2**20  # sent of each size if that is between the fewest and the most rounds


def measure_link(cluster: Cluster, *, timeout_s: float = 60.0) -> Link:
    """Measure the link between the first two devices of a cluster.

    Args:
        cluster: at least two devices of this machine.
        timeout_s: after which a message counts as lost.

    Raises:
        ArgumentError: there is no link, or a device is not on this machine.
        ExecutionError: the two processes could not talk to each other.
    """
    if len(cluster.devices) < 2:
        raise ArgumentError(f"the cluster has {len(cluster.devices)} device; a link needs 2")
    pair = cluster.devices[:2]
    first, second = (torch_device(device) for device in pair)
    if first == second and backend_of(first).keeps_order:
        raise ArgumentError(
            f"both ends of the link are {str(first)!r}; messages between processes need a device each: measure with "
            "other devices, or pass Cluster(devices=..., link=Link(...)), as for a pipeline in one process"
        )
    threads = max(1, *(device.threads for device in pair))
    laps, _ = run_workers(
        ping_pong, [(device,) for device in pair], threads=threads, timeout_s=timeout_s, users_modules=False
    )
    return fit_link(SIZES_BYTES, [lap.transfer_s for lap in laps]).model_copy(update=shares_copied(laps))


def shares_copied(laps: Sequence[Lap]) -> dict[str, float]:
    """The shares of a link that its ends copy: of messages of all sizes the median."""
    sender, receiver = (
        statistics.median(copied_s / lap.transfer_s for lap, copied_s in zip(laps, copies_s, strict=True))
        for copies_s in ([lap.sending_s for lap in laps], [lap.receiving_s for lap in laps])
    )
    less = min(1.0, MOST_COPIED / (sender + receiver)) if sender + receiver else 1.0
    return {"sender_share": sender * less, "receiver_share": receiver * less}


def fit_link(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The line `latency_s + size / bytes_per_s` through measured transfers, both coefficients positive.

    Least squares of relative distances, so that small messages count as much as large ones; `Link.error` is the
    largest of these distances. Where it is more than `WORST_LINE`, the link says what was measured.

    Args:
        sizes_bytes: of the messages.
        seconds: that each took one way.
    """
    sizes, times = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    unit = float(sizes.max())  # keeps both columns of the same order
    columns = np.stack([1 / times, sizes / unit / times], axis=1)
    (latency_s, unit_s), _ = nnls(columns, np.ones_like(times))
    unit_s = max(float(unit_s), float(times.min()) * 1e-9)  # a bandwidth that latency hides entirely
    fitted = latency_s + sizes / unit * unit_s
    error = float(np.max(np.abs(fitted / times - 1)))
    table = zip(sizes_bytes, (float(taken) for taken in times), strict=True) if error > WORST_LINE else ()
    return Link(latency_s=float(latency_s), bytes_per_s=unit / unit_s, error=error, measured=tuple(sorted(table)))


def ping_pong(device: Device, sizes_bytes: Sequence[int] = SIZES_BYTES, rounds: int = MOST_ROUNDS) -> list[Lap]:
    """Medians of one transfer for each size, of at most `rounds`; runs in both processes of a world of two.

    Sizes take turns, so that a moment in which the machine is busy does not fall on one of them alone.
    """
    place = torch_device(device)
    backend = backend_of(place)
    backend.use(place)
    rank = torch.distributed.get_rank()
    outgoing, incoming = torch.zeros((2, max(sizes_bytes)), dtype=torch.uint8, device=place)
    rings = _rings(rank) if backend.is_host else None
    if rings is not None:
        turn = _through_memory(rank, *rings, outgoing)
        found = _laps(turn, sizes_bytes, rounds)
        means = (_between_ends([[lap[part] for lap in laps] for laps in found]) for part in range(len(Lap._fields)))
        return [Lap(*lap) for lap in zip(*means, strict=True)]
    with _computing(place):
        found = _laps(_there_and_back(rank, outgoing, incoming), sizes_bytes, rounds)
    return [Lap(statistics.median(lap.transfer_s for lap in laps)) for laps in found]


def _laps(turn: Turn, sizes_bytes: Sequence[int], rounds: int) -> list[list[Lap]]:
    """What the turns of each size gave, without those that warm up."""
    seconds: list[list[Lap]] = [[] for _ in sizes_bytes]
    for number in range(WARM_UPS + rounds):
        turn(sizes_bytes[0])  # after a long wait the other end sleeps
        for size, laps in zip(sizes_bytes, seconds, strict=True):
            if number < WARM_UPS + min(rounds_of(size), rounds):
                lap = turn(size)
                if number >= WARM_UPS:
                    laps.append(lap)
    return seconds


def rounds_of(size_bytes: int) -> int:
    """How often a message of that size goes to and fro."""
    return min(max(FEWEST_ROUNDS, BYTES_OF_A_SIZE // size_bytes), MOST_ROUNDS)


@contextlib.contextmanager
def _computing(place: torch.device) -> Iterator[None]:
    """A thread of this process computes until the block ends; on a CUDA device in a stream of its own."""
    ended = threading.Event()

    def compute() -> None:
        work, backend = busy_work(place), backend_of(place)
        with backend.aside(place):
            while not ended.is_set():
                work()
                backend.synchronize(place)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _rings(rank: int) -> tuple[Outgoing, Incoming] | None:
    """To the other end and from there; None, at both ends, if they cannot share memory."""
    other = 1 - rank
    rings = meet({(rank, other): Wanted(other, SLOTS_AT_LEAST, SLOTS_BYTES)}, {(other, rank): other})
    if rings.refused or not rings.any:
        return None
    return rings.outgoing[rank, other], rings.incoming[other, rank]


def _through_memory(rank: int, there: Outgoing, back: Incoming, outgoing: torch.Tensor) -> Turn:
    """A turn gives when the other end's message was here, less when this end began to send its own."""
    work = busy_work(HOST, rows=ROWS_BETWEEN)

    def send(size: int) -> tuple[float, float]:
        message = outgoing[:size]
        work()
        message.fill_(rank)  # the last layer leaves it
        begun_s, spent_s = time.perf_counter(), time.thread_time()
        there.room(size).memory[:size].copy_(message)
        there.send(0)
        return begun_s, time.thread_time() - spent_s

    def receive(size: int) -> tuple[float, float]:
        slot = back.arrived(0)
        spent_s = time.thread_time()
        slot.memory[:size].clone()
        back.release()
        return time.perf_counter(), time.thread_time() - spent_s

    def turn(size: int) -> Lap:
        if rank == 0:
            (begun_s, sending_s), (here_s, receiving_s) = send(size), receive(size)
        else:
            (here_s, receiving_s), (begun_s, sending_s) = receive(size), send(size)
        return Lap(here_s - begun_s, sending_s, receiving_s)

    return turn


def _between_ends(own: Sequence[Sequence[float]]) -> list[float]:
    """The median of both transfers of a turn for each size, at both ends.

    Where each end knows when it had the other's message, less when it began to send its own, the sum of both ends is
    that of both transfers; and that of what each spends on a copy is that of both copies.
    """
    both = torch.tensor([seconds for laps in own for seconds in laps], dtype=torch.float64)
    torch.distributed.all_reduce(both)
    return [statistics.median(laps.tolist()) / 2 for laps in both.split([len(laps) for laps in own])]


def _there_and_back(rank: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> Turn:
    """A turn takes two transfers. Rank 0 sends first: NCCL runs messages between two ranks one after the other."""

    def turn(size: int) -> Lap:
        message, room = [outgoing[:size]], [incoming[:size]]
        begun_s = time.perf_counter()
        if rank == 0:
            sending = start_send(message, to=1, tag=0)
            receiving = start_receive(room, source=1, tag=0)
            finish(sending)
            finish(receiving)
        else:
            finish(start_receive(room, source=0, tag=0))
            finish(start_send(message, to=0, tag=0))
        backend_of(outgoing.device).synchronize(outgoing.device)
        return Lap((time.perf_counter() - begun_s) / 2)

    return turn
