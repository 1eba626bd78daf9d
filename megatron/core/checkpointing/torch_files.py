"""Files of ``torch.save``, read without ``torch.load``: untrusted files give tensors, containers and numbers alone.

``torch.load`` starts TorchScript programs, unpacks tar files and calls what a program has registered as safe. Here the
container is opened by hand: a zip archive of a pickle and a record for each storage, or, before torch 1.6, pickles with
the storages behind them.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from megatron.core.checkpointing.unpickling import Builders, Placeholder, key_of, mapping_of, unpickle
from megatron.errors import CheckpointError
from megatron.small_files import check_regular

_SCRIPT_RECORD = "constants.pkl"
_ZIP, _PICKLE = b"PK", b"\x80"
_LARGEST_PICKLE = 2**29
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of files before torch 1.6
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature; lengths of the name and of what follows it
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
} | {"torch.storage.UntypedStorage": torch.uint8}


def load_torch_file(path: Path) -> Any:
    """What ``torch.save`` wrote to ``path``. Its tensors are mapped from the file, so only what is used is read.

    Raises CheckpointError for a file that names code, or is none of torch's.
    """
    check_regular(path, where=str(path), error=CheckpointError)
    with path.open("rb") as file, _explained(str(path)):
        length = file.seek(0, io.SEEK_END)
        return _load(mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY) if length else None, str(path))


def load_torch_bytes(file: IO[bytes], length: int, *, name: str, is_checked: bool = True) -> Any:
    """Load a ``torch.save`` file from the next ``length`` bytes of ``file``, which are read as a whole; ``name`` is
    used for them in messages. ``is_checked``: the checksums of tensors are compared, too.
    """
    with _explained(name):
        begin = file.tell()
        if length > file.seek(0, io.SEEK_END) - begin:
            raise CheckpointError(f"it ends before byte {begin + length:,}")
        file.seek(begin)
        buffer = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if file.readinto(buffer) != length:  # type: ignore[attr-defined]
            raise CheckpointError("it became shorter while it was read")
        return _load(buffer, name, is_checked=is_checked)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise error if str(error).startswith(name) else CheckpointError(f"{name} is refused: {error}") from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{name} is damaged or not a checkpoint ({type(error).__name__}: {reason})") from error


def _load(buffer: mmap.mmap | None, name: str, *, is_checked: bool = False) -> Any:
    if buffer is not None and buffer[:2] == _ZIP:
        return _load_zip(buffer, is_checked=is_checked)
    if buffer is not None and buffer[:1] == _PICKLE:
        return _load_pickles(buffer)
    raise CheckpointError(f"{name} is not a file of torch.save")


def _load_zip(buffer: mmap.mmap, *, is_checked: bool) -> Any:
    with zipfile.ZipFile(cast(IO[bytes], buffer)) as archive:
        records = {info.filename: info for info in archive.infolist()}
        (top,) = {name.split("/")[0] for name in records}
    if len(records) < len(archive.infolist()):
        raise CheckpointError("it has several records of the same name")
    if f"{top}/{_SCRIPT_RECORD}" in records:
        raise CheckpointError("it is a TorchScript program, not a checkpoint")
    if f"{top}/byteorder" in records and bytes(_record(buffer, records[f"{top}/byteorder"])) != b"little":
        raise CheckpointError("its numbers are big-endian")

    def numbers(key: str, dtype: torch.dtype, count: int) -> Tensor:
        stored = _record(buffer, records[f"{top}/data/{key}"], is_checked=is_checked)
        if count * dtype.itemsize > len(stored):
            raise CheckpointError(f"storage {key} has {len(stored)} bytes, too few for {count} of {dtype}")
        return torch.frombuffer(stored, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)

    pickled = _record(buffer, records[f"{top}/data.pkl"], is_checked=True)
    if len(pickled) > _LARGEST_PICKLE:
        raise CheckpointError(f"its pickle has {len(pickled):,} bytes, more than {_LARGEST_PICKLE:,}")
    return unpickle(io.BytesIO(pickled), _BUILDERS, is_foreign=True, storage=_Storages(numbers))


def _record(buffer: mmap.mmap, info: zipfile.ZipInfo, *, is_checked: bool = False) -> memoryview:
    """A record's bytes in place. torch never compresses records, so a compressed one is refused."""
    signature, name, extra = _LOCAL_HEADER.unpack_from(buffer, info.header_offset)
    begin = info.header_offset + _LOCAL_HEADER.size + name
    named = buffer[begin - name : begin].decode("utf-8", "replace")
    if signature != b"PK\3\4" or named != info.orig_filename or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"its record {ascii(info.filename)[:100]} differs from its entry in the archive's directory"
        )
    stored = memoryview(buffer)[begin + extra :][: info.file_size]
    if len(stored) < info.file_size or (is_checked and zlib.crc32(stored) != info.CRC):
        raise CheckpointError(f"its record {ascii(info.filename)[:100]} is damaged")
    return stored


