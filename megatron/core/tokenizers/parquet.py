"""Rows of a Parquet file as lines of JSON, so that they are read as text files are."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

from megatron.core.files.remote_path import is_url
from megatron.core.tokenizers.input_files import opened, size_of
from megatron.core.tokenizers.line_batches import LineBatch, Position
from megatron.errors import ConfigError, DataError

_ROWS = 256  # decoded at a time; a row of web text is a few KB


def column_names(path: str) -> list[str]:
    """Names of a file's columns. Raises as ``read_rows`` does."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise _needs_pyarrow(path) from None
    try:
        with _source(path) as source:
            return list(parquet.read_schema(source).names)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"--input {path} cannot be read: {error}; the file is damaged.") from None


def read_rows(
    path: str, begin: Position, *, keys: Sequence[str], batch_bytes: int, stop: int | None = None
) -> Iterator[LineBatch]:
    """Rows from ``begin.line`` (counted from 1) on, below ``stop``, each an object of the columns ``keys``.

    Raises ConfigError without the pyarrow library, DataError for a file that is damaged or lacks a column.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise _needs_pyarrow(path) from None
    row = 0
    try:
        with _source(path) as source, parquet.ParquetFile(source) as file:
            names = list(file.schema_arrow.names)
            if lacking := [key for key in keys if key not in names]:
                raise DataError(f"--input {path} has no column {lacking[0]} (its columns are {', '.join(names[:8])}).")
            size, total = size_of(path), max(file.metadata.num_rows, 1)
            groups, row = _groups_from(
                [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)],
                begin.line - 1,
                stop,
            )
            lines, held = list[bytes](), 0
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=list(keys)):
                for record in batch.to_pylist():
                    row += 1
                    if row < begin.line:
                        continue
                    lines.append(json.dumps(record, ensure_ascii=False).encode())
                    held += len(lines[-1])
                    if held >= batch_bytes:
                        yield _batch(path, begin.file, row, lines, size * row // total)
                        lines, held = [], 0
            if lines:
                yield _batch(path, begin.file, row, lines, size)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"--input {path} cannot be read after row {row}: {error}; the file is damaged.") from None
    except TypeError as error:
        raise DataError(f"--input {path} row {row}: {error}; --json-keys name columns of text.") from None


def row_groups(path: str) -> list[tuple[int, int]]:
    """Bytes and rows of each group of rows. Raises as ``read_rows`` does."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise _needs_pyarrow(path) from None
    try:
        with _source(path) as source:
            facts = parquet.read_metadata(source)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"--input {path} cannot be read: {error}; the file is damaged.") from None
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    return [(sum(g.column(c).total_compressed_size for c in range(g.num_columns)), g.num_rows) for g in groups]


def _needs_pyarrow(path: str) -> ConfigError:
    return ConfigError(
        f"--input {path} needs the pyarrow library: pip install pyarrow, or write the file as JSON lines first."
    )


def _groups_from(sizes: Sequence[int], row: int, stop: int | None) -> tuple[list[int], int]:
    """The row groups from the one that holds ``row`` on that begin before line ``stop``, and the rows before them."""
    starts = [0, *accumulate(sizes)]
    first = next((number for number, end in enumerate(starts[1:]) if end > row), len(sizes))
    last = len(sizes) if stop is None else sum(start < stop - 1 for start in starts[:-1])
    return list(range(first, last)), starts[first] if first < len(sizes) else 0


def _source(path: str) -> AbstractContextManager[str | io.BufferedReader]:
    """What pyarrow reads: a file of this machine by its own means."""
    return opened(path) if is_url(path) else nullcontext(path)


def _batch(path: str, file: int, row: int, lines: list[bytes], bytes_read: int) -> LineBatch:
    """Rows up to number ``row``."""
    return LineBatch(path, row - len(lines) + 1, b"\n".join(lines) + b"\n", bytes_read, Position(file, row + 1))
