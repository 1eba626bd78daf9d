"""Read and write token sequences in ``PREFIX.bin`` and ``PREFIX.idx``, byte for byte as Megatron-LM does."""

from __future__ import annotations

import hashlib
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from typing_extensions import override

from megatron.core.datasets.indexed_format import (
    LENGTH_DTYPE,
    MODE_DTYPE,
    OFFSET_DTYPE,
    TOKEN_DTYPES,
    IndexHeader,
    bin_path,
    check_tables,
    idx_path,
    read_header,
)
from megatron.core.datasets.metadata import ContentDigests, DatasetMetadata, TokenizerStamp
from megatron.core.datasets.remote import RemoteTokens
from megatron.core.files.durable import sync_path, write_errors
from megatron.core.files.locks import lock
from megatron.core.files.remote_path import is_url
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import RESTART_MAY_HELP, ConfigError, DataError, read_errors

_BLOCK_BYTES = 1 << 23
_TABLE_BYTES = 1 << 18
_NUM_PROBES, _PROBE_TOKENS = 4, 1024


class IndexedDataset:
    """Sequences of tokens on disk, read on demand; opening checks that the two files are whole and agree.

    ``prefix``: path of both files without their endings, or a URL whose data are fetched into ``cache`` as they are
    read; ``local_prefix``: their path on this machine. ``mmap``: map the tokens into memory, else read them from the
    file. ``multimodal``: the index also holds a mode per sequence. Raises DataError for files that are missing or
    damaged.

    ``lengths`` [sequences] in tokens; ``offsets`` [sequences] in bytes; ``boundaries`` [documents + 1]: document d is
    sequences ``boundaries[d]`` to ``boundaries[d + 1]``; ``modes`` [sequences] or None.
    """

    def __init__(
        self, prefix: str | Path, *, mmap: bool = True, multimodal: bool = False, cache: Path | None = None
    ) -> None:
        self.prefix = self.local_prefix = str(prefix)
        self.mmap, self._cache = mmap, cache
        self._remote: RemoteTokens | None = None
        if is_url(self.prefix):
            if cache is None:
                raise ConfigError(f"{self.prefix} is fetched into a local folder: give one with --data-cache-path")
            self._remote = RemoteTokens(self.prefix, cache)
            self.local_prefix = self._remote.local_prefix
        tokens, index = bin_path(self.local_prefix), idx_path(self.local_prefix)
        with read_errors(self.prefix):
            header = read_header(self.local_prefix, multimodal=multimodal)
            self.dtype, count, start = header.dtype, header.num_sequences, header.size
            self.lengths: NDArray[np.int32] = _map_array(index, LENGTH_DTYPE, count=count, start=start)
            start += LENGTH_DTYPE.itemsize * count
            self.offsets: NDArray[np.int64] = _map_array(index, OFFSET_DTYPE, count=count, start=start)
            start += OFFSET_DTYPE.itemsize * count
            self.boundaries: NDArray[np.int64] = _map_array(
                index, OFFSET_DTYPE, count=header.num_boundaries, start=start
            )
            start += OFFSET_DTYPE.itemsize * header.num_boundaries
            self.modes: NDArray[np.int8] | None = None
            if multimodal:
                self.modes = _map_array(index, MODE_DTYPE, count=count, start=start)
            self.num_tokens = check_tables(
                self.local_prefix,
                dtype=self.dtype,
                lengths=self.lengths,
                offsets=self.offsets,
                boundaries=self.boundaries,
            )
            self._file = os.open(tokens, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            if mmap:
                self._tokens = _map_array(tokens, self.dtype, count=self.num_tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.boundaries) - 1

    @cached_property
    def fingerprint(self) -> str:
        """Digest of a part of the tokens: 4 stretches of up to 1,024."""
        digest = hashlib.blake2b(digest_size=16)
        for start in np.linspace(0, max(self.num_tokens - _PROBE_TOKENS, 0), _NUM_PROBES).astype(np.int64).tolist():
            digest.update(self._read(start, min(_PROBE_TOKENS, self.num_tokens)).tobytes())
        return digest.hexdigest()

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens ``[offset, offset + length)`` of sequence ``index`` (to its end without ``length``), not writable."""
        size = self.lengths.item(index)
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens {offset} to {stop} of sequence {index}, which has {size}")
        return self._read(self.offsets.item(index) // self.dtype.itemsize + offset, stop - offset)

    def get_range(self, first: int, stop: int) -> NDArray[Any]:
        """Tokens of sequences ``first`` to ``stop`` (not included), which lie end to end, not writable."""
        start = self.offsets.item(first) // self.dtype.itemsize
        end = self.offsets.item(stop - 1) // self.dtype.itemsize + self.lengths.item(stop - 1)
        return self._read(start, end - start)

    def __getitem__(self, index: int | slice) -> Any:
        """Tokens of one sequence, or a list of them for a slice without a step."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"slices of an indexed data set are contiguous; got a step of {step}")
            return [self.get(i) for i in range(start, stop)]
        return self.get(index)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All tokens in order, a few MB at a time."""
        count = _BLOCK_BYTES // self.dtype.itemsize
        for start in range(0, self.num_tokens, count):
            yield self._read(start, min(count, self.num_tokens - start))

    def digests(self) -> ContentDigests:
        """Digests of all bytes of both files, which are read whole."""
        tokens = hashlib.sha256()
        for block in self.blocks():
            tokens.update(block.data)
        return ContentDigests(tokens.hexdigest(), _sha256(idx_path(self.local_prefix)).hexdigest())

    def _read(self, start: int, count: int) -> NDArray[Any]:
        if self._remote is not None:
            self._remote.ensure(start * self.dtype.itemsize, (start + count) * self.dtype.itemsize)
        size = self.dtype.itemsize
        if os.fstat(self._file).st_size < (start + count) * size:  # reading a map beyond it would kill the process
            raise DataError(
                f"{bin_path(self.local_prefix)} was cut short while it was in use: it had "
                f"{self.num_tokens * size} bytes and has {os.fstat(self._file).st_size}; copy it again"
            )
        if self.mmap:
            return self._tokens[start : start + count]
        return np.frombuffer(os.pread(self._file, count * size, start * size), self.dtype)

    @override
    def __reduce__(self) -> tuple[Any, ...]:  # worker processes open the files anew
        settings: dict[str, Any] = {"mmap": self.mmap, "multimodal": self.modes is not None, "cache": self._cache}
        return partial(IndexedDataset, self.prefix, **settings), ()


class IndexedDatasetWriter:
    """Writes ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.meta.json``, document by document, in constant memory.

    The files get their names in ``finish`` (at the end of a ``with`` block without error); until then everything is in
    ``.part`` files beside them. A failure removes those, unless ``sync`` was called: then a writer with its result as
    ``resume`` continues from there.
    Raises DataError for a full disk, for ids that don't fit ``dtype`` and while another writer has the same ``prefix``,
    ConfigError for a URL.

    ``tokenizer``: the one that made the ids, for the metadata; ``chat`` and ``num_images``, which may be set until the
    end: how the conversations are written, and of how many images there are places. ``multimodal``: store a mode per
    sequence.
    """

    chat: ChatSettings | None = None
    num_images: int | None = None

    def __init__(
        self,
        prefix: str | Path,
        dtype: DTypeLike,
        *,
        multimodal: bool = False,
        tokenizer: TokenizerStamp | None = None,
        resume: DatasetMetadata | None = None,
    ) -> None:
        self.prefix, self.dtype, self.tokenizer = str(prefix), np.dtype(dtype), tokenizer
        if self.dtype not in TOKEN_DTYPES.values():
            raise ValueError(f"the format has no code for {self.dtype}")
        if is_url(self.prefix):
            raise ConfigError(
                f"{self.prefix} is a URL, but data sets are written to a folder: give a folder, and copy the files"
            )
        self.num_tokens, self.num_sequences, self.num_documents = resume.counts if resume else (0, 0, 0)
        self.max_token_id = resume.max_token_id if resume else None
        # In the order in which they get their names: the index last, so that it always describes these tokens.
        finals = (bin_path(self.prefix), DatasetMetadata.path(self.prefix), idx_path(self.prefix))
        self._aside = {path: path.with_name(path.name + ".part") for path in finals}
        self._tables: list[Path] = []
        self._written: ContentDigests | None = None
        self._open, self._alone = ExitStack(), ExitStack()
        self._lasting = True  # until the files are known to be ours
        with self._writing():
            bin_path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            # Excludes other writers until the files have names, where locks work; a killed writer's lock is released.
            if lock(self._alone.enter_context(self._aside[bin_path(self.prefix)].open("ab"))) == "held elsewhere":
                raise DataError(
                    f"another process is writing {bin_path(self.prefix)}: wait for it, or give another prefix",
                    exit_code=RESTART_MAY_HELP,
                )
            self._lasting = resume is not None
            self._bin = self._part(self._aside[bin_path(self.prefix)], size=self.num_tokens * self.dtype.itemsize)
            self._digest = _sha256(self._aside[bin_path(self.prefix)])
            self._lengths = self._table("lengths", size=self.num_sequences * LENGTH_DTYPE.itemsize)
            self._boundaries = self._table("documents", size=self.num_documents * OFFSET_DTYPE.itemsize)
            self._modes = self._table("modes", size=self.num_sequences) if multimodal else None

    def _table(self, name: str, *, size: int) -> IO[bytes]:
        self._tables.append(Path(f"{self.prefix}.{name}.part"))
        return self._part(self._tables[-1], size=size)

    def _part(self, path: Path, *, size: int) -> IO[bytes]:
        """The file, cut to its first ``size`` bytes, open at its end."""
        file = self._open.enter_context(path.open("rb+" if size else "wb+"))
        if os.fstat(file.fileno()).st_size < size:
            raise DataError(
                f"{path} is shorter than the {size} bytes from which an interrupted run continues: delete it to "
                "start again"
            )
        file.truncate(size)
        file.seek(size)
        return file

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with write_errors(bin_path(self.prefix)):
                yield
        except BaseException:
            self.abort()
            raise

    def add_documents(
        self, tokens: ArrayLike, lengths: ArrayLike, sequences: ArrayLike | None = None, *, modes: ArrayLike = 0
    ) -> None:
        """Append many documents: ``tokens`` end to end, ``lengths`` [sequences] to divide them.

        ``sequences`` [documents]: how many sequences each document has, possibly none; None: one. ``modes``
        [sequences]: only for multimodal files.
        """
        values, sizes = np.asarray(tokens), np.asarray(lengths, LENGTH_DTYPE)
        counts = np.ones(len(sizes), OFFSET_DTYPE) if sequences is None else np.asarray(sequences, OFFSET_DTYPE)
        assert int(counts.sum()) == len(sizes), "documents don't add up to the number of sequences"
        assert values.size == int(sizes.sum(dtype=np.int64)), "lengths don't add up to the number of tokens"
        ends = self.num_sequences + np.cumsum(counts)
        self._add_tokens(values)
        with self._writing():
            self._lengths.write(sizes.data)
            self._boundaries.write(ends.data)
            if self._modes is not None:
                self._modes.write(np.broadcast_to(np.asarray(modes, MODE_DTYPE), sizes.shape).tobytes())
        self.num_sequences += len(sizes)
        self.num_documents += len(counts)

    def add_document(self, *sequences: ArrayLike, modes: ArrayLike = 0) -> None:
        """Append a document of these sequences, usually one; ``modes`` as in ``add_documents``."""
        arrays = [np.asarray(sequence).reshape(-1) for sequence in sequences]
        tokens = np.concatenate([np.empty(0, self.dtype), *arrays])
        self.add_documents(tokens, [len(array) for array in arrays], [len(arrays)], modes=modes)

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Append all documents of another data set of the same type."""
        assert dataset.dtype == self.dtype, f"{dataset.prefix} holds {dataset.dtype}, not {self.dtype}"
        assert (dataset.modes is None) == (self._modes is None), (
            f"{dataset.prefix} has modes and the others have none, or the other way round"
        )
        for block in dataset.blocks():
            self._add_tokens(block)
        with self._writing():
            self._lengths.write(np.ascontiguousarray(dataset.lengths).data)
            self._boundaries.write((dataset.boundaries[1:] + self.num_sequences).data)
            if self._modes is not None and dataset.modes is not None:
                self._modes.write(np.ascontiguousarray(dataset.modes).data)
        self.num_sequences += len(dataset)
        self.num_documents += dataset.num_documents

    def _add_tokens(self, values: NDArray[Any]) -> None:
        if values.size and self.dtype.kind in "iu":
            low, high, limits = int(values.min()), int(values.max()), np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                self.abort()
                raise DataError(
                    f"token id {low if low < limits.min else high} does not fit into {self.dtype}, the type of "
                    f"{bin_path(self.prefix)}: the tokenizer gives ids beyond its vocabulary size"
                )
            self.max_token_id = high if self.max_token_id is None else max(high, self.max_token_id)
        content = np.ascontiguousarray(values, self.dtype).reshape(-1).data
        self._digest.update(content)
        with self._writing():
            self._write_tokens(content)
        self.num_tokens += values.size

    def _write_tokens(self, content: memoryview) -> None:
        self._bin.write(content)

    @property
    def tokens_sha256(self) -> str:
        """Hex digest of what has been written so far of ``PREFIX.bin``."""
        return self._digest.hexdigest()

    def metadata(self) -> DatasetMetadata:
        """Metadata of what has been written so far; with digests once finished."""
        return DatasetMetadata(
            tokenizer=self.tokenizer,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
            num_documents=self.num_documents,
            max_token_id=self.max_token_id,
            sha256=self._written,
            chat=self.chat,
            num_images=self.num_images,
        )

    def sync(self) -> DatasetMetadata:
        """Keep what is written so far in case of a failure; another writer can ``resume`` from the result."""
        with self._writing():
            for file in (self._bin, self._lengths, self._boundaries, self._modes):
                if file is not None:
                    file.flush()
                    os.fsync(file.fileno())
        self._lasting = True
        return self.metadata()

    def finish(self) -> None:
        """Complete the files and give them their names."""
        index = idx_path(self.prefix)
        with self._writing():
            self._write_index(self._aside[index])
            self._written = ContentDigests(self._digest.hexdigest(), _sha256(self._aside[index]).hexdigest())
            self._aside[DatasetMetadata.path(self.prefix)].write_text(self.metadata().to_json(), encoding="utf-8")
            self._open.close()
            self._give_names()
            for table in self._tables:
                table.unlink()
        self._alone.close()

    def _give_names(self) -> None:
        for aside in self._aside.values():
            sync_path(aside)
        idx_path(self.prefix).unlink(missing_ok=True)
        for path, aside in self._aside.items():
            aside.replace(path)

    def _write_index(self, path: Path) -> None:
        with path.open("wb") as index:
            index.write(IndexHeader(self.dtype, self.num_sequences, self.num_documents + 1).pack())
            self._lengths.seek(0)
            shutil.copyfileobj(self._lengths, index)
            self._lengths.seek(0)
            end = 0
            while block := self._lengths.read(_TABLE_BYTES):
                sizes = np.frombuffer(block, LENGTH_DTYPE).astype(OFFSET_DTYPE) * self.dtype.itemsize
                ends = end + np.cumsum(sizes)
                index.write((ends - sizes).data)
                end = int(ends[-1])
            index.write(np.zeros(1, OFFSET_DTYPE).data)
            for table in (self._boundaries, self._modes):
                if table is not None:
                    table.seek(0)
                    shutil.copyfileobj(table, index)

    def abort(self) -> None:
        """Remove everything written so far, unless ``sync`` was called; the files of an earlier run stay."""
        with suppress(OSError):  # what could not be flushed doesn't count
            self._open.close()
        for path in () if self._lasting else (*self._aside.values(), *self._tables):
            with suppress(OSError):
                path.unlink()
        self._alone.close()

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.abort()


def _sha256(path: Path) -> hashlib._Hash:
    """Digest of a file's content, which more can be added to."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest


def _map_array(path: Path, dtype: np.dtype[Any], *, count: int, start: int = 0) -> NDArray[Any]:
    if count == 0:
        return np.empty(0, dtype)
    # A plain array over the map: np.memmap itself is several times slower to index.
    return np.memmap(path, dtype, mode="r", offset=start, shape=(count,)).view(np.ndarray)
