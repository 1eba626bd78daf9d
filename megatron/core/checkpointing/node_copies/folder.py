"""The folder of one node in which a run's copies lie: ``iter_0000040`` each, whole once its manifest is there."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.core.checkpointing.folders import iteration_of
from megatron.core.checkpointing.manifest import MANIFEST, Manifest, checksum
from megatron.core.checkpointing.node_copies.choosing import FoundCopy
from megatron.core.files.remote_path import AnyPath
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.mesh import Mesh
from megatron.errors import CheckpointError
from megatron.small_files import read_text

ORIGINS = "origins.txt"
"""A file of each copy: the checkpoints that it was made after, a line each."""
_DATA = re.compile(r"__\d+_\d+\.distcp")
_TEXT = 1 << 16


def read_origins(copy: AnyPath) -> frozenset[str]:
    """The checkpoints that a copy was made after; raises CheckpointError where that is damaged."""
    said = read_text(copy / ORIGINS, where=ORIGINS, error=CheckpointError, most_bytes=_TEXT)
    return frozenset(filter(None, said.split("\n")))


@dataclass(frozen=True)
class NodeFolder:
    """The folder as a rank sees it. ``places``: number of the folder that each rank sees; ranks of a node share one.

    ``rank``: this rank.
    """

    path: Path
    rank: int
    places: tuple[int, ...]

    @classmethod
    def seen(cls, path: Path, mesh: Mesh) -> NodeFolder:
        """Make the folder, for this user alone, and find out who shares it. A collective.

        Raises OSError where it can't be made, and CheckpointError where another user has made it: its name is known
        beforehand, and folders such as /dev/shm are everybody's.
        """
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
            what = "is a link" if stat.S_ISLNK(facts.st_mode) else "belongs to another user"
            raise CheckpointError(
                f"{path}, for copies of this run, {what}, so that what is in it may not be the run's: delete it, or "
                "name another folder with --non-persistent-local-ckpt-dir or --save-fallback-dir"
            )
        if facts.st_mode & 0o077:
            path.chmod(0o700)
        everyone = gather_objects((socket.gethostname(), facts.st_dev, facts.st_ino), mesh)
        numbers = {each: number for number, each in enumerate(dict.fromkeys(everyone))}
        return cls(path, mesh.world_rank, tuple(numbers[each] for each in everyone))

    @property
    def neighbours(self) -> list[int]:
        """Ranks that see the same folder."""
        return [rank for rank, place in enumerate(self.places) if place == self.places[self.rank]]

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once in the folder."""
        return self.neighbours[0] == self.rank

    def of(self, iteration: int) -> Path:
        """The folder of a copy."""
        return self.path / f"iter_{iteration:07d}"

    def found(self) -> list[FoundCopy]:
        """The copies in the folder, as far as they are here and described by a manifest."""
        copies = []
        for path in sorted(self.path.iterdir()):
            if iteration_of(path) is None or not (path / MANIFEST).is_file():
                continue
            try:
                manifest = Manifest.read(path)
                origins = read_origins(path)
            except (CheckpointError, OSError):
                continue
            here = frozenset(
                name
                for name, record in manifest.files.items()
                if (path / name).is_file() and (path / name).stat().st_size == record.size
            )
            small = {name for name in manifest.files if not _DATA.fullmatch(name)}
            if small <= here and not manifest.checksum_problems(path, small):
                files = frozenset(manifest.files) - small
                copies.append(FoundCopy(manifest.iteration, manifest.saved_at, origins, files, here - small))
        return copies

    def verified(self, iteration: int, saved_at: float) -> set[str]:
        """The files of a copy that this rank reads for others, undamaged: its share of those in the folder."""
        path = self.of(iteration)
        if not (path / MANIFEST).is_file():
            return set()
        manifest = Manifest.read(path)
        if manifest.saved_at != saved_at:
            return set()
        share, shares = self.neighbours.index(self.rank), len(self.neighbours)
        names = [name for name in sorted(manifest.files) if (path / name).is_file()]
        data = [name for name in names if _DATA.fullmatch(name)]
        good = set(data[share::shares])
        good -= {name for name in good if checksum(path / name) != manifest.files[name]}
        return good

    def small_files(self, iteration: int) -> dict[str, bytes]:
        """What a copy holds beside tensors, its manifest last."""
        path = self.of(iteration)
        names = [name for name in Manifest.read(path).files if not _DATA.fullmatch(name)]
        return {name: (path / name).read_bytes() for name in (*names, MANIFEST)}

    def keep(self, iterations: Iterable[int]) -> None:
        """Delete copies of other iterations, and what saves that were stopped have left; for the first rank."""
        kept = {self.of(iteration).name for iteration in iterations}
        for path in self.path.iterdir():
            if iteration_of(path) is not None and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Delete all copies and the folder."""
        self.keep(())
        try:
            self.path.rmdir()
        except OSError:
            return  # somebody else's files are in it
