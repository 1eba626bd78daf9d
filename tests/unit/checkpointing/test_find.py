"""The newest whole checkpoint is loaded, or the user reads what is there and why none of it will do."""

from __future__ import annotations

import json
import logging
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core.checkpointing import manifest
from megatron.core.checkpointing.find import CheckpointFolder, find_checkpoint, is_unused, whole_checkpoints
from megatron.core.checkpointing.manifest import FileRecord, Manifest
from megatron.core.checkpointing.save import save_checkpoint
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import CheckpointError
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.unit.checkpointing.simulated import on_ranks

SINGLE = Mesh.single()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of iterations 10, 20 and 30, saved in this order."""
    for iteration in (10, 20, 30):
        state = [ShardedState("model.w", torch.full((64,), float(iteration)), Sharding((64,)))]
        save_checkpoint(tmp_path, iteration, state, {"iteration": iteration}, SINGLE)
    return tmp_path


def damage(path: Path, how: str, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[int(at * len(data))] ^= 1 << 3
    elif how == "truncate":
        data = data[: len(data) // 2]
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(data)


def test_the_tracker_decides(root: Path) -> None:
    """Also when a user edits it to go back; and a healthy load is silent."""
    assert find_checkpoint(root) == CheckpointFolder(root / "iter_0000030", 30, is_verified=True)
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    assert find_checkpoint(root) == CheckpointFolder(root / "iter_0000010", 10, is_verified=True)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_damage_is_detected_and_the_previous_one_used(
    how: str, name: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped byte anywhere, a short or missing file: said loudly, and the run goes on from the one before."""
    damage(root / "iter_0000030" / name, how)
    with caplog.at_level(logging.WARNING):
        found = find_checkpoint(root)
    assert found.iteration == 20
    assert any(name in reason for reason in found.passed_over)
    check_line(caplog.text, "iter_0000020")
    assert name in caplog.text


@pytest.mark.parametrize(
    ("listed", "facts"),
    [
        ([], ["manifest.json", ".metadata", "run.json"]),
        ([".metadata", "__0_0.distcp"], ["manifest.json", "run.json"]),
        ([".metadata", "run.json"], ["'__0_0.distcp'"]),
    ],
    ids=["nothing", "no run.json", "no distcp"],
)
@pytest.mark.parametrize("is_there", [True, False], ids=["there", "deleted"])
def test_a_manifest_that_lists_too_little(listed: list[str], facts: list[str], is_there: bool, root: Path) -> None:
    """A checkpoint whose manifest listed no files was called whole, with its tensors' files unread or missing."""
    folder = root / "iter_0000030"
    known = Manifest.read(folder)
    files = {name: known.files[name] for name in listed}
    (folder / "manifest.json").write_text(replace(known, files=files).to_json())
    if not is_there:
        (folder / "__0_0.distcp").unlink()
    check_sentence(", ".join(find_checkpoint(root).passed_over), "iter_0000030", *facts)
    with expect_error(CheckpointError, *facts):
        find_checkpoint(folder)
    if "run.json" in listed:
        with expect_error(CheckpointError, *facts):
            StoredTensors(folder)


def test_files_shorter_than_their_tensors(root: Path) -> None:
    """An empty file of tensors, listed with its zero bytes, was called whole."""
    folder = root / "iter_0000030"
    (folder / "__0_0.distcp").write_bytes(b"")
    known = Manifest.read(folder)
    files = {**known.files, "__0_0.distcp": FileRecord(0, 0)}
    (folder / "manifest.json").write_text(replace(known, files=files).to_json())
    reason = find_checkpoint(root).passed_over[0]
    check_line(reason, "'__0_0.distcp'", "manifest.json", "0 bytes")


