"""One run at a time in a save folder: the second is refused by name, a dead one's place is free."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from megatron.core.checkpointing import lease
from megatron.core.checkpointing.find import is_unused
from megatron.core.checkpointing.lease import IN_USE, held
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.errors import CheckpointError
from tests.harness.bucket import failing, url
from tests.harness.ranks import fork_server
from tests.harness.sentences import check_line, check_sentence, expect_error

QUICK: dict[str, Any] = {"beat": 0.2, "grace": 0.2}
BEAT = 15.0


class Clock:
    """The time of the lease: what sleeps lets it pass at once, and others act at their times meanwhile."""

    def __init__(self) -> None:
        self.now = 100.0
        self._acts: list[tuple[float, Callable[[], object]]] = []
        self.time, self.monotonic, self.strftime = self.get, self.get, time.strftime

    def get(self) -> float:
        """Seconds."""
        return self.now

    def at(self, seconds: float, act: Callable[[], object]) -> None:
        """Let somebody else ``act`` when so many seconds from now have passed."""
        self._acts.append((self.now + seconds, act))

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        due = [each for each in self._acts if each[0] <= self.now]
        for each in due:
            self._acts.remove(each)
            each[1]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the lease, which no other process moves."""
    clock = Clock()
    monkeypatch.setattr(lease, "time", clock)
    return clock


def note(folder: Path, token: str, *, beat: float = 0.0, machine: str = "elsewhere") -> None:
    """Write down that another run holds the folder."""
    holder = {"pid": 7, "host": "other", "since": "now", "token": token, "machine": machine, "beat": beat}
    (folder / IN_USE).write_text(json.dumps(holder))


def holder_of(folder: Path) -> Any:
    """What is written down about the run that holds the folder."""
    return json.loads((folder / IN_USE).read_text())


def hold_until_told(place: str, report: Connection) -> None:
    with held(path_of(place), **QUICK):
        report.send("held")
        report.recv()


