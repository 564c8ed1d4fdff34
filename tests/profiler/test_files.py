"""A file is written whole or not at all, and reaches the disk before its name does."""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from profiler.cache import Cache, CachedCosts
from profiler.errors import ArgumentError
from profiler.files import replace_file
from profiler.value import write_atomically


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was flushed: after a loss of power the name could mean an empty file, which the docstring ruled out."""
    done = []
    flush, move = os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"{os.fstat(descriptor).st_size} bytes"
        done.append(kind)
        flush(descriptor)

    def moved(source: Path, target: Path) -> Path:
        done.append("move")
        return move(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", moved)
    write_atomically(tmp_path / "plan.json", "text")
    assert done == ["4 bytes", "move", "folder"]
    Cache(tmp_path).put({"what": "costs"}, CachedCosts(costs=()))
    assert done[3:] == [done[3], "move", "folder"]
    assert done[3].endswith("bytes")


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    problem: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before")

    def fail(_: int) -> None:
        raise problem

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((KeyboardInterrupt, ArgumentError)) as raised:
        write_atomically(path, "after")
    if isinstance(problem, OSError):
        assert "No space left on device; choose a file" in str(raised.value)
        with pytest.warns(UserWarning, match="cannot remember measurements .* No space left"):
            Cache(tmp_path).put({"what": "costs"}, CachedCosts(costs=()))
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "before"


@pytest.mark.usefixtures("umask")
def test_rights_are_those_of_the_users_files(tmp_path: Path) -> None:
    """Entries of the cache were 0600 whatever the umask: a group that shares a cache folder could not read them."""
    Cache(tmp_path).put({"what": "costs"}, CachedCosts(costs=()))
    write_atomically(tmp_path / "plan.json", "text")
    assert {stat.S_IMODE(found.stat().st_mode) for found in tmp_path.iterdir()} == {0o640}
    (tmp_path / "plan.json").chmod(0o600)
    write_atomically(tmp_path / "plan.json", "again")
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o600, "it has become readable for others"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """The link was replaced by a file, and what it pointed to kept the old text."""
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real.json", tmp_path / "plan.json"
    link.symlink_to(real)
    for text in ("made", "changed"):
        write_atomically(link, text)
        assert link.is_symlink()
        assert real.read_text() == text
    assert [found.name for found in real.parent.iterdir()] == ["real.json"]


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    """A superuser who wrote to /dev/stdout or /dev/null replaced them by a file, for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    replace_file(pipe, b"text")
    reader.join(timeout=60)
    assert read == [b"text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArgumentError, match="Is a directory"):
        write_atomically(tmp_path / "folder", "text")
