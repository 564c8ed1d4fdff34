"""A kind of device is one class."""

import pytest
import torch

from profiler.device import Device
from profiler.errors import ArgumentError
from profiler.machine.backend import BACKENDS, backend_of, ends_by_abort, process_groups
from profiler.machine.cpu import Cpu
from profiler.machine.cuda import Cuda
from profiler.machine.local import local_devices
from profiler.observe.random_states import preserved


def test_each_kind_of_device_has_one() -> None:
    assert isinstance(backend_of("cpu"), Cpu)
    assert isinstance(backend_of("cuda:3"), Cuda)
    assert backend_of(torch.device("meta")) is backend_of("cpu")
    with pytest.raises(KeyError):
        backend_of("mps")


def test_the_peak_of_a_call_is_what_its_tensors_take() -> None:
    def call() -> torch.Tensor:
        first = torch.ones(1000)
        return first + torch.ones(1000)

    assert backend_of("cpu").peak_of(torch.device("cpu"), call)[1] == 3 * 4000


def test_what_was_there_before_counts_while_watching() -> None:
    held = [torch.ones(500), torch.ones(500)]
    with backend_of("cpu").watching(torch.device("cpu"), [*held, held[0][:1]]) as found:
        torch.ones(1000).add(1)
    assert found.peak_bytes >= 2 * 2000 + 2 * 4000


def test_what_lies_on_the_host_is_there_at_once() -> None:
    tensor = torch.ones(3)
    moved, has_arrived = backend_of("cpu").to_host(tensor)
    assert moved is tensor
    assert has_arrived()


@pytest.mark.parametrize(("libraries", "ends"), [("gloo", False), ("nccl", True), ("cpu:gloo,cuda:nccl", True)])
def test_waits_end_by_abort_where_a_library_lets_them(libraries: str, ends: bool) -> None:
    assert ends_by_abort(libraries) is ends


class Counting(Cpu):
    """A kind of device that computes on the host, of which there are two."""

    type = "xpu"
    is_host = False
    keeps_order = True
    process_group = "gloo"

    def count(self) -> int:  # type: ignore[override]
        return 2

    drawn_from = torch.Generator()

    def generator(self, device: torch.device) -> torch.Generator:
        return self.drawn_from

    def described(self, device: torch.device, threads: int, sharing: int) -> Device:
        return Device(name=str(device), kind="made up", memory_bytes=1)


def test_a_new_kind_is_one_class_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Counting()
    monkeypatch.setitem(BACKENDS, "xpu", new)
    assert backend_of("xpu:1") is new
    assert process_groups() == "cpu:gloo,xpu:gloo"
    assert [device.name for device in local_devices(2).devices] == ["xpu:0", "xpu:1"]
    with pytest.raises(ArgumentError, match="this machine has 2 XPU devices"):
        local_devices(3)


def test_random_states_are_those_of_the_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile took CUDA's states, whatever the devices: on a third kind it ended in torch's CUDA."""
    monkeypatch.setitem(BACKENDS, "xpu", Counting())
    before = torch.rand(3, generator=Counting.drawn_from.manual_seed(5))
    Counting.drawn_from.manual_seed(5)
    with preserved([torch.device("xpu:1")]):
        torch.rand(3, generator=Counting.drawn_from)
    assert torch.equal(torch.rand(3, generator=Counting.drawn_from), before)
