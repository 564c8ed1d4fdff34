"""Values and their files."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from profiler import ArgumentError, Cluster, Device, Link, Profile, ProfileError
from profiler.value import LARGEST_FILE_BYTES, write_atomically

WRITER = """
import sys
from profiler.value import write_atomically
for _ in range(200):
    write_atomically(sys.argv[1], "x" * 1000)
"""


def test_two_processes_may_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(2)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
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


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Device(name="cpu", kind="cpu", memory_bytes=0), r"Device: \$\.memory_bytes: Input should be greater"),
        (lambda: Cluster(devices=[]), r"Cluster: \$\.devices: Input should be a valid tuple"),  # type: ignore[arg-type]
        (lambda: Link(bytes_per_s=0.0), r"Link: \$\.latency_s: Field required \(and 1 more\)"),  # type: ignore[call-arg]
        (lambda: Link(latency_s=0.0, bytes_per_s=float("nan")), r"\$\.bytes_per_s: Input should be a finite number"),
        (lambda: Cluster.of(8, link="nvlink3"), "8 is no list of devices; pass a text"),  # type: ignore[arg-type]
        (lambda: Cluster.of("2xT4", link=5), "link=5; pass link='nvlink3'"),  # type: ignore[arg-type]
        (lambda: Cluster.of("2xT4", link="pcie3", devices_per_host=0), "devices_per_host=0; pass how many"),
        (lambda: Cluster.of("2xT4", link="pcie3", devices_per_host=-2), "devices_per_host=-2; pass how many"),
        (lambda: Device.of(["T4"]), r"\['T4'\] is no kind of device; pass one of V100"),  # type: ignore[arg-type]
        (lambda: Link.of(["nvlink3"]), r"no data sheet of a link \['nvlink3'\]"),  # type: ignore[arg-type]
    ],
)
def test_values_that_mean_nothing_are_arguments(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_a_value_survives_a_trip() -> None:
    cluster = Cluster.of("2xT4", link="pcie3")
    for other in (
        pickle.loads(pickle.dumps(cluster)),
        copy.deepcopy(cluster),
        cluster.model_copy(),
        Cluster(devices=cluster.devices, link=cluster.link),
        Cluster.parse_json(cluster.to_json(), source="text", error=ProfileError),
    ):
        assert other == cluster
        assert hash(other) == hash(cluster)
    with pytest.raises(ProfileError, match=r"text: \$\.devices\[1\]\.memory_bytes: Input should be greater than 0"):
        text, memory = cluster.to_json(), f'"memory_bytes": {cluster.devices[1].memory_bytes}'
        before, _, after = text.rpartition(memory)
        Cluster.parse_json(f'{before}"memory_bytes": 0{after}', source="text", error=ProfileError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EOF while parsing"),
        (b"\xff\xfe{}", "it is no text"),
        (b"[" * 100_000, "recursion limit exceeded"),
        (b'{"layers":' * 100_000, "recursion limit exceeded"),
        (b'{"input_bytes": ' + b"9" * 5000 + b"}", "number out of range"),
        (b"\xef\xbb\xbf{}", r"\$\.fingerprint: Field required"),
    ],
)
def test_a_file_that_holds_no_profile_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "profile.json").write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        Profile.load(tmp_path / "profile.json")


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """`/dev/zero` filled the memory, and a pipe without another end was waited for without end."""
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path / "pipe", "a pipe or a device"), ("/dev/zero", "a device"), (tmp_path, "directory")):
        with pytest.raises(ProfileError, match=reason):
            Profile.load(path)


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    with (tmp_path / "profile.json").open("wb") as file:
        file.truncate(LARGEST_FILE_BYTES + 1)  # without taking room on the disk
    with pytest.raises(ProfileError, match="it holds more than 268435456 bytes"):
        Profile.load(tmp_path / "profile.json")


def test_messages_of_our_errors_hold_no_terminal_commands() -> None:
    assert str(ProfileError("layer \x1b[2J\r of\nblocks")) == "layer \\x1b[2J\\r of\nblocks"
