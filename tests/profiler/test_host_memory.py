"""A container's memory is less than its machine's: plans for CPU workers took all of the machine's, and were killed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from profiler.machine.cpu import FOR_TENSORS
from profiler.machine.host_memory import machine_bytes, process_bytes
from profiler.machine.local import local_devices

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 2**20


def limited(folder: Path, own: str, limits: dict[str, str]) -> int:
    for name, said in limits.items():
        file = folder / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(said + "\n")
    (folder / "own").write_text(own + "\n")
    return machine_bytes(folder / "groups", folder / "own")


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/", {"memory.max": str(64 * MIB)}, 64 * MIB),
        ("0::/", {"memory.max": "max"}, PHYSICAL),
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": str(32 * MIB)}, 32 * MIB),
        ("0::/elsewhere/of/the/host", {"memory.max": str(16 * MIB)}, 16 * MIB),
        ("5:cpu:/x\n4:memory:/docker/1", {"memory/memory.limit_in_bytes": str(8 * MIB)}, 8 * MIB),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, PHYSICAL),
        ("5:cpu:/x", {"memory.max": str(8 * MIB)}, PHYSICAL),
    ],
)
def test_a_group_limits_what_there_is(tmp_path: Path, own: str, limits: dict[str, str], expected: int) -> None:
    assert limited(tmp_path, own, limits) == expected


def test_without_groups_there_is_the_machine(tmp_path: Path) -> None:
    assert machine_bytes(tmp_path, tmp_path / "nothing") == PHYSICAL


def test_workers_share_what_there_is() -> None:
    sizes = [device.memory_bytes for device in local_devices(["cpu"] * 4).devices]
    assert sizes == [int(FOR_TENSORS * min(machine_bytes() // 4, process_bytes() or machine_bytes()))] * 4


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_DATA"), reason="the system has no such limit")
def test_a_process_has_no_more_than_its_limit() -> None:
    program = (
        "import resource; from profiler.machine.host_memory import process_bytes; "
        f"resource.setrlimit(resource.RLIMIT_DATA, ({512 * MIB}, {512 * MIB})); print(process_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 512 * MIB
