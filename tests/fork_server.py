"""Workers of tests are forks of a process that has loaded what they load first, which takes a fresh one three seconds.

    test                              server (a fresh interpreter without threads, which has traced a model)
    start(module, ...)  -- request, descriptors -->  fork --> main() of the module
                        <-- number of the process --
    wait()              <-- how it has ended, over a channel of its own --

A fork finds what a fresh process would: its environment, arguments, folder, cores and descriptors, a group of its own,
and random numbers that nobody else draws. Only the seed of Python's hashes is the server's, so two servers take turns:
ranks still disagree on the order of a set. What is read when an interpreter starts cannot be changed in a fork; where
it differs, a fresh process is started.

The processes of one run of the tests have one pair of servers together, which the first that needs them starts. What
many ranks trace alike, their server has traced before (`tests.executor.known_traces`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import inspect
import itertools
import json
import os
import runpy
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

# What workers import, and what they import when they trace.
PRELOADED = (
    "torch._dynamo",
    "torch.export._trace",
    "profiler.machine.worker_main",
    "profiler.machine.busy_work",
    "profiler.machine.links",
    "profiler.tracing.tracing",
    "executor.pipeline",
    "executor.checkpoint",
    "pytest",  # the modules of tests import it
)
# Variables that are read when they are needed, not when an interpreter starts or a library is loaded.
READ_LATE = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "GPIPE_AUTOPLAN_CACHE",
    "GPIPE_AUTOPLAN_TIMEOUT_S",
    "PYTEST_CURRENT_TEST",
    "PYTEST_XDIST_WORKER",
    "TORCHELASTIC_RUN_ID",
    "GPIPE_TEST_TRACE",  # INHERITED
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it when it first asks for it
}
SERVERS = 2
INHERITED = "GPIPE_TEST_TRACE"
"""Variable that names what forks inherit: search path, module, function and its text argument, a line each."""
TRANSPORT = "GPIPE_TEST_TRANSPORT"
"""Variable that names the transport of all pipelines in forks that ask for none; see `pytest --transport`."""
IN_ORDER = "GPIPE_TEST_IN_ORDER"
"""Variable that is set where messages on the CPU are to be begun in the order of NCCL's; see `pytest --in-order`."""
RUN = "PYTEST_XDIST_TESTRUNUID"  # names a run of the tests in all its processes
LONGEST_START_S = 300.0  # a server that loads what it preloads on a busy machine
_LONGEST_REQUEST_BYTES = 2**18


@contextlib.contextmanager
def forks() -> Iterator[Callable[..., Any]]:
    """What stands in for `profiler.machine.start.start_process`; its servers start with the first process.

    With `script` for a module it runs a script, as `python script arguments` does; see `ForkServer.start`.
    """
    from profiler.machine.start import start_process
    from profiler.machine.workers import KEEP_FREED_MEMORY

    at_start = {**KEEP_FREED_MEMORY, **os.environ, "OMP_NUM_THREADS": "1"}
    servers: list[ForkServer] = []
    turns = itertools.cycle(range(SERVERS))

    def start(module: str, *arguments: str, environment: Mapping[str, str], **settings: Any) -> Any:
        if not servers:
            run = os.environ.get(RUN)
            addresses = [f"\0gpipe-autoplan-{run}-{number}" if run else "" for number in range(SERVERS)]
            servers.extend(ForkServer(at_start, address=address) for address in addresses)
        server = servers[next(turns)]
        how = server.start if server.suits(environment) else start_process
        return how(module, *arguments, environment=environment, **settings)

    try:
        yield start
    finally:
        for server in servers:
            server.close()