def _load_pickles(buffer: mmap.mmap) -> Any:
    """The format before torch 1.6, where storages come after the value, which is made on empty storages."""
    stream = cast(IO[bytes], buffer)
    if (unpickle(stream, {}, is_foreign=False), unpickle(stream, {}, is_foreign=False)) != (_MAGIC, _PROTOCOL):
        raise ValueError("it does not start like a file of torch.save")
    unpickle(stream, {}, is_foreign=False)  # what the machine was
    empty: dict[str, Tensor] = {}

    def allocate(key: str, dtype: torch.dtype, count: int) -> Tensor:
        if sum(held.nbytes for held in empty.values()) + count * dtype.itemsize > len(buffer):
            raise CheckpointError(f"its storages have more bytes than the file, {len(buffer):,}")
        empty[key] = torch.empty(count, dtype=dtype)
        return empty[key]

    value = unpickle(stream, _BUILDERS, is_foreign=True, storage=_Storages(allocate))
    for key in unpickle(stream, {}, is_foreign=False):
        count, held = int.from_bytes(stream.read(8), "little"), empty.pop(key)
        stored = bytearray(stream.read(count * held.itemsize))
        if len(stored) < held.nbytes:
            raise CheckpointError(f"storage {key} has {len(stored)} bytes, too few for {len(held)} of {held.dtype}")
        if len(held):
            held.copy_(torch.frombuffer(stored, dtype=held.dtype, count=len(held)))
    if empty:
        raise CheckpointError(f"it lacks the storages {', '.join(map(ascii, [*empty][:3]))}")
    return value


class _Storages:
    """The storages of a file by their persistent ids in its pickle: tensors of one dim."""

    def __init__(self, numbers: Callable[[str, torch.dtype, int], Tensor]) -> None:
        self._numbers = numbers
        self._found: dict[str, Tensor] = {}

    def __call__(self, identity: Any) -> Tensor:
        kind, of, key, _, count, *views = identity
        dtype = _STORAGES.get(of.stands_for) if isinstance(of, Placeholder) else None
        if kind != "storage" or dtype is None or type(key) is not str or not _are_counts((count,)):
            raise CheckpointError(
                f"it names {ascii(kind)[:20]} {ascii(of)[:60]} outside the file, which is not a storage"
            )
        found = self._found[key] if key in self._found else self._numbers(key, dtype, count)
        if found.dtype != dtype:
            raise CheckpointError(f"storage {key} has two types")
        self._found[key] = found
        if any(views):  # torch before 0.4
            _, start, length = views[0]
            return found[start : start + length]
        return found


def _are_counts(values: Any) -> bool:
    return type(values) is tuple and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    """The tensor on a storage, which must hold all of it, and each number once."""
    if not (isinstance(storage, Tensor) and _are_counts((offset,)) and _are_counts(size) and _are_counts(stride)):
        raise CheckpointError("a tensor's shape has numbers that are not whole")
    numel = 1
    for length in size:
        numel *= length
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if numel and (last >= len(storage) or numel > len(storage)):
        raise CheckpointError(f"a tensor of shape {list(size)[:20]} lies outside its storage of {len(storage)} numbers")
    return storage.as_strided(size, stride, offset) if numel else storage.new_empty(size)


def _typed_tensor(storage: Any, offset: Any, size: Any, stride: Any, _: Any, __: Any, dtype: Any, *___: Any) -> Tensor:
    if not (isinstance(storage, Tensor) and isinstance(dtype, torch.dtype)):
        raise CheckpointError("a tensor's type is not a type of torch")
    return _tensor(storage.view(dtype), offset, size, stride)


def _parameter(data: Any, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise CheckpointError(f"a parameter is a {type(data).__name__}")
    return data


def _encoded(text: Any, encoding: Any) -> bytes:
    """How protocol 2 writes bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise CheckpointError("its text has an encoding that no pickle uses")
    return text.encode("latin1")


def _set(values: Any = ()) -> set[Any]:
    return {key_of(value) for value in values}


def _numbers_of(values: Any = ()) -> tuple[int, ...]:
    if not _are_counts(values):
        raise CheckpointError("a shape has numbers that are not whole")
    return cast(tuple[int, ...], values)


# What torch.save writes for tensors and plain containers, and what Megatron-LM keeps its settings in.
_BUILDERS: Builders = {
    "argparse.Namespace": Namespace,
    "collections.OrderedDict": mapping_of,
    "torch.Size": _numbers_of,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "_codecs.encode": _encoded,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.bytearray": None,
    "builtins.complex": None,
    "builtins.getattr": None,  # how Python 3.11 pickles a member of an enum
}
