"""Files that appear whole or not at all, and disk errors as one sentence."""

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
    """A new file beside ``path``, which replaces it when the block ends; deleted when the block fails.

    With several writers of the same ``path``, the last one to finish wins.
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
    """Wait until the file's bytes are on disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def write_errors(path: Path, *, remedy: str = "write to another folder") -> Iterator[None]:
    """Turn a full disk, a missing permission and the like into a DataError that names ``path``.

    ``remedy``: what works for any reason; freeing space is suggested only when the disk is full.
    """
    try:
        yield
    except OSError as error:
        advice = f"free some space, or {remedy}" if error.errno in _NO_SPACE else remedy
        said = f"cannot write {path}: {error.strerror or error}; {advice}"
        raise DataError(said, exit_code=exit_code_of(error)) from error