@contextmanager
def another_run(place: str) -> Iterator[tuple[Any, Connection]]:
    """A process that holds ``place``, and the connection by which it is told to end."""
    ours, theirs = multiprocessing.Pipe()
    process = fork_server().Process(target=hold_until_told, args=(place, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(60)
        ours.recv()
        yield process, ours
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_the_second_run_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Two runs in one folder deleted each other's unfinished checkpoints, and neither said a word."""
    place = str(tmp_path) if kind == "disk" else url(tmp_path)
    with another_run(place) as (process, told):
        with pytest.raises(CheckpointError) as caught, held(path_of(place), beat=BEAT / 3, grace=0.2):
            pass
        check_line(str(caught.value), f"--save {place}", process.pid, os.uname().nodename)
        check_line(str(caught.value), "--save")
        assert caught.value.exit_code == 1, "a job that comes back may get in"
        told.send("end")
        process.join()
        assert os.listdir(tmp_path) == []
    with held(path_of(place), **QUICK):
        assert is_unused(place), "it is no checkpoint"


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_a_killed_run_makes_way_at_once(kind: str, tmp_path: Path, clock: Clock) -> None:
    """A job that is killed and started anew must not be locked out by its own predecessor."""
    place = str(tmp_path) if kind == "disk" else url(tmp_path)
    with another_run(place) as (process, _):
        process.kill()
        process.join()
    assert (tmp_path / IN_USE).exists()
    began = clock.now
    with held(path_of(place), beat=BEAT, grace=0.0):
        assert holder_of(tmp_path)["pid"] == os.getpid()
        assert clock.now - began <= BEAT / 30
    assert os.listdir(tmp_path) == []


def test_a_deleted_folder_is_held_anew(tmp_path: Path) -> None:
    """A run whose folder was deleted made it again, and a second run could save there."""
    place = tmp_path / "run"
    place.mkdir()
    with held(place, **QUICK) as still_held:
        shutil.rmtree(place)
        still_held()
        assert json.loads((place / IN_USE).read_text())["pid"] == os.getpid()
        shutil.rmtree(place)
        place.mkdir()
        with another_run(str(place)), expect_error(CheckpointError, exit_code=1):
            still_held()
    with held(place, **QUICK):
        pass


def test_children_do_not_hold_it_on(tmp_path: Path) -> None:
    """Workers that load data outlive a killed run by seconds; the lock is the run's own."""
    with ExitStack() as stack:
        stack.enter_context(held(tmp_path, **QUICK))
        child = os.fork()
        if child == 0:
            os.read(os.pipe()[0], 1)
            os._exit(0)
    try:
        with another_run(str(tmp_path)):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_silence_is_death_and_a_beat_is_life(tmp_path: Path, clock: Clock) -> None:
    """In object storage a holder on another machine is known by its beats alone."""
    place = path_of(url(tmp_path))
    note(tmp_path, "other")
    clock.at(2.5 * BEAT, lambda: note(tmp_path, "other", beat=1.0))
    with expect_error(CheckpointError, exit_code=1), held(place, beat=BEAT):
        pass
    began = clock.now
    with held(place, beat=BEAT):
        assert holder_of(tmp_path)["pid"] == os.getpid()
        assert 3 * BEAT <= clock.now - began <= 3.2 * BEAT
    assert os.listdir(tmp_path) == []


class Beats:
    """The signal to end, after so many beats."""

    def __init__(self, left: int) -> None:
        self.left = left

    def wait(self, seconds: float) -> bool:
        """Whether to end."""
        self.left -= 1
        return self.left < 0


def test_a_run_whose_place_was_taken_stops(tmp_path: Path, clock: Clock) -> None:
    """It warned and went on: two runs saved into one folder and deleted each other's checkpoints.

    It learns by its next sign of life; asked after a silence, at once.
    """
    place, mine = path_of(url(tmp_path)), lease._myself()
    for beats, silence in ((1, 0.0), (0, 2.2 * BEAT)):
        note(tmp_path, mine.token, machine="")
        own: Any = lease._Lease(place / IN_USE, mine, BEAT)  # type: ignore[arg-type]
        own.check()
        own.ended = Beats(1)
        own.keep()
        own.check()
        assert holder_of(tmp_path)["beat"] == clock.now, "a sign of life"
        note(tmp_path, "other")
        own.check()  # nothing is asked so soon
        own.ended = Beats(beats)
        own.keep()
        clock.now += silence
        with expect_error(CheckpointError, "7", f"--save {place}", f"{silence:.0f} s", exit_code=1):
            own.check()
        assert holder_of(tmp_path)["token"] == "other"


def test_what_a_successor_wrote_is_left(tmp_path: Path, clock: Clock) -> None:
    """The run that had lost the folder deleted the other's note at its end, and a third run came in."""
    with held(path_of(url(tmp_path)), beat=BEAT) as still_held:
        still_held()
        note(tmp_path, "other")
    assert holder_of(tmp_path)["token"] == "other"
    (tmp_path / IN_USE).unlink()
    with held(tmp_path) as still_held:
        still_held()


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a mount must not refuse every run."""

    def none(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", none)
    with held(tmp_path, **QUICK):
        pass
    check_line(caplog.text, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 4}', "\x00" * 10])
def test_damaged_notes_are_taken_over(text: str, tmp_path: Path) -> None:
    """A note that was half written is nobody's."""
    places: list[AnyPath] = [tmp_path, path_of(url(tmp_path))]
    for place in places:
        (tmp_path / IN_USE).write_text(text)
        with held(place, **QUICK):
            pass


def test_a_process_may_run_twice(tmp_path: Path) -> None:
    """Two runs after one another in a process: the first has gone."""
    for place in [tmp_path, path_of(url(tmp_path))] * 2:
        with held(place, **QUICK):
            pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_only_a_lack_of_locks_goes_without_one(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that NFS had deleted, or a disk that failed, was taken for a file system without locks: two runs saved."""
    tries, take = 0, fcntl.lockf

    def refuse_once(*arguments: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(number, os.strerror(number))
        take(*arguments)

    monkeypatch.setattr(fcntl, "lockf", refuse_once)
    with pytest.raises(OSError, match=IN_USE) if number == errno.EIO else nullcontext(), held(tmp_path, **QUICK):
        assert tries == 2
    assert "locks" not in caplog.text


@pytest.mark.parametrize("is_last", [False, True])
def test_two_that_start_together_over_a_slow_link(is_last: bool, tmp_path: Path, clock: Clock) -> None:
    """Each looked for the other's note before that had arrived, and both saved into the folder.

    A note takes 2 seconds to arrive. This run's comes second, or the other's does, a second later.
    """

    def slow(operation: str, path: str) -> None:
        if operation == "put":
            clock.sleep(2.0)

    clock.at(1.0 if is_last else 3.0, lambda: note(tmp_path, "other"))
    refused = nullcontext() if is_last else expect_error(CheckpointError, exit_code=1)
    with failing(slow), refused, held(path_of(url(tmp_path)), beat=BEAT):
        assert holder_of(tmp_path)["pid"] == os.getpid()
    assert os.listdir(tmp_path) == ([] if is_last else [IN_USE])


def test_a_holder_without_a_name(tmp_path: Path) -> None:
    """A note that is being written, or somebody else's, was called "process None on None"."""
    for text in ("", "{}", "[" * 1000, '{"pid": "x"}', '{"pid": 5}', '{"host": "there"}', "x" * (17 << 20)):
        (tmp_path / IN_USE).write_text(text)
        check_sentence(str(lease._in_use(tmp_path, lease._read(tmp_path / IN_USE))), f"--save {tmp_path}")
