"""Work that succeeds on every rank or fails on every rank, with one message that names the ranks and the reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.mesh import Mesh
from megatron.errors import (
    RESTART_MAY_HELP,
    CheckpointError,
    ConfigError,
    DataError,
    MegatronError,
    ParallelError,
    StorageAwayError,
    exit_code_of,
    may_pass,
)

T = TypeVar("T")
_KINDS = (ConfigError, DataError, StorageAwayError, CheckpointError, ParallelError)


@dataclass(frozen=True)
class _Failure:
    message: str
    exit_code: int
    kind: type[MegatronError] = CheckpointError


def gather_from_all(work: Callable[[], T], mesh: Mesh) -> list[T]:
    """Every rank's ``work()``, by world rank. A collective, whatever happens inside ``work``.

    When any rank fails, all ranks raise the same error: that of a user's mistake as it is, and CheckpointError for an
    OSError, naming the rank, its coordinates and the reason, and for errors of several kinds; StorageAwayError where
    every reason may pass. Another error is a defect of ours: it keeps its type and traceback on its own rank.
    """
    caught: Exception | None = None
    outcome: T | _Failure
    try:
        outcome = work()
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # torch.save answers Ctrl-C with a RuntimeError of its own
            raise error.__context__ from None
        caught, outcome = error, _failure(error, mesh)
    outcomes: list[T | _Failure] = gather_objects(outcome, mesh)
    results = [outcome for outcome in outcomes if not isinstance(outcome, _Failure)]
    if len(results) == len(outcomes):
        return results
    is_alone = mesh.world_size == 1 and isinstance(caught, MegatronError)  # which says all, and keeps its class
    if caught is not None and (is_alone or not isinstance(caught, (OSError, MegatronError))):
        raise caught
    failures = [outcome for outcome in outcomes if isinstance(outcome, _Failure)]
    messages = "; ".join(dict.fromkeys(failure.message for failure in failures))
    code = max(failure.exit_code for failure in failures)  # a restart is worth it only when it is for each of them
    kinds = {failure.kind for failure in failures}
    raise (kinds.pop() if len(kinds) == 1 else CheckpointError)(messages, exit_code=code) from caught


def run_on_all(work: Callable[[], T], mesh: Mesh) -> T:
    """This rank's ``work()``; fails everywhere when it fails anywhere. Only failures travel."""
    mine: list[T] = []
    gather_from_all(lambda: mine.append(work()), mesh)
    return mine[0]


def run_on_first(work: Callable[[], T], mesh: Mesh) -> T:
    """Rank 0's ``work()``, on all ranks; fails everywhere when it fails there."""
    first: T | None = gather_from_all(lambda: work() if mesh.world_rank == 0 else None, mesh)[0]
    return first  # type: ignore[return-value]


def _failure(error: Exception, mesh: Mesh) -> _Failure:
    if isinstance(error, MegatronError):
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), CheckpointError)
        return _Failure(str(error), error.exit_code, kind)
    where = f"rank {mesh.world_rank} ({mesh.describe()}): " if mesh.world_size > 1 else ""
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename else ""
        kind = StorageAwayError if may_pass(error) else CheckpointError
        return _Failure(f"{where}{path}{error.strerror or error}", exit_code_of(error), kind)
    return _Failure(f"{where}{type(error).__name__}: {error}", RESTART_MAY_HELP)