@dataclass(frozen=True)
class Request:
    """What a fork is to be.

    Attributes:
        module: whose `main` it calls; with a search path the script that it runs.
        arguments: `sys.argv[1:]` there.
        environment: all variables.
        folder: the current one.
        cores: that it may run on.
        descriptors: the numbers at which it finds those that come with the request.
        search_path: of a script; empty for a module.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]
    descriptors: list[int]
    search_path: list[str]


class Fork:
    """A process that a server has forked; like `subprocess.Popen`.

    Args:
        pid: its number, which stays taken until the channel is closed.
        channel: over which its server says how it has ended.
    """

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel

    def poll(self) -> int | None:
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, signal_number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal_number)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._channel], [], [], timeout_s)[0]:
            code = self._channel.recv(32)
            if not code:
                raise RuntimeError(f"the server has ended before process {self.pid}")
            self.returncode = int(code)
            self._channel.close()
        return self.returncode


class ForkServer:
    """A server, seen by the tests; it ends with this process, or with the last of those that share it.

    Args:
        environment: of forks, but for what is read late.
        preloaded: modules that forks have at hand.
        address: where processes that share it find it, in Linux's abstract namespace; empty for one of our own.
    """

    def __init__(
        self, environment: Mapping[str, str], preloaded: Sequence[str] = PRELOADED, *, address: str = ""
    ) -> None:
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        if address:
            self._requests = self._found_or_started(address, preloaded)
        else:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._start(theirs, preloaded)
        self._requests.settimeout(LONGEST_START_S)

    def _found_or_started(self, address: str, preloaded: Sequence[str]) -> socket.socket:
        """A connection to the server at an address, which one process alone can take."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError):  # another has it
            listener.bind(address)
            listener.listen()
            self._start(listener, preloaded)
        listener.close()
        deadline = time.monotonic() + LONGEST_START_S
        while True:
            requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                requests.connect(address)
                return requests
            except ConnectionRefusedError:  # it does not listen yet
                requests.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _start(self, theirs: socket.socket, preloaded: Sequence[str]) -> None:
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).resolve()), str(theirs.fileno()), *preloaded],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the tests
            )

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork with this environment is like a fresh process."""
        own = self._environment
        return all(own.get(name) == environment.get(name) for name in {*own, *environment} - READ_LATE)

    def start(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        output: tuple[int, int] = (1, 2),
        search_path: Sequence[str] = (),
    ) -> Fork:
        """Like `profiler.machine.start.start_process`; with a search path, `module` is the path of a script.

        Args:
            output: descriptors that become standard output and standard error.
        """
        channel, theirs = socket.socketpair()
        numbers = [0, 1, 2, *descriptors]
        cores = sorted(os.sched_getaffinity(0))
        folder = str(Path.cwd())
        request = Request(module, list(arguments), dict(environment), folder, cores, numbers, list(search_path))
        with theirs, Path(os.devnull).open() as nothing:
            sent = [nothing.fileno(), *output, *descriptors, theirs.fileno()]
            socket.send_fds(self._requests, [json.dumps(asdict(request)).encode()], sent)
        return Fork(int(self._requests.recv(32)), channel)

    def close(self) -> None:
        """End the server if nobody else has it; forks end with their parent."""
        self._requests.close()
        if self._process is not None:
            self._process.wait()


def serve(given: socket.socket) -> Request | None:
    """Fork once for each request: returns in each fork, and with None when nobody is left to ask.

    Args:
        given: a connection to the one process that asks, or where several connect.
    """
    listeners, clients = ([given], []) if _listens(given) else ([], [given])
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that says that it has ended
    ended: dict[socket.socket, int] = {}  # and have been told of; their numbers stay taken until that has been heard
    while True:
        watched: list[Any] = [*listeners, *clients, *running, *ended]
        ready = select.select(watched, [], [])[0]
        for about in ready:
            if about in ended:
                os.waitpid(ended.pop(about), 0)
                about.close()
            elif about in running:
                process, channel = running.pop(about)
                os.close(about)
                ended[channel] = process
                with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                    channel.send(str(_code_of(process)).encode())
        for listener in set(listeners).intersection(ready):
            client, _ = listener.accept()
            if _is_ours(client):
                clients.append(client)
        for requests in [client for client in clients if client in ready]:
            message, received, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST_BYTES, 250)
            if not message:
                requests.close()
                clients.remove(requests)
                if not clients:
                    return None
                continue
            request = Request(**json.loads(message))
            *descriptors, channel_descriptor = received
            _make(request.environment.get(INHERITED, ""))
            process = os.fork()
            if not process:
                for each in (*listeners, *clients, *ended, *(channel for _, channel in running.values())):
                    each.close()  # before its number is another's
                _become(request, descriptors)
                return request
            os.setpgid(process, process)  # here too, so that it has its group when its parent knows its number
            for descriptor in descriptors:
                os.close(descriptor)
            running[os.pidfd_open(process)] = process, socket.socket(fileno=channel_descriptor)
            requests.send(str(process).encode())


@cache
def _make(inherited: str) -> None:
    """Trace what this and later forks inherit, unless that was done."""
    if inherited:
        path, *named = inherited.split("\n")
        own, sys.path[:] = list(sys.path), path.split(os.pathsep)
        importlib.import_module("tests.executor.known_traces").make(*named)
        sys.path[:] = own
        gc.freeze()


def _listens(given: socket.socket) -> bool:
    return bool(given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_ours(client: socket.socket) -> bool:
    """Whether a process of this user's has connected: anybody can."""
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        client.close()
    return bool(user == os.getuid())


def _code_of(process: int) -> int:
    """How a process has ended, as `subprocess` puts it."""
    status = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _become(request: Request, descriptors: Sequence[int]) -> None:
    """Be in a fork what the request asks for."""
    os.setpgid(0, 0)
    free = max(request.descriptors) + 1
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free) for descriptor in descriptors]
    for descriptor, number in zip(aside, request.descriptors, strict=True):
        os.dup2(descriptor, number)
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if number not in request.descriptors:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(number)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cores)
    sys.argv[:] = ["-c", *request.arguments]
    if INHERITED in os.environ:
        sys.modules["tests.executor.known_traces"].inherit()
    for library in ("numpy.random", "torch.random"):  # Python seeds its own random numbers anew in a fork
        if library in sys.modules:
            sys.modules[library].seed()


def _load_what_tracing_loads() -> None:
    """Trace a model: torch and sympy load 26 modules only when they trace, 0.1 s in each fork [measured]."""
    import torch

    from profiler.tracing.tracing import trace

    trace(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh()), torch.ones(2, 1))


def main() -> None:
    """What a server runs, and then each of its forks."""
    gc.disable()  # as `profiler.machine.start` loads them
    descriptor, *preloaded = sys.argv[1:]
    for module in preloaded:
        importlib.import_module(module)
    if preloaded:
        _load_what_tracing_loads()
    if TRANSPORT in os.environ:
        construct = inspect.unwrap(sys.modules["executor.pipeline"].Pipeline.__init__)
        construct.__kwdefaults__["transport"] = os.environ[TRANSPORT]
    if IN_ORDER in os.environ:
        sys.modules["profiler.machine.cpu"].Cpu.keeps_order = True
    gc.freeze()
    gc.enable()
    request = serve(socket.socket(fileno=int(descriptor)))
    if request is None:
        os._exit(0)
    if request.search_path:
        sys.argv[0], sys.path[:] = request.module, request.search_path
        runpy.run_path(request.module, run_name="__main__")
    else:
        importlib.import_module(request.module).main()
    _end()


def _end() -> None:
    """End a fork as Python ends a process, but for taking apart all that the server has loaded.

    That writes to each page that the fork shares with its server, which copies it: 0.4 s [measured].
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads; nothing public does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it takes nothing
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
