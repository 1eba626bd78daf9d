"""One run at a time in a save folder, since two would delete each other's unfinished checkpoints.

On a file system the kernel knows whether the holder lives: a record lock ends with its process, however that ends, and
NFS passes it on to other machines. Object stores have no locks: there the holder rewrites a small object every few
seconds, and one that stays as it is belongs to a run that is dead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.errors import RESTART_MAY_HELP, CheckpointError

logger = logging.getLogger(__name__)

IN_USE = ".in_use.json"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system without locks

StillHeld = Callable[[], None]
"""Raises CheckpointError when another run has taken the folder over; it costs nothing, so ask before each write."""


@contextmanager
def held(root: AnyPath, *, beat: float = 15.0, grace: float = 5.0) -> Iterator[StillHeld]:
    """Hold the folder ``root``, which must exist, for the block; call it in one process of a run.

    Yields what tells whether it still is: in object storage another run may take it over from one that was silent.
    ``beat``: seconds between two signs of life in object storage; three without one are a death. ``grace``: seconds
    that a predecessor may take to end. Raises CheckpointError that names the run that holds it.
    """
    with _beating(root, beat) if isinstance(root, RemotePath) else _locked(root, grace) as still_held:
        yield still_held


@contextmanager
def _locked(root: Path, grace: float) -> Iterator[StillHeld]:
    path = root / IN_USE
    until = time.monotonic() + grace
    while (file := _lock(path)) is None:
        if time.monotonic() > until:
            raise _in_use(root, _read(path))
        time.sleep(0.1)
    with file:
        file.truncate(0)
        file.write(json.dumps(_myself()))
        file.flush()
        try:
            yield lambda: None
        finally:
            with suppress(OSError):
                path.unlink()


def _lock(path: Path) -> TextIO | None:
    """The locked file; None while another process has it, or when it has just been deleted."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # held by another process, or the file is gone: the caller tries again
            file.close()
            return None
        logger.warning("%s has no locks (%s): make sure that only one run saves there", path.parent, error.strerror)
        return file
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
    path.write_text(json.dumps(mine), encoding="utf-8")
    time.sleep(beat / 30)  # of two that start together, the last to write has it
    if (now := _read(path)).get("token") != mine["token"]:
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
            if _read(path).get("token") == mine["token"]:
                path.unlink()


class _Lease:
    """What this run wrote into ``path``, and whether it is still there."""

    def __init__(self, path: RemotePath, mine: dict[str, Any], beat: float) -> None:
        self._path, self._mine, self._beat = path, mine, beat
        self._seen_at = time.monotonic()
        self._successor: dict[str, Any] = {}
        self.ended = threading.Event()

    def keep(self) -> None:
        """Give signs of life until ``ended``, or until another run has the folder."""
        while not self.ended.wait(self._beat) and not self._successor:
            with suppress(OSError):  # the next beat may work
                self._look()
                if not self._successor:
                    self._path.write_text(json.dumps({**self._mine, "beat": time.time()}), encoding="utf-8")

    def check(self) -> None:
        """Raise CheckpointError when another run has the folder; a request only after a silence (a stopped process)."""
        if time.monotonic() - self._seen_at > 2 * self._beat:
            with suppress(OSError):  # a save that comes now says what is wrong
                self._look()
        if self._successor:
            raise CheckpointError(
                f"--save {self._path.parent}: this run gave no sign of life for {3 * self._beat:.0f} seconds, and "
                f"{_words(self._successor)} saves there now; this one stops, so that they don't delete each other's "
                "checkpoints",
                exit_code=RESTART_MAY_HELP,
            )

    def _look(self) -> None:
        found = _read(self._path)
        if found and found.get("token") != self._mine["token"]:
            self._successor = found
        self._seen_at = time.monotonic()


def _myself() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "token": os.urandom(8).hex(),
    }


def _machine() -> str:
    """This boot of this machine and its space of process numbers; empty where that isn't known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _is_dead_here(holder: dict[str, Any]) -> bool:
    if not holder.get("machine") or holder["machine"] != _machine():
        return False
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(holder["pid"]) == os.getpid()  # a run of this process that has ended


def _read(path: AnyPath) -> dict[str, Any]:
    """Who holds the folder; empty where nobody does, or it can't be told."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        return {"pid": 0}
    return found if isinstance(found, dict) else {"pid": 0}


def _in_use(root: AnyPath, holder: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"--save {root}: {_words(holder)} saves there already; wait for its end or stop it, or give another folder",
        exit_code=RESTART_MAY_HELP,
    )


def _words(holder: dict[str, Any]) -> str:
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"another run (process {holder.get('pid')} on {holder.get('host')}{job}, since {holder.get('since')})"
