"""The most memory that a process has held."""

from pathlib import Path


def peak_resident_bytes() -> int:
    """Of this process, since its program began.

    `resource.getrusage` says what the process held that started it, if that was more: it survives fork and exec.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
