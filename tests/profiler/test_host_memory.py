"""A container's memory is less than its machine's: plans for CPU workers took all of the machine's, and were killed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from profiler import profile, trace
from profiler.machine.cpu import COMMON_BYTES, OPERATION_BYTES, OWN_BYTES, for_tensors
from profiler.machine.host_memory import machine_bytes, process_bytes, room
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
    share_bytes = min(machine_bytes() // 4, process_bytes() or machine_bytes())
    assert sizes == [for_tensors(share_bytes, COMMON_BYTES // 4)] * 4


def test_libraries_take_more_of_less() -> None:
    assert for_tensors(16 * 2**30, 0) > 0.91 * (16 * 2**30)
    assert for_tensors(2**30) < 2**30 - OWN_BYTES - COMMON_BYTES
    assert for_tensors(256 * MIB) == 256 * MIB // 10


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_DATA"), reason="the system has no such limit")
def test_a_process_has_no_more_than_its_limit() -> None:
    program = (
        "import resource; from profiler.machine.host_memory import process_bytes; "
        f"resource.setrlimit(resource.RLIMIT_DATA, ({512 * MIB}, {512 * MIB})); print(process_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 512 * MIB


@pytest.mark.parametrize(
    ("own", "said", "expected"),
    [
        ("0::/", {"memory.max": "64", "memory.current": "20", "memory.stat": "anon 5\nactive_file 9"}, (64, 44)),
        ("0::/", {"memory.max": "64", "memory.current": "60", "memory.stat": "active_file 9\ninactive_file 3"},
         (64, 16)),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "64", "memory/memory.usage_in_bytes": "60",
                        "memory/memory.stat": "active_file 9\ntotal_active_file 7\n"}, (64, 11)),
        ("0::/a", {"a/memory.max": "64", "a/memory.current": "1", "memory.max": "80", "memory.current": "79",
                   "memory.stat": "anon 79"}, (80, 1)),
        ("0::/", {"memory.max": "64"}, (2000 * 1024, 1990 * 1024)),
        ("0::/", {"memory.max": "max"}, (2000 * 1024, 1990 * 1024)),
    ],
)  # fmt: skip
def test_room_is_what_is_left_where_least_is(
    tmp_path: Path, own: str, said: dict[str, str], expected: tuple[int, int]
) -> None:
    limited(tmp_path, own, said)
    (tmp_path / "machine").write_text("MemTotal: 2000 kB\nMemFree: 1 kB\nMemAvailable: 1990 kB\n")
    assert room(tmp_path / "groups", tmp_path / "own", tmp_path / "machine") == expected


def test_without_a_word_of_the_system_all_is_left(tmp_path: Path) -> None:
    assert room(tmp_path, tmp_path / "nothing", tmp_path / "nothing") == (PHYSICAL, PHYSICAL)
    whole, left = room()
    assert 0 < left <= whole <= PHYSICAL


def test_a_plan_counts_what_the_graph_takes_of_a_workers_memory() -> None:
    """A worker of 1 GiB whose graph had 2,700 operations was killed: 136 MiB of it were in no plan."""
    sequence = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.zeros(2, 4))
    found = profile(sequence, ["cpu"], batch_size=2, loss_fn=nn.functional.mse_loss, target=torch.zeros(2, 1))
    assert found.reserve_bytes == len(sequence.operations) * OPERATION_BYTES > 0


GRAPH = """
import ctypes, gc, torch
from torch import nn
from profiler import trace

def resident_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def traced(blocks):
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(blocks)]
        return trace(nn.Sequential(*layers), torch.zeros(4, 8, 32, device="meta"))

one = traced(1)
before = resident_bytes()
many = traced(12)
print(resident_bytes() - before, len(many.operations))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process holds")
def test_a_graph_takes_no_more_than_that() -> None:
    done = subprocess.run([sys.executable, "-c", GRAPH], capture_output=True, text=True, check=True)
    taken_bytes, operations = map(int, done.stdout.split())
    assert operations > 100
    assert taken_bytes < operations * OPERATION_BYTES, f"{taken_bytes / operations:.0f} bytes an operation"
