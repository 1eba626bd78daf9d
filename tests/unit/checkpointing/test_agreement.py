"""Ranks succeed together or fail together, and the message is worth reading."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from megatron.core.checkpointing.agreement import gather_from_all, run_on_all, run_on_first
from megatron.core.parallel.mesh import Mesh
from megatron.errors import RESTART_CANNOT_HELP, CheckpointError, ConfigError, DataError, MegatronError
from tests.unit.checkpointing.simulated import on_ranks

MESHES = [Mesh.of(tp=2, pp=2, rank=rank) for rank in range(4)]


def failing_on(ranks: set[int], error: Exception, mesh: Mesh) -> Callable[[], int]:
    def work() -> int:
        if mesh.world_rank in ranks:
            raise error
        return mesh.world_rank * 10

    return work


def caught_on(ranks: set[int], error: Exception) -> list[Exception]:
    def attempt(mesh: Mesh) -> Exception:
        with pytest.raises(type(error) if mesh.world_rank in ranks else CheckpointError) as caught:
            gather_from_all(failing_on(ranks, error, mesh), mesh)
        return caught.value

    return on_ranks(MESHES, attempt)


def test_results_arrive_where_they_should() -> None:
    """All of them, one's own, or the first's."""
    fine = CheckpointError("")
    assert on_ranks(MESHES, lambda mesh: gather_from_all(failing_on(set(), fine, mesh), mesh)) == [[0, 10, 20, 30]] * 4
    assert on_ranks(MESHES, lambda mesh: run_on_all(failing_on(set(), fine, mesh), mesh)) == [0, 10, 20, 30]
    assert on_ranks(MESHES, lambda mesh: run_on_first(failing_on({1, 2, 3}, fine, mesh), mesh)) == [0] * 4


def test_errors_of_the_system_name_rank_path_and_reason() -> None:
    """All ranks raise the same sentence."""

    def attempt(mesh: Mesh) -> str:
        error = OSError(errno.ENOSPC, "No space left on device", "/data/x")
        with pytest.raises(CheckpointError) as caught:
            run_on_all(failing_on({2}, error, mesh), mesh)
        return str(caught.value)

    assert on_ranks(MESHES, attempt) == ["rank 2 (pp=1 dp=0 cp=0 tp=0): /data/x: No space left on device"] * 4


def test_a_restart_is_advised_only_when_it_may_help_on_every_rank() -> None:
    """A full disk beside a folder that may not be written told the scheduler to start again, for ever."""

    def attempt(mesh: Mesh) -> int:
        code = errno.ENOSPC if mesh.world_rank == 0 else errno.EACCES
        with pytest.raises(CheckpointError) as caught:
            run_on_all(failing_on({0, 2}, OSError(code, "x"), mesh), mesh)
        return caught.value.exit_code

    assert on_ranks(MESHES, attempt) == [RESTART_CANNOT_HELP] * 4


def test_the_same_finding_of_all_ranks_is_said_once() -> None:
    """Each rank reads the same damaged file."""
    for error in caught_on({0, 1, 2, 3}, CheckpointError("the file is damaged")):
        assert str(error) == "the file is damaged"


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_a_users_mistake_on_one_rank_is_the_same_sentence_on_all(kind: type[MegatronError]) -> None:
    """A port that is in use on rank 0's node ended other ranks with 1, so that a scheduler started them again."""

    def attempt(mesh: Mesh) -> tuple[type, str, int]:
        with pytest.raises(MegatronError) as caught:
            gather_from_all(failing_on({0}, kind("name a free port"), mesh), mesh)
        return type(caught.value), str(caught.value), caught.value.exit_code

    assert on_ranks(MESHES, attempt) == [(kind, "name a free port", RESTART_CANNOT_HELP)] * 4


def test_a_defect_keeps_its_type_on_its_own_rank() -> None:
    """The traceback of a programming error is worth more than a sentence; the others say where to look."""
    errors = caught_on({3}, KeyError("layer"))
    assert isinstance(errors[3], KeyError)
    assert [str(error) for error in errors[:3]] == ["rank 3 (pp=1 dp=0 cp=0 tp=1): KeyError: 'layer'"] * 3
