"""Messages between processes through memory that both have."""

import errno
import gc
import os
import random
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from profiler.errors import ExecutionError
from profiler.machine.ring import MOST_SLOTS, Incoming, Outgoing
from profiler.machine.ring_meeting import Wanted, meet, this_machine
from profiler.machine.semaphore import EndedError
from profiler.machine.workers import run_workers

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory without a name")

AT_LEAST = 4
MESSAGES = 1000


def pair(ahead_bytes: int = 0) -> tuple[Outgoing, Incoming]:
    """Both ends in this process."""
    outgoing = Outgoing(AT_LEAST, ahead_bytes, looks=False)
    return outgoing, Incoming(outgoing.address, looks=False)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=60),
    st.sampled_from([0, 64 * 8, 64 * MOST_SLOTS * 2]),
)
def test_any_order_of_sends_and_receives(moves: list[tuple[bool, int]], ahead_bytes: int) -> None:
    """Of any sizes, with up to `AT_LEAST` under way: what comes is what was sent, and no end ever waits for itself."""
    outgoing, incoming = pair(ahead_bytes)
    under_way: deque[torch.Tensor] = deque()
    sent = received = 0
    for sends, size in moves:
        if sends and len(under_way) < AT_LEAST:
            content = torch.randint(256, (size,), dtype=torch.uint8)
            outgoing.room(size).memory[:size].copy_(content)
            outgoing.send(sent)
            under_way.append(content)
            sent += 1
        elif under_way:
            expected = under_way.popleft()
            assert torch.equal(incoming.arrived(received).memory[: len(expected)], expected)
            incoming.release()
            received += 1


def test_a_ring_has_as_many_slots_as_its_messages_may_need() -> None:
    """More for an evaluation, and no longer when a training step, whose plan counts them, follows."""
    outgoing, incoming = pair()
    sent = 0
    for most, slots in ((2, 2), (AT_LEAST + 1, AT_LEAST), (1, 1), (2, 2)):
        for _ in range(2 * AT_LEAST):
            outgoing.room(64, most).memory.fill_(sent)
            outgoing.send(sent)
            assert outgoing.size_bytes == 64 * slots
            assert incoming.arrived(sent).memory.eq(sent).all()
            incoming.release()
            sent += 1


@pytest.mark.parametrize("sent", [1, AT_LEAST])
def test_a_sender_does_not_end_before_its_slots_are_open(sent: int) -> None:
    """A last process that was through with its only step ended, and a receiver that came later found nothing."""
    outgoing, incoming = pair()
    outgoing.settle()  # nothing was sent
    for tag in range(sent):
        outgoing.room(64)
        outgoing.send(tag)
    settled = threading.Event()

    def settle() -> None:
        outgoing.settle()
        settled.set()

    threading.Thread(target=settle, daemon=True).start()
    assert not settled.wait(0.05)
    incoming.arrived(0)
    assert not settled.wait(0.05)
    incoming.release()
    assert settled.wait(10)
    for tag in range(1, sent):
        incoming.arrived(tag)
        incoming.release()
    for tag in range(sent, sent + 3 * AT_LEAST):  # all slots are free again, and no more
        outgoing.room(64)
        outgoing.send(tag)
        incoming.arrived(tag)
        incoming.release()
    outgoing.settle()


def test_as_many_short_messages_are_under_way_as_fit() -> None:
    """A sender of short messages waited for each of them."""
    outgoing, incoming = pair(ahead_bytes=64 * 10)
    for number in range(10):
        outgoing.room(64)
        outgoing.send(number)
    late = threading.Thread(target=outgoing.room, args=(64,))
    late.start()
    late.join(0.05)
    assert late.is_alive(), "ten are under way, and there is room for ten"
    incoming.arrived(0)
    incoming.release()
    late.join(60)
    assert not late.is_alive()


@pytest.mark.parametrize("receives", [False, True])
def test_a_wait_is_ended_from_another_thread(receives: bool) -> None:
    """As the watch does when another rank has failed; later waits end at once."""
    outgoing, incoming = pair()
    said: list[type] = []

    def wait() -> None:
        try:
            while True:
                if receives:
                    incoming.arrived(0)
                else:
                    outgoing.room(64)
                    outgoing.send(0)
        except Exception as problem:
            said.append(type(problem))

    waiting = threading.Thread(target=wait)
    waiting.start()
    (incoming if receives else outgoing).end()
    waiting.join(60)
    assert said == [EndedError]
    with pytest.raises(EndedError):
        incoming.arrived(0) if receives else outgoing.room(64)


