"""Whether files can be written somewhere, found out without leaving any there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryFile

from megatron.core.files.remote_path import AnyPath, RemotePath


def try_to_write(folder: AnyPath, *, make: bool = True) -> None:
    """Write a file into ``folder`` and delete it; raises the OSError that names what can't be written.

    ``make``: make the folder if it is missing; otherwise the file goes into its nearest parent that exists.
    """
    if isinstance(folder, RemotePath):
        folder.exists()  # so that the error of a missing library or bucket names the folder
        probe = folder / f".writable-{os.urandom(4).hex()}"
        probe.write_text("writable", encoding="utf-8")
        probe.unlink()
        return
    path = folder.absolute()
    while not path.exists():
        if path.is_symlink():
            raise FileNotFoundError(errno.ENOENT, "it is a broken link", str(path))
        path = path.parent
    if make:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder
    try:
        with TemporaryFile(dir=path) as file:  # permissions alone don't tell: root, networks, read-only mounts
            file.write(b"writable")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def why_not_writable(folder: Path, *, make: bool = False) -> str | None:
    """The reason why ``try_to_write`` fails, or None."""
    try:
        try_to_write(folder, make=make)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


@contextmanager
def leaving_no_empty(folder: AnyPath) -> Iterator[None]:
    """For a block that makes ``folder`` and its parents: those that were missing and are empty at its end are deleted.

    Object storage has no folders, so nothing is.
    """
    there = (folder, *folder.parents) if isinstance(folder, Path) else ()
    missing = [*takewhile(lambda each: not each.exists(), there)]
    try:
        yield
    finally:
        with suppress(OSError):  # the first that isn't empty
            for each in missing:
                each.rmdir()
