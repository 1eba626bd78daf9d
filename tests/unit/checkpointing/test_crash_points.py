"""A save that stops or fails at each of its file operations in turn, and a checkpoint that is damaged in every way."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import load_checkpoint, read_run_document
from megatron.core.checkpointing.retention import Retention, prune
from megatron.core.checkpointing.save import save_checkpoint
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error

SINGLE = Mesh.single()
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


class Killed(BaseException):
    """The process is gone."""


class Operations:
    """Python's audit events of changes below ``root``; ``fault`` is called with the number of each, and may raise."""

    root: Path | None = None
    fault: Callable[[int], None]
    seen = 0
    is_installed = False

    @classmethod
    def note(cls, event: str, arguments: tuple[object, ...]) -> None:
        if cls.root is None or not (event in CHANGES or event == "open"):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        named = isinstance(arguments[0], (str, Path)) and str(arguments[0]).startswith(str(cls.root))
        if named or event in ("os.remove", "os.rmdir"):  # rmtree names what it deletes relative to its folder
            cls.seen += 1
            cls.fault(cls.seen)

    @classmethod
    @contextmanager
    def watched(cls, root: Path, fault: Callable[[int], None]) -> Iterator[None]:
        """Consult ``fault`` inside this block. A hook can't be taken away, so there is one for all tests."""
        if not cls.is_installed:
            sys.addaudithook(cls.note)
            cls.is_installed = True
        cls.root, cls.fault, cls.seen = root, staticmethod(fault), 0
        try:
            yield
        finally:
            cls.root = None


def save(root: Path, iteration: int, value: float) -> None:
    state = [ShardedState("model.w", torch.full((8,), value), Sharding((8,)))]
    save_checkpoint(root, iteration, state, {"value": value}, SINGLE)


def loaded(root: Path) -> tuple[int, float]:
    """Iteration and value of what is found, which must be whole."""
    states, found = [ShardedState("model.w", torch.full((8,), float("nan")), Sharding((8,)))], find_checkpoint(root)
    load_checkpoint(found, states, SINGLE)
    value = states[0].tensor[0].item()
    assert (states[0].tensor == value).all()
    assert read_run_document(found)["state"] == {"value": value}
    return found.iteration, value


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run that has saved twice."""
    save(tmp_path / "saved", 5, 0.5)
    save(tmp_path / "saved", 10, 1.0)
    return tmp_path / "saved"


@pytest.mark.parametrize("again", [False, True], ids=["next iteration", "same iteration"])
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "disk error"])
def test_every_operation_of_a_save(is_killed: bool, again: bool, saved: Path, tmp_path: Path) -> None:
    """The old checkpoint is found or the new one, always whole; the next save works and clears the rubbish."""
    iteration, outcomes, moment = (10 if again else 20), [], 0
    reasons: list[str] = []
    while True:
        moment += 1
        root = tmp_path / str(moment)
        shutil.copytree(saved, root)

        def fault(number: int, moment: int = moment) -> None:
            if is_killed and number >= moment:  # whatever it still tries reaches nobody
                raise Killed
            if not is_killed and number == moment:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        is_reported = False
        with Operations.watched(root, fault):
            try:
                save(root, iteration, 2.0)
                prune(root, iteration, Retention(keep_last=2), SINGLE)
            except (Killed, CheckpointError) as error:
                is_reported = True
                reasons.append(str(error))
            num_operations = Operations.seen
        outcomes.append(loaded(root))
        assert is_reported or outcomes[-1] == (iteration, 2.0), "a save that failed says so"
        save(root, 30, 3.0)
        assert loaded(root) == (30, 3.0)
        assert [path.name for path in root.iterdir() if path.name.startswith(".iter")] == []
        shutil.rmtree(root)
        if num_operations < moment:
            break
    assert set(outcomes) == {(10, 1.0), (iteration, 2.0)}
    assert outcomes[-1] == (iteration, 2.0)
    assert len(reasons) > 5
    assert is_killed or all("No space left on device" in reason for reason in reasons)
    assert len(outcomes) > 15, "folder, files, renames, tracker and what is deleted"


def test_every_kind_of_damage(saved: Path) -> None:
    """Noticed, and the checkpoint before is used; where there is no other, the error is one sentence."""
    folder, before = saved / "iter_0000010", saved / "iter_0000005"
    num_damaged = 0
    for name in sorted(path.name for path in folder.iterdir()):
        content = (folder / name).read_bytes()
        cuts = [content[: len(content) * part // 16] for part in range(16)]
        wrong = [*cuts, content + b"\0", bytes(len(content)), content[::-1], (before / name).read_bytes()]
        for damaged in [*wrong, None]:
            (folder / name).unlink()
            if damaged is None:
                (folder / name).mkdir()
            else:
                (folder / name).write_bytes(damaged)
            num_damaged += 1
            is_same = damaged == content  # .metadata says nothing of values, so both have the same
            assert loaded(saved) == ((10, 1.0) if is_same else (5, 0.5)), (name, damaged)
            if not is_same:
                with expect_error(
                    CheckpointError, f"--load {folder}", "iter_0000010", hide=[r"\d+ bytes.*", r":\d+ is not JSON.*"]
                ):
                    find_checkpoint(folder)
            shutil.rmtree(folder / name) if damaged is None else (folder / name).unlink()
            (folder / name).write_bytes(content)
    assert loaded(saved) == (10, 1.0)
    assert num_damaged > 80
