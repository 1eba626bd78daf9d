"""Folders for what isn't complete yet, locked by the process that fills them, so that those of dead ones can go.

Such a folder is ``.NAME.partial-HOST-HEX`` and holds a file that its process keeps locked. The kernel drops the lock
with the process, however that ends. A folder of another host is never deleted: its lock may not be visible here.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_LOCK = "lock"
_NAME = re.compile(r"\..+\.partial-(.+)-[0-9a-f]{8}")


@contextmanager
def folder_aside(parent: Path, name: str, *, say: Callable[[str], None]) -> Iterator[Path]:
    """A path in a new, hidden folder of ``parent`` that vanishes at the end, whatever is in it then.

    Before, folders that killed conversions left in ``parent`` are deleted, or named where they may be in use.
    """
    parent.mkdir(parents=True, exist_ok=True)
    delete_leftovers(parent, say=say)
    while True:
        folder = parent / f".{name}.partial-{platform.node()}-{os.urandom(4).hex()}"
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir()
            if _is_locked(folder, stack):
                yield folder / name
                return


def _is_locked(folder: Path, stack: ExitStack) -> bool:
    """Lock ``folder`` until ``stack`` ends; False where another conversion deleted it before it was locked."""
    try:
        lock = stack.enter_context((folder / _LOCK).open("w"))
    except FileNotFoundError:
        return False
    with suppress(OSError):  # a file system without locks: nobody will delete the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
    return (folder / _LOCK).exists()


def delete_leftovers(parent: Path, *, say: Callable[[str], None]) -> None:
    """Delete the folders in ``parent`` whose conversions are dead, and name those of which that isn't known."""
    for folder in sorted(path for path in parent.glob(".*.partial-*") if path.is_dir()):
        match = _NAME.fullmatch(folder.name)
        state = _state_of(folder, match[1]) if match else "no conversion's"
        if state == "dead":
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder, ignore_errors=True)
            say(f"deleted {folder}: {size / 1e9:.1f} GB that a killed conversion left")
        elif state == "unknown":
            say(f"note: {folder} is what another conversion left, or is still writing: delete it if none is running")


def _state_of(folder: Path, host: str | None) -> str:
    """``dead``, ``in use`` or ``unknown``."""
    if host != platform.node():
        return "unknown"
    try:
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "dead"
    except BlockingIOError:
        return "in use"
    except FileNotFoundError:
        return "dead" if not any(folder.iterdir()) else "unknown"
    except OSError:
        return "unknown"