def test_every_flipped_byte_of_a_checkpoint_is_noticed(root: Path) -> None:
    """Weights are not special: the table of contents, settings and the manifest itself count too."""
    draw = random.Random(5)
    folder = root / "iter_0000030"
    for _ in range(40):
        path = draw.choice(sorted(folder.iterdir()))
        intact = path.read_bytes()
        damage(path, "flip", at=draw.random())
        was_json = path.name == "manifest.json" and _same_json(intact, path.read_bytes())
        assert was_json or find_checkpoint(root).iteration == 20, path
        path.write_bytes(intact)
    assert find_checkpoint(root).iteration == 30


def _same_json(before: bytes, after: bytes) -> bool:
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["../iter_0000020/run.json", "/etc/hostname"])
def test_a_manifest_names_files_of_its_folder_alone(name: str, root: Path) -> None:
    """A stranger's manifest could have any file of the machine read, and its size told."""
    folder = root / "iter_0000030"
    whole = manifest.Manifest.read(folder)
    changed = manifest.Manifest(whole.iteration, whole.saved_at, {**whole.files, name: manifest.FileRecord(1, 2)})
    (folder / manifest.MANIFEST).write_text(changed.to_json())
    with expect_error(CheckpointError, "manifest.json", f"'{name}'"):
        manifest.Manifest.read(folder)
    assert find_checkpoint(root).iteration == 20


def test_without_verification_only_sizes_count(root: Path) -> None:
    """Reading settings before a launch must not read terabytes; the load itself verifies."""
    damage(root / "iter_0000030" / "__0_0.distcp", "flip")
    assert find_checkpoint(root, verify=False).iteration == 30
    damage(root / "iter_0000030" / "__0_0.distcp", "truncate")
    assert find_checkpoint(root, verify=False).iteration == 20


@pytest.mark.parametrize("text", [None, "", "x", "release", "40", "3\0", "\udcff"])
def test_a_useless_tracker_falls_back_to_the_newest(text: str | None, root: Path) -> None:
    """A job killed between its rename and its tracker, or a tracker lost in copying."""
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    if text is not None:
        tracker.write_bytes(text.encode(errors="surrogateescape"))
    found = find_checkpoint(root)
    assert found.iteration == 30
    assert "latest_checkpointed_iteration.txt" in found.passed_over[0]


def test_newest_means_saved_last(root: Path) -> None:
    """A run that went back to 10 and saved 15 goes on from 15, not from the abandoned 30."""
    state = [ShardedState("model.w", torch.zeros(64), Sharding((64,)))]
    save_checkpoint(root, 15, state, {}, SINGLE)
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert find_checkpoint(root).iteration == 15


