"""What holds for every test: no windows, no deadlines, and no GPU test where there is no GPU."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.fork_server import IN_ORDER, READ_LATE, TRANSPORT, forks
from tests.processor_time import Durations, mark_slow

os.environ["COLUMNS"] = "110"  # what the command prints is as wide as the terminal
os.environ["MPLBACKEND"] = "Agg"  # draw into memory; subprocesses inherit it
os.environ["GPIPE_AUTOPLAN_CACHE"] = "off"  # tests measure, and leave the user's cache alone
# As tests.coverage.model_list sets them. Here, so that no test changes the environment: see `environment_stays`.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

# A shared machine pauses at any moment: a deadline would only measure that.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")

FRESH = ("fresh_processes", "gpu", "benchmark")  # tests with one of these marks have workers as users have them
_GPU_FOLDER = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to-list", action="store_true", help="add to tests/slow.txt")
    parser.addoption("--transport", help="of pipelines in several processes that ask for none")
    parser.addoption("--in-order", action="store_true", help="their messages are in the order of calls, as NCCL's are")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--transport"):
        os.environ[TRANSPORT] = config.getoption("--transport")
    if config.getoption("--in-order"):
        os.environ[IN_ORDER] = "1"
    if config.getoption("--durations-to-list"):
        config.pluginmanager.register(Durations())


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items)


def pytest_itemcollected(item: pytest.Item) -> None:
    if _GPU_FOLDER in item.path.parents:
        item.add_marker(pytest.mark.gpu)


def pytest_collection_finish() -> None:
    """The garbage collector need not look through what all tests have imported, nor after each 700 new objects.

    It took 4.3 of 46 s of processor time of tests that trace models, and so takes 1.8 s [measured].
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def start_fork() -> Iterator[Callable[..., Any]]:
    with forks() as start:
        yield start


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """A test that leaves a variable behind makes the workers of all later tests fresh interpreters.

    The first test that imported transformers did: each worker of a later test took 3 s of processor time, not 0.4 s.
    """
    before = dict(os.environ)
    yield
    changed = {name for name in {*before, *os.environ} - READ_LATE if before.get(name) != os.environ.get(name)}
    assert changed == set()


@pytest.fixture(autouse=True)
def workers_are_forks(
    request: pytest.FixtureRequest,
    environment_stays: None,  # `monkeypatch` ends first, with what the test has set by it
    monkeypatch: pytest.MonkeyPatch,
    start_fork: Callable[..., Any],
) -> None:
    """Workers of tests start in no time; those of tests that are about processes are fresh interpreters."""
    if hasattr(os, "pidfd_open") and not any(map(request.node.get_closest_marker, FRESH)):
        for module in ("workers", "background_load"):
            monkeypatch.setattr(f"profiler.machine.{module}.start_process", start_fork)


@pytest.fixture
def nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are measured without busy neighbours, and a link is made up: most of what measuring a small model takes.

    For tests of neither; processes, loads and links have tests of their own.
    """
    from profiler import Link

    monkeypatch.setattr("profiler.measure.measure_link", lambda *_, **__: Link(latency_s=1e-5, bytes_per_s=1e9))
    monkeypatch.setattr("profiler.measured_kind.neighbours", lambda *_, **__: contextlib.nullcontext(lambda: None))


@pytest.fixture
def script(start_fork: Callable[..., Any]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`script(path, "argument")` like `python path argument`, in a fork that has loaded what such scripts load.

    For scripts of which it does not matter how their interpreter starts, which takes 3 s of processor time.
    """
    from profiler.machine.workers import KEEP_FREED_MEMORY

    search_path = [entry for entry in sys.path if entry]
    environment = {**KEEP_FREED_MEMORY, **os.environ, "OMP_NUM_THREADS": "1"}

    def call(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            files = (output.fileno(), errors.fileno())
            if hasattr(os, "pidfd_open"):
                process = start_fork(
                    str(path), *arguments, environment=environment, output=files, search_path=search_path
                )
            else:
                environment["PYTHONPATH"] = os.pathsep.join(search_path)
                command = [sys.executable, str(path), *arguments]
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
            try:
                code = process.wait(300)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                raise
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess([str(path), *arguments], code, output.read(), errors.read())

    return call


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python("-c", "print(1)")` in a fresh interpreter, in an empty folder outside the repository."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)

    return call
