"""One training run with a fault at a random moment: what the caller and the ranks end with, how fast, what is left.

The fault is made inside the rank itself, by a thread that strikes at its time, so that it may fall into any action, the
optimizer or the time between steps. Runs under `launch` and, as a script, under torchrun.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executor import Pipeline, launch
from executor.run.stage_runner import StageRunner
from executor.world import TIMEOUT_VARIABLE
from planner import ExecutionError, Plan
from planner.plan.schedules import ScheduleName
from profiler import trace
from tests.executor.random_orders import orders_for

BATCH = 16
M = 8
WIDTH = 32
TIMEOUT_S = 8.0
STEPS = 100_000
FAULTS = ("kill", "exception", "stop", "endless action", "fewer steps", "nan", "out of memory")
STUCK = ("stop", "endless action")
SPEECHLESS = ("kill", "stop", "fewer steps")  # in these the rank itself has no error
X = torch.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@dataclass(frozen=True)
class Fault:
    """What goes wrong, in which rank, how many seconds after the first step, and where the moment is written.

    `transport` carries the messages meanwhile.
    """

    kind: str
    rank: int
    after_s: float
    mark: str
    transport: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """How a trial ended for the caller or a rank: the error, seconds from the fault to it, and what was left behind."""

    error: str
    seconds: float
    left: list[str]

    def wrong(self, fault: Fault, plan: Plan) -> bool:
        """Whether it is not the error that it should be, or late, or not all."""
        late = self.seconds > (TIMEOUT_S if fault.kind in STUCK else 1.0)
        return late or bool(self.left) or not expected(fault, plan).match(self.error)


class _Switch:
    """Turned on by the thread, acted on by the training thread."""

    on = False


def train(plan: Plan, fault: Fault) -> None:
    """Train without end; the fault ends it."""
    switch = _Switch()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = (output - target).square().mean()
        return loss * float("nan") if switch.on and fault.kind == "nan" else loss

    torch.manual_seed(0)
    pipe = Pipeline(Deep(), plan, loss_fn=loss_fn, check_finite=True, transport=fault.transport)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        pipe.step(X, target=X)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and pipe.rank == fault.rank:
            _arm(fault, switch)
        if switch.on and fault.kind == "fewer steps":
            return


def _arm(fault: Fault, switch: _Switch) -> None:
    """Let a thread strike."""
    for name in ("forward", "backward", "weights"):
        setattr(StageRunner, name, _failing(getattr(StageRunner, name), fault, switch))

    def strike() -> None:
        time.sleep(fault.after_s)
        Path(fault.mark).write_text(json.dumps([time.time(), int(os.environ.get("MASTER_PORT", "0"))]))
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        switch.on = True

    threading.Thread(target=strike, daemon=True).start()


def _failing(method: Any, fault: Fault, switch: _Switch) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if switch.on and fault.kind == "exception":
            raise RuntimeError("the first cause")
        if switch.on and fault.kind == "endless action":
            time.sleep(1e6)
        if switch.on and fault.kind == "out of memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**31, resource.getrlimit(resource.RLIMIT_AS)[1]))
            torch.empty(2**40)
        return method(*args, **kwargs)

    return call


EXPECTED = {
    "kill": r"rank {rank} of {n} failed: .*killed",
    "exception": r"rank {rank} of {n} failed: step \d+, {place}: RuntimeError: the first cause",
    "stop": r"rank {rank} of {n} failed: it has not answered for \d+ s .*; rank \d has waited \d+ s at step \d+",
    "endless action": r"rank {rank} of {n} failed: it has been at step \d+, {place} for \d+ s, after \d+ calls; "
    r"rank \d has waited \d+ s at step \d+",
    "fewer steps": r"rank {rank} of {n} failed: it ended after \d+ of the pipeline's calls",
    "nan": r"rank {rank} of {n} failed: step \d+, stage {last}, micro-batch \d+, action {last}F\d+: the loss .* is nan",
    "out of memory": r"rank {rank} of {n} failed: step \d+, stage {any}, micro-batch \d+, action .*out of memory",
}


def expected(fault: Fault, plan: Plan) -> re.Pattern[str]:
    """What the one error says."""
    stages = "|".join(str(stage) for stage, one in enumerate(plan.stages) if one.rank == fault.rank)
    place = rf"stage (?P<stage>{stages}), micro-batch (?P<batch>\d+), action (?P=stage)[FBIW](?P=batch)"
    said = EXPECTED[fault.kind].format(
        rank=fault.rank, n=ranks_of(plan), place=place, any=f"(?:{stages})", last=plan.K - 1
    )
    return re.compile(said, re.DOTALL)


def ranks_of(plan: Plan) -> int:
    """Of a plan without replicas."""
    return plan.K // plan.chunks


def began(fault: Fault) -> float:
    """When it struck."""
    return json.loads(Path(fault.mark).read_text())[0]


def random_fault(kind: str, ranks: int, folder: Path, random_numbers: random.Random, transport: str = "auto") -> Fault:
    """A fault of a kind in a random rank at a random moment."""
    rank = ranks - 1 if kind == "nan" else random_numbers.randrange(ranks)
    return Fault(kind, rank, random_numbers.uniform(0.0, 0.5), str(folder / f"mark-{uuid.uuid4().hex}"), transport)


def launch_trial(plan: Plan, fault: Fault, folder: Path, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run under `launch`, in this process."""
    with _Leftovers(folder) as leftovers:
        try:
            launch(train, plan, (fault,), timeout_s=timeout_s)
            error = "none"
        except ExecutionError as problem:
            error = str(problem)
        ended = time.time()
    return Outcome(error, ended - began(fault), leftovers.found(fault))


