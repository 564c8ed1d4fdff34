"""What schedules gain on devices whose messages are not copied by the threads that compute: two halves of one card.

CUDA's multi-process service lets two processes compute on a card at the same time, each on half of its multiprocessors;
they share its memory's bandwidth. Messages go through sockets, as in `test_ranks_on_a_card.py`.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import halves_of_a_card

SHARE = 0.8  # of the predicted gain, what is to be measured
CONTROL = shutil.which("nvidia-cuda-mps-control")


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of processes that have half of the card each."""
    if CONTROL is None:
        pytest.skip("needs nvidia-cuda-mps-control")
    folders = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "log")}
    for folder in folders.values():
        Path(folder).mkdir()
    service = {**os.environ, **folders}
    subprocess.run([CONTROL, "-d"], env=service, check=True)
    try:
        yield {
            **service,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
    finally:
        subprocess.run([CONTROL], env=service, input="quit\n", text=True, check=True)


def test_gains_over_1f1b_are_as_predicted(halves: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", halves_of_a_card.__name__], env=halves, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:  # as they come: the session on a card may end before
            print(line, end="", flush=True)
            lines.append(line)
    assert process.returncode == 0
    worth = [row for row in json.loads(lines[-1]) if row["predicted"] >= halves_of_a_card.WORTH]
    assert worth
    assert [row for row in worth if row["gain"] < SHARE * row["predicted"]] == []
