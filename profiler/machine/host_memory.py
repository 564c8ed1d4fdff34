"""How much memory processes may have here: the machine's, or less where a container, a job or a limit says so."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MACHINE = Path("/proc/meminfo")
LIMITS = ("RLIMIT_DATA", "RLIMIT_AS")
"""Of one process, where the system has them."""


def machine_bytes(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """What all processes here may have together.

    Args:
        cgroups: where the system shows the limits of control groups; a container is one.
        own: what the system says of the groups of this process.
    """
    return min([_physical_bytes(), *(group.limit_bytes for group in _limited_groups(cgroups, own))])


def process_bytes() -> int | None:
    """What one process may have, if it is limited; the processes that it starts are, too."""
    limits = [resource.getrlimit(getattr(resource, name))[0] for name in LIMITS if hasattr(resource, name)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def room(cgroups: Path = CGROUPS, own: Path = OWN, machine: Path = MACHINE) -> tuple[int, int]:
    """How many bytes processes here may have together, and how many of them are left, where the smallest share is.

    Pages of files are left: the system drops them where it needs their memory.

    Args:
        cgroups: as `machine_bytes` has them.
        own: likewise.
        machine: what the system says of the machine's memory.
    """
    rooms = []
    for group in _limited_groups(cgroups, own):
        with contextlib.suppress(OSError, ValueError):  # the group is gone, or says nothing of what it holds
            rooms.append((group.limit_bytes, group.left_bytes()))
    with contextlib.suppress(OSError, KeyError):
        said = _numbers(machine, unit_bytes=1024)
        rooms.append((said["MemTotal:"], said["MemAvailable:"]))
    return min(rooms, key=lambda one: one[1] / one[0], default=(_physical_bytes(), _physical_bytes()))


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True)
class _Group:
    """A control group with a limit.

    Attributes:
        limit_bytes: that its processes may have together.
        used: the file that says what they have.
        parts: the file that says what that consists of.
        of_files: the names of its parts that are pages of files.
    """

    limit_bytes: int
    used: Path
    parts: Path
    of_files: tuple[str, ...]

    def left_bytes(self) -> int:
        """What its processes may still have; what it consists of is read only where little is left without."""
        left = self.limit_bytes - int(self.used.read_text())
        if left < self.limit_bytes // 4:
            parts = _numbers(self.parts, unit_bytes=1)
            left += sum(parts.get(name, 0) for name in self.of_files)
        return left


def _limited_groups(cgroups: Path, own: Path) -> Iterator[_Group]:
    """The groups of this process and those around them that have a limit, in both versions of the interface."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, total = cgroups, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, used, total = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):  # a container sees its own group as the root
            try:
                said = (root / folder / limit).read_text().strip()
            except OSError:
                continue
            if said.isdigit():  # and not "max"
                parts = (f"{total}active_file", f"{total}inactive_file")
                yield _Group(int(said), root / folder / used, root / folder / "memory.stat", parts)


def _numbers(file: Path, unit_bytes: int) -> dict[str, int]:
    """What lines of a name and a number say."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: unit_bytes * int(words[1]) for words in lines if len(words) > 1}
