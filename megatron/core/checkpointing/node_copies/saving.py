"""Copies on nodes are made: each rank writes its part into its node's folder and sends it to its partners."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron.core.checkpointing.agreement import gather_from_all, run_on_all
from megatron.core.checkpointing.manifest import MANIFEST, FileRecord, checksum
from megatron.core.checkpointing.node_copies.folder import ORIGINS, NodeFolder
from megatron.core.checkpointing.save import Snapshot, Written
from megatron.core.files.durable import write_durably
from megatron.core.parallel.byte_links import ByteLinks
from megatron.core.parallel.collectives import broadcast_object

_CHUNK = 16 << 20


class NodeCopy:
    """A copy in the making. Making one is a collective, and so is ``finish``.

    ``origins``: the checkpoints that it is made after. ``links``: to the ``partners`` that hold this rank's files, too.
    """

    def __init__(
        self,
        folder: NodeFolder,
        snapshot: Snapshot,
        *,
        origins: Sequence[str],
        small_files: Mapping[str, bytes],
        partners: tuple[int, ...] = (),
        links: ByteLinks | None = None,
    ) -> None:
        self.snapshot, self._folder, self._mesh = snapshot, folder, snapshot.mesh
        self._links, self._partners = links, [rank for rank in partners if rank != folder.rank]
        about_run: dict[str, bytes] = broadcast_object(
            {name: text for name, text in snapshot.files.items() if name not in small_files}, self._mesh
        )
        snapshot.files = {**small_files, **about_run, ORIGINS: "\n".join(origins).encode()}
        self._path = folder.of(snapshot.iteration)
        run_on_all(self._clear, self._mesh)
        self._written: Callable[[], Written] = self._write
        self.is_written: Callable[[], bool] = lambda: False

    def _clear(self) -> None:
        if self._folder.is_first and self._path.exists():
            shutil.rmtree(self._path)

    def write_in_background(self) -> None:
        """Start writing, while the snapshot's tensors don't change."""
        one_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="node copy")
        future = one_thread.submit(self._write)
        one_thread.shutdown(wait=False)
        self._written, self.is_written = future.result, future.done

    def finish(self) -> None:
        """Wait until the copy is whole on every node, then delete older ones.

        Raises CheckpointError on all ranks when a rank could not write; older copies are untouched then.
        """
        try:
            written = gather_from_all(lambda: self._written(), self._mesh)
            run_on_all(lambda: self._describe(written), self._mesh)
        except BaseException:
            shutil.rmtree(self._path, ignore_errors=True)
            raise
        run_on_all(lambda: self._folder.keep([self.snapshot.iteration]) if self._folder.is_first else None, self._mesh)

    def _describe(self, written: list[Written]) -> None:
        if self._folder.is_first:
            manifest = self.snapshot.describe(self._path, written)
            write_durably(self._path / MANIFEST, manifest.to_json())

    def _write(self) -> Written:
        """Write this rank's files and, even where that fails, exchange them with partners, who wait for it."""
        written, failure = Written([], {}), None
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            if not self.snapshot.is_empty:
                written = self.snapshot.write(self._path)
        except Exception as error:
            failure = error
        if self._links is not None:
            _exchange(self._links, self._path, {} if failure else written.files, self._partners)
        if failure is not None:
            raise failure
        return written


def _exchange(links: ByteLinks, path: Path, files: Mapping[str, FileRecord], partners: list[int]) -> None:
    """Send this rank's ``files`` to its partners and write theirs. Raises OSError, when all has been exchanged."""
    header = json.dumps({name: [record.size, record.crc32] for name, record in files.items()}).encode()
    theirs = _headers(links, header, partners)
    own = _Chunks(path, {name: record.size for name, record in files.items()})
    arriving = {rank: _Arriving(path, of_rank) for rank, of_rank in theirs.items()}
    with ExitStack() as closing:
        closing.callback(own.close)
        for each in arriving.values():
            closing.callback(each.close)
        while own.left or any(each.left for each in arriving.values()):
            chunk = own.next()
            lengths = {rank: min(_CHUNK, each.left) for rank, each in arriving.items()}
            for rank, data in links.exchange(dict.fromkeys(partners, chunk), lengths).items():
                arriving[rank].take(data)
    if own.error is not None:
        raise own.error
    for rank, each in arriving.items():
        if each.error is not None:
            raise each.error
        for name, (size, crc32) in theirs[rank].items():
            if checksum(path / name) != FileRecord(size, crc32):
                raise OSError(f"{path / name} arrived with other bytes than rank {rank} has sent")


def _headers(links: ByteLinks, header: bytes, partners: list[int]) -> dict[int, dict[str, tuple[int, int]]]:
    length = torch.tensor([len(header)], dtype=torch.int64).view(torch.uint8)
    lengths = links.exchange(dict.fromkeys(partners, length), dict.fromkeys(partners, 8))
    sizes = {rank: int(data.view(torch.int64)) for rank, data in lengths.items()}
    sent = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    found = links.exchange(dict.fromkeys(partners, sent), sizes)
    return {rank: json.loads(bytes(data.tolist())) for rank, data in found.items()}


class _Files:
    """Files of a folder, one after another, as a row of bytes; the first error is kept, and the row goes on."""

    def __init__(self, path: Path, sizes: Mapping[str, int], mode: str) -> None:
        self.left = sum(sizes.values())
        self.error: OSError | None = None
        self._path, self._mode = path, mode
        self._todo = [(name, size) for name, size in sizes.items() if size]
        self._file: IO[Any] | None = None
        self._left_of_file = 0

    def _step(self, most: int) -> tuple[IO[Any] | None, int]:
        """The file that is next, and how many of ``most`` bytes are its."""
        if not self._left_of_file:
            self.close()
            name, self._left_of_file = self._todo.pop(0)
            try:
                self._file = (self._path / name).open(self._mode)
            except OSError as error:
                self.error = self.error or error
        count = min(most, self._left_of_file)
        self._left_of_file -= count
        self.left -= count
        return self._file, count

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self.error = self.error or error
        self._file = None


class _Chunks(_Files):
    """Bytes to send."""

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        super().__init__(path, sizes, "rb")

    def next(self) -> Tensor:
        """The next bytes; zeros where they can't be read, which their checksum tells."""
        data = bytearray(min(_CHUNK, self.left))
        view, start = memoryview(data), 0
        while start < len(data):
            file, count = self._step(len(data) - start)
            try:
                if file is not None:
                    file.readinto(view[start : start + count])  # type: ignore[attr-defined]
            except OSError as error:
                self.error = self.error or error
            start += count
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class _Arriving(_Files):
    """Bytes that arrive."""

    def __init__(self, path: Path, files: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(path, {Path(name).name: size for name, (size, _) in files.items()}, "wb")

    def take(self, data: Tensor) -> None:
        """Write the next bytes."""
        start = 0
        while start < data.numel():
            file, count = self._step(data.numel() - start)
            try:
                if file is not None:
                    file.write(data[start : start + count].numpy())
            except OSError as error:
                self.error = self.error or error
                self._file = None
            start += count
