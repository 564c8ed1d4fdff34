"""Turns a model into layers and measures what each layer costs. Part of gpipe-autoplan.

    sequence = trace(model, sample)            # LayerSequence: the layers and what crosses between them
    measured = profile(sequence, devices)      # Profile: seconds and bytes of each layer

Names load on first use, so that reading a plan never waits for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler.device import Cluster, Device, Link
    from profiler.errors import (
        ArgumentError,
        ExecutionError,
        ForeignPlanError,
        InfeasibleError,
        NotTraceableError,
        PlanError,
        PlanFileError,
        ProfileError,
    )
    from profiler.measure import profile
    from profiler.record import Profile
    from profiler.tracing.sequence import LayerSequence
    from profiler.tracing.tracing import trace

__all__ = [
    "ArgumentError",
    "Cluster",
    "Device",
    "ExecutionError",
    "ForeignPlanError",
    "InfeasibleError",
    "LayerSequence",
    "Link",
    "NotTraceableError",
    "PlanError",
    "PlanFileError",
    "Profile",
    "ProfileError",
    "profile",
    "trace",
]

# Public name -> module. No module may have the name of something public: importing it would hide the other.
_HOME = {
    "ArgumentError": "profiler.errors",
    "Cluster": "profiler.device",
    "Device": "profiler.device",
    "ExecutionError": "profiler.errors",
    "ForeignPlanError": "profiler.errors",
    "InfeasibleError": "profiler.errors",
    "LayerSequence": "profiler.tracing.sequence",
    "Link": "profiler.device",
    "NotTraceableError": "profiler.errors",
    "PlanError": "profiler.errors",
    "PlanFileError": "profiler.errors",
    "Profile": "profiler.record",
    "ProfileError": "profiler.errors",
    "profile": "profiler.measure",
    "trace": "profiler.tracing.tracing",
}

if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts every name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
