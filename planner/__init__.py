"""Turns a profile into a plan: cuts, stages, micro-batches, recompute. Part of gpipe-autoplan.

    plan = autoplan(model, sample, devices)    # trace, profile, plan_from_profile in a row
    print(plan)
    plan.save("plan.json")

Names load on first use, so that reading a plan never waits for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.automatic import autoplan
    from planner.explain import what_if
    from planner.from_profile import plan_from_profile
    from planner.plan.plan import Plan
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

__all__ = [
    "ArgumentError",
    "Cluster",
    "Device",
    "ExecutionError",
    "ForeignPlanError",
    "InfeasibleError",
    "Link",
    "NotTraceableError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "ProfileError",
    "autoplan",
    "plan_from_profile",
    "what_if",
]

# Public name -> module. No module may have the name of something public: importing it would hide the other.
_HOME = {
    "ArgumentError": "profiler.errors",
    "Cluster": "profiler.device",
    "Device": "profiler.device",
    "ExecutionError": "profiler.errors",
    "ForeignPlanError": "profiler.errors",
    "InfeasibleError": "profiler.errors",
    "Link": "profiler.device",
    "NotTraceableError": "profiler.errors",
    "Plan": "planner.plan.plan",
    "PlanError": "profiler.errors",
    "PlanFileError": "profiler.errors",
    "ProfileError": "profiler.errors",
    "autoplan": "planner.automatic",
    "plan_from_profile": "planner.from_profile",
    "what_if": "planner.explain",
}


def _refuse_intruders() -> None:
    """Check that `profiler` and `executor` are our siblings.

    Unrelated distributions install packages of these names, and many scripts have a folder called `profiler` next to
    them. Python would pick those up without a word and fail much later.

    Raises:
        ImportError: another package of that name stands in the way, or none was found.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("profiler", "executor"):
        spec = find_spec(name)
        if spec is None:
            raise ImportError(f"gpipe-autoplan is incomplete: no package {name!r} next to {home}; reinstall it")
        places = [*spec.submodule_search_locations] if spec.submodule_search_locations else [spec.origin or name]
        found = Path(places[0]).resolve()
        text = Path(spec.origin).read_text(encoding="utf-8", errors="replace") if spec.origin else ""
        if found == home / name and "gpipe-autoplan" in text:
            continue
        owner = _distribution_of(found)
        origin = f"of the distribution {owner!r}" if owner else f"(PyPI has an unrelated distribution {name!r}, too)"
        raise ImportError(
            f"gpipe-autoplan found another package {name!r} where its own should be: {spec.origin or found} {origin}; "
            f"expected {home / name}. Install gpipe-autoplan in a fresh virtual environment; if the other package "
            "lies next to your script, start it with `python -P`, or rename that folder"
        )


def _distribution_of(package: Path) -> str | None:
    """Name of the distribution that installed a package, if its folder tells; ours is no answer."""
    from importlib.metadata import distributions  # slow to import, and only needed here

    for distribution in distributions(path=[str(package.parent)]):
        name = distribution.metadata["Name"]
        owned = {file.parts[0] for file in distribution.files or ()}
        if name != "gpipe-autoplan" and not owned.isdisjoint({package.name, package.with_suffix(".py").name}):
            return name
    return None


_refuse_intruders()

if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts every name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
