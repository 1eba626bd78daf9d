"""Pickles of strangers, read without Python's unpickler: plain data come out, and nothing that they name is looked up.

A pickle is a program for a small machine. ``pickletools`` splits it into operations; those that build plain data are
carried out here, on objects of this module. A name becomes a ``StandIn``, a record of the name, of the arguments it was
called with and of the state it was given. The caller says which names it builds something of, with its own functions.
Whatever else the program of the file may need ends the reading.
"""

from __future__ import annotations

import pickletools
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from megatron.errors import CheckpointError

Builders = Mapping[str, Callable[..., Any] | None]
"""By its full name, what a name stands for when a pickle calls it: a function, which is given whatever a stranger wrote
and checks it, or None for a ``StandIn``."""

# Packages whose classes are met in checkpoints and needed by no conversion: random states, enums, plans.
STOOD_IN_FOR = ("megatron", "transformer_engine", "apex", "numpy", "torch", "signal", "functools", "pathlib", "enum")
_STOOD_IN_FOR_TOO = "builtins.getattr"  # how Python 3.11 pickles a member of an enum
_MOST_VALUES, _MOST_DEPTH = 10_000_000, 100


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
    within themselves or too large when written out. ``storage``: what a persistent id stands for. A damaged pickle
    raises almost anything.
    """
    machine = _Machine(builders, stood_in_for, storage)
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in _VALUES:
            machine.stack.append(argument)
        elif opcode.name in _OPERATIONS:
            _OPERATIONS[opcode.name](machine, argument)
        elif opcode.name != "STOP":
            raise CheckpointError(f"it uses {opcode.name}, which no checkpoint needs")
    value = machine.stack.pop()
    _measure(value, {}, depth=0)
    return value


class _Machine:
    """The state of a pickle being read. Only objects made here are changed, by their own type's means."""

    def __init__(self, builders: Builders, stood_in_for: tuple[str, ...], storage: Callable[[Any], Any] | None) -> None:
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._builders, self._stood_in_for, self._storage = builders, stood_in_for, storage

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.marked.pop()
        return found

    def tuple_of(self, count: int) -> None:
        if count > len(self.stack):
            raise CheckpointError("it takes more values than it has made")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def memoize(self, place: int | None = None) -> None:
        self.memo[len(self.memo) if place is None else place] = self.stack[-1]

    def name(self, module: Any, name: Any) -> None:
        """A global: one of torch's types of numbers, or a record of the name."""
        module = "builtins" if module == "__builtin__" else module  # as Python 2 called it, and protocol 2 does
        full = f"{module}.{name}" if type(module) is type(name) is str else ""
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            self.push(dtype)
        elif full in self._builders or self._is_stood_in_for(full):
            self.push(StandIn(full))
        else:
            raise CheckpointError(f"it names {ascii(full)[1:-1][:100]}, which checkpoints may not name")

    def _is_stood_in_for(self, full: str) -> bool:
        return bool(self._stood_in_for) and (full.split(".")[0] in self._stood_in_for or full == _STOOD_IN_FOR_TOO)

    def call(self, function: Any, arguments: Any) -> None:
        if not isinstance(function, StandIn) or function.arguments is not None or type(arguments) is not tuple:
            raise CheckpointError(f"it calls a {type(function).__name__}, which is not callable")
        build = self._builders.get(function.stands_for)
        self.push(build(*arguments) if build else StandIn(function.stands_for, arguments))

    def persistent(self, identity: Any) -> None:
        if self._storage is None:
            raise CheckpointError("it names tensors outside of it")
        self.push(self._storage(identity))

    def set_state(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, StandIn) and target.arguments is not None:
            target.state = state
        elif type(target) is Namespace:
            vars(target).update((key, value) for key, value in state.items() if type(key) is str)
        elif type(target) is not dict:  # an OrderedDict has attributes, which nobody needs
            raise CheckpointError(f"it sets attributes of {target!r}"[:200])

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target += values
        elif type(target) is set:
            target.update(map(key_of, values))
        elif not isinstance(target, StandIn):
            raise CheckpointError(f"it appends to a {type(target).__name__}")

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is dict:
            target.update(zip(map(key_of, values[::2]), values[1::2], strict=True))
        elif not isinstance(target, StandIn):
            raise CheckpointError(f"it sets items of a {type(target).__name__}")

    def make_dict(self) -> None:
        values = self.since_mark()
        self.push({})
        self.set_items(values)

    def make_instance(self) -> None:
        function, *arguments = self.since_mark()
        self.call(function, tuple(arguments))


