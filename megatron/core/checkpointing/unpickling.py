"""Untrusted pickles give plain data alone, and no name in them is looked up.

This is Python's unpickler written in Python, cut down to the operations that parse plain data. Those that call, fill
or hash something are replaced. A name becomes a ``Placeholder``, a record of the name, of the arguments it was called
with and of the state it was given. The caller says for which names it builds something, with functions of its own.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import unpack
from sys import getsizeof
from typing import IO, Any, NoReturn

import torch
from typing_extensions import override

from megatron.errors import CheckpointError

Builders = Mapping[str, Callable[..., Any] | None]
"""What is built when a pickle calls a name, by its full name: a function that checks its arguments, since a stranger
wrote them, or None for a ``Placeholder``."""

# Packages whose classes are in other programs' checkpoints and needed by no conversion: random states, enums, plans.
_FOREIGN = ("megatron", "transformer_engine", "apex", "numpy", "torch", "signal", "functools", "pathlib", "enum")
_MOST_SHARED, _MOST_DEPTH, _MOST_COPIED_BYTES = 300_000, 100, 1 << 24
MOST_DIMS = 64


@dataclass(eq=False, slots=True, repr=False)
class Placeholder:
    """A name in a pickle (``arguments`` is None), or what the pickle made of the name; it does nothing."""

    stands_for: str
    arguments: tuple[Any, ...] | None = None
    state: Any = None

    @override
    def __repr__(self) -> str:
        return f"<stand-in for {self.stands_for}>"


def unpickle(
    file: IO[bytes], builders: Builders, *, is_foreign: bool, storage: Callable[[Any], Any] | None = None
) -> Any:
    """The value of the pickle at the position of ``file``, which is left behind the pickle's end.

    Raises CheckpointError for names that ``builders`` lack, for objects within themselves, and for shared objects that
    make the value far larger than its file when written out. A damaged pickle raises almost anything. ``is_foreign``:
    it may also name classes of the program that wrote it. ``storage``: makes the value of a
    persistent id.
    """
    begin = file.tell()
    value = _PlainUnpickler(file, builders, is_foreign, storage).load()
    _check_bounds(value, most=_MOST_SHARED + file.tell() - begin)
    return value


class _PlainUnpickler(pickle._Unpickler):
    """``dispatch`` is below. Only objects made here are changed, by their own type's means."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(
        self, file: IO[bytes], builders: Builders, is_foreign: bool, storage: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(file, encoding="latin-1")
        self._file, self._builders, self._is_foreign, self._storage = file, builders, is_foreign, storage
        self._copied_bytes = 0

    @override
    def find_class(self, module: str, name: str) -> Any:
        """A global: one of torch's types of numbers, or a record of the name."""
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"  # what Python 2 and protocol 2 call it
        self._count_copied(full)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if full in self._builders or (self._is_foreign and full.split(".")[0] in _FOREIGN):
            return Placeholder(full)
        raise CheckpointError(f"it names {ascii(full)[1:-1][:100]}, which checkpoints may not name")

    @override
    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage."""
        if self._storage is None:
            raise CheckpointError("it refers to tensors outside the file")
        return self._storage(pid)

    def call(self) -> None:
        """REDUCE and NEWOBJ."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Placeholder) or function.arguments is not None or type(arguments) is not tuple:
            raise CheckpointError(f"it calls {_kind(function)}, which is not callable")
        build = self._builders.get(function.stands_for)
        if build is not None:
            self._count_copied(*arguments)
        self.append(Placeholder(function.stands_for, arguments) if build is None else build(*arguments))

    def call_marked(self) -> None:
        """Opcode OBJ: call with arguments from the mark on."""
        function, *arguments = self.pop_mark()
        self.stack += [function, tuple(arguments)]
        self.call()

    def _count_copied(self, *values: Any) -> None:
        """Bound what all copies take together: of one large object a short file can ask for any number."""
        self._copied_bytes += sum(map(getsizeof, values))
        if self._copied_bytes > _MOST_COPIED_BYTES + self._file.tell():
            raise CheckpointError("it copies the same objects so often that they are far larger than its file")

    def set_state(self) -> None:
        """Opcode BUILD: set an object's state."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Placeholder) and target.arguments is not None:
            target.state = state
        elif type(target) is Namespace:
            self._count_copied(state)
            vars(target).update((key, value) for key, value in state.items() if type(key) is str)
        elif type(target) is not dict:  # the attributes of an OrderedDict aren't needed
            raise CheckpointError(f"it sets attributes of {_kind(target)}")

    def extend(self, values: list[Any]) -> None:
        """APPEND, APPENDS and ADDITEMS."""
        target = self.stack[-1]
        if type(target) is list:
            target += values
        elif type(target) is set:
            target.update(map(key_of, values))
        elif not isinstance(target, Placeholder):
            raise CheckpointError(f"it appends to {_kind(target)}")

    def set_items(self, values: list[Any]) -> None:
        """SETITEM, SETITEMS and DICT."""
        target = self.stack[-1]
        if type(target) is dict:
            for key, value in zip(values[::2], values[1::2], strict=True):
                target[key if type(key) is str else key_of(key)] = value
        elif not isinstance(target, Placeholder):
            raise CheckpointError(f"it sets items of {_kind(target)}")

    def make_dict(self) -> None:
        """Opcode DICT: make a dictionary from the items after the mark."""
        values = self.pop_mark()
        self.append({})
        self.set_items(values)

    def make_bytes(self) -> None:
        """Opcode BYTEARRAY8. Python's own would take the memory before it reads."""
        self.append(self.read(*unpack("<Q", self.read(8))))


