"""A save is complete or absent: what a failing rank, a full disk, a rerun or a background write leave behind."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import Buffer, override

from megatron.core.checkpointing import storage
from megatron.core.checkpointing.find import find_checkpoint, is_unused
from megatron.core.checkpointing.load import load_checkpoint, read_run_document
from megatron.core.checkpointing.save import begin_save, save_checkpoint
from megatron.core.checkpointing.sharded_view import Staging
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import CheckpointError
from tests.harness.sentences import check_sentence, expect_error
from tests.unit.checkpointing.simulated import on_ranks

SINGLE = Mesh.single()


def state(value: float, size: int = 8) -> list[ShardedState]:
    return [ShardedState("model.w", torch.full((size,), value), Sharding((size,)))]


def loaded_value(root: Path) -> float:
    states = state(float("nan"))
    load_checkpoint(find_checkpoint(root), states, SINGLE)
    assert (states[0].tensor == states[0].tensor[0]).all()
    return states[0].tensor[0].item()


def limit_files(monkeypatch: pytest.MonkeyPatch, prefix: str, room: int, error: BaseException | int) -> None:
    """Raise ``error``, or the OSError of that number, where a file named ``prefix…`` would exceed ``room`` bytes."""

    class SmallFile(io.FileIO):
        @override
        def write(self, data: Buffer, /) -> int:
            if self.tell() + memoryview(data).nbytes > room:
                raise OSError(error, os.strerror(error)) if isinstance(error, int) else error
            return super().write(data)

    open_path = Path.open

    def open_small(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if path.name.startswith(prefix) and mode == "wb":
            return SmallFile(path, "w")
        return open_path(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_small)


def test_folder_and_tracker_look_as_documented(tmp_path: Path) -> None:
    """Users and scripts rely on Megatron's folder name and tracker, and on nothing else being there."""
    folder = save_checkpoint(tmp_path / "new" / "root", 1000, state(1.0), {"consumed_samples": 5}, SINGLE)
    assert folder == tmp_path / "new" / "root" / "iter_0001000"
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        "iter_0001000",
        "latest_checkpointed_iteration.txt",
    ]
    assert (folder.parent / "latest_checkpointed_iteration.txt").read_text() == "1000\n"
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json", "run.json"]
    run = json.loads((folder / "run.json").read_text())
    assert run["iteration"] == 1000
    assert run["layout"] == {"world_size": 1} | dict.fromkeys(["pp", "dp", "cp", "tp", "edp", "ep", "etp"], 1)
    assert run["versions"]["torch"] == torch.__version__
    assert read_run_document(folder)["state"] == {"consumed_samples": 5}
    assert tmp_path.name.encode() not in (folder / ".metadata").read_bytes(), (
        "paths of this machine are nobody's business"
    )


def test_run_state_comes_back_exactly(tmp_path: Path) -> None:
    """Floats (a loss scale, a learning rate) and nested settings survive the JSON bit by bit."""
    run_state = {"lr": 0.1 + 0.2, "scale": 2.0**16, "big": 2**62, "config": {"group": {"a": [1, None, True, "ü"]}}}
    save_checkpoint(tmp_path, 1, state(1.0), run_state, SINGLE)
    assert read_run_document(find_checkpoint(tmp_path))["state"] == run_state


