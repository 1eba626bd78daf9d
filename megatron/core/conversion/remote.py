"""Models in object storage: fetched to a disk for the libraries that open them, and put there when they are whole.

A model in storage is the files below a name. The files by which readers recognize a model are put last, so that an
interrupted upload is never taken for one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.core.checkpointing.folders import TRACKER
from megatron.core.checkpointing.manifest import MANIFEST
from megatron.core.conversion.aside import folder_aside
from megatron.core.files.durable import sync_path
from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.errors import CheckpointError

_LAST = ("metadata.json", "config.json", MANIFEST, TRACKER)


@contextmanager
def fetched(place: RemotePath, *, say: Callable[[str], None]) -> Iterator[Path]:
    """A copy of ``place`` in the folder for temporary files, which is gone afterwards."""
    with folder_aside(Path(tempfile.gettempdir()), place.name, say=say) as copy:
        _fetch(place, copy)
        yield copy


def _fetch(place: RemotePath, folder: Path) -> None:
    folder.mkdir(parents=True)
    for each in place.iterdir():
        if each.is_dir():
            _fetch(each, folder / each.name)
        else:
            each.copy_to(folder / each.name)


@contextmanager
def becoming(
    place: AnyPath, *, say: Callable[[str], None], check: Callable[[], object], first: str = ""
) -> Iterator[Path]:
    """A folder that becomes ``place`` at the end, and vanishes on an error: hidden beside it, or temporary.

    ``check`` raises unless ``place`` may be written; it is called last. What is there then makes way. ``first``: the
    file that an interrupted upload is known by.
    """
    parent = Path(tempfile.gettempdir()) if isinstance(place, RemotePath) else place.parent
    with folder_aside(parent, place.name, say=say) as aside:
        yield aside
        if isinstance(place, RemotePath):
            check()
            with suppress(FileNotFoundError):
                place.remove_tree()
            put(aside, place, first=first)
            return
        for path in (*aside.rglob("*"), aside):
            sync_path(path)
        check()
        if place.exists() and any(place.iterdir()):
            place.rename(aside.with_name(f"{place.name}.replaced"))
        aside.rename(place)
        sync_path(place.parent)


def put(folder: Path, place: RemotePath, *, first: str = "") -> None:
    """Copy the files below ``folder`` to ``place``, the one called ``first`` before the others; raises OSError, and
    then nothing is left there.

    CheckpointError where not even that can be done.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    files.sort(key=lambda path: -2 if path.name == first else _LAST.index(path.name) if path.name in _LAST else -1)
    try:
        for path in files:
            target = place
            for part in path.relative_to(folder).parts:
                target = target / part
            with path.open("rb") as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
    except BaseException as error:
        try:
            with suppress(FileNotFoundError):  # nothing had been put
                place.remove_tree()
        except OSError as second:
            raise CheckpointError(
                f"{str(error) or 'interrupted'}; the files already written to {place} could not be deleted "
                f"({second.strerror}): delete it"
            ) from error
        raise