def test_an_irrelevant_broken_checkpoint_is_no_news(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only what stands between the user and what they asked for is reported."""
    damage(root / "iter_0000010" / "run.json", "delete")
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(root).passed_over == ()
    assert caplog.text == ""


def test_a_given_step_is_taken_or_refused(root: Path) -> None:
    """--ckpt-step never silently loads another iteration."""
    assert find_checkpoint(root, step=20).iteration == 20
    with expect_error(CheckpointError, "--ckpt-step 25", "10", "20"):
        find_checkpoint(root, step=25)
    damage(root / "iter_0000020" / "__0_0.distcp", "flip")
    with expect_error(CheckpointError, "--ckpt-step 20", "iter_0000020", "__0_0.distcp"):
        find_checkpoint(root, step=20)


def test_one_checkpoint_may_be_named_itself(root: Path) -> None:
    """--load root/iter_0000020 works; with another --ckpt-step it is a contradiction, not a choice."""
    assert find_checkpoint(root / "iter_0000020") == CheckpointFolder(root / "iter_0000020", 20, is_verified=True)
    assert find_checkpoint(root / "iter_0000020", step=20).iteration == 20
    with expect_error(CheckpointError, "iter_0000020", "20", "--ckpt-step 30"):
        find_checkpoint(root / "iter_0000020", step=30)
    damage(root / "iter_0000020" / "run.json", "flip")
    with expect_error(CheckpointError, "run.json"):
        find_checkpoint(root / "iter_0000020")


def test_nothing_usable_lists_everything_and_why(root: Path) -> None:
    """The user sees each candidate once with its reason, and the program ends."""
    damage(root / "iter_0000010" / "__0_0.distcp", "flip")
    damage(root / "iter_0000020" / "__0_0.distcp", "truncate")
    damage(root / "iter_0000030" / "manifest.json", "delete")
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(root)
    message = str(caught.value)
    assert message.startswith(f"--load {root} holds no usable checkpoint: latest_checkpointed_iteration.txt says '30'")
    check_line(message, "iter_0000010", "__0_0.distcp")
    check_line(message, "iter_0000020", "__0_0.distcp")
    check_line(message, "iter_0000030", "manifest.json")


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    """Nothing there is an error that says so, and is told apart from something unusable."""
    with expect_error(CheckpointError):
        find_checkpoint(tmp_path / "absent")
    with expect_error(CheckpointError):
        find_checkpoint(tmp_path)
    for flag, said in (("--pretrained-checkpoint", f"--pretrained-checkpoint {tmp_path}"), ("", str(tmp_path))):
        with expect_error(CheckpointError, said):
            find_checkpoint(tmp_path, flag=flag)
    assert is_unused(tmp_path / "absent")
    assert is_unused(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert not is_unused(tmp_path)
    with expect_error(CheckpointError, "'5'"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "program"),
    [
        (["iter_0000500/mp_rank_00/model_optim_rng.pt"], "megatron-lm"),
        (["release/mp_rank_00_001/model_optim_rng.pt"], "megatron-lm"),
        (["iter_0000500/metadata.json", "iter_0000500/common.pt", "iter_0000500/.metadata"], "megatron-lm"),
        (["config.json", "model-00001-of-00002.safetensors"], "hf"),
    ],
    ids=["torch", "torch with experts", "torch_dist", "Hugging Face"],
)
def test_checkpoints_of_other_programs_are_recognised(files: list[str], program: str, tmp_path: Path) -> None:
    """Their owner is told the command that converts them, with the folder already in it."""
    whole = tmp_path / "theirs"
    for name in files:
        (whole / name).parent.mkdir(parents=True, exist_ok=True)
        (whole / name).write_text("{}")
    assert not is_unused(whole)
    for root in dict.fromkeys([whole, (whole / files[0]).parent if "metadata" in files[0] else whole]):
        command = f"tools/checkpoint/convert.py --from {program} --load {whole} --to megatron"
        with expect_error(CheckpointError, command):
            find_checkpoint(root)


def test_all_ranks_agree_and_share_the_reading(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage that only rank 2 reads makes every rank fall back; each file is read by one rank."""
    read: list[str] = []
    original = manifest.checksum

    def noted(path: Path) -> manifest.FileRecord:
        read.append(str(path))
        return original(path)

    monkeypatch.setattr(manifest, "checksum", noted)
    damage(root / "iter_0000030" / "run.json", "flip")
    meshes = [Mesh.of(dp=3, rank=rank) for rank in range(3)]
    found = on_ranks(meshes, lambda mesh: find_checkpoint(root, mesh=mesh))
    assert {folder.iteration for folder in found} == {20}
    assert len(read) == len(set(read)) == 6


def test_ranks_fail_together(tmp_path: Path) -> None:
    """Every rank gets the same sentence, none hangs."""

    def find(mesh: Mesh) -> str:
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(tmp_path / "absent", mesh=mesh)
        return str(caught.value)

    assert len(set(on_ranks([Mesh.of(dp=2, rank=rank) for rank in range(2)], find))) == 1


def test_whole_checkpoints_are_listed_by_iteration(root: Path) -> None:
    """What retention and the inspector count."""
    shutil.rmtree(root / "iter_0000020")
    damage(root / "iter_0000010" / "run.json", "truncate")
    assert whole_checkpoints(root) == {30: root / "iter_0000030"}
