"""Pickles of strangers: a pickle can run anything, so these build tensors, containers and numbers, and nothing else.

Checkpoints of other programs name classes of those programs. They come out as stand-ins, which take whatever is given
to them and do nothing; any name outside the lists here ends the reading.
"""

from __future__ import annotations

import io
import pickle
import types
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from megatron.errors import CheckpointError

# What torch.save writes for tensors and plain containers, and what Megatron-LM keeps its settings in.
TENSOR_GLOBALS = frozenset(
    {
        ("argparse", "Namespace"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.serialization", "_get_layout"),
        ("builtins", "bytearray"),
        ("builtins", "set"),
        ("builtins", "complex"),
        ("_codecs", "encode"),
    }
)
# Packages whose classes are met in checkpoints and needed by no conversion: random states, enums, plans.
STOOD_IN_FOR = ("megatron", "transformer_engine", "apex", "numpy", "torch", "signal", "functools", "pathlib", "enum")
_STOOD_IN_FOR_TOO = {("builtins", "getattr")}  # how Python 3.11 pickles a member of an enum

# TorchScript archives are programs, and torch.load would start them.
_SCRIPT_RECORD = "constants.pkl"
_ZIP, _PICKLE = b"PK", b"\x80"


class StandIn:
    """In the place of something that a pickle names and nobody needs: takes anything, does nothing."""

    stands_for = ""

    def __new__(cls, *args: object, **kwargs: object) -> StandIn:
        """Whatever the arguments are, they are dropped."""
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Items of a pickled list."""

    def extend(self, values: object) -> None:
        """Items of a pickled list."""

    def __repr__(self) -> str:
        return f"<stand-in for {self.stands_for}>"


class RestrictedUnpickler(pickle.Unpickler):
    """Finds ``allowed`` globals and dtypes, stands in for those of the packages ``stood_in_for``, refuses others."""

    def __init__(
        self,
        file: IO[bytes],
        *,
        allowed: Collection[tuple[str, str]],
        stood_in_for: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(file, **options)
        self._allowed = allowed
        self._stood_in_for = stood_in_for

    def find_class(self, module: str, name: str) -> Any:
        """The global, or its stand-in; raises CheckpointError for one that has no business in a checkpoint."""
        if (module, name) in self._allowed or _is_dtype(module, name):
            return super().find_class(module, name)
        known = module.split(".")[0] in self._stood_in_for or (module, name) in _STOOD_IN_FOR_TOO
        if known and self._stood_in_for:
            return type(name, (StandIn,), {"stands_for": f"{module}.{name}"})
        raise CheckpointError(f"it names {module}.{name}, which has no business there")


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def load_torch_file(path: Path) -> Any:
    """What ``torch.save`` wrote to ``path``, its tensors mapped from the file: what isn't looked at isn't read.

    Raises CheckpointError for a file that names code, or is none of torch's.
    """
    with path.open("rb") as file:
        start = file.read(2)
    if start == _ZIP:
        return _load_zip(path)
    if start[:1] == _PICKLE:  # torch before 1.6
        return _load(path, mmap=False)
    raise CheckpointError(f"{path} is not a file of torch.save")


def _load_zip(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            records = {Path(name).name for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is damaged or incomplete ({error})") from error
    if _SCRIPT_RECORD in records:
        raise CheckpointError(f"{path} is a TorchScript program, not a checkpoint")
    return _load(path, mmap=True)


def load_torch_bytes(data: bytes, *, name: str) -> Any:
    """As ``load_torch_file``, of bytes that ``name`` stands for in messages."""
    with _explained(name):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_pickle_module())


def _load(path: Path, *, mmap: bool) -> Any:
    with _explained(str(path)):
        return torch.load(str(path), map_location="cpu", weights_only=False, mmap=mmap, pickle_module=_pickle_module())


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{name} is refused: {error}") from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{name} is damaged or not a checkpoint ({type(error).__name__}: {reason})") from error


class _TorchFileUnpickler(RestrictedUnpickler):
    """The unpickler of files that ``torch.save`` wrote."""

    def __init__(self, file: IO[bytes], **options: Any) -> None:
        super().__init__(file, allowed=TENSOR_GLOBALS, stood_in_for=STOOD_IN_FOR, **options)


def _pickle_module() -> types.ModuleType:
    """What torch.load asks of its ``pickle_module``."""

    def load(file: IO[bytes], **options: Any) -> Any:
        return _TorchFileUnpickler(file, **options).load()

    module = types.ModuleType("restricted_pickle")
    module.Unpickler = _TorchFileUnpickler  # type: ignore[attr-defined]
    module.load = load  # type: ignore[attr-defined]
    return module
