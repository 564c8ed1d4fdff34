"""Prints the coverage table in Markdown: `make coverage`."""

import datetime
import os
import platform
from pathlib import Path

import torch

from profiler import PlanError
from tests.coverage.fidelity import Fidelity, Traced, measure
from tests.coverage.model_list import MODELS, Entry, transformers

HEAD = (
    "| model | kind | front end | trace | layers | distinct | narrowest | widest | most FLOPs in one layer | any cut | "
    "against eager |",
    "|---|---|---|---:|---:|---:|---:|---:|---:|---|---:|",
)


def machine() -> str:
    """The CPU's name and how many cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor() or platform.machine())}, {os.cpu_count()} cores, 1 thread"


def row(entry: Entry, found: Fidelity) -> str:
    single = ", one operation" if found.is_single else ""
    cells = (
        entry.name,
        entry.family,
        found.front_end,
        f"{found.trace_s:.1f} s",
        str(found.layers),
        str(found.distinct),
        f"{found.narrowest_bytes:,} B",
        f"{found.widest_bytes:,} B",
        f"{found.largest_share:.1%}{single}",
        "bitwise" if found.bitwise else "**differs**",
        f"{found.difference:.1e}" if found.difference else "0",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    torch.set_num_threads(1)
    print(f"`make coverage`, {datetime.datetime.now(datetime.UTC).date()}: {machine()};")
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers().__version__}.\n"
    )
    print("\n".join(HEAD))
    for entry in MODELS:
        try:
            print(row(entry, measure(Traced.of(entry.build()))), flush=True)
        except PlanError as problem:
            print(f"| {entry.name} | {entry.family} | {problem} |{' |' * 8}", flush=True)


if __name__ == "__main__":
    main()
