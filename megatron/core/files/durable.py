"""Files that appear whole or not at all and survive a power failure, and disk errors as one sentence."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.files.remote_path import AnyPath, RemotePath
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
        sync_path(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def put_text(path: AnyPath, text: str) -> None:
    """Write a small file that appears whole or not at all, also with several writers."""
    if isinstance(path, RemotePath):
        path.write_text(text, encoding="utf-8")
        return
    with replaced_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_durably(path: AnyPath, content: str | bytes) -> None:
    """Write a small file so that it has the old contents or the new ones after a crash, never a mixture.

    For one writer: what a killed one leaves is overwritten by the next.
    """
    data = content.encode() if isinstance(content, str) else content
    if isinstance(path, RemotePath):
        with path.open("wb") as put:
            put.write(data)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    sync_path(temporary)
    temporary.replace(path)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Make a file's contents, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(path: AnyPath, *, remedy: str = "write to another folder") -> Iterator[None]:
    """Turn a full disk, a missing permission and the like into a DataError that names ``path``.

    ``remedy``: what works for any reason; freeing space is suggested only when the disk is full.
    """
    try:
        yield
    except OSError as error:
        advice = f"free some space, or {remedy}" if error.errno in _NO_SPACE else remedy
        said = f"cannot write {path}: {error.strerror or error}; {advice}"
        raise DataError(said, exit_code=exit_code_of(error)) from error
