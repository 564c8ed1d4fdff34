"""Values and their files."""

import subprocess
import sys
from pathlib import Path

import pytest

from profiler import ArgumentError, Profile, ProfileError
from profiler.value import write_atomically

WRITER = """
import sys
from profiler.value import write_atomically
for _ in range(200):
    write_atomically(sys.argv[1], "x" * 1000)
"""


def test_two_processes_may_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert path.read_text() == "x" * 1000
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", ["", None, "a\0b", 5, "/proc/x/y.json"])
def test_what_is_no_path_is_an_argument(path: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"cannot write|no path"):
        write_atomically(path, "text")  # type: ignore[arg-type]
    with pytest.raises((ArgumentError, ProfileError), match=r"cannot read|no path"):
        Profile.load(path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_the_rights_of_the_users_files(tmp_path: Path) -> None:
    write_atomically(tmp_path / "ours", "")
    (tmp_path / "theirs").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode
