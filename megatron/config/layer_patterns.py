"""Which layers of a stack have a property: every N-th, or a list such as ``[1]*3+[0]``, as Megatron-LM writes it."""

from __future__ import annotations

import ast
from contextlib import suppress
from functools import lru_cache
from typing import Any

from megatron.errors import ConfigError

_LONGEST = 10_000  # layers that a list may have


@lru_cache(maxsize=64)  # every layer asks
def marked_layers(pattern: str, num_layers: int, *, flag: str) -> tuple[bool, ...]:
    """Whether ``pattern`` marks each of ``num_layers`` layers.

    A number N marks every N-th layer, counted from 1. A list has a 1 for each marked layer and a 0 for the others; it
    may be written with ``+`` and ``*`` and is repeated when it is shorter than the stack and divides it.
    ``flag``: in the message of the ConfigError for anything else.
    """
    value = _number_or_list(pattern, flag=flag)
    if isinstance(value, int):
        return tuple((number + 1) % value == 0 for number in range(num_layers))
    if num_layers % len(value):
        raise ConfigError(
            f"{flag} {pattern!r} lists {len(value)} layers, and --num-layers {num_layers} is not a multiple of "
            f"{len(value)}: list each layer, or a part that repeats"
        )
    return tuple(map(bool, value * (num_layers // len(value))))


@lru_cache(maxsize=64)
def every_or_listed(pattern: str, *stacks: int, flag: str) -> tuple[bool, ...]:
    """Whether ``pattern`` marks each layer, as Megatron-LM reads ``--moe-layer-freq``: a number N marks layers 0, N,
    2N, … of each stack, and a list is as long as all stacks, one after the other.

    ``stacks``: numbers of layers. Raises ConfigError, which names ``flag``, for anything else.
    """
    value = _number_or_list(pattern, flag=flag)
    if isinstance(value, int):
        return tuple(number % value == 0 for stack in stacks for number in range(stack))
    if len(value) != sum(stacks):
        there = f"--num-layers is {stacks[0]}: list each layer"
        if len(stacks) > 1:
            there = f"the stacks have {' + '.join(map(str, stacks))}: list each layer, one stack after the other"
        raise ConfigError(f"{flag} {pattern!r} lists {len(value)} layers, and {there}")
    return tuple(map(bool, value))


@lru_cache
def window_layers(pattern: str | None, num_layers: int, *, flag: str = "--window-attn-skip-freq") -> tuple[bool, ...]:
    """Whether each layer sees a window only (``--window-attn-skip-freq``), or has linear attention
    (``--linear-attention-freq``): where a list has a 1, and all but every N-th layer for a number N; all without a
    pattern.
    """
    if pattern is None:
        return (True,) * num_layers
    marked = marked_layers(pattern, num_layers, flag=flag)
    return marked if "[" in pattern else tuple(not each for each in marked)


def window_pattern(windows: tuple[bool, ...]) -> str | None:
    """The shortest pattern of ``window_layers``: None for a window in all layers."""
    full = pattern_of(tuple(not each for each in windows))
    return full if full is None or "[" not in full else listed_layers(windows)


def canonical(field: str, pattern: Any, num_layers: Any) -> Any:
    """The shortest spelling of a pattern in ``field``, if it is one that marks layers; anything else as it is."""
    with suppress(ConfigError, TypeError, AttributeError):
        if field == "window_attn_skip_freq":
            windows = window_layers(pattern, num_layers)
            return (window_pattern(windows) if any(windows) else None) or pattern
        if field == "no_rope_freq":
            return pattern_of(marked_layers(pattern, num_layers, flag="--no-rope-freq")) or pattern
    return pattern


def shortened(pattern: str | None, num_layers: int, shorter: int) -> str | None:
    """The pattern of the first ``shorter`` of ``num_layers`` layers."""
    if pattern is None or "[" not in pattern:
        return pattern
    return listed_layers(marked_layers(pattern, num_layers, flag="pattern")[:shorter])


def pattern_of(marked: tuple[bool, ...]) -> str | None:
    """The shortest pattern that marks these layers: None for none, N for every N-th, else a list."""
    if not any(marked):
        return None
    every = marked.index(True) + 1
    if marked == tuple((number + 1) % every == 0 for number in range(len(marked))):
        return str(every)
    return listed_layers(marked)


def listed_layers(marked: tuple[bool, ...]) -> str:
    """The pattern that lists each layer."""
    return f"[{','.join(str(int(each)) for each in marked)}]"


def _number_or_list(pattern: str, *, flag: str) -> int | list[int]:
    """A number of at least 1, or a list of 0 and 1; ConfigError for anything else, which is never evaluated."""
    try:
        value = _value(ast.parse(pattern.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = []
    if (isinstance(value, int) and value >= 1) or (isinstance(value, list) and value and {*value} <= {0, 1}):
        return value
    raise ConfigError(
        f"{flag} {pattern!r} is neither a number of layers nor a list of 0 and 1: give a number such as 4, or a "
        "list such as '[0,0,0,1]', as --help says"
    )


def shortest_pattern(marked: tuple[bool, ...], *stacks: int) -> str:
    """The shortest pattern of ``every_or_listed`` that marks these layers; of one stack unless ``stacks`` are given."""
    stacks = stacks or (len(marked),)
    for every in range(1, max(stacks) + 1):
        if marked == tuple(number % every == 0 for stack in stacks for number in range(stack)):
            return str(every)
    return listed_layers(marked)


def _value(node: ast.expr) -> int | list[int]:
    """A number or a list of numbers; ValueError for every other expression."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        found = [_value(each) for each in node.elts]
        if all(isinstance(each, int) for each in found):
            return [each for each in found if isinstance(each, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if not isinstance(node.op, ast.Mult) or not isinstance(left, list) or not isinstance(right, int):
            raise ValueError
        if len(left) * right <= _LONGEST:
            return left * right
    raise ValueError
