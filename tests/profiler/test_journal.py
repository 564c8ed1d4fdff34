"""The page that says what a process is at."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from profiler.machine.journal import ForeignJournal, Journal

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="journals are found by way of /proc")

OTHER = """
import sys
from profiler.machine.journal import Journal
journal = Journal()
journal.write(1, 2, 3)
print(*journal.address, flush=True)
for line in sys.stdin:
    journal.write(*map(int, line.split()))
    print(flush=True)
"""


def test_the_journal_of_another_process_is_read_after_its_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        limit = threading.Timer(60, other.kill)
        limit.start()
        assert other.stdin is not None
        assert other.stdout is not None
        process, descriptor, key = map(int, other.stdout.readline().split())
        found = ForeignJournal((process, descriptor, key))
        assert found.read() == (1, 1, 2, 3, 0, 0, 0)
        other.stdin.write("4 5 6 7 8 9\n")
        other.stdin.flush()
        other.stdout.readline()
        other.kill()
        other.wait(timeout=60)
        limit.cancel()
    assert found.read() == (2, 4, 5, 6, 7, 8, 9)


def test_a_page_of_another_process_is_not_taken_for_the_journal() -> None:
    journal = Journal()
    process, descriptor, key = journal.address
    with pytest.raises(FileNotFoundError, match="another one"):
        ForeignJournal((process, descriptor, key + 1))
    reading, writing = os.pipe()
    with pytest.raises(FileNotFoundError, match="another one"):
        ForeignJournal((process, reading, key))
    os.close(reading)
    os.close(writing)
