"""How much memory processes may have here: the machine's, or less where a container, a job or a limit says so."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
LIMITS = ("RLIMIT_DATA", "RLIMIT_AS")
"""Of one process, where the system has them."""


def machine_bytes(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """What all processes here may have together.

    Args:
        cgroups: where the system shows the limits of control groups; a container is one.
        own: what the system says of the groups of this process.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_group_limits(cgroups, own)])


def process_bytes() -> int | None:
    """What one process may have, if it is limited; the processes that it starts are, too."""
    limits = [resource.getrlimit(getattr(resource, name))[0] for name in LIMITS if hasattr(resource, name)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def _group_limits(cgroups: Path, own: Path) -> Iterator[int]:
    """Of the groups of this process and of those around them, in both versions of the system's interface."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):  # a container sees its own group as the root
            try:
                said = (root / folder / file).read_text().strip()
            except OSError:
                continue
            if said.isdigit():  # and not "max"
                yield int(said)
