"""An object store for tests, shared by processes: ``bucket:///folder/key`` is an object below ``/folder``.

As in the real ones, an object is seen whole or not at all, folders are only prefixes, and nothing can be renamed. It
can be told to fail, or to stop as a killed process does. Importing this module makes fsspec know it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem
from typing_extensions import override

Fault = Callable[[str, str], None]


class Killed(BaseException):
    """The process is gone; whatever it still tries reaches nobody."""


class ServiceError(Exception):
    """What a storage library of its own makes of a failing service: not an OSError."""


class BucketFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The store. ``fault`` is called before each operation with its name and path, and may raise."""

    protocol = "bucket"
    fault: ClassVar[Fault | None] = None

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self.operate("list", path)
        folder = Path(self._strip_protocol(path))
        if folder.is_file():
            found = [folder]
        else:
            found = [each for each in folder.glob("*") if each.is_file() or any(_objects(each))]
        found = [each for each in found if not each.name.startswith(".put-")]
        if not found:
            raise FileNotFoundError(path)
        entries = [
            {"name": str(each), "size": each.stat().st_size, "type": "file" if each.is_file() else "directory"}
            for each in sorted(found)
        ]
        return entries if detail else [entry["name"] for entry in entries]

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Folders are only prefixes."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are only prefixes."""

    def rm_file(self, path: str) -> None:
        if Path(path).is_file():
            self.operate("delete", path)
            Path(path).unlink()

    def mv(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError("objects can't be renamed")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            self.operate("get", path)
            return Path(path).open("rb")
        return _Put(self, Path(path))

    @classmethod
    def operate(cls, name: str, path: str) -> None:
        if cls.fault is not None:
            cls.fault(name, str(path))


def _objects(folder: Path) -> Iterator[Path]:
    return (each for each in folder.rglob("*") if each.is_file() and not each.name.startswith(".put-"))


class _Put(io.BytesIO):
    """An object being sent; it is there when this is closed."""

    def __init__(self, files: BucketFileSystem, path: Path) -> None:
        super().__init__()
        self._files, self._path = files, path

    @override
    def write(self, data: Any, /) -> int:
        self._files.operate("write", str(self._path))
        return super().write(data)

    @override
    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._files.operate("put", str(self._path))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside = self._path.with_name(f".put-{os.urandom(4).hex()}")
            aside.write_bytes(content)
            aside.replace(self._path)


@contextmanager
def failing(fault: Fault) -> Iterator[None]:
    """Let the store consult ``fault`` inside this block."""
    BucketFileSystem.fault = staticmethod(fault)
    try:
        yield
    finally:
        BucketFileSystem.fault = None


def killed_at(operation: int) -> Fault:
    """The process stops at its ``operation``-th change to the store; nothing that it tries later arrives."""
    changes = 0

    def stop(name: str, path: str) -> None:
        nonlocal changes
        changes += name in ("put", "delete")
        if changes > operation:
            raise Killed

    return stop


def url(folder: Path) -> str:
    """The URL of a folder of the store."""
    return f"bucket://{folder}"


fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)


def empty_memory() -> None:
    """Forget what tests have left at memory:// URLs: objects, and folders that were made for them."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