def torchrun_trial(plan: Plan, fault: Fault, folder: Path) -> list[Outcome]:
    """Run under torchrun; one outcome for each rank that can speak.

    A rank that its agent ends before the exception is raised has said the error at once, in its log.
    """
    plan.save(folder / "plan.json")
    (folder / "fault.json").write_text(json.dumps(asdict(fault)))
    with _Leftovers(folder) as leftovers:
        logs = folder / f"logs-{uuid.uuid4().hex}"
        launcher = ["--standalone", "--nproc-per-node", str(ranks_of(plan)), "--log-dir", str(logs), "--redirects", "3"]
        script = [str(Path(__file__).resolve()), str(folder)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, *script]
        agent = subprocess.run(command, env=environment, capture_output=True, timeout=180, check=False)
    left = leftovers.found(fault) + ([] if agent.returncode else ["an agent that ended with 0"])
    ranks = [rank for rank in range(ranks_of(plan)) if rank != fault.rank or fault.kind not in SPEECHLESS]
    found = {rank: _end_of(rank, fault, folder, logs) for rank in ranks}
    if len({error.partition("\n")[0] for _, error in found.values()}) > 1:  # of a log the first line was read
        left.append(f"several errors: {found}")
    return [Outcome(error, ended - began(fault), left) for ended, error in found.values()]


def _end_of(rank: int, fault: Fault, folder: Path, logs: Path) -> tuple[float, str]:
    """When a rank told its error, and which."""
    file = folder / f"{Path(fault.mark).name}-end-{rank}"
    if file.exists():
        ended, error = json.loads(file.read_text())
        return ended, error
    for log in logs.rglob(f"{rank}/stderr.log"):
        said = re.search(r"^ExecutionError on rank \d+ of \d+: (.*)", log.read_text(), re.MULTILINE)
        if said is not None:
            return log.stat().st_mtime, said[1]
    return float("inf"), f"rank {rank} said nothing"


class _Leftovers:
    """Processes, files of temporary folders and of shared memory, descriptors and a port that a block leaves behind."""

    def __init__(self, folder: Path) -> None:
        self._token = uuid.uuid4().hex
        self._temporary = folder / f"tmp-{self._token}"

    def __enter__(self) -> _Leftovers:
        self._temporary.mkdir()
        self._before = self._files()
        self._environment = dict(os.environ)
        os.environ["GPIPE_TRIAL"] = self._token
        os.environ["TMPDIR"] = str(self._temporary)
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self._environment)

    def _files(self) -> set[str]:
        shared = {str(path) for path in Path("/dev/shm").glob("*")} if Path("/dev/shm").exists() else set()
        own = Path("/proc/self/fd")
        return shared | {f"{len(list(own.iterdir()))} descriptors" if own.exists() else ""}

    def found(self, fault: Fault) -> list[str]:
        """What is there now and was not before."""
        new = {str(path) for path in self._temporary.rglob("*")} | (self._files() - self._before)
        return sorted(new) + self._port(fault) + [f"process {number}" for number in self._processes()]

    def _port(self, fault: Fault) -> list[str]:
        """That of the store at which the ranks met, if it cannot be had again; under `launch` they need none."""
        _, port = json.loads(Path(fault.mark).read_text())
        try:
            socket.create_server(("", port)).close()
        except OSError as problem:
            return [f"port {port}: {problem}"]
        return []

    def _processes(self) -> list[str]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                environment = (place / "environ").read_bytes()
            except OSError:
                continue
            if self._token.encode() in environment and place.name != str(os.getpid()):
                found.append(place.name)
        return found


def free_port() -> int:
    """A port that nobody listens at, for ranks that are started by hand."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def plan_of(plan_for: Any, ranks: int, schedule: ScheduleName = "gpipe", chunks: int = 1) -> Plan:
    """A plan of as many ranks."""
    sequence = trace(Deep(), X)
    stages = ranks * chunks
    cuts = [round(len(sequence) * stage / stages) for stage in range(1, stages)]
    orders = orders_for(schedule, stages, M, random.Random(0), chunks)
    return plan_for(sequence, cuts, batch_size=BATCH, micro_batches=M, schedule=schedule, chunks=chunks, orders=orders)


def main(folder: Path) -> None:
    """What torchrun runs in each rank: the error that it ends with, and when, goes into a file."""
    torch.set_num_threads(1)
    fault = Fault(**json.loads((folder / "fault.json").read_text()))
    end = folder / f"{Path(fault.mark).name}-end-{os.environ['RANK']}"
    os.environ[TIMEOUT_VARIABLE] = str(TIMEOUT_S)
    try:
        train(Plan.load(folder / "plan.json"), fault)
    except ExecutionError as problem:
        written = end.with_suffix(".written")
        written.write_text(json.dumps([time.time(), str(problem)]))
        written.replace(end)  # whole or not at all: the agent may end this process here
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
