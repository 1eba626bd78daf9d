"""Which copy a restart goes on from, and who reads which file of it. No files are needed to choose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.core.checkpointing.manifest import MANIFEST, Manifest, checksum
from megatron.core.checkpointing.node_copies.choosing import FoundCopy, candidates, incomplete, partners_of, sources
from megatron.core.checkpointing.node_copies.folder import ORIGINS, NodeFolder
from megatron.core.parallel.mesh import Mesh
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error

FILES = frozenset({"__0_0.distcp", "__1_0.distcp"})
FIRST, SECOND = FILES, frozenset({"__1_0.distcp"})
NEWEST = "checkpoint of iteration 20"


def copy(iteration: int, here: frozenset[str] = FILES, *, saved_at: float = 1.0, origin: str = NEWEST) -> FoundCopy:
    return FoundCopy(iteration, saved_at, frozenset({origin}), FILES, here)


@pytest.mark.parametrize(
    ("rank", "jump", "factor", "partners"),
    [(0, 1, 2, (0, 1)), (3, 1, 2, (2, 3)), (1, 2, 2, (1, 3)), (6, 2, 2, (4, 6)), (9, 2, 3, (7, 9, 11))],
)
def test_partners_are_a_jump_apart(rank: int, jump: int, factor: int, partners: tuple[int, ...]) -> None:
    """Megatron-LM's meaning of the flags: a cluster's launch lines place copies by it."""
    assert partners_of(rank, jump=jump, factor=factor) == partners
    assert all(partners_of(each, jump=jump, factor=factor) == partners for each in partners)


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([[copy(30)], [copy(30)]], [30]),
        ([[copy(30), copy(40)], []], [40, 30]),  # a new node has nothing, its partner all
        ([[copy(40, frozenset({"__0_0.distcp"}))], [copy(40, SECOND)]], [40]),  # each node has its own part
        ([[copy(30)], [copy(40, SECOND)]], [30]),  # killed while 40 was made, or its node is lost
        ([[copy(40, frozenset({"__0_0.distcp"}))], [copy(40, SECOND, saved_at=2.0)]], []),  # of two pasts
        ([[copy(40, origin="checkpoint of iteration 10")], []], []),  # of a past before the newest checkpoint
        ([[copy(20), copy(10)], []], []),  # the checkpoint is as new
    ],
)
def test_the_newest_whole_copy_is_chosen(found: list[list[FoundCopy]], chosen: list[int]) -> None:
    """A run that mixed parts of two iterations, or went on from a past that it had left, would diverge in silence."""
    assert [iteration for iteration, _ in candidates(found, origin=NEWEST, newer_than=20)] == chosen


def test_what_a_copy_lacks_is_counted() -> None:
    """The log says why an older state was taken."""
    assert incomplete([[copy(40, frozenset())], [copy(40, SECOND)]], origin=NEWEST, newer_than=20) == {40: 1}
    assert incomplete([[copy(40)], [copy(40, SECOND)]], origin=NEWEST, newer_than=20) == {}


def test_files_are_read_where_they_lie() -> None:
    """Ranks of a node read its folder themselves; what it lacks comes from a rank that has found it undamaged."""
    first, second = "__0_0.distcp", "__1_0.distcp"
    found = sources([{first}, set(), {second}, set()], (0, 0, 1, 1), FILES)
    assert [each[first] for each in found] == [0, 1, 0, 0]
    assert [each[second] for each in found] == [2, 2, 2, 3]
    assert sources([{first}, set()], (0, 1), FILES)[1].keys() == {first}  # nobody has the other


@pytest.mark.parametrize("kind", ["link", "other user"])
def test_a_folder_that_another_user_has_made_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may write into /dev/shm, and the folder's name follows from --save: its weights would be trained on."""
    path, made = tmp_path / "megatron-1", tmp_path / "made"
    NodeFolder.seen(made, Mesh.single())
    assert made.stat().st_mode & 0o777 == 0o700
    if kind == "link":
        path.symlink_to(made)
    else:
        path.mkdir()
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with expect_error(CheckpointError, path, "--non-persistent-local-ckpt-dir", "--save-fallback-dir"):
        NodeFolder.seen(path, Mesh.single())


@pytest.mark.parametrize("damaged", [None, "run.json", ORIGINS])
def test_small_files_of_a_copy_are_compared_by_their_bytes(damaged: str | None, tmp_path: Path) -> None:
    """A flipped bit in a run's settings or counters keeps a file's size."""
    folder = NodeFolder.seen(tmp_path / "copies", Mesh.single())
    path = folder.of(40)
    path.mkdir()
    (path / "run.json").write_text('{"iteration": 40}')
    (path / ORIGINS).write_text(NEWEST)
    files = {name: checksum(path / name) for name in ("run.json", ORIGINS)}
    (path / MANIFEST).write_text(Manifest(iteration=40, saved_at=1.0, files=files).to_json())
    if damaged is not None:
        (path / damaged).write_bytes((path / damaged).read_bytes()[:-1] + b"?")
    assert [each.iteration for each in folder.found()] == ([] if damaged else [40])
