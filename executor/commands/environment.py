"""`autoplan env`: what a maintainer asks first, as a block to paste into an issue."""

from __future__ import annotations

import json
import os
import platform
import sys

import click

from executor.commands.output import json_option

_PACKAGES = ("gpipe-autoplan", "torch", "numpy", "numba", "scipy", "pandas", "networkx", "pydantic", "transformers")
_VARIABLES = (
    "GPIPE_AUTOPLAN_",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_",
    "GLOO_",
    "TORCH_",
)


@click.command()
@json_option
def env(as_json: bool) -> None:
    """Print versions, devices and settings, to paste into an issue.

    \b
    Examples:
      autoplan env
      autoplan env --json
    """
    if as_json:
        click.echo(json.dumps(dict(_facts()), indent=2))
        return
    for name, value in _facts():
        click.echo(f"{name:<16} {value}")


def _facts() -> list[tuple[str, str]]:
    from profiler.machine.local import local_devices
    from profiler.machine.workers import usable_cores

    facts = [
        ("python", f"{platform.python_version()} ({sys.platform}, {platform.machine()})"),
        *((name, _version(name)) for name in _PACKAGES),
        ("cores", f"{len(usable_cores())} of {os.cpu_count()} usable"),
    ]
    facts.extend(
        (f"device {device.name}", f"{device.kind}, {device.memory_bytes / 2**30:.1f} GiB")
        for device in local_devices().devices
    )
    facts.extend((name, value) for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES))
    return facts


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
