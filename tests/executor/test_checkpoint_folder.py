"""Whose a checkpoint is, who may save into a folder, and that nothing in a folder ends a training but a failed save."""

import errno
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import functional

from executor import Pipeline
from executor.checkpoint import load_checkpoint, save_checkpoint
from executor.checkpoints import lock as checkpoint_lock
from executor.checkpoints.manifest import Manifest
from executor.checkpoints.together import failures_named
from executor.watch.failure import FirstCause
from planner import ArgumentError, ExecutionError, Plan
from profiler import trace
from tests.executor.rich_training import Training, plans_of, same

HOLDER = """
import sys
from pathlib import Path
from traceback import StackSummary
from executor.checkpoints.lock import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def plan(plan_for: Callable[..., Plan]) -> Plan:
    return plans_of(plan_for)[1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    folder.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_clean_up_leaves_what_the_run_has_not_saved(plan: Plan, tmp_path: Path) -> None:
    """Every folder called step-* went: another run's, a user's, and those of later steps."""
    other = Training(plan)
    other.steps(1)
    other.save(tmp_path)
    kept = (tmp_path / "step-00000001" / "manifest.json").read_bytes()
    (tmp_path / "step-00000009").mkdir()  # nobody knows whose
    (tmp_path / "step-00000009" / "notes.txt").write_text("mine")
    del other
    gc.collect()
    training = Training(plan)
    training.steps(1)
    with pytest.warns(UserWarning, match=r"holds checkpoints of another run, the newest step-00000001; they stay"):
        save_checkpoint(tmp_path, training.pipe, keep=1)
    for _ in range(2):
        training.steps(1)
        save_checkpoint(tmp_path, training.pipe, keep=1)  # and no second warning
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000003", "step-00000009"]
    assert (tmp_path / "step-00000001" / "manifest.json").read_bytes() == kept
    assert (tmp_path / "step-00000009" / "notes.txt").read_text() == "mine"


def test_a_run_that_comes_back_owns_what_it_goes_on_from_and_no_later_step(plan: Plan, tmp_path: Path) -> None:
    """A run that went back to step 2 lost step 3 with the first checkpoint that it saved."""
    first = Training(plan)
    for _ in range(3):
        first.steps(1)
        first.save(tmp_path)
    del first
    gc.collect()
    second = Training(plan)
    assert second.load(tmp_path / "step-00000002") == 2
    second.steps(1)
    save_checkpoint(tmp_path, second.pipe, second.optimizer, also={"scheduler": second.scheduler}, keep=2)
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000003", "step-00000003.1"]
    assert (tmp_path / "latest").resolve().name == "step-00000003.1"
    del second
    gc.collect()
    third = Training(plan)
    assert third.load(tmp_path) == 3
    third.steps(1)
    save_checkpoint(tmp_path, third.pipe, keep=1)
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000004"]


def test_all_are_kept_unless_asked_otherwise(plan: Plan, tmp_path: Path) -> None:
    training = Training(plan)
    for _ in range(3):
        training.save(tmp_path)
    assert names(tmp_path) == ["latest", "step-00000000", "step-00000000.1", "step-00000000.2"]
    for keep in (0, -1, 1.5, True, "2"):
        with pytest.raises(ArgumentError, match=f"keep is {keep!r}; pass how many"):
            save_checkpoint(tmp_path, training.pipe, keep=keep)  # type: ignore[arg-type]


def test_one_run_at_a_time_saves_into_a_folder(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs took turns with `latest`, and what one of them loaded as its own held the weights of the other."""
    monkeypatch.setattr(checkpoint_lock, "WAIT_S", 0.0)
    training = Training(plan)
    with held_by_another_process(tmp_path) as other:
        with pytest.raises(
            ExecutionError, match=rf"another run saves in .*: process {other.pid} on .*, since '\d+-.*another folder"
        ):
            training.save(tmp_path)
        assert names(tmp_path) == []
        with pytest.raises(ExecutionError, match="holds no complete checkpoint"):
            training.load(tmp_path)  # reading needs no lock
    assert other.wait(60) == -signal.SIGKILL
    training.save(tmp_path)  # its lock ended with it
    assert training.load(tmp_path) == 0


def test_two_pipelines_of_a_process_are_two_runs(plan: Plan, tmp_path: Path) -> None:
    first = Training(plan)
    first.save(tmp_path / "folder")
    (tmp_path / "other name").symlink_to(tmp_path / "folder")
    second = Training(plan)
    with pytest.raises(ExecutionError, match="another pipeline of this process has saved in"):
        second.save(tmp_path / "other name")
    first.save(tmp_path / "other name")
    del first  # even if Python has not collected it yet
    with pytest.warns(UserWarning, match="checkpoints of another run"):
        second.save(tmp_path / "folder")


