"""Functions that torch.compile may fuse: pure functions of tensors and constants, without collectives."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

from megatron.errors import ConfigError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Switch:
    is_on = False


class Compiled(Generic[_P, _R]):
    """``eager``, compiled while ``compile_bodies`` says so: for the first shape of its arguments, and for any when they
    come in others, as in generated texts. Beyond torch's limit of variants it is called as it is.
    """

    def __init__(self, eager: Callable[_P, _R]) -> None:
        self.eager = eager

    @functools.cached_property
    def _compiled(self) -> Callable[_P, _R]:
        compiled: Callable[_P, _R] = torch.compile(self.eager)
        return compiled

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """The function's result."""
        return (self._compiled if _Switch.is_on else self.eager)(*args, **kwargs)


def compile_bodies(on: bool, device: torch.device) -> None:
    """Let this process compile the functions that are ``Compiled``, or call them as they are.

    Raises ConfigError where torch would find no compiler for the device.
    """
    compiler = os.environ.get("CXX", "g++")
    if on and device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"--compile needs a C++ compiler for a CPU, and there is no {compiler}: install one, name one by CXX=…, or "
            "leave --compile out"
        )
    _Switch.is_on = on


def bodies_are_compiled() -> bool:
    """Whether functions that are ``Compiled`` run as torch.compile's kernels now."""
    return _Switch.is_on
