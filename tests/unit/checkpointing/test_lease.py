"""One run at a time in a save folder: the second is refused by name, a dead one's place is free."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator
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
        with pytest.raises(CheckpointError) as caught, held(path_of(place), beat=1.0, grace=0.2):
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
def test_a_killed_run_makes_way_at_once(kind: str, tmp_path: Path) -> None:
    """A job that is killed and started anew must not be locked out by its own predecessor."""
    place = str(tmp_path) if kind == "disk" else url(tmp_path)
    with another_run(place) as (process, _):
        process.kill()
        process.join()
    assert (tmp_path / IN_USE).exists()
    with held(path_of(place), beat=1000.0, grace=0.0) if kind == "disk" else held(path_of(place), beat=1.0):
        assert json.loads((tmp_path / IN_USE).read_text())["pid"] == os.getpid()
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


def test_silence_is_death_and_a_beat_is_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In object storage a holder on another machine is known by its beats alone."""
    place = path_of(url(tmp_path))
    with another_run(str(place)) as (process, _):
        monkeypatch.setattr(lease, "_machine", lambda: "elsewhere")
        with expect_error(CheckpointError, exit_code=1), held(place, beat=1.0):
            pass
        process.kill()
        process.join()
    with held(place, **QUICK):
        assert json.loads((tmp_path / IN_USE).read_text())["machine"] == "elsewhere"


def test_a_run_whose_place_was_taken_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It warned and went on: two runs saved into one folder and deleted each other's checkpoints."""
    place, successor = path_of(url(tmp_path)), {"pid": 7, "host": "other", "since": "now", "token": "other"}

    def take_over() -> None:
        (tmp_path / IN_USE).write_text(json.dumps(successor))

    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with held(place, beat=15.0) as still_held:  # asked after a silence, it learns at once
        still_held()
        take_over()
        now[0] += 60.0
        with expect_error(CheckpointError, "7", f"--save {place}", exit_code=1):
            still_held()
    assert json.loads((tmp_path / IN_USE).read_text()) == successor, "it is the other's"
    (tmp_path / IN_USE).unlink()
    with held(place, beat=0.05) as still_held:  # else by a sign of life, which may come just after the other's
        noticed = None
        for _ in range(1000):
            take_over()
            time.sleep(0.06)
            try:
                still_held()
            except CheckpointError as error:
                noticed = error
                break
        check_line(str(noticed), "7", f"--save {place}")
    assert json.loads((tmp_path / IN_USE).read_text()) == successor, "it is the other's"
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


def test_two_that_start_together_over_a_slow_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looked for the other's note before that had arrived, and both saved into the folder."""
    monkeypatch.setattr(lease, "_is_dead_here", lambda holder: False)  # both are of this process
    place, ended, both = path_of(url(tmp_path)), list[str](), threading.Event()

    def slow(operation: str, path: str) -> None:
        if operation == "put":
            time.sleep(0.2)

    def start(delay: float) -> None:
        time.sleep(delay)
        try:
            with held(place, beat=1.2):
                ended.append("held")
                assert both.wait(60), "two hold it"
        except CheckpointError:
            ended.append("refused")
            both.set()

    with failing(slow):
        runs = [threading.Thread(target=start, args=(delay,)) for delay in (0.0, 0.1)]
        for run in runs:
            run.start()
        for run in runs:
            run.join()
    assert sorted(ended) == ["held", "refused"]


def test_a_holder_without_a_name(tmp_path: Path) -> None:
    """A note that is being written, or somebody else's, was called "process None on None"."""
    for note in ("", "{}", "[" * 1000, '{"pid": "x"}', '{"pid": 5}', '{"host": "there"}', "x" * (17 << 20)):
        (tmp_path / IN_USE).write_text(note)
        check_sentence(str(lease._in_use(tmp_path, lease._read(tmp_path / IN_USE))), f"--save {tmp_path}")