def key_of(value: Any, *, nested: bool = False) -> Any:
    """``value`` if it may be a key: Python's hash of deeply nested tuples overflows the stack of the process."""
    if type(value) is tuple and not nested:
        return tuple(key_of(each, nested=True) for each in value)
    if value is None or type(value) in (str, int, float, bool, bytes, torch.dtype, StandIn):
        return value
    raise CheckpointError(f"it has a {type(value).__name__} as a key")


def mapping_of(items: Any = ()) -> dict[Any, Any]:
    """An OrderedDict; only Python 2 gave it items."""
    return {key_of(key): value for key, value in items}


def _measure(value: Any, known: dict[int, tuple[int, int]], *, depth: int) -> tuple[int, int]:
    """How many values ``value`` has when written out, and how deep; CheckpointError where that has no bounds."""
    if isinstance(value, Namespace):
        value = vars(value)
    if not isinstance(value, (dict, list, tuple, set)):
        return 1, 0
    if id(value) not in known:
        if depth > _MOST_DEPTH:
            raise CheckpointError(f"it is nested more than {_MOST_DEPTH} deep")
        known[id(value)] = _MOST_VALUES, 0  # while it is open: within itself it has no end
        parts = [_measure(each, known, depth=depth + 1) for each in _children(value)]
        known[id(value)] = 1 + sum(size for size, _ in parts), 1 + max((height for _, height in parts), default=0)
    size, height = known[id(value)]
    if size > _MOST_VALUES or depth + height > 2 * _MOST_DEPTH:
        raise CheckpointError(f"it holds objects within themselves, or more than {_MOST_VALUES:,} values")
    return size, height


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


# Operations whose argument is a value.
_VALUES = frozenset(
    ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING")
    + ("SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES")
    + ("BINBYTES8", "BYTEARRAY8")
)
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_SET": lambda machine, _: machine.push(set()),
    "MARK": lambda machine, _: machine.mark(),
    "POP_MARK": lambda machine, _: machine.since_mark().clear(),
    "POP": lambda machine, _: machine.pop(),
    "DUP": lambda machine, _: machine.push(machine.stack[-1]),
    "LIST": lambda machine, _: machine.push(machine.since_mark()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "DICT": lambda machine, _: machine.make_dict(),
    "FROZENSET": lambda machine, _: machine.push({key_of(each) for each in machine.since_mark()}),
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "ADDITEMS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "PUT": lambda machine, place: machine.memoize(place),
    "BINPUT": lambda machine, place: machine.memoize(place),
    "LONG_BINPUT": lambda machine, place: machine.memoize(place),
    "MEMOIZE": lambda machine, _: machine.memoize(),
    "GET": lambda machine, place: machine.push(machine.memo[place]),
    "BINGET": lambda machine, place: machine.push(machine.memo[place]),
    "LONG_BINGET": lambda machine, place: machine.push(machine.memo[place]),
    "GLOBAL": lambda machine, names: machine.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(machine.stack.pop(-2), machine.stack.pop()),
    "REDUCE": lambda machine, _: machine.call(machine.stack.pop(-2), machine.stack.pop()),
    "NEWOBJ": lambda machine, _: machine.call(machine.stack.pop(-2), machine.stack.pop()),
    "OBJ": lambda machine, _: machine.make_instance(),
    "BUILD": lambda machine, _: machine.set_state(machine.stack.pop()),
    "PERSID": lambda machine, identity: machine.persistent(identity),
    "BINPERSID": lambda machine, _: machine.persistent(machine.stack.pop()),
}
