"""What users pass as devices."""

from typing import Any

import pytest
import torch

from profiler.device import Cluster, Device
from profiler.errors import ArgumentError
from profiler.machine.cpu import OWN_BYTES
from profiler.machine.local import local_devices, torch_device
from profiler.measured_sizes import measured_sizes


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda_the_default_is_two_workers_of_one_thread() -> None:
    first, second = local_devices().devices
    assert first == second
    assert (first.name, first.kind, first.threads) == ("cpu", "cpu/1 thread", 1)


@pytest.mark.usefixtures("no_cuda")
def test_a_count_means_cpu_workers_that_share_the_memory() -> None:
    one = local_devices(1).devices[0]
    four = local_devices(4, threads=2).devices
    assert len(four) == 4
    assert four[0].kind == "cpu/2 threads"
    whole = one.memory_bytes + OWN_BYTES
    assert whole - 4 <= 4 * (four[0].memory_bytes + OWN_BYTES) <= whole + 4, "each has libraries of its own"


def test_names_devices_and_clusters() -> None:
    own = Device(name="cpu", kind="fast", memory_bytes=7, threads=3)
    cluster = local_devices(["cpu", torch.device("cpu"), own])
    assert [device.kind for device in cluster.devices] == ["cpu/1 thread", "cpu/1 thread", "fast"]
    assert local_devices(cluster) is cluster
    assert local_devices("cpu, cpu") == local_devices(["cpu", "cpu"])
    assert torch_device(own) == torch.device("cpu")


def test_more_cuda_devices_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match=r"devices=3, but this machine has 2 CUDA devices; ask for at most 2"):
        local_devices(3)
    with pytest.raises(ArgumentError, match=r"'cuda:5' is not on this machine, which has 2 CUDA devices"):
        local_devices(["cuda:5"])


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, "devices=0, at least 1 is needed"),
        (-3, "devices=-3, at least 1 is needed"),
        ([], "holds 0 devices, at least 1"),
        ("gpu", "no data sheet of a device 'gpu'; .*; devices of this machine have names such as 'cpu'"),
        ("cpu, gpu", "'gpu' is not a torch device"),
        (True, "is a bool; pass a count"),
        (2.0, "is a float; pass a count"),
        ([7], "holds a int, 7; pass a count"),
        (["tpu:0"], "'tpu:0' is not a torch device"),
        (["meta"], "device 'meta' cannot run a stage"),
    ],
)
def test_what_is_no_device(devices: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        local_devices(devices)


def test_workers_without_threads() -> None:
    with pytest.raises(ArgumentError, match="threads=0; a CPU worker computes with at least 1 thread"):
        local_devices(1, threads=0)


def test_more_threads_than_a_system_starts() -> None:
    with pytest.raises(ArgumentError, match="threads=1000000; a CPU worker computes with at most 1024 threads"):
        local_devices(1, threads=10**6)


def _cluster(count: int) -> Cluster:
    return Cluster(devices=(Device(name="cpu", kind="cpu", memory_bytes=1, threads=1),) * count)


@pytest.mark.parametrize(
    ("batch", "devices", "sizes"),
    [
        (1, 2, (1,)),
        (8, 2, (1, 2)),
        (32, 2, (1, 2, 4, 8)),
        (100, 3, (1, 2, 4, 8, 12, 16, 25)),
        (30, 1, (1, 2, 4, 7, 8)),
    ],
)
def test_sizes_by_default(batch: int, devices: int, sizes: tuple[int, ...]) -> None:
    assert measured_sizes(batch, None, _cluster(devices)) == sizes


def test_sizes_that_the_user_asks_for() -> None:
    assert measured_sizes(16, [4, 2, 4], _cluster(1)) == (2, 4)
    assert measured_sizes(16, [1], _cluster(1)) == (1,)
    assert measured_sizes(16, [8, 1], _cluster(1)) == (1, 2, 8)


@pytest.mark.parametrize(
    ("batch", "sizes", "message"),
    [
        (0, None, "batch_size: 0 is no size"),
        (-4, None, "batch_size: -4 is no size"),
        (8, [], "holds 0 sizes, at least 1 is needed"),
        (8, [0], "micro_batch_sizes: 0 is no size"),
        (8, [16], "holds 16, but the batch has 8 samples"),
        (8, "4", "is not a list"),
    ],
)
def test_sizes_that_mean_nothing(batch: int, sizes: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        measured_sizes(batch, sizes, _cluster(1))