def key_of(value: Any, *, nested: bool = False) -> Any:
    """``value`` if it may be a key: Python's hash of deeply nested tuples overflows the stack of the process."""
    if type(value) is tuple and not nested and len(value) <= MOST_DIMS:
        return tuple(key_of(each, nested=True) for each in value)
    if value is None or type(value) in (str, int, float, bool, bytes, torch.dtype, Placeholder):
        return value
    raise CheckpointError(f"it has a {type(value).__name__} as a key")


def _kind(value: Any) -> str:
    """The kind of a value, for an error."""
    if isinstance(value, Placeholder):
        return ascii(value.stands_for)[1:-1][:100]
    return f"a {type(value).__name__}"


def mapping_of(items: Any = ()) -> dict[Any, Any]:
    """A dictionary in place of an OrderedDict; only Python 2 gave it items."""
    return {key_of(key): value for key, value in items}


_HOLDERS = frozenset({dict, list, tuple, set, Placeholder, Namespace})


def _check_bounds(value: Any, most: int) -> None:
    """Raise CheckpointError where ``value`` has more than ``most`` values when written out, or is nested too deep."""
    level: list[Any] = [[value]]  # what is at one depth; of what it holds, only what may hold more
    for _ in range(_MOST_DEPTH):
        below: list[Any] = []
        for each in level:
            parts = _parts(each)
            most -= len(parts)
            if most < 0:
                raise CheckpointError("it refers to the same objects so often that it is far larger than its file")
            below += [part for part in parts if type(part) in _HOLDERS]
        level = below
        if not level:
            return
    raise CheckpointError(f"it is nested more than {_MOST_DEPTH} deep, or has objects that contain themselves")


def _parts(value: Any) -> Any:
    if type(value) is Placeholder:
        return value.arguments, value.state
    if type(value) is Namespace:
        value = vars(value)
    return [*value, *value.values()] if type(value) is dict else value


class _Operations(dict[int, Callable[[Any], None]]):
    """What carries out each operation, by its byte; others end the reading."""

    def __missing__(self, code: int) -> NoReturn:
        name = next((name for name, value in vars(pickle).items() if name.isupper() and value == bytes([code])), None)
        if name is None:
            raise ValueError(f"{code:#04x} is no operation of a pickle")
        raise CheckpointError(f"it uses {name}, which no checkpoint needs")


_PARSED = """
PROTO FRAME STOP MARK POP POP_MARK DUP PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL PERSID
BINPERSID NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING
SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST EMPTY_TUPLE
EMPTY_DICT EMPTY_SET LIST TUPLE TUPLE1 TUPLE2 TUPLE3
"""
_REPLACED: dict[bytes, Callable[[_PlainUnpickler], None]] = {
    pickle.REDUCE: _PlainUnpickler.call,
    pickle.NEWOBJ: _PlainUnpickler.call,
    pickle.OBJ: _PlainUnpickler.call_marked,
    pickle.BUILD: _PlainUnpickler.set_state,
    pickle.APPEND: lambda self: self.extend([self.stack.pop()]),
    pickle.APPENDS: lambda self: self.extend(self.pop_mark()),
    pickle.ADDITEMS: lambda self: self.extend(self.pop_mark()),
    pickle.SETITEM: lambda self: self.set_items([self.stack.pop(-2), self.stack.pop()]),
    pickle.SETITEMS: lambda self: self.set_items(self.pop_mark()),
    pickle.DICT: _PlainUnpickler.make_dict,
    pickle.FROZENSET: lambda self: self.append(set(map(key_of, self.pop_mark()))),
    pickle.BYTEARRAY8: _PlainUnpickler.make_bytes,
}
_OF_PYTHON = pickle._Unpickler.dispatch
_PlainUnpickler.dispatch = _Operations(
    {getattr(pickle, name)[0]: _OF_PYTHON[getattr(pickle, name)[0]] for name in _PARSED.split()}
    | {code[0]: operation for code, operation in _REPLACED.items()}
)
