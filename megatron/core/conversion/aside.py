"""Folders for unfinished conversions, locked by the process that fills them, so that those of dead ones can be deleted.

Such a folder is ``.NAME.partial-HOST-HEX`` and holds a file that its process keeps locked. The kernel drops the lock
with the process, however that ends. A folder of another host is never deleted: its lock may not be visible here.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron.core.files.locks import lock
from megatron.core.files.writable import leaving_no_empty

_LOCK = "lock"
_NAME = re.compile(r"\..+\.partial-(.+)-[0-9a-f]{8}")


@contextmanager
def folder_aside(parent: Path, name: str, *, say: Callable[[str], None]) -> Iterator[Path]:
    """A path in a new, hidden folder of ``parent`` that vanishes at the end, whatever is in it then; so do ``parent``
    and folders above it that were made for it, unless something is in them.

    Before, folders that killed conversions left in ``parent`` are deleted, or named where they may be in use.
    """
    with leaving_no_empty(parent):
        parent.mkdir(parents=True, exist_ok=True)
        delete_leftovers(parent, say=say)
        with _locked_aside(parent, name) as folder:
            yield folder / name


@contextmanager
def _locked_aside(parent: Path, name: str) -> Iterator[Path]:
    """A new folder in ``parent`` that this process keeps locked for the block."""
    while True:
        folder = parent / f".{name}.partial-{platform.node()}-{os.urandom(4).hex()}"
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(parents=True)  # another conversion may have deleted the empty parent
            with suppress(FileNotFoundError):  # another conversion deletes what isn't locked yet: then try again
                lock(stack.enter_context((folder / _LOCK).open("w")), wait=True)
            if (folder / _LOCK).exists():
                yield folder
                return


def delete_leftovers(parent: Path, *, say: Callable[[str], None]) -> None:
    """Delete the folders in ``parent`` of dead conversions; print a note for those that may be in use."""
    for folder in sorted(parent.glob(".*.partial-*")):
        match = _NAME.fullmatch(folder.name)
        if match is None or not folder.is_dir():
            continue
        try:
            is_known = match[1] == platform.node() and _delete_unless_locked(folder, say)
        except OSError:
            is_known = not folder.exists()
        if not is_known:
            say(
                f"note: {folder} belongs to another conversion, which may have been killed: delete it if none is "
                "running"
            )


def _delete_unless_locked(folder: Path, say: Callable[[str], None]) -> bool:
    """Delete ``folder``, holding its lock; False where there are no locks, so that it may be in use."""
    try:
        file = (folder / _LOCK).open("r+")
    except FileNotFoundError:  # killed before it wrote anything; a folder with files is not empty and stays
        folder.rmdir()
        say(f"deleted {folder}: a killed conversion left it empty")
        return True
    with file:
        found = lock(file)
        if found == "locked":
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
            say(f"deleted {folder}: {size / 1e9:.1f} GB that a killed conversion left")
        return found != "no locks here"
