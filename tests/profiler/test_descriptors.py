"""Standard output and error that are closed disturb nothing."""

import os
import subprocess
import sys

import pytest

from profiler import Cluster, profile, trace

HELD = """
import os, sys
from profiler.machine.descriptors import hold_standard_descriptors
hold_standard_descriptors()
found = [os.open(os.devnull, os.O_RDONLY)]
os.write(1, b"%d %s" % (found[0], str(sys.stderr).encode()))
"""


def test_nothing_gets_the_number_of_standard_error() -> None:
    """With `2>&-` a socket to another process got it, and with it what C++ prints on standard error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", HELD]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    number, stderr = said.split()
    assert int(number) > 2 and stderr == "None"


def test_a_profile_is_made_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar ended it: 'NoneType' object has no attribute 'write'."""
    import torch

    sequence = trace(torch.nn.Linear(4, 4), torch.ones(2, 4))
    monkeypatch.setattr(sys, "stderr", None)
    profile(sequence, Cluster.of("2xA100-40GB", link="nvlink3"), micro_batch_sizes=[1])
