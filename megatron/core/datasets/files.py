"""Files that appear whole or not at all, and disk trouble as one sentence."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.errors import DataError, exit_code_of

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A file to write beside ``path``, which takes its place when the block ends; deleted when the block fails.

    Several writers of the same ``path`` don't disturb each other: the last one to finish wins.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield aside
        sync_file(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def sync_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def write_errors(path: Path, *, remedy: str = "write to another folder") -> Iterator[None]:
    """Turn a full disk, a missing permission and the like into a DataError that names ``path``.

    ``remedy``: what works whatever the reason; space is asked for only where it is lacking.
    """
    try:
        yield
    except OSError as error:
        advice = f"free some space, or {remedy}" if error.errno in _NO_SPACE else remedy
        said = f"cannot write {path}: {error.strerror or error}; {advice}"
        raise DataError(said, exit_code=exit_code_of(error)) from error