def test_a_folder_without_locks_is_worth_a_warning(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    training = Training(plan)
    (tmp_path / ".draft-step-00000009").mkdir()  # perhaps of another run that is writing it
    with pytest.warns(UserWarning, match=r"cannot be locked \(Operation not supported\): see to it that no other run"):
        training.save(tmp_path)
    training.save(tmp_path)
    assert names(tmp_path) == [".draft-step-00000009", "latest", "step-00000000", "step-00000000.1"]


def test_a_lock_that_leads_elsewhere_overwrites_nothing(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "checkpoints" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(ExecutionError, match=r"cannot write .*checkpoints"):
        Training(plan).save(tmp_path / "checkpoints")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("what", ["folder", "file in a folder", "file", "link", "endless link"])
def test_whatever_is_called_latest_the_training_goes_on(plan: Plan, tmp_path: Path, what: str) -> None:
    """A real folder of that name ended the training, although the checkpoint was whole; a file of that name went."""
    latest = tmp_path / "latest"
    if "folder" in what:
        latest.mkdir()
        if what != "folder":
            (latest / "mine.txt").write_text("mine")
    elif what == "file":
        latest.write_text("mine")
    else:
        latest.symlink_to(latest if what == "endless link" else tmp_path / "elsewhere")
    training = Training(plan)
    training.steps(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            path = save_checkpoint(tmp_path, training.pipe, keep=1)
    assert load_checkpoint(path, training.pipe) == 1
    if "link" not in what:
        assert [str(one.message).split(" (")[0] for one in told] == [
            f"{tmp_path / name} is whole, but {latest} could not be made to point to it"
            for name in ("step-00000001", "step-00000001.1")
        ]
        assert names(tmp_path) == ["latest", "step-00000001", "step-00000001.1"]  # none went: which is the newest?
        mine = latest if what == "file" else latest / "mine.txt"
        assert latest.is_dir() if what == "folder" else mine.read_text() == "mine"
        with pytest.raises(
            ExecutionError, match=r"has no link 'latest' .* load one by its own path: .*step-00000001.1$"
        ):
            load_checkpoint(tmp_path, training.pipe)
    else:
        assert not told
        assert load_checkpoint(tmp_path, training.pipe) == 1


def test_a_link_among_the_old_ones_stays(plan: Plan, tmp_path: Path) -> None:
    """Someone moved an old checkpoint to another disk and left a link: removing it raised, and ended the training."""
    training = Training(plan)
    first = save_checkpoint(tmp_path / "here", training.pipe)
    first.rename(tmp_path / "moved")
    first.symlink_to(tmp_path / "moved")
    training.steps(1)
    save_checkpoint(tmp_path / "here", training.pipe, keep=1)
    assert names(tmp_path / "here") == ["latest", "step-00000000", "step-00000001"]
    assert load_checkpoint(first, training.pipe) == 0


def test_what_cannot_be_removed_is_a_warning(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(plan)
    save_checkpoint(tmp_path, training.pipe)

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        with pytest.warns(UserWarning, match=r"could not be removed \(Permission denied\); it is no checkpoint"):
            save_checkpoint(tmp_path, training.pipe, keep=1)
    assert names(tmp_path) == [".draft-step-00000000", "latest", "step-00000000.1"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", _fails_for("step-00000000.1", Path.rename))
        with pytest.warns(UserWarning, match=r"the old checkpoint .* could not be removed \(Permission denied\)"):
            save_checkpoint(tmp_path, training.pipe, keep=1)
    save_checkpoint(tmp_path, training.pipe, keep=1)
    assert names(tmp_path) == ["latest", "step-00000000.3"]


def _fails_for(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Path, *arguments: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return method(path, *arguments)

    return call


@contextmanager
def room_for_files_of(size_bytes: int) -> Iterator[None]:
    """As if the disk were full after so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Failing:
    """Something to save that fails when it is asked for its state, or does something first."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, Any]:
        return {"acted": self.act()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.act()


def test_a_save_that_fails_leaves_the_last_checkpoint_and_no_draft(plan: Plan, tmp_path: Path) -> None:
    """The draft stayed, and with it the full disk."""
    training = Training(plan)
    training.steps(1)
    training.save(tmp_path)
    before, state = names(tmp_path), training.state()
    for size_bytes in (100, 2_000, 5_000, 8_000):  # the manifest has 600 bytes, training.pt 6 kB, the tensors 34 kB
        with (
            room_for_files_of(size_bytes),
            pytest.raises(
                ExecutionError, match=r"cannot write .*draft-step-00000001.1: File too large; allow larger files"
            ),
        ):
            training.save(tmp_path)
        assert names(tmp_path) == before

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, training.pipe, also={"failing": Failing(interrupt)})
    assert names(tmp_path) == before
    training.save(tmp_path)
    assert training.load(tmp_path) == 1
    assert same(training.state(), state)


def test_where_there_is_no_room_for_large_tensors_the_error_says_so(
    plan_for: Callable[..., Plan], tmp_path: Path
) -> None:
    """Torch spoke of positions in a file: "unexpected pos 704 vs 598"."""
    x = torch.ones(2, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plan = plan_for(trace(model, x), [1], batch_size=2, micro_batches=1)
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss, compare_first_step=False)
    large, refused = nn.Linear(64, 100), 0
    sizes = range(100, 70_000, 2_000)  # the tensors have 33 kB, and what is kept in addition 26 kB
    for size_bytes in sizes:
        try:
            with room_for_files_of(size_bytes):
                save_checkpoint(tmp_path / str(size_bytes), pipe, also={"large": large})
        except ExecutionError as problem:
            refused += 1
            assert "File too large; allow larger files (ulimit -f)" in str(problem)
    assert 0 < refused < len(sizes)


def test_a_folder_that_goes_while_it_is_saved_into(plan: Plan, tmp_path: Path) -> None:
    training = Training(plan)
    home = tmp_path / "checkpoints"
    with pytest.raises(ExecutionError, match=r"cannot write .*: No such file or directory; someone removed it"):
        save_checkpoint(home, training.pipe, also={"removing": Failing(lambda: shutil.rmtree(home))})
    assert not home.exists()
    training.save(home)
    shutil.rmtree(home)
    training.save(home)
    assert names(home) == ["latest", "step-00000000"]
    with held_by_another_process(tmp_path / "other"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint_lock, "WAIT_S", 0.0)
        shutil.rmtree(home)
        shutil.copytree(tmp_path / "other", home)
        training.save(home)  # the copy of a lock is nobody's


@pytest.mark.parametrize("place", ["file", "file/below", "a\0b"])
def test_where_nothing_can_be_written(plan: Plan, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExecutionError, match=r"cannot write|null byte"):
        Training(plan).save(tmp_path / place)


def test_the_manifest_says_whose_it_is(plan: Plan, tmp_path: Path) -> None:
    training = Training(plan)
    path = save_checkpoint(tmp_path, training.pipe)
    manifest = Manifest.of(path)
    assert manifest is not None
    assert (manifest.run, manifest.step, manifest.inherits) == (training.pipe.run.id, 0, {})
    assert sorted(manifest.files) == [".metadata", "__0_0.distcp", "training.pt"]
    assert torch.load(path / "training.pt", weights_only=True)["format"] == manifest.format == 3


def take_for_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process seem to be one of three."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_who_could_not_write_is_the_first_cause(failing: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise, and who was heard of first was blamed: "rank 1 of 3 failed: cannot write ... on rank 0"."""
    take_for_rank(rank, monkeypatch)
    causes = {2: ValueError("nobody's fault"), failing: OSError(errno.ENOSPC, "No space left")}
    with pytest.raises(ExecutionError) as caught, failures_named(Path("checkpoints")):
        raise CheckpointException("saving", {at: (cause, StackSummary()) for at, cause in causes.items()})
    told = FirstCause.of(caught.value, rank=rank, world_size=3, position="in save_checkpoint")
    room = "make room, or keep fewer checkpoints (keep=...)"
    said = f"rank {failing} of 3 failed: cannot write checkpoints: No space left; {room}"
    assert (told.text, told.rank) == (said, failing)


def ended_within(ending: BaseException, *, wrapped: bool) -> BaseException:
    """What torch catches where an interrupt comes while it writes: it, or an error of what it was in the middle of."""
    try:
        try:
            raise ending
        except BaseException:
            if wrapped:
                raise RuntimeError("unexpected pos 5 vs 3") from None
            raise
    except BaseException as problem:
        return problem


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_an_end_that_was_asked_for_while_torch_writes_is_no_failed_write(
    ending: type[BaseException], wrapped: bool
) -> None:
    """Of 199 interrupts 55 were an ExecutionError that named them, and 6 one that spoke of positions in a file."""
    problem = CheckpointException("saving", {0: (ended_within(ending(), wrapped=wrapped), StackSummary())})
    with pytest.raises(ending), failures_named(Path("checkpoints")):
        raise problem


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_write_is_one_where_an_interrupt_is_handled_or_another_rank_had_it(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever saves on Ctrl-C does so while he handles it."""
    take_for_rank(0, monkeypatch)

    def save() -> None:
        cause = KeyboardInterrupt() if rank else ended_within(ValueError("a full disk"), wrapped=True)
        with failures_named(Path("checkpoints")):
            raise CheckpointException("saving", {rank: (cause, StackSummary())})

    with pytest.raises(ExecutionError, match="cannot write checkpoints"):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            save()
