"""The process in which a reward function of the user's runs; it needs no package.

It reads a line of JSON, ``[FILE, NAME, BYTES]``, then questions, a line each: the keyword arguments of a call. It
answers each line by one of JSON: ``{"rewards": [...]}``, ``{"ready": true}`` to the first, or ``{"error": "..."}``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST_SHOWN, _PR_SET_PDEATHSIG = 300, 1
_LARGEST = 1e30  # squares of rewards, in deviations, must be finite


class RewardError(Exception):
    """What is wrong with the function or with what it returned."""


def load(file: str, name: str) -> Callable[..., Any]:
    """The function; raises RewardError where the file has none."""
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec = importlib.util.spec_from_file_location("rewards_of_the_user", file)
    if spec is None or spec.loader is None:
        raise RewardError("is no Python file; name one that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # also SystemExit
        raise RewardError(f"can't be imported: {said(error, file)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        defined = sorted(each for each, value in vars(module).items() if callable(value) and not each.startswith("_"))
        raise RewardError(f"has no function {name}; it has {', '.join(defined[:8]) or 'none'}")
    return function  # type: ignore[no-any-return]


def rewards_of(function: Callable[..., Any], arguments: dict[str, Any], file: str) -> list[float | None]:
    """The rewards that a call returns; raises RewardError for anything but a number or None for each completion."""
    completions, process = list(arguments["completions"]), os.getpid()  # the function may change what it is given
    try:
        found = function(**arguments)
    except MemoryError:
        raise
    except BaseException as error:
        raise RewardError(f"raised {said(error, file)}") from None
    if os.getpid() != process:  # a copy that the function has made of itself would answer, too
        os._exit(0)
    found = found.tolist() if hasattr(found, "tolist") else found
    wanted = len(completions)
    if not isinstance(found, (list, tuple)):
        raise RewardError(
            f"returned {shown(found)}, where a list of {wanted} numbers is wanted, one for each completion"
        )
    if len(found) != wanted:
        raise RewardError(f"returned {len(found)} rewards for {wanted} completions; return one for each, or None")
    return [_number(each, number, completions) for number, each in enumerate(found)]


def _number(value: Any, number: int, completions: list[Any]) -> float | None:
    if value is None:
        return None
    try:
        found = float(value)
    except Exception:  # of a class of the user's, any
        found = None
    if found is None or not abs(found) <= _LARGEST:
        raise RewardError(
            f"returned {shown(value)} for completion {number}, {shown(completions[number])}; return a number between "
            f"-{_LARGEST:g} and {_LARGEST:g}, or None to leave it out"
        )
    return found


def said(error: BaseException, file: str) -> str:
    """The error in words, with the line of the user's file in which it happened."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {frames[-1].lineno})" if frames else ""
    text = shorter(str(error))
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def shown(value: Any) -> str:
    """A value in a message."""
    return shorter(repr(value))


def shorter(text: str) -> str:
    """A text that fits into a sentence."""
    text = " ".join(text[: 4 * _MOST_SHOWN].split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def main() -> None:
    """Answer lines until there are no more. What the function prints goes to the standard error, which is bounded by
    its reader; it reads nothing.
    """
    asked, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    if sys.platform == "linux":  # a run that is killed takes along a function that hangs
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    file, name, memory = json.loads(asked.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    function: Callable[..., Any] | None = None

    def answer(line: str) -> dict[str, Any]:
        nonlocal function
        try:
            if function is None:
                function = load(file, name)
                return {"ready": True}
            return {"rewards": rewards_of(function, json.loads(line), file)}
        except MemoryError:
            return {"error": f"needs more memory than --reward-memory-gb {memory / 2**30:g}"}
        except RewardError as error:
            return {"error": str(error)}

    print(json.dumps(answer("")), file=answers, flush=True)
    for line in asked:
        print(json.dumps(answer(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
