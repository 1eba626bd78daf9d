"""Pickles of strangers, read without Python's unpickler: plain data come out, and nothing that they name is looked up.

A pickle is a program for a small machine. ``pickletools`` splits it into operations; those that build plain data are
carried out here, on objects of this module. A name becomes a ``StandIn``, a record of the name, of the arguments it was
called with and of the state it was given. The caller says which names it builds something of, with its own functions.
Whatever else the program of the file may need ends the reading.
"""

from __future__ import annotations

import pickle
import pickletools
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from sys import getsizeof
from typing import IO, Any

import torch

from megatron.errors import CheckpointError

Builders = Mapping[str, Callable[..., Any] | None]
"""By its full name, what a name stands for when a pickle calls it: a function, which is given whatever a stranger wrote
and checks it, or None for a ``StandIn``."""

# Packages whose classes are met in checkpoints and needed by no conversion: random states, enums, plans.
STOOD_IN_FOR = ("megatron", "transformer_engine", "apex", "numpy", "torch", "signal", "functools", "pathlib", "enum")
_STOOD_IN_FOR_TOO = "builtins.getattr"  # how Python 3.11 pickles a member of an enum
_MOST_SHARED, _MOST_DEPTH, _MOST_COPIED_BYTES = 300_000, 100, 1 << 24
MOST_DIMS = 64


@dataclass(eq=False, slots=True, repr=False)
class StandIn:
    """What a pickle names (``arguments`` is None), or has made of the name; it does nothing."""

    stands_for: str
    arguments: tuple[Any, ...] | None = None
    state: Any = None

    def __repr__(self) -> str:
        return f"<stand-in for {self.stands_for}>"


def unpickle(
    file: IO[bytes],
    builders: Builders,
    *,
    stood_in_for: tuple[str, ...] = (),
    storage: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of the pickle at the position of ``file``, which is left behind the pickle's end.

    Names that are neither in ``builders`` nor of a package in ``stood_in_for`` raise CheckpointError; so do objects
    within themselves, and shared ones that make the value far larger than its file when written out. ``storage``: what
    a persistent id stands for. A damaged pickle raises almost anything.
    """
    machine, begin = _Machine(file, builders, stood_in_for, storage), file.tell()
    machine.run()
    value = machine.stack.pop()
    _check_bounds(value, most=_MOST_SHARED + file.tell() - begin)
    return value


class _Machine:
    """The state of a pickle being read. Only objects made here are changed, by their own type's means."""

    def __init__(
        self,
        file: IO[bytes],
        builders: Builders,
        stood_in_for: tuple[str, ...],
        storage: Callable[[Any], Any] | None,
    ) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}
        self._copied_bytes = 0
        self._file, self._builders, self._stood_in_for, self._storage = file, builders, stood_in_for, storage

    def run(self) -> None:
        """Carry out all operations up to STOP; the commonest, over half of all, in place."""
        read, stack, memo = self._file.read, self.stack, self.memo
        while (code := read(1)) != pickle.STOP:
            if code == pickle.MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == pickle.BINGET:
                stack.append(memo[read(1)[0]])
            elif code == pickle.LONG_BINGET:
                stack.append(memo[int.from_bytes(read(4), "little")])
            elif code == pickle.BININT1:
                stack.append(read(1)[0])
            elif code in _OPERATIONS:
                operation, read_argument = _OPERATIONS[code]
                if read_argument is None:
                    operation(self)
                else:
                    operation(self, read_argument(self._file))
            elif name := _OTHERS.get(code):
                raise CheckpointError(f"it uses {name}, which no checkpoint needs")
            else:
                raise ValueError(f"no operation of a pickle ends at byte {self._file.tell():,}")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def ignore(self, _: Any) -> None:
        pass

    def pop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def get(self, place: int) -> None:
        self.stack.append(self.memo[place])

    def name(self, module: Any, name: Any) -> None:
        """A global: one of torch's types of numbers, or a record of the name."""
        module = "builtins" if module == "__builtin__" else module  # as Python 2 called it, and protocol 2 does
        full = f"{module}.{name}" if type(module) is type(name) is str else ""
        self._count_copied(full)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            self.push(dtype)
        elif full in self._builders or self._is_stood_in_for(full):
            self.push(StandIn(full))
        else:
            raise CheckpointError(f"it names {ascii(full)[1:-1][:100]}, which checkpoints may not name")

    def _is_stood_in_for(self, full: str) -> bool:
        return bool(self._stood_in_for) and (full.split(".")[0] in self._stood_in_for or full == _STOOD_IN_FOR_TOO)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, StandIn) or function.arguments is not None or type(arguments) is not tuple:
            raise CheckpointError(f"it calls {_kind(function)}, which is not callable")
        build = self._builders.get(function.stands_for)
        if build is None:
            self.stack.append(StandIn(function.stands_for, arguments))
            return
        self._count_copied(*arguments)
        self.stack.append(build(*arguments))

    def _count_copied(self, *values: Any) -> None:
        """Bound what all copies take together: of one large object a short file can ask for any number."""
        self._copied_bytes += sum(map(getsizeof, values))
        if self._copied_bytes > _MOST_COPIED_BYTES + self._file.tell():
            raise CheckpointError("it copies the same objects so often that they are far larger than its file")

    def persistent(self, identity: Any) -> None:
        if self._storage is None:
            raise CheckpointError("it refers to tensors outside the file")
        self.push(self._storage(identity))

    def set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, StandIn) and target.arguments is not None:
            target.state = state
        elif type(target) is Namespace:
            self._count_copied(state)
            vars(target).update((key, value) for key, value in state.items() if type(key) is str)
        elif type(target) is not dict:  # an OrderedDict has attributes, which nobody needs
            raise CheckpointError(f"it sets attributes of {_kind(target)}")

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target += values
        elif type(target) is set:
            target.update(map(key_of, values))
        elif not isinstance(target, StandIn):
            raise CheckpointError(f"it appends to {_kind(target)}")

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is dict:
            for key, value in zip(values[::2], values[1::2], strict=True):
                target[key if type(key) is str else key_of(key)] = value
        elif not isinstance(target, StandIn):
            raise CheckpointError(f"it sets items of {_kind(target)}")

    def make_dict(self) -> None:
        values = self.since_mark()
        self.push({})
        self.set_items(values)

    def make_instance(self) -> None:
        function, *arguments = self.since_mark()
        self.stack += [function, tuple(arguments)]
        self.call()


