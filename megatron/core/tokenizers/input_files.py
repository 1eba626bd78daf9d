"""Files of text where they lie, on this machine or at URLs: found by paths, folders and globs, and opened."""

from __future__ import annotations

import glob
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.files.range_reader import BLOCK, RangeReader
from megatron.core.files.remote_path import RemotePath, is_url, path_of
from megatron.core.tokenizers import compressed
from megatron.errors import DataError, exit_code_of
from megatron.small_files import check_regular, has_file

STDIN = "-"
JSON_ENDINGS = (".jsonl", ".json")
PARQUET_ENDING = ".parquet"
TEXT_ENDINGS = (".txt",)


@dataclass(frozen=True)
class InputFile:
    """A file of the input. ``size``: bytes where it lies, None for a pipe; ``version``: changes with its content.

    ``source``: the path, folder or glob by which the user named it.
    """

    path: str
    source: str
    size: int | None
    version: str


def find_inputs(patterns: Sequence[str], *, endings: Sequence[str] = (*JSON_ENDINGS, PARQUET_ENDING)) -> list[str]:
    """The files that paths, folders and globs name, in the order given and sorted by name within each; ``-`` is stdin.

    A folder stands for the files below it with one of ``endings``, compressed or not.
    Raises DataError for a pattern that matches nothing, and for a file that is named twice.
    """
    return [each.path for each in list_inputs(patterns, endings=endings)]


def list_inputs(
    patterns: Sequence[str], *, endings: Sequence[str] = (*JSON_ENDINGS, PARQUET_ENDING)
) -> list[InputFile]:
    """What ``find_inputs`` finds, with sizes and versions. URLs take one listing for each pattern."""
    found = dict[str, InputFile]()
    for pattern in patterns:
        remote = is_url(pattern) and not pattern.startswith("file://")
        matches = _remote_matches(pattern, endings) if remote else _local_matches(pattern, endings)
        repeated = next((each.path for each in matches if each.path in found), None)
        if repeated:
            raise DataError(f"--input names {repeated} twice; its documents would be used twice.")
        found |= {each.path: each for each in matches}
    return list(found.values())


def total_size(paths: Sequence[str]) -> int | None:
    """Bytes where the files lie; None when a file is a pipe."""
    if any(path == STDIN or not (is_url(path) or Path(path).is_file()) for path in paths):
        return None
    return sum(map(size_of, paths))


def size_of(path: str) -> int:
    """Bytes of a file where it lies; 0 for a pipe. Raises OSError for a URL that cannot be reached."""
    if is_url(path):
        return path_of(path).stat().st_size
    return Path(path).stat().st_size if Path(path).is_file() else 0


def opened(path: str, *, stop: int | None = None) -> io.BufferedReader:
    """The file, open to be read in bytes; at a URL, what lies after byte ``stop`` isn't fetched ahead."""
    place = path_of(path)
    if path == STDIN:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    if isinstance(place, RemotePath):
        return io.BufferedReader(RangeReader(place, place.stat().st_size, stop=stop), BLOCK >> 4)
    return place.open("rb")


def is_plain_text(path: str) -> bool:
    """Whether the file's name says plain text rather than JSON lines."""
    name = Path(path)
    return (Path(name.stem) if name.suffix in compressed.ENDINGS else name).suffix in TEXT_ENDINGS


def _of_folder(endings: Sequence[str]) -> tuple[str, ...]:
    return tuple(ending + packed for ending in endings for packed in ("", *compressed.ENDINGS))


def _local_matches(pattern: str, endings: Sequence[str]) -> list[InputFile]:
    if pattern == STDIN:
        return [InputFile(pattern, pattern, None, "")]
    found = []
    for path in _local_paths(pattern.removeprefix("file://"), endings):
        state = Path(path).stat()
        size = state.st_size if Path(path).is_file() else None
        found.append(InputFile(path, pattern, size, str(state.st_mtime_ns)))
    return found


def _local_paths(pattern: str, endings: Sequence[str]) -> list[str]:
    path = Path(pattern)
    if path.is_dir():
        named = (each for each in path.rglob("*") if each.name.endswith(_of_folder(endings)))
        inside = sorted(str(each) for each in named if has_file(each, error=DataError))
        if not inside:
            raise DataError(f"--input {pattern} holds no {' or '.join(endings)} file, compressed or not.")
        return inside
    if path.exists():
        check_regular(path, where=f"--input {pattern}", error=DataError)
        return [pattern]
    matches = sorted(each for each in glob.glob(pattern, recursive=True) if has_file(Path(each), error=DataError))
    if not matches:
        problem = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise DataError(f"--input {pattern} {problem}; give files of JSON lines, folders of them, or globs in quotes.")
    return matches


def _remote_matches(pattern: str, endings: Sequence[str]) -> list[InputFile]:
    place = RemotePath(pattern.rstrip("/"))
    try:
        entries = place.files_matching() if glob.has_magic(pattern) else place.files_below()
        is_folder = not any(each.url == place.url for each in entries)
        if not glob.has_magic(pattern) and is_folder:
            named = [each for each in entries if each.url.endswith(_of_folder(endings))]
            if entries and not named:
                raise DataError(f"--input {pattern} holds no {' or '.join(endings)} file, compressed or not.")
            entries = named
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"--input {pattern} cannot be read: {reason}.", exit_code=exit_code_of(error)) from None
    if not entries:
        problem = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise DataError(f"--input {pattern} {problem}; give files of JSON lines, folders of them, or globs in quotes.")
    return [InputFile(each.url, pattern, each.size, each.version) for each in sorted(entries)]
