"""What a launch file says about a run: a Slurm batch script, a Kubernetes manifest, a SkyPilot task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megatron.errors import ConfigError

T = TypeVar("T")
GIB = 2**30
_UNITS = {
    "": 1,
    "m": 1e-3,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
}


@dataclass(frozen=True)
class Said(Generic[T]):
    """A value and where the file says it, such as ``completions`` or ``#SBATCH --nodes``."""

    value: T
    where: str


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder that a container sees. ``lasts``: whether it is there after the container's end."""

    path: str
    where: str
    read_only: bool = False
    lasts: bool = True


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """What a launch file says; empty or None where it says nothing.

    ``kind``: in words. ``nodes``, ``ranks_per_node``: from every place that says them. ``gpu``: the model's name.
    ``memory``: bytes of a node. ``shared_memory``: bytes of /dev/shm, None for the host's. ``grace``: seconds from the
    signal to the kill. ``mounts``: of a container; None for programs that see the host's files. ``variables``: of the
    program. ``words``: the command that the file starts. ``health``: the files that probes read. ``stops_early``: why
    the run may be told to end before it is done. ``problems``: parts of the file that contradict each other.
    """

    path: str
    kind: str
    nodes: tuple[Said[int], ...] = ()
    ranks_per_node: tuple[Said[int], ...] = ()
    gpu: Said[str] | None = None
    memory: Said[int] | None = None
    shared_memory: Said[int] | None = None
    grace: Said[int] | None = None
    mounts: tuple[Mount, ...] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    health: tuple[Said[str], ...] = ()
    stops_early: str = ""
    problems: tuple[str, ...] = ()

    @property
    def world_size(self) -> int | None:
        """Ranks of the run, by the first places that say nodes and ranks of a node; None without the latter."""
        if not self.ranks_per_node:
            return None
        return (self.nodes[0].value if self.nodes else 1) * self.ranks_per_node[0].value


def size_in_bytes(text: object, *, where: str) -> int:
    """The number of bytes, or of things, that a quantity such as ``512Gi``, ``8`` or ``64G`` stands for."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([A-Za-z]{0,2})", str(text).strip())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{where} is {str(text)!r}, which is no quantity such as 8, 512Gi or 64G; correct it")
    return int(float(match[1]) * _UNITS[match[2]])


def whole(text: object, *, where: str) -> int:
    """A count of nodes, ranks or seconds. Raises ConfigError for what is no whole number above 0."""
    if isinstance(text, bool) or not re.fullmatch(r"[1-9][0-9]{0,8}", str(text).strip()):
        raise ConfigError(f"{where} is {str(text)!r} and must be a whole number above 0; correct it")
    return int(str(text))
