"""Checkpoints in object storage, where nothing can be renamed: complete or absent all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint, is_unused, whole_checkpoints
from megatron.core.checkpointing.folders import is_unfinished
from megatron.core.checkpointing.load import load_checkpoint, read_run_document
from megatron.core.checkpointing.manifest import Manifest
from megatron.core.checkpointing.retention import Retention, prune
from megatron.core.checkpointing.save import begin_save, save_checkpoint, save_streamed
from megatron.core.checkpointing.sharded_view import Staging
from megatron.core.checkpointing.streamed import StreamedBox
from megatron.core.checkpointing.summary import compare, summarize
from megatron.core.files.remote_path import AnyPath, RemotePath, path_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import RESTART_MAY_HELP, CheckpointError
from tests.harness.bucket import Killed, ServiceError, empty_memory, failing, killed_at, url
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.unit.checkpointing.simulated import Layout, assert_holds, logical_values, on_ranks, state_of

SINGLE = Mesh.single()


def state(value: float) -> list[ShardedState]:
    return [ShardedState("model.w", torch.full((8,), value), Sharding((8,)))]


def save(root: AnyPath, iteration: int, value: float) -> AnyPath:
    return save_checkpoint(root, iteration, state(value), {"value": value}, SINGLE)


def loaded(root: AnyPath) -> tuple[int, float]:
    """Iteration and value of what is found, whose run state must say the same."""
    states, found = state(float("nan")), find_checkpoint(root)
    load_checkpoint(found, states, SINGLE)
    value = states[0].tensor[0].item()
    assert (states[0].tensor == value).all()
    assert read_run_document(found)["state"] == {"value": value}
    return found.iteration, value


def objects(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture
def memory() -> Iterator[RemotePath]:
    yield RemotePath("memory://runs/mine")
    empty_memory()


def test_the_whole_life_in_memory(memory: RemotePath) -> None:
    """Saved, found, loaded, replaced, pruned, summarized and compared as in a folder."""
    assert is_unused(memory)
    first = save(memory, 10, 1.0)
    assert first.name.startswith("iter_0000010-")
    assert (memory / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == "10\n"
    assert not is_unused(memory)
    save(memory, 20, 2.0)
    assert loaded(memory) == (20, 2.0)
    assert find_checkpoint(memory, step=10).path == first == find_checkpoint(first).path
    save(memory, 20, 3.0)
    assert loaded(memory) == (20, 3.0)
    assert len([path for path in memory.iterdir() if path.name.startswith("iter_")]) == 2
    assert summarize(find_checkpoint(memory)).iteration == 20
    assert list(compare(find_checkpoint(first), find_checkpoint(memory)).differences) == ["model.w"]
    assert prune(memory, 20, Retention(keep_last=1), SINGLE) == [10]
    assert list(whole_checkpoints(memory)) == [20]
    assert not first.exists()


def test_streamed_and_background_saves(memory: RemotePath) -> None:
    """What conversion writes, and what --async-save writes in its thread."""
    boxes = [StreamedBox.whole("model.w", (8,), torch.float32, lambda: torch.full((8,), 5.0))]
    save_streamed(memory, 1, boxes, {"value": 5.0})
    assert loaded(memory) == (1, 5.0)
    states = state(6.0)
    pending = begin_save(memory, 2, states, {"value": 6.0}, SINGLE, background=Staging())
    states[0].tensor.fill_(-1.0)
    pending.finish()
    assert loaded(memory) == (2, 6.0)


@pytest.mark.parametrize("layouts", [(Layout(tp=2, pp=2, dp=2, zero=True), Layout(tp=4)), (Layout(dp=2), Layout(pp=4))])
def test_any_layout_to_any_other(layouts: tuple[Layout, Layout], tmp_path: Path) -> None:
    """Several ranks put objects of one checkpoint, and others read parts of them."""
    values, root = logical_values(1), path_of(url(tmp_path / "run"))
    saved, wanted = layouts
    on_ranks(saved.meshes(), lambda mesh: save_checkpoint(root, 7, state_of(saved, mesh, values), {}, mesh))

    def load(mesh: Mesh) -> None:
        states = state_of(wanted, mesh, None)
        load_checkpoint(find_checkpoint(root, mesh=mesh), states, mesh)
        assert_holds(states, mesh, values)

    on_ranks(wanted.meshes(), load)


@pytest.mark.parametrize("again", [False, True], ids=["next iteration", "same iteration"])
def test_killed_at_every_put_and_delete(again: bool, tmp_path: Path) -> None:
    """A process that dies at any moment leaves the old checkpoint or the new one; the next save clears its rubbish."""
    iteration, outcomes = (10 if again else 20), []
    for moment in range(100):
        root = path_of(url(tmp_path / str(moment)))
        save(root, 5, 0.5)
        save(root, 10, 1.0)
        try:
            with failing(killed_at(moment)):
                save(root, iteration, 2.0)
                prune(root, iteration, Retention(keep_last=2), SINGLE)
        except Killed:
            outcomes.append(loaded(root))
            if again:
                assert find_checkpoint(root).passed_over == ()
            save(root, 30, 3.0)
            assert loaded(root) == (30, 3.0)
            folders = {name.split("/")[0] for name in objects(tmp_path / str(moment))}
            assert {name.split("-")[0] for name in folders} >= {"iter_0000030", "latest_checkpointed_iteration.txt"}
            for name in filter(lambda name: "iter_" in name and "txt" not in name, folders):
                assert Manifest.read(root / name).size_problems(root / name) == []
        else:
            break
    assert outcomes == sorted(outcomes)
    assert {(10, 1.0), (iteration, 2.0)} == set(outcomes)
    assert outcomes.count((10, 1.0)) >= 4, "data, table of contents, settings and manifest come one after another"
    assert loaded(root) == (iteration, 2.0)


def test_killed_at_every_put_of_the_first_save(tmp_path: Path) -> None:
    """A run that was killed in its first save was refused from then on: its folder held no usable checkpoint."""
    outcomes = []
    for moment in range(100):
        root = path_of(url(tmp_path / str(moment)))
        try:
            with failing(killed_at(moment)):
                save(root, 10, 1.0)
        except Killed:
            outcomes.append(None if is_unused(root) else loaded(root))
            save(root, 20, 2.0)
            assert [path for path in root.iterdir() if is_unfinished(path)] == []
            assert loaded(root) == (20, 2.0)
        else:
            break
    assert {None, (10, 1.0)} == {*outcomes} and outcomes.count(None) >= 4


def test_a_lost_manifest_is_no_first_save(tmp_path: Path) -> None:
    """A run whose only checkpoint has lost an object must not start anew."""
    root = path_of(url(tmp_path / "run"))
    (save(root, 10, 1.0) / "manifest.json").unlink()
    assert not is_unused(root)


@pytest.mark.parametrize("operation", ["write", "put"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json", "manifest.json"])
def test_a_failing_service_leaves_the_old_checkpoint(name: str, operation: str, tmp_path: Path) -> None:
    """One sentence that names the object and the reason; nothing of the save stays; the next one works."""
    root = path_of(url(tmp_path / "run"))
    save(root, 10, 1.0)
    before = objects(tmp_path)

    def fault(done: str, path: str) -> None:
        if done == operation and Path(path).name == name:
            raise ServiceError("503 slow down")

    with failing(fault), expect_error(CheckpointError, name, "503", exit_code=1) as caught:
        save(root, 20, 2.0)
    check_line(str(caught.value), "iteration 20", root)
    assert objects(tmp_path) == before
    assert loaded(root) == (10, 1.0)
    save(root, 20, 2.0)
    assert loaded(root) == (20, 2.0)


@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", "manifest.json", "run.json", "__0_0.distcp"])
def test_a_failing_service_is_no_reason_for_an_older_checkpoint(name: str, tmp_path: Path) -> None:
    """A run went on from an older checkpoint, with a warning, or ended as by a user's mistake and wasn't restarted."""
    root = path_of(url(tmp_path / "run"))
    save(root, 10, 1.0)
    newest = save(root, 20, 2.0)

    def fault(done: str, path: str) -> None:
        if done == "get" and Path(path).name == name and (newest.name in path or "latest" in name):
            raise ServiceError("503 slow down")

    with failing(fault), expect_error(CheckpointError, "503", exit_code=1) as caught:
        find_checkpoint(root)
    assert caught.value.exit_code == RESTART_MAY_HELP
    assert loaded(root) == (20, 2.0)


def test_one_rank_that_cannot_put_stops_all(tmp_path: Path) -> None:
    """Every rank says which rank it was."""
    root = path_of(url(tmp_path / "run"))

    def fault(done: str, path: str) -> None:
        if done == "put" and Path(path).name.startswith("__1_"):
            raise ServiceError("403 forbidden")

    def save_part(mesh: Mesh) -> str:
        part = ShardedState("model.w", torch.zeros(4), Sharding((8,), split={0: "tp"}))
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(root, 20, [part], {}, mesh)
        return str(caught.value)

    with failing(fault):
        messages = on_ranks([Mesh.of(tp=2, rank=rank) for rank in range(2)], save_part)
    assert messages[0] == messages[1]
    check_sentence(messages[0], "rank 1 (pp=0 dp=0 cp=0 tp=1)", "403")
    assert objects(tmp_path) == []


def test_a_failure_after_publishing_keeps_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The old one of the same iteration can't be deleted: a warning, since the new one is durable; later ones work."""
    root = path_of(url(tmp_path / "run"))
    save(root, 10, 1.0)

    def fault(done: str, path: str) -> None:
        if done == "delete" and path.endswith("manifest.json"):
            raise ServiceError("403 forbidden")

    with failing(fault):
        save(root, 10, 2.0)
        assert loaded(root) == (10, 2.0)
        save(root, 20, 3.0)
        assert prune(root, 20, Retention(keep_last=1), SINGLE) == []
    assert loaded(root) == (20, 3.0)
    assert caplog.text.count("could not be deleted") == 2
    assert "manifest.json: 403 forbidden" in caplog.text
    assert " ".join(objects(tmp_path)).count("iter_0000010-") == 8
    save(root, 30, 4.0)
    assert " ".join(objects(tmp_path)).count("iter_0000010-") == 4, "each later save tries again, as the warning says"
    assert read_run_document(find_checkpoint(root, step=10))["state"] == {"value": 2.0}


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damage_is_found_and_the_previous_one_used(damage: str, tmp_path: Path) -> None:
    """As on a disk: said, and passed over."""
    root = path_of(url(tmp_path / "run"))
    save(root, 10, 1.0)
    folder = Path(str(save(root, 20, 2.0)).removeprefix("bucket://"))
    data = folder / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "delete":
        data.unlink()
    else:
        data.write_bytes(content if damage == "flip" else content[:-1])
    assert loaded(root) == (10, 1.0)
    assert "__0_0.distcp" in " ".join(find_checkpoint(root).passed_over)


