"""Patterns of parameters' names: which of them are trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter's global name matches one of the patterns, as a shell matches file names, case included."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class TrainedNames:
    """Names of the parameters that a run trains: all that match ``only``, which is all without a pattern there, and
    don't match ``freeze``.
    """

    freeze: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        """Whether the parameter of this global name is trained."""
        return (not self.only or matches(name, self.only)) and not matches(name, self.freeze)

    @property
    def is_all(self) -> bool:
        """Whether no pattern leaves anything out."""
        return not (self.freeze or self.only)
