"""What a checkpoint root looks like, and the moves that keep it whole when the machine stops at any moment.

On a file system ``iter_0001000/`` is a complete checkpoint: it gets that name last, by a rename. Anything under way
has a name that starts with a dot and isn't taken for a checkpoint. Object stores can't rename, so there a save
writes into ``iter_0001000-5f3a9c1e/``, a name of its own, and its manifest, which is put last, makes it a checkpoint.
``latest_checkpointed_iteration.txt`` names the one to resume.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import cast

from megatron.core.checkpointing.manifest import MANIFEST, Manifest
from megatron.core.files.durable import sync_path, write_durably
from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.errors import CheckpointError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"

_COMPLETE = re.compile(r"iter_(\d{7,})")
_REMOTE = re.compile(r"iter_(\d{7,})-[0-9a-f]{8}")
_REPLACED = re.compile(r"\.iter_(\d{7,})\.replaced-\w+")
_LEFTOVER = re.compile(r"\.iter_\d{7,}\.(partial|removed)-\w+")


def aside_path(root: Path, iteration: int, token: str, *, kind: str) -> Path:
    """Where a checkpoint is written (``partial``), makes way for its successor (``replaced``) or goes (``removed``)."""
    return root / f".iter_{iteration:07d}.{kind}-{token}"


def iteration_of(path: AnyPath) -> int | None:
    """Iteration of a folder that may be a complete checkpoint, by its name.

    A ``replaced`` one counts: it is all there is if a save was stopped between its last two renames.
    """
    match = _COMPLETE.fullmatch(path.name) or _REMOTE.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return int(match[1]) if match else None


def is_unfinished(path: AnyPath) -> bool:
    """Whether a save into object storage was stopped there before its manifest, which comes last.

    On a disk such a folder has another name. Names of other programs' checkpoints have no token.
    """
    return isinstance(path, RemotePath) and bool(_REMOTE.fullmatch(path.name)) and not (path / MANIFEST).exists()


def folder_for(root: AnyPath, iteration: int, token: str) -> AnyPath:
    """The folder that a save into ``root`` writes into. ``token``: 8 hexadecimal digits of its own."""
    if isinstance(root, RemotePath):
        return root / f"iter_{iteration:07d}-{token}"
    return aside_path(root, iteration, token, kind="partial")


def begin(root: AnyPath, folder: AnyPath) -> None:
    """Make the ``folder`` that a save writes into, and ``root``; clear away what saves that never finished have left.

    Other ranks may write into ``folder`` already.
    """
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        with _cleaning(path):
            if path.name == folder.name:
                continue
            if _LEFTOVER.fullmatch(path.name):
                _delete(cast(Path, path))
            elif isinstance(path, RemotePath) and is_unfinished(path):
                path.remove_tree()
    folder.mkdir(exist_ok=True)


def publish(folder: AnyPath, iteration: int) -> AnyPath:
    """Make a checkpoint of a complete folder, whose manifest was written last and durably, and with it the names of the
    others; returns its path from now on.

    Durable when this returns. One of the same iteration makes way, and is removed afterwards.
    """
    if isinstance(folder, RemotePath):
        write_durably(folder.parent / TRACKER, f"{iteration}\n")
        with _cleaning(folder.parent):
            for superseded in _superseded(folder):
                remove(superseded)
        return folder
    target = folder.parent / f"iter_{iteration:07d}"
    if target.exists():
        target.rename(aside_path(target.parent, iteration, os.urandom(4).hex(), kind="replaced"))
    folder.rename(target)
    sync_path(target.parent)
    write_durably(target.parent / TRACKER, f"{iteration}\n")
    with _cleaning(target.parent):
        for path in target.parent.iterdir():
            if _REPLACED.fullmatch(path.name):
                remove(path)
    return target


def _superseded(newest: RemotePath) -> list[RemotePath]:
    """Checkpoints with a later one of their iteration: ``newest``'s, and those that earlier saves could not delete."""
    again: dict[int | None, list[RemotePath]] = {}
    for path in newest.parent.iterdir():
        again.setdefault(iteration_of(path), []).append(path)
    saved_at: dict[RemotePath, float] = {newest: math.inf}
    for iteration, paths in again.items():
        if iteration is not None and len(paths) > 1:
            for path in paths:
                with suppress(CheckpointError):  # no checkpoint, or one that can't be judged now
                    saved_at.setdefault(path, Manifest.read(path).saved_at)
    latest = {
        iteration: max(paths, key=lambda path: saved_at.get(path, -math.inf)) for iteration, paths in again.items()
    }
    return [path for path in saved_at if path != latest[iteration_of(path)]]


def discard(folder: AnyPath) -> None:
    """Clear away as much as possible of the folder of a failed save."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):  # the next save tries again
        try:
            Manifest.read(folder)
        except CheckpointError:  # what has a manifest is complete, whatever failed afterwards
            folder.remove_tree()


def remove(path: AnyPath) -> bool:
    """Delete a checkpoint so that a half-deleted one is never taken for one; whether nothing of it is left.

    What can't be deleted is a warning: a newer checkpoint is durable already, and each later save tries again.
    """
    iteration = iteration_of(path)
    assert iteration is not None, f"{path} is not a checkpoint's name"
    with _cleaning(path):
        if isinstance(path, RemotePath):
            (path / MANIFEST).unlink()
            path.remove_tree()
            return True
        going = aside_path(path.parent, iteration, os.urandom(4).hex(), kind="removed")
        path.rename(going)
        with _cleaning(going):  # the name that later saves find it by
            _delete(going)
            return True
    return False


def _delete(path: Path) -> None:
    """Delete a folder, or a link to one; raises OSError when something of it is left."""
    if path.is_symlink():
        target = path.resolve()
        path.unlink()
        _warn(f"a checkpoint was a link to {target}: the link is deleted; delete that folder to free its space")
        return
    shutil.rmtree(path, ignore_errors=True)  # as much as can be deleted
    if path.exists():
        shutil.rmtree(path)  # raises the reason


@contextmanager
def _cleaning(path: AnyPath) -> Iterator[None]:
    """Make a failure to clean ``path`` a warning."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        _warn(f"{path} could not be deleted ({where}: {error.strerror or error}); each later save tries again")


@cache  # once for each folder and reason, however many saves try again
def _warn(text: str) -> None:
    logger.warning(text)
