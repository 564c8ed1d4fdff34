"""Training over a link of 100 Mbit/s and 5 ms between two network namespaces, and restarts under torchrun.

    make bench

The measured transfer of a boundary is compared with the link that `profiler.machine.links` measures with the same
calls.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner import Plan
from profiler import trace
from tests.benchmarks import over_a_link, slow_link
from tests.executor.conftest import plan_for  # noqa: F401 - a fixture
from tests.executor.fault_trials import plan_of
from tests.executor.test_torchrun import (
    HOSTS,
    STEPS,
    can_make_hosts,
    check_equal,
    ip,
    prepare,
    results,
    run,
    torchrun,
)
from tests.executor.under_torchrun import train

BYTES_PER_S = 100e6 / 8
DELAY_S = 0.005
TRANSFER_WITHIN = 0.1
RESTARTS = 20


@pytest.mark.benchmark
def test_a_slow_link(plan_for: Callable[..., Plan], tmp_path: Path) -> None:  # noqa: F811
    if not can_make_hosts() or not Path("/dev/net/tun").exists():
        pytest.skip("this user may not make network namespaces (ip netns add), or there is no /dev/net/tun")
    sequence = trace(over_a_link.Wide(), over_a_link.inputs())
    plans = [
        plan_for(sequence, cuts, batch_size=over_a_link.BATCH, micro_batches=4) for cuts in ([], [len(sequence) // 2])
    ]
    _, expected = over_a_link.train(plans[0])
    plans[1].save(tmp_path / "plan.json")
    spaces = ["gpipe-slow-left", "gpipe-slow-right"]
    addresses = [address for address, _ in HOSTS]
    try:
        for space in spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        with slow_link.start(spaces, addresses, bytes_per_s=BYTES_PER_S, delay_s=DELAY_S) as link:
            found = _train_on(spaces, tmp_path)
            link.terminate()
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
    boundary = sequence.boundaries[len(sequence) // 2]
    (value,) = boundary
    size = value.shape_at(16)[0] * value.shape_at(16)[1] * 4
    link_s = found["latency_s"] + size / found["bytes_per_s"]
    print(
        f"\nlink set to {DELAY_S * 1e3:.0f} ms and {BYTES_PER_S / 1e6:.1f} MB/s, profiled as "
        f"{found['latency_s'] * 1e3:.1f} ms and {found['bytes_per_s'] / 1e6:.1f} MB/s: {size >> 10} KiB in "
        f"{link_s * 1e3:.1f} ms; in training: {', '.join(f'{k} {v * 1e3:.1f} ms' for k, v in found['sent_s'].items())}"
    )
    assert found["losses"] == expected
    behind_another_s = link_s - found["latency_s"]  # its latency passes while the message before still arrives
    for seconds in found["sent_s"].values():
        assert (1 - TRANSFER_WITHIN) * behind_another_s <= seconds <= (1 + TRANSFER_WITHIN) * link_s


def _train_on(spaces: list[str], folder: Path) -> dict[str, Any]:
    script = Path(over_a_link.__file__).resolve()
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", HOSTS[0][0], "--master-port", "29512"]
    running = [
        torchrun(
            folder,
            *rendezvous,
            "--node-rank",
            str(number),
            prefix=["ip", "netns", "exec", space],
            script=script,
            GLOO_SOCKET_IFNAME="cable0",
        )
        for number, space in enumerate(spaces)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    return json.loads((folder / "result-0.json").read_text())


@pytest.mark.benchmark
def test_restarts(plan_for: Callable[..., Plan], tmp_path: Path) -> None:  # noqa: F811
    alone = train(plan_of(plan_for, 1), STEPS, tmp_path / "alone")
    back = 0
    for trial in range(RESTARTS):
        folder = prepare(tmp_path / str(trial), plan_of(plan_for, 2), dies=[[trial % 2, 1 + trial // 2 % (STEPS - 1)]])
        code, _ = run(folder, "--nproc-per-node", "2", "--max-restarts", "1")
        if code == 0:
            parts = results(folder, 2)
            check_equal(parts, alone)
            back += parts[0]["begun"] == 1 + trial // 2 % (STEPS - 1)
    print(f"\ntorchrun --max-restarts: came back from the last checkpoint {back} times of {RESTARTS}")
    assert back == RESTARTS
