"""One run at a time in a save folder, since two would delete each other's unfinished checkpoints.

On a file system the run holds a record lock, which ends with its process, however that ends, and which NFS passes on to
other machines. Object stores have no locks: there the holder rewrites a small object every few
seconds, and an object that doesn't change belongs to a dead run.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from typing_extensions import override

from megatron.core.files.locks import lock
from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.errors import RESTART_MAY_HELP, CheckpointError, may_pass
from megatron.small_files import check_regular, read_json

logger = logging.getLogger(__name__)

IN_USE = ".in_use.json"
_GONE = (errno.ENOENT, errno.ESTALE)  # the latter when another machine deleted a file


@dataclass(frozen=True, kw_only=True)
class _Holder:
    """A run in ``.in_use.json``. ``machine``: see ``_machine``. ``beat``: seconds since 1970."""

    host: str = ""
    machine: str = ""
    pid: int = 0
    since: str = ""
    job: str = ""
    token: str = ""
    beat: float = 0.0

    @override
    def __str__(self) -> str:
        place = f"process {self.pid} on {self.host}" if self.pid and self.host else ""
        facts = (place, self.job and f"Slurm job {self.job}", self.since and f"since {self.since}")
        known = ", ".join(filter(None, facts))
        return f"another run ({known})" if known else "another run"


StillHeld = Callable[[], None]
"""Raises CheckpointError when another run has taken the folder over; it costs little, so call it before each write."""


@contextmanager
def held(root: AnyPath, *, beat: float = 15.0, grace: float = 5.0) -> Iterator[StillHeld]:
    """Hold the folder ``root``, which must exist, for the block; call it in one process of a run.

    Yields a check of whether it is still held: in object storage another run may take it over from one that was silent.
    ``beat``: seconds between two signs of life in object storage; after three of them without one, the run is dead.
    ``grace``: seconds that a predecessor may take to end. Raises CheckpointError that names the run that holds it.
    """
    with _beating(root, beat) if isinstance(root, RemotePath) else _locked(root, grace) as still_held:
        yield still_held


@contextmanager
def _locked(root: Path, grace: float) -> Iterator[StillHeld]:
    path = root / IN_USE
    with ExitStack() as files:
        file = files.enter_context(_take(path, grace))

        def still_held() -> None:
            nonlocal file
            try:
                if not _is_at(path, file):  # somebody deleted the folder: another run could hold a new one
                    root.mkdir(parents=True, exist_ok=True)
                    file = files.enter_context(_take(path, grace))
            except OSError as error:
                if not may_pass(error):  # otherwise a save that comes now reports the error
                    raise

        try:
            yield still_held
        finally:
            with suppress(OSError):
                if _is_at(path, file):
                    path.unlink()


def _take(path: Path, grace: float) -> TextIO:
    """The locked file, which names this run; raises CheckpointError when another run has it for ``grace`` seconds."""
    until = time.monotonic() + grace
    while (file := _lock(path)) is None:
        if time.monotonic() > until:
            raise _in_use(path.parent, _read(path))
        time.sleep(0.1)
    file.truncate(0)
    file.write(json.dumps(asdict(_myself())))
    file.flush()
    return file


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise


def _lock(path: Path) -> TextIO | None:
    """The locked file; None while another process holds it, or when it has just been deleted."""
    check_regular(path, where=str(path), error=CheckpointError)
    file = path.open("a", encoding="utf-8")
    try:
        found = lock(file, inherited=False)
        if found == "no locks here":
            logger.warning("%s is on a file system without locks: make sure that no other run saves there", path.parent)
            return file
        if found == "locked" and _is_at(path, file):
            return file
    except OSError as error:
        if error.errno not in _GONE:
            file.close()
            raise
    file.close()
    return None


@contextmanager
def _beating(root: RemotePath, beat: float) -> Iterator[StillHeld]:
    path, mine = root / IN_USE, _myself()
    seen, until = _read(path), time.monotonic() + 3 * beat
    while seen and not _is_dead_here(seen) and time.monotonic() < until:
        time.sleep(beat / 10)
        now = _read(path)
        if now and now != seen:
            raise _in_use(root, now)
        seen = now
    began = time.monotonic()
    path.write_text(json.dumps(asdict(mine)), encoding="utf-8")
    # Of two that start together, the last to write has it: wait until one has written that looked before this did.
    time.sleep(max(beat / 30, 2 * (time.monotonic() - began)))
    if (now := _read(path)) is None or now.token != mine.token:
        raise _in_use(root, now)
    lease = _Lease(path, mine, beat)
    thread = threading.Thread(target=lease.keep, name="lease", daemon=True)
    thread.start()
    try:
        yield lease.check
    finally:
        lease.ended.set()
        thread.join()
        with suppress(OSError):
            if (now := _read(path)) and now.token == mine.token:
                path.unlink()


class _Lease:
    """What this run wrote into ``path``, and whether it is still there."""

    def __init__(self, path: RemotePath, mine: _Holder, beat: float) -> None:
        self._path, self._mine, self._beat = path, mine, beat
        self._asked_at = self._renewed_at = time.monotonic()
        self._is_asking = False
        self._successor: _Holder | None = None
        self.ended = threading.Event()

    def keep(self) -> None:
        """Give signs of life until ``ended``, or until another run has the folder."""
        while not self.ended.wait(self._beat) and not self._successor:
            with suppress(OSError):  # the next beat may work
                self._look()
                if not self._successor:
                    beat = replace(self._mine, beat=time.time())
                    self._path.write_text(json.dumps(asdict(beat)), encoding="utf-8")
                    self._renewed_at = time.monotonic()

    def check(self) -> None:
        """Raise CheckpointError when another run has the folder; a request only after a silence (a stopped process).

        While ``keep`` waits for an answer, beside training, none is waited for here: the storage may be away.
        """
        if time.monotonic() - self._asked_at > (4 if self._is_asking else 2) * self._beat:
            with suppress(OSError):  # a save that comes now reports the error
                self._look()
        if self._successor:
            raise CheckpointError(
                f"{self._successor} has taken over --save {self._path.parent}, because this run did not renew "
                f"{IN_USE} for {time.monotonic() - self._renewed_at:.0f} s; stop one of them",
                exit_code=RESTART_MAY_HELP,
            )

    def _look(self) -> None:
        self._asked_at, self._is_asking = time.monotonic(), True
        try:
            found = _read(self._path)
            if found and found.token != self._mine.token:
                self._successor = found
        finally:
            self._asked_at, self._is_asking = time.monotonic(), False


def _myself() -> _Holder:
    return _Holder(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        job=os.environ.get("SLURM_JOB_ID", ""),
        token=os.urandom(8).hex(),
    )


def _machine() -> str:
    """This boot of this machine and its space of process numbers; empty where that isn't known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _is_dead_here(holder: _Holder) -> bool:
    if not holder.machine or holder.machine != _machine() or holder.pid <= 0:
        return False
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return holder.pid == os.getpid()  # a run of this process that has ended


def _read(path: AnyPath) -> _Holder | None:
    """The run that holds the folder; None where none does, and a holder without a name where the file can't be read."""
    try:
        found: _Holder = read_json(path, _Holder, error=CheckpointError)
    except FileNotFoundError:
        return None
    except CheckpointError:
        return _Holder()
    return found


def _in_use(root: AnyPath, holder: _Holder | None) -> CheckpointError:
    return CheckpointError(
        f"--save {root}: {holder or _Holder()} is already saving there: wait until it ends, stop it, or give another "
        "--save",
        exit_code=RESTART_MAY_HELP,
    )
