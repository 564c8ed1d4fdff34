"""Many trials of `fault_trials` in little time: the ranks are forks of one process that has all modules at hand.

    python forked_trials.py FOLDER KIND,KIND,... TRIALS TIMEOUT_S [TRANSPORT]

`FOLDER` holds plan.json; each kind of fault is tried TRIALS times, messages go over TRANSPORT. The ranks meet as under
torchrun, each trial like a restart. One line of JSON a trial: seconds from the fault to the error in each rank that can
still speak, and what was not as it should be.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from executor.world import TIMEOUT_VARIABLE
from planner import ExecutionError, Plan
from profiler import trace
from tests.executor import known_traces
from tests.executor.fault_trials import (
    SPEECHLESS,
    STUCK,
    Deep,
    Fault,
    X,
    began,
    expected,
    random_fault,
    ranks_of,
    train,
)

LAST_WORDS = "endless action"  # the fault whose rank cannot be interrupted: its error is printed before it is ended
SHARED = Path("/dev/shm")  # where shared memory with a name would be
PATIENCE_S = 60.0  # no trial takes as long
ENVIRONMENT = {  # of this script; torch must not warn of a name server that does not answer where nothing is printed
    "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclass
class Trial:
    """One run of all ranks with a fault in one of them."""

    plan: Plan
    fault: Fault
    number: int
    folder: Path

    def run(self, allowed_s: float) -> tuple[list[float], list[str]]:
        """Seconds until the errors, and what is wrong."""
        ranks = range(ranks_of(self.plan))
        before = set(SHARED.glob("*"))
        children = {rank: self._fork(rank) for rank in ranks}
        hung = self._wait(dict(children))
        wrong = [f"rank {rank} had to be killed" for rank in hung if (self.fault.kind, rank) != ("stop", self._odd)]
        wrong += [f"{left} is left" for left in set(SHARED.glob("*")) - before]
        seconds, errors = [], set()
        for rank in ranks:
            said = self._file("stderr", rank).read_text()
            if rank == self._odd and self.fault.kind == LAST_WORDS:
                wrong += [] if expected(self.fault, self.plan).search(said) else [f"last words: {said}"]
            elif rank != self._odd or self.fault.kind not in SPEECHLESS:
                if not self._file("end", rank).exists():  # it could not be interrupted in time: last words
                    wrong += [] if expected(self.fault, self.plan).search(said) else [f"rank {rank} said: {said}"]
                    continue
                ended, error = json.loads(self._file("end", rank).read_text())
                seconds.append(ended - began(self.fault))
                errors.add(error)
                wrong += [] if expected(self.fault, self.plan).match(error) else [f"rank {rank}: {error}"]
                wrong += [] if seconds[-1] <= allowed_s else [f"rank {rank} took {seconds[-1]:.2f} s"]
                wrong += [f"rank {rank} printed {said}"] if said else []
        return seconds, wrong + ([f"several errors: {errors}"] if len(errors) > 1 else [])

    @property
    def _odd(self) -> int:
        return self.fault.rank

    def _file(self, what: str, rank: int) -> Path:
        return self.folder / f"{what}-{self.number}-{rank}"

    def _fork(self, rank: int) -> int:
        child = os.fork()
        return child or self._train(rank)

    def _train(self, rank: int) -> NoReturn:
        """What a rank does."""
        os.environ |= {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(self.number)}
        os.dup2(os.open(self._file("stderr", rank), os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
        code = 0
        try:
            train(self.plan, self.fault)
        except ExecutionError as problem:
            self._file("end", rank).write_text(json.dumps([time.time(), str(problem)]))
            code = 1
        finally:
            atexit._run_exitfuncs()  # as at the end of a process that is no fork
            os._exit(code)

    def _wait(self, running: dict[int, int]) -> list[int]:
        """Wait until all have ended; those that did not are killed and returned."""
        deadline = time.monotonic() + PATIENCE_S
        while set(running) - ({self._odd} if self.fault.kind == "stop" else set()) and time.monotonic() < deadline:
            for rank, child in list(running.items()):
                if os.waitpid(child, os.WNOHANG)[0]:
                    del running[rank]
            time.sleep(0.01)
        for child in running.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return list(running)


def port_of_store() -> int:
    """Port of the store at which the ranks meet, held by a process of its own, which ends with this one.

    For each rank that connects, torch's store looks up a name in a thread of its own. A fork of its process meanwhile
    may get the C library's lock on the name servers as held by that thread, which a fork does not have: the rank waited
    for the lock when it connected itself, and all others for the rank, in 4 of 1,350 trials.
    """
    port_read, port_written = os.pipe()
    end_of_this_read, lifeline = os.pipe()
    if not os.fork():
        os.close(lifeline)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port_written, str(store.port).encode())
        os.read(end_of_this_read, 1)  # returns when nobody holds the lifeline any more
        os._exit(0)
    os.close(port_written)
    return int(os.read(port_read, 8))


def main(folder: Path, kinds: str, trials: int, timeout_s: float, transport: str = "auto") -> None:
    torch.set_num_threads(1)
    plan = Plan.load(folder / "plan.json")
    known_traces.remember(trace(Deep(), X))  # loads all that the forks will need
    known_traces.inherit()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port_of_store()),
        "WORLD_SIZE": str(ranks_of(plan)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        TIMEOUT_VARIABLE: str(timeout_s),
    }
    numbers = random.Random(kinds)
    files = Path(tempfile.mkdtemp(dir=folder))
    for number, kind in enumerate(kinds.split(",") * trials):
        fault = random_fault(kind, ranks_of(plan), files, numbers, transport)
        seconds, wrong = Trial(plan, fault, number, files).run(timeout_s if kind in STUCK else 1.0)
        print(json.dumps({"kind": kind, "rank": fault.rank, "seconds": seconds, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:6])