def key_of(value: Any, *, nested: bool = False) -> Any:
    """``value`` if it may be a key: Python's hash of deeply nested tuples overflows the stack of the process."""
    if type(value) is tuple and not nested and len(value) <= MOST_DIMS:
        return tuple(key_of(each, nested=True) for each in value)
    if value is None or type(value) in (str, int, float, bool, bytes, torch.dtype, StandIn):
        return value
    raise CheckpointError(f"it has a {type(value).__name__} as a key")


def _kind(value: Any) -> str:
    """What a pickle takes a value for, in an error."""
    if isinstance(value, StandIn):
        return ascii(value.stands_for)[1:-1][:100]
    return f"a {type(value).__name__}"


def mapping_of(items: Any = ()) -> dict[Any, Any]:
    """An OrderedDict; only Python 2 gave it items."""
    return {key_of(key): value for key, value in items}


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
    if type(value) is StandIn:
        return value.arguments, value.state
    if type(value) is Namespace:
        value = vars(value)
    return [*value, *value.values()] if type(value) is dict else value


_HOLDERS = frozenset({dict, list, tuple, set, StandIn, Namespace})

# Operations whose argument is a value.
_VALUES = (
    *("INT", "BININT", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
    *("BINBYTES8", "BYTEARRAY8"),
)
_KNOWN: dict[str, Callable[..., None]] = {
    **dict.fromkeys(_VALUES, _Machine.push),
    "PROTO": _Machine.ignore,
    "FRAME": _Machine.ignore,
    "NONE": lambda machine: machine.stack.append(None),
    "NEWTRUE": lambda machine: machine.stack.append(True),
    "NEWFALSE": lambda machine: machine.stack.append(False),
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine: machine.stack.append(()),
    "EMPTY_DICT": lambda machine: machine.stack.append({}),
    "EMPTY_SET": lambda machine: machine.stack.append(set()),
    "MARK": _Machine.mark,
    "POP_MARK": lambda machine: machine.since_mark().clear(),
    "POP": _Machine.pop,
    "DUP": lambda machine: machine.stack.append(machine.stack[-1]),
    "LIST": lambda machine: machine.stack.append(machine.since_mark()),
    "TUPLE": lambda machine: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": lambda machine: machine.stack.append((machine.stack.pop(),)),
    "TUPLE2": lambda machine: machine.stack.append((machine.stack.pop(-2), machine.stack.pop())),
    "TUPLE3": lambda machine: machine.stack.append(tuple(machine.stack.pop(-3 + at) for at in range(3))),
    "DICT": _Machine.make_dict,
    "FROZENSET": lambda machine: machine.stack.append({key_of(each) for each in machine.since_mark()}),
    "APPEND": lambda machine: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine: machine.append(machine.since_mark()),
    "ADDITEMS": lambda machine: machine.append(machine.since_mark()),
    "SETITEM": lambda machine: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine: machine.set_items(machine.since_mark()),
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "GET": _Machine.get,
    "GLOBAL": lambda machine, names: machine.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine: machine.name(machine.stack.pop(-2), machine.stack.pop()),
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "OBJ": _Machine.make_instance,
    "BUILD": _Machine.set_state,
    "PERSID": _Machine.persistent,
    "BINPERSID": lambda machine: machine.persistent(machine.stack.pop()),
}
# By its byte: what carries out an operation, and what reads its argument from the file; names of all operations.
_OTHERS = {each.code.encode("latin-1"): each.name for each in pickletools.opcodes}
_OPERATIONS = {
    each.code.encode("latin-1"): (_KNOWN[each.name], each.arg.reader if each.arg else None)
    for each in pickletools.opcodes
    if each.name in _KNOWN
}
