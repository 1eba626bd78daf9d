"""What a checkpoint root looks like on disk, and the moves that keep it whole when the machine stops at any moment.

``iter_0001000/`` is a complete checkpoint: it gets that name last, by a rename. Anything under way has a name that
starts with a dot and that nobody takes for a checkpoint. ``latest_checkpointed_iteration.txt`` names the one to resume.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"

_COMPLETE = re.compile(r"iter_(\d{7,})")
_REPLACED = re.compile(r"\.iter_(\d{7,})\.replaced-\w+")
_LEFTOVER = re.compile(r"\.iter_\d{7,}\.(partial|removed)-\w+")


def checkpoint_path(root: Path, iteration: int) -> Path:
    """Where the checkpoint of ``iteration`` lies once it is complete; Megatron-LM's name."""
    return root / f"iter_{iteration:07d}"


def aside_path(root: Path, iteration: int, token: str, *, kind: str) -> Path:
    """Where a checkpoint is written (``partial``), makes way for its successor (``replaced``) or goes (``removed``)."""
    return root / f".iter_{iteration:07d}.{kind}-{token}"


def iteration_of(path: Path) -> int | None:
    """Iteration of a folder that may be a complete checkpoint, by its name.

    A ``replaced`` one counts: it is all there is if a save was stopped between its last two renames.
    """
    match = _COMPLETE.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return int(match[1]) if match else None


def remove_leftovers(root: Path) -> None:
    """Clear away what saves that never finished have left."""
    for path in root.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)


def publish(aside: Path, target: Path, token: str) -> None:
    """Give a finished checkpoint its name, durably. One of that name makes way, and is removed afterwards."""
    iteration = iteration_of(target)
    assert iteration is not None, f"{target} is not a checkpoint's name"
    sync_folder(aside)
    if target.exists():
        target.rename(aside_path(target.parent, iteration, token, kind="replaced"))
    aside.rename(target)
    sync_folder(target.parent)
    write_durably(target.parent / TRACKER, f"{iteration}\n")
    for path in target.parent.iterdir():
        if _REPLACED.fullmatch(path.name):
            remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint so that a half-deleted one is never taken for one."""
    iteration = iteration_of(path)
    assert iteration is not None, f"{path} is not a checkpoint's name"
    going = aside_path(path.parent, iteration, os.urandom(4).hex(), kind="removed")
    path.rename(going)
    shutil.rmtree(going)


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that it has the old contents or the new ones after a crash, never a mixture."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make names in a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