def test_a_half_written_manifest_or_tracker_is_no_checkpoint(tmp_path: Path) -> None:
    """Where a put is not atomic after all (a file server behind a URL)."""
    root = path_of(url(tmp_path / "run"))
    save(root, 10, 1.0)
    folder = Path(str(save(root, 20, 2.0)).removeprefix("bucket://"))
    manifest = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(manifest[: len(manifest) // 2])
    assert loaded(root) == (10, 1.0)
    (folder / "manifest.json").write_bytes(manifest)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("")
    assert loaded(root) == (20, 2.0)


def test_other_programs_checkpoints_are_left_alone(tmp_path: Path) -> None:
    """Megatron-LM's folders have no manifest of ours: they must not be taken for what a killed save has left."""
    root, theirs = path_of(url(tmp_path)), tmp_path / "iter_0000005" / "common.pt"
    theirs.parent.mkdir()
    theirs.write_bytes(b"theirs")
    save(root, 10, 1.0)
    assert theirs.read_bytes() == b"theirs"


def test_listing_replaces_a_request_for_each_file(tmp_path: Path) -> None:
    """A checkpoint of 1,000 ranks has 1,000 files; asking for the size of each takes minutes."""
    root, layout, values = path_of(url(tmp_path)), Layout(tp=4, dp=2, zero=True), logical_values(1)
    on_ranks(layout.meshes(), lambda mesh: save_checkpoint(root, 7, state_of(layout, mesh, values), {}, mesh))
    operations: list[str] = []
    with failing(lambda name, path: operations.append(name)):
        folder = find_checkpoint(root, verify=False)
    assert len(json.loads((folder.path / "manifest.json").read_text(encoding="utf-8"))["files"]) == 10
    assert len(operations) < 10
