"""Names of the workers' states in a checkpoint: the first worker's are those of any run, so any run loads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megatron.config.objective import is_of_objective
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState

_WEIGHTS = ("model.", "optimizer.fp32_param.")


def of_worker(state: Iterable[ShardedState], mesh: Mesh) -> Iterator[ShardedState]:
    """The state under the names of this rank's worker: ``worker2.<name>`` for the third."""
    for each in state:
        yield replace(each, name=_named(each.name, mesh.rank("dc")))


def where_to_find_worker(
    state: Iterable[ShardedState], mesh: Mesh, choices: Mapping[str, tuple[str, ...]], *, has_own: bool
) -> dict[str, tuple[str, ...]]:
    """Names to look for, best first, by the name of this rank's worker. ``choices``: those of a run without workers.

    A worker that the checkpoint lacks takes the weights that the workers share, and the first worker's moments.
    ``has_own``: whether workers differ, or all take the first's.
    """
    worker = mesh.rank("dc")
    found = {each.name: choices.get(each.name, (each.name,)) for each in state}
    if not worker:
        return found
    for name, usual in [*found.items()]:
        own = [_named(choice, worker) for choice in usual] if has_own else []
        parameter = next((name.removeprefix(prefix) for prefix in _WEIGHTS if name.startswith(prefix)), None)
        parameter = name if is_of_objective(name) and parameter is None else parameter
        shared = [f"diloco.theta.{parameter}"] if parameter is not None and has_own else []
        found[_named(name, worker)] = (*own, *shared, *found.pop(name))
    return found


def _named(name: str, worker: int) -> str:
    return f"worker{worker}.{name}" if worker else name
