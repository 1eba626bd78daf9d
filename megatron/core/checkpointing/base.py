"""The checkpoint that another one is made of: ``base.json`` names it where a checkpoint holds only what was trained."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from megatron.core.checkpointing.manifest import Manifest
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.errors import CheckpointError
from megatron.small_files import as_kind, read_json

BASE_FILE = "base.json"


@dataclass(frozen=True)
class Base:
    """A checkpoint whose weights another one refers to. ``folder``: of its iteration. ``fingerprint``: of its files."""

    folder: str
    fingerprint: str

    @classmethod
    def of(cls, folder: AnyPath) -> Base:
        """The checkpoint in ``folder``, by its absolute path."""
        named = os.path.realpath(folder) if isinstance(folder, Path) else str(folder)
        return cls(named, fingerprint_of(folder))

    def to_json(self) -> str:
        """Text of ``base.json``."""
        return json.dumps(asdict(self), indent=1) + "\n"


def base_of(folder: AnyPath) -> AnyPath | None:
    """The folder of the checkpoint that the one in ``folder`` refers to; None for a whole one.

    Raises CheckpointError when it isn't there, or holds other files than when the reference was written.
    """
    path = folder / BASE_FILE
    if not path.exists():
        return None
    body = read_json(path, dict[str, str], error=CheckpointError)
    base = cast(Base, as_kind(body, Base, where=str(path), error=CheckpointError))
    where = path_of(base.folder)
    try:
        found = fingerprint_of(where)
    except (CheckpointError, OSError):
        raise CheckpointError(
            f"{folder} holds only what was trained, and the checkpoint with the other weights, {where}, is not there: "
            "put it back, or a link to its new place"
        ) from None
    if found != base.fingerprint:
        raise CheckpointError(
            f"{folder} holds only what was trained beside the weights in {where}, which have changed since: put back "
            "the checkpoint that was there"
        )
    return where


def fingerprint_of(folder: AnyPath) -> str:
    """A digest of a checkpoint's manifest: the sizes and checksums of its files."""
    files = {name: asdict(record) for name, record in Manifest.read(folder).files.items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
