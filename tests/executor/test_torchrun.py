"""The same script under torchrun and after its restarts, and on two hosts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from executor import Pipeline
from planner import ForeignPlanError, Plan
from profiler.machine.workers import KEEP_FREED_MEMORY, run_workers
from tests.executor import on_host
from tests.executor.fault_trials import Deep, plan_of
from tests.executor.under_torchrun import train

SCRIPT = Path(__file__).with_name("under_torchrun.py").resolve()
STEPS = 4


def torchrun(
    folder: Path, *options: str, prefix: Sequence[str] = (), script: Path = SCRIPT, **variables: str
) -> subprocess.Popen[str]:
    """Start torchrun with a script on a folder."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    logs = ["--log-dir", str(folder / "logs")]  # or it leaves a folder among the system's temporary files
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *logs, *options, str(script), str(folder)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of torchrun on one machine."""
    process = torchrun(folder, "--standalone", *options)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def prepare(folder: Path, plan: Plan, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    plan.save(folder / "plan.json")
    (folder / "settings.json").write_text(json.dumps({"steps": STEPS, "dies": [], **settings}))
    return folder


def results(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(ranks)]


def check_equal(parts: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """The processes end with the losses and weights of one process, in every bit."""
    weights: dict[str, Any] = {}
    for part in parts:
        assert part["losses"] == {step: expected["losses"][step] for step in range(part["begun"], STEPS)}
        weights.update(part["weights"])
    assert weights.keys() == expected["weights"].keys()
    assert all(torch.equal(value, expected["weights"][name]) for name, value in weights.items())


@pytest.fixture
def alone(plan_for: Callable[..., Plan], tmp_path: Path) -> dict[str, Any]:
    """What one process without torchrun ends with."""
    return train(plan_of(plan_for, 1), STEPS, tmp_path / "alone")


def test_a_killed_rank_is_named_and_comes_back_from_the_last_checkpoint(
    plan_for: Callable[..., Plan], tmp_path: Path, alone: dict[str, Any]
) -> None:
    """It was where its journal says."""
    folder = prepare(tmp_path / "run", plan_of(plan_for, 2), dies=[[1, 2]], in_loss=True)
    code, output = run(folder, "--nproc-per-node", "2", "--max-restarts", "1")
    assert code == 0, output
    assert "rank 1 of 2 failed: its process ended without a word" in output
    assert "last at step 2, stage 1, micro-batch 1, action 1F1" in output
    parts = results(folder, 2)
    assert [part["begun"] for part in parts] == [2, 2]
    check_equal(parts, alone)


def refused(plan: Plan) -> str:
    with pytest.raises(ForeignPlanError) as caught:
        Pipeline(Deep(), plan)
    return str(caught.value)


def test_a_wrong_world_size_is_an_error_on_every_rank(plan_for: Callable[..., Plan]) -> None:
    """`launch` starts as many as there should be, torchrun as many as it is told."""
    for error in run_workers(refused, [(plan_of(plan_for, 3),)] * 2):
        assert "the plan has 3 stages, but 2 processes run; start 3 processes, or one" in error


HOSTS = (("10.99.7.1", "left"), ("10.99.7.2", "right"))


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_make_hosts() -> bool:
    try:
        ip("netns", "add", "gpipe-probe")
        ip("netns", "del", "gpipe-probe")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """Two network namespaces joined by a cable; for each the words that a command in it begins with."""
    if not can_make_hosts():
        pytest.skip("this user may not make network namespaces (ip netns add)")
    spaces = [f"gpipe-{os.getpid()}-{side}" for _, side in HOSTS]
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", "cable0", "netns", spaces[0], "type", "veth", "peer", "name", "cable0", "netns", spaces[1])
        for space, (address, _) in zip(spaces, HOSTS, strict=True):
            ip("-n", space, "address", "add", f"{address}/24", "dev", "cable0")
            for device in ("lo", "cable0"):
                ip("-n", space, "link", "set", device, "up")
        yield [["ip", "netns", "exec", space] for space in spaces]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def run_on(hosts: Sequence[Sequence[str]], folder: Path, start_fork: Callable[..., Any]) -> None:
    """One rank on each host, without torchrun's agents, which take 3 s each; with them in tests/benchmarks."""
    path = [entry for entry in sys.path if entry]
    variables = {
        **KEEP_FREED_MEMORY,
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": HOSTS[0][0],
        "MASTER_PORT": "29511",
        "GLOO_SOCKET_IFNAME": "cable0",
    }
    said = folder / "said"
    with said.open("w") as output:
        files = (output.fileno(), output.fileno())
        running = [
            start_fork(
                str(Path(on_host.__file__).resolve()),
                host[-1],
                str(folder),
                environment={**variables, "RANK": str(rank)},
                output=files,
                search_path=path,
            )
            for rank, host in enumerate(hosts)
        ]
        codes = [process.wait(240) for process in running]
    assert codes == [0, 0], said.read_text()


def test_two_hosts_train_as_one(
    plan_for: Callable[..., Plan],
    tmp_path: Path,
    alone: dict[str, Any],
    hosts: list[list[str]],
    start_fork: Callable[..., Any],
) -> None:
    folder = prepare(tmp_path / "run", plan_of(plan_for, 2))
    run_on(hosts, folder, start_fork)
    check_equal(results(folder, 2), alone)
