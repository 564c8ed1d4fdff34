"""Ctrl-C while torch is imported, and readers that go away: a command ends as programs do."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.commands.interruption import interruption_later

PLAN = Path(__file__).parents[2] / "notebooks" / "plan.json"


@pytest.fixture
def pythons_own() -> Iterator[None]:
    """Who starts the tests in the background has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own")
def test_an_interruption_waits_for_the_end() -> None:
    """In the midst of numpy's import it was taken for the absence of numpy, and the next import failed."""
    reached = False
    with pytest.raises(KeyboardInterrupt), interruption_later():
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interruption_later():
        pass


@pytest.mark.parametrize("command", ["show", "explain", "diff"])
def test_a_reader_that_has_gone_is_no_failure(command: str) -> None:
    """Rich ends the process with 1 by itself."""
    given = [str(PLAN)] * (2 if command == "diff" else 1)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from executor.command import main; main()", command, *given],
            stdout=writing, stderr=subprocess.PIPE, cwd=PLAN.parents[1], check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