def test_nothing_is_left_of_a_ring() -> None:
    """No descriptor, no name, and no memory; longer messages left a descriptor each."""
    gc.collect()
    before = _held()
    outgoing, incoming = pair()
    for number in range(40):
        outgoing.room(64 * number)
        outgoing.send(number)
        incoming.arrived(number)
        incoming.release()
        assert len(outgoing._files) <= AT_LEAST + 2
    del outgoing, incoming
    gc.collect()
    assert _held() == before


def _held() -> tuple[int, int, list[Path]]:
    """Descriptors and mappings of this process, and names of shared memory."""
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    mappings = Path("/proc/self/maps").read_text().count("gpipe-autoplan")
    return descriptors, mappings, sorted(Path("/dev/shm").glob("*"))


def test_another_ring_is_not_taken_for_the_one_meant() -> None:
    outgoing, _ = pair()
    process, descriptor, key = outgoing.address
    with pytest.raises(FileNotFoundError, match="another one than was meant"):
        Incoming((process, descriptor, key + 1), looks=False)


def test_a_lack_of_memory_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a SIGBUS at the first write to a page that there is no memory for."""
    outgoing, _ = pair()
    monkeypatch.setattr(os, "posix_fallocate", _no_memory)
    with pytest.raises(ExecutionError, match=r"4 messages of 1000 bytes .* need 4096 bytes .*transport=.gloo."):
        outgoing.room(1000)


def _no_memory(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def exchange(seed: int) -> str:
    """Random messages both ways at once, either side late now and then; then a process that has no memory to share."""
    rank = dist.get_rank()
    other = 1 - rank
    rings = meet({(rank, other): Wanted(other, AT_LEAST, 2**12)}, {(other, rank): other})
    outgoing, incoming = rings.outgoing[rank, other], rings.incoming[other, rank]
    orders, own = random.Random(seed), random.Random(f"{seed} {rank}")
    lengths = [[_length(orders) for _ in range(MESSAGES)] for _ in range(2)]
    sent = received = 0
    while sent < MESSAGES or received < MESSAGES:
        if own.random() < 0.01:
            time.sleep(own.random() * 1e-3)
        may_send = sent < MESSAGES and sent < received + AT_LEAST
        if may_send and (own.random() < 0.5 or received == MESSAGES):
            size = lengths[rank][sent]
            outgoing.room(size).memory[:size].copy_(_content(rank, sent, size))
            outgoing.send(sent)
            sent += 1
        elif received < MESSAGES and (received < sent or not may_send):
            size = lengths[other][received]
            memory = incoming.arrived(received).memory[:size]
            if not torch.equal(memory, _content(other, received, size)):
                return f"message {received} of {size} bytes is another one"
            incoming.release()
            received += 1
    return ""


def _length(numbers: random.Random) -> int:
    return numbers.choice([0, 1, 8, 64, 65, 500, numbers.randrange(20_000)])


def _content(rank: int, number: int, size: int) -> torch.Tensor:
    return torch.arange(size).add_(number * 31 + rank * 17).to(torch.uint8)


def refused() -> tuple[Any, ...]:
    """Rank 1 has no memory to share, rank 0 has."""
    rank = dist.get_rank()
    if rank == 1:
        os.posix_fallocate = _no_memory
    rings = meet({(rank, 1 - rank): Wanted(1 - rank, AT_LEAST, 2**12)}, {(1 - rank, rank): 1 - rank})
    return sorted(rings.outgoing), sorted(rings.incoming), rings.any, rings.refused


def both(seed: int) -> tuple[str, tuple[Any, ...]]:
    return exchange(seed), refused()


def test_two_processes_exchange_what_they_mean_to() -> None:
    found = run_workers(both, [(3,), (3,)])
    assert [wrong for wrong, _ in found] == ["", ""]
    why = {(1, 0): "[Errno 28] No space left on device"}
    assert [rings for _, rings in found] == [([(0, 1)], [], True, why), ([], [(0, 1)], True, why)]


def test_a_machine_is_told_from_others() -> None:
    assert this_machine() == this_machine() != ""
