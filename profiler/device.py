"""Devices, links and clusters: what stages run on and what lies between them.

Torch-free on purpose: plans carry these values, and `autoplan show` must answer without importing torch.
"""

from pydantic import Field

from profiler.value import Value


class Device(Value):
    """Something that runs one stage.

    Attributes:
        name: the torch device string that the executor uses, `"cpu"` or `"cuda:1"`.
        kind: devices of equal kind run equally fast, so each kind is profiled once (`"cpu/1 thread"`, `"NVIDIA H200"`).
        memory_bytes: memory that a stage may fill.
        threads: threads that a CPU worker computes with; 0 for devices that are not CPUs.
    """

    name: str
    kind: str
    memory_bytes: int = Field(gt=0)
    threads: int = Field(default=0, ge=0)


class Link(Value):
    """A point-to-point connection between two ranks: a message of n bytes takes `latency_s + n / bytes_per_s`.

    Attributes:
        latency_s: seconds that an empty message takes.
        bytes_per_s: bandwidth.
        error: largest relative distance between the fitted line and a measured size (0 where nothing was fitted).
    """

    latency_s: float = Field(ge=0)
    bytes_per_s: float = Field(gt=0)
    error: float = Field(default=0.0, ge=0)

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds that a message of `size_bytes` takes; 0 when there is nothing to send."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes else 0.0


class Cluster(Value):
    """Devices in pipeline order (stage k runs on `devices[k]`) and the link between neighbours.

    Attributes:
        devices: at least one device.
        link: None when it was not measured yet; a plan of one stage needs none.
    """

    devices: tuple[Device, ...] = Field(min_length=1)
    link: Link | None = None
