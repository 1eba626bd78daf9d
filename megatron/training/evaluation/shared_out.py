"""Requests that the ranks' engines share out among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.mesh import Mesh

T = TypeVar("T")


def own_share(mesh: Mesh) -> slice:
    """The part of all requests that this rank's engine answers.

    The ranks of a replica, or with context parallelism of a copy of it, compute without the others unless these have
    experts that they lack.
    """
    if mesh.size("ep") * mesh.size("etp") > mesh.size("tp"):
        return slice(None)
    return slice(mesh.rank("dp", "cp"), None, mesh.size("dp") * mesh.size("cp"))


def of_all_ranks(found: Mapping[str, T], mesh: Mesh) -> dict[str, T]:
    """What all ranks have found, by the id of the request. A collective."""
    return {id: each for part in gather_objects(dict(found), mesh) for id, each in part.items()}