@pytest.mark.parametrize("room", [0, 2000], ids=["no room", "room for a part"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES], ids=os.strerror)
def test_one_failing_rank_fails_all_and_leaves_no_trace(
    code: int, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk on one node: every rank stops with the rank, the file and the reason; the old checkpoint is whole."""
    save_checkpoint(tmp_path, 10, state(1.0), {}, SINGLE)
    limit_files(monkeypatch, "__1_", room, code)

    def save(mesh: Mesh) -> str:
        part = torch.full((1000,), float(mesh.world_rank))
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path, 20, [ShardedState("model.w", part, Sharding((2000,), split={0: "tp"}))], {}, mesh)
        return str(caught.value)

    messages = on_ranks([Mesh.of(tp=2, rank=rank) for rank in range(2)], save)
    assert messages[0] == messages[1]
    check_sentence(messages[0], "rank 1 (pp=0 dp=0 cp=0 tp=1)", f"__1_0.distcp: {os.strerror(code)}", "--save")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "latest_checkpointed_iteration.txt"]
    assert loaded_value(tmp_path) == 1.0


def test_an_unwritable_root_is_named(tmp_path: Path) -> None:
    """--save at a file, or below one, fails before anything is written."""
    (tmp_path / "file").write_text("")
    with expect_error(CheckpointError):
        save_checkpoint(tmp_path / "file", 1, state(1.0), {}, SINGLE)


def test_leftovers_of_killed_saves_go_with_the_next(tmp_path: Path) -> None:
    """They would fill the disk; nothing else in the folder is touched."""
    for name in [".iter_0000010.partial-0a1b", ".iter_0000005.removed-0a1b", ".iter_x", "notes"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    assert is_unused(tmp_path)
    save_checkpoint(tmp_path, 20, state(1.0), {}, SINGLE)
    names = [".iter_x", "iter_0000020", "latest_checkpointed_iteration.txt", "notes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    """A run that went back and comes by again must not stumble over its own folder."""
    save_checkpoint(tmp_path, 10, state(1.0), {}, SINGLE)
    save_checkpoint(tmp_path, 10, state(2.0), {}, SINGLE)
    assert loaded_value(tmp_path) == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "latest_checkpointed_iteration.txt"]


def test_a_stop_while_replacing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two renames only the old one exists, under its waiting name: it is found and loaded."""
    save_checkpoint(tmp_path, 10, state(1.0), {}, SINGLE)
    rename = Path.rename

    def stop_before_publishing(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stop_before_publishing)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 10, state(2.0), {}, SINGLE)
    monkeypatch.undo()
    assert not (tmp_path / "iter_0000010").exists()
    assert loaded_value(tmp_path) == 1.0
    save_checkpoint(tmp_path, 20, state(3.0), {}, SINGLE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000020", "latest_checkpointed_iteration.txt"]


def test_files_that_rank_0_cannot_see_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--save on each node's own disk: the save fails with that reason, not the load days later."""
    write = storage.CheckpointWriter.write_data

    def write_elsewhere(writer: storage.CheckpointWriter, *arguments: object) -> object:
        done = write(writer, *arguments)  # type: ignore[arg-type]
        for name in writer.files.written:
            if name.startswith("__1_"):
                Path(writer.path, name).unlink()
        return done

    monkeypatch.setattr(storage.CheckpointWriter, "write_data", write_elsewhere)

    def save(mesh: Mesh) -> None:
        part = torch.zeros(4)
        with expect_error(CheckpointError, "__1_0.distcp", "--save"):
            save_checkpoint(tmp_path, 20, [ShardedState("model.w", part, Sharding((8,), split={0: "tp"}))], {}, mesh)

    on_ranks([Mesh.of(tp=2, rank=rank) for rank in range(2)], save)
    assert is_unused(tmp_path)


def test_a_defect_keeps_its_traceback(tmp_path: Path) -> None:
    """Run state that is no JSON is a programming error; nothing is written."""
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint(tmp_path, 1, state(1.0), {"x": object()}, SINGLE)
    assert is_unused(tmp_path)


def test_background_saves_hold_the_moment_they_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training changes the weights while they are written; and "saved" is not said before it is durable."""
    proceed = threading.Event()
    write = storage.CheckpointWriter.write_data

    def write_when_told(writer: storage.CheckpointWriter, *arguments: object) -> object:
        assert proceed.wait(60)
        return write(writer, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(storage.CheckpointWriter, "write_data", write_when_told)
    states = state(1.0)
    pending = begin_save(tmp_path, 10, states, {}, SINGLE, background=Staging())
    states[0].tensor.fill_(2.0)
    assert not pending.is_written()
    assert is_unused(tmp_path)
    proceed.set()
    assert pending.finish() == tmp_path / "iter_0000010"
    assert loaded_value(tmp_path) == 1.0


def test_copies_reuse_the_memory_of_the_save_before() -> None:
    """Fresh memory costs more than the copy: training would stand still at every save, not only at the first."""
    staging, flat = Staging(), torch.arange(6.0)
    first = staging.copy("model.a", flat)
    flat += 1.0
    second = staging.copy("model.a", flat)
    assert second.data_ptr() == first.data_ptr() != flat.data_ptr()
    assert second.tolist() == flat.tolist()
    assert staging.copy("model.a", flat.half()).dtype == torch.float16


class LateCopies(TorchFunctionMode):
    """Copies that the host doesn't wait for are not there yet, as from a GPU."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_late = func is torch.Tensor.copy_ and ((kwargs or {}).get("non_blocking") or args[2:] == (True,))
        return args[0] if is_late else func(*args, **(kwargs or {}))


def test_copies_are_there_before_they_are_written() -> None:
    """A file would hold what lay in main memory before, and no error would say so."""
    flat = torch.arange(1.0, 7.0)
    with LateCopies():
        assert torch.equal(Staging().copy("model.a", flat), flat)
        assert not torch.zeros(6).copy_(flat, non_blocking=True).any(), "what an unfinished copy looks like"


def test_background_failures_surface_at_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's error must not vanish with the thread."""
    limit_files(monkeypatch, "__0_", 1000, errno.ENOSPC)
    pending = begin_save(tmp_path, 10, state(1.0), {}, SINGLE, background=Staging())
    with expect_error(CheckpointError, exit_code=1):
        pending.finish()
    assert is_unused(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room", [0, 300, 2000])
def test_ctrl_c_during_a_save_stays_one_and_leaves_nothing(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a tensor it became torch's RuntimeError, and ended the run in two tracebacks with code 1.

    What had been written stayed as a hidden folder as large as the checkpoint.
    """
    save_checkpoint(tmp_path, 10, state(1.0), {}, SINGLE)
    limit_files(monkeypatch, "__0_", room, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 20, state(2.0, size=1000), {}, SINGLE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "latest_checkpointed_iteration.txt"]


def test_the_tracker_moves_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the tracker finds the checkpoint that it names."""
    save_checkpoint(tmp_path, 10, state(1.0), {}, SINGLE)
    order: list[str] = []
    for name in ("replace", "rename"):
        move = getattr(Path, name)

        def noted(path: Path, target: Path, *, move: Callable[[Path, Path], Path] = move) -> Path:
            order.append(target.name)
            return move(path, target)

        monkeypatch.setattr(Path, name, noted)
    save_checkpoint(tmp_path, 20, state(1.0), {}, SINGLE)
    assert order[-3:] == ["manifest.json", "iter_0000020", "latest_checkpointed_iteration.txt"]


def test_everything_is_on_the_disk_before_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure after the rename would leave a checkpoint of empty files, and a tracker that names it."""
    synced: set[int] = set()
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def named(path: Path, target: Path) -> Path:
        if target.parent == tmp_path:
            unsynced = [part.name for part in (path, *path.iterdir()) if part.stat().st_ino not in synced]
            assert not unsynced, f"{target.name} gets its name before {unsynced} are on the disk"
            synced.clear()
        return rename(path, target)

    def replaced(path: Path, target: Path) -> Path:
        if target.parent == tmp_path:
            assert tmp_path.stat().st_ino in synced, "the tracker names a folder whose name may not survive"
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", named)
    monkeypatch.setattr(Path, "replace", replaced)
    for background in (None, Staging()):
        begin_save(tmp_path, 10 if background is None else 20, state(1.0), {}, SINGLE, background=background).finish()
    assert find_checkpoint(tmp_path).iteration == 20
