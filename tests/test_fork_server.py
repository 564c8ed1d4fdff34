"""A worker that is a fork finds what one that is a fresh interpreter finds, and ends as one."""

import gc
import importlib
import os
import random
import resource
import select
import signal
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from profiler.errors import ExecutionError
from profiler.machine import workers
from profiler.machine.start import start_process
from profiler.machine.workers import run_workers
from tests import fork_server
from tests.fork_server import PRELOADED, READ_LATE, ForkServer

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="workers of tests are forks on Linux")
OWN = ("GPIPE_AUTOPLAN_JOURNAL", "TORCHINDUCTOR_CACHE_DIR")  # variables that a process sets for itself
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP)


def found() -> dict[str, Any]:
    """What a worker could tell a fork by, but for what it has loaded."""
    for module in PRELOADED:
        importlib.import_module(module)
    opened = {int(path.name): path for path in Path("/proc/self/fd").iterdir()}
    output: tuple[Any, ...] = (sys.stdout, sys.stderr)
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in OWN},
        "arguments": (sys.argv[0], len(sys.argv)),
        "path": sys.path,
        "folder": str(Path.cwd()),
        "group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0),
        "descriptors": {number: stat.S_IFMT(path.stat().st_mode) for number, path in opened.items() if path.exists()},
        "standard": [str(opened[number].readlink()) for number in range(3)],
        "output": [(stream.line_buffering, stream.write_through, stream.encoding, stream.errors) for stream in output],
        "signals": [(signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN)) for number in SIGNALS],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "cores": os.sched_getaffinity(0),
        "limits": [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)],
        "flags": tuple(sys.flags),
        "filters": {str(each) for each in warnings.filters},
        "collector": (gc.isenabled(), gc.get_threshold()),
        "threads": (torch.get_num_threads(), threading.active_count(), len([*Path("/proc/self/task").iterdir()])),
        "torch": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_interop_threads()),
    }


def test_a_fork_finds_what_a_fresh_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    (forked,) = run_workers(found, [()], environment={"GPIPE_AUTOPLAN_TIMEOUT_S": "7"})
    monkeypatch.setattr(workers, "start_process", start_process)
    (fresh,) = run_workers(found, [()], environment={"GPIPE_AUTOPLAN_TIMEOUT_S": "7"})
    assert {name: (forked[name], fresh[name]) for name in fresh if forked[name] != fresh[name]} == {}


def drawn() -> tuple[float, float, float, int, bool]:
    drawn = random.random(), float(numpy.random.rand()), torch.rand(()).item()
    return *drawn, hash("any text"), PRELOADED[0] in sys.modules


def test_no_two_forks_draw_alike() -> None:
    """Nor do all of them put the members of a set into the same order."""
    *drawings, hashes, forked = zip(*run_workers(drawn, [()] * 4), strict=True)
    assert all(forked)
    assert [len(set(drawing)) for drawing in drawings] == [4, 4, 4]
    assert len(set(hashes)) > 1


def ends(how: str) -> None:
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


@pytest.mark.parametrize(("how", "words"), [("signal", "was killed by SIGKILL"), ("code", "exited with code 3")])
def test_it_is_known_how_a_fork_ended(how: str, words: str) -> None:
    with pytest.raises(ExecutionError, match=words):
        run_workers(ends, [(how,)])


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "PYTHONWARNINGS", "MALLOC_ARENA_MAX"])
def test_what_is_read_at_the_start_needs_a_fresh_process(variable: str) -> None:
    server = ForkServer({**os.environ}, preloaded=())
    try:
        assert server.suits({**os.environ, **dict.fromkeys(READ_LATE, "1")})
        assert not server.suits({**os.environ, variable: "2"})
    finally:
        server.close()


SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from fork_server import ForkServer
server = ForkServer(os.environ, preloaded=())
print(server._process.pid, flush=True)
signal.pause()
"""


def test_a_server_ends_with_the_tests_even_if_they_are_killed() -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(fork_server.__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        server = os.pidfd_open(int(tests.stdout.readline()))
        tests.kill()
    try:
        assert select.select([server], [], [], 60)[0]
    finally:
        os.close(server)


def test_a_process_that_has_not_ended_is_waited_for_as_long_as_said(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ndef main():\n    time.sleep(600)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    server = ForkServer(environment, preloaded=())
    try:
        process = server.start("sleeps", environment=environment)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == process.poll() == process.returncode == -signal.SIGTERM
        process.send_signal(signal.SIGTERM)  # it is gone: nothing happens
    finally:
        server.close()


def test_pipelines_of_a_run_over_sockets_talk_over_sockets() -> None:
    """`pytest --transport gloo --in-order`, in a run of its own."""
    own = "tests/executor/test_shared_memory.py::test_pipelines_of_tests_talk_as_their_run_says"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--transport", "gloo", "--in-order", own]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
