"""Which addresses a process that trains listens at, and strangers at its ports."""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor import launch
from executor.connect.listening import listener_at
from planner import Plan
from profiler.machine.start import start_process
from profiler.machine.workers import KEEP_FREED_MEMORY
from tests.executor.fault_trials import free_port, plan_of
from tests.executor.test_door import KINDS, Stranger


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "localhost"])
def test_it_listens_at_the_address_that_was_asked_for(host: str) -> None:
    listener = listener_at(host, 0)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] in (host, "127.0.0.1", "::1")


def test_an_address_of_another_machine_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"MASTER_ADDR 192\.0\.2\.1 is no address of this machine"):
        assert listener_at("192.0.2.1", 0) is None


def test_a_name_that_others_may_know_by_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian lets a machine's own name mean 127.0.1.1; to other machines it means one that they reach."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listener_at("node7", 0) is None


def listening(processes: set[int]) -> set[tuple[str, int]]:
    """Addresses and ports at which processes of this machine listen, by the system's own tables."""
    sockets = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets |= set(re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink())))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                address, port = local.split(":")
                words = bytes.fromhex(address)
                host = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add((socket.inet_ntop(family, host), int(port, 16)))
    return found


@contextlib.contextmanager
def strangers_everywhere(folder: Path) -> Iterator[set[tuple[str, int]]]:
    """While the block runs: at each port at which a rank listens, one of each kind, as soon as it is seen.

    Ranks write their process' number into a file `process-RANK`. Yields the addresses, which are known at its end.
    """
    over = threading.Event()
    seen: set[tuple[str, int]] = set()
    there: list[Stranger] = []

    def watch() -> None:
        while not over.wait(0.05):
            processes = {int(file.read_text() or 0) for file in folder.glob("process-*")} - {0}
            with contextlib.suppress(OSError):  # a process has just ended
                for address in listening(processes) - seen:
                    seen.add(address)
                    for pieces in KINDS.values():
                        with contextlib.suppress(OSError):  # it listens no more
                            there.append(Stranger(address, *pieces))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join(60)
        for stranger in there:
            stranger.leave()


def _visits(folder: Path, *, strangers: bool) -> contextlib.AbstractContextManager[set[tuple[str, int]]]:
    return strangers_everywhere(folder) if strangers else contextlib.nullcontext(set())


def _train(plan: Plan, folder: str) -> list[float]:
    from executor import Pipeline
    from tests.executor.fault_trials import Deep, X

    with open(f"{folder}/process-{os.environ['RANK']}", "w") as file:  # noqa: PTH123
        file.write(str(os.getpid()))
    pipe = Pipeline(Deep(), plan, loss_fn=lambda output, target: (output - target).square().mean())
    return [pipe.step(X, target=X).item() for _ in range(20)]


def train_by_launch(plan_for: Callable[..., Plan], folder: Path, *, strangers: bool) -> set[tuple[str, int]]:
    """Train under `launch`; the addresses at which strangers were."""
    with _visits(folder, strangers=strangers) as seen:
        first, second = launch(_train, plan_of(plan_for, 2), (str(folder),), timeout_s=20)
    assert first == second
    return seen


def main() -> None:
    """What each rank runs that is started by hand."""
    _train(Plan.load("plan.json"), ".")


def train_by_hand(
    plan_for: Callable[..., Plan], folder: Path, *, strangers: bool, start: Callable[..., Any] = start_process
) -> set[tuple[str, int]]:
    """Train in processes that are started by hand; the addresses at which strangers were."""
    plan_of(plan_for, 2).save(folder / "plan.json")
    variables = {
        **KEEP_FREED_MEMORY,
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with contextlib.chdir(folder), contextlib.ExitStack() as running, _visits(folder, strangers=strangers) as seen:
        ranks = []
        for rank in range(2):
            ranks.append(start("tests.executor.test_listening", environment={**variables, "RANK": str(rank)}))
            running.callback(ranks[-1].send_signal, signal.SIGKILL)
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' tables of sockets")
def test_strangers_at_launch(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """Its store listened at a port where any user could read and write all keys; now the ranks meet in a file."""
    assert {host for host, _ in train_by_launch(plan_for, tmp_path, strangers=True)} == {"127.0.0.1"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' tables of sockets")
def test_strangers_where_ranks_are_started_by_hand(
    plan_for: Callable[..., Plan], tmp_path: Path, start_fork: Callable[..., Any]
) -> None:
    """With MASTER_ADDR=127.0.0.1 the store listened on all interfaces, and gloo at that of the machine's name.

    A stranger that connected and said nothing was waited for until the time-out, and the error blamed MASTER_ADDR.
    """
    assert {host for host, _ in train_by_hand(plan_for, tmp_path, strangers=True, start=start_fork)} == {"127.0.0.1"}
