"""Loading fits exactly, or says what doesn't before it changes anything; and it never runs what a file contains."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from typing_extensions import override

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import load_checkpoint, read_run_document
from megatron.core.checkpointing.save import save_checkpoint
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import CheckpointError
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.unit.checkpointing.simulated import on_ranks

SINGLE = Mesh.single()


def part(name: str, shape: Sequence[int], value: float = 0.0, dtype: torch.dtype = torch.float32) -> ShardedState:
    return ShardedState(name, torch.full(tuple(shape), value, dtype=dtype), Sharding(tuple(shape)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with two weights, one moment and one master."""
    state = [
        part("model.a", (2, 3), 1.0),
        part("model.b", (4,), 2.0, torch.bfloat16),
        part("optimizer.exp_avg.a", (2, 3), 3.0),
        part("optimizer.fp32_param.b", (4,), 4.0),
    ]
    save_checkpoint(tmp_path, 10, state, {}, SINGLE)
    return tmp_path / "iter_0000010"


def refusal(folder: Path, state: list[ShardedState]) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, state, SINGLE)
    assert all(not state.tensor.any() for state in state), "something was changed before the refusal"
    return str(caught.value)


def test_weights_alone_can_be_loaded(folder: Path) -> None:
    """--no-load-optim: moments in the file that nobody asks for are no surplus."""
    state = [part("model.a", (2, 3)), part("model.b", (4,))]
    load_checkpoint(folder, state, SINGLE)
    assert [state.tensor.flatten()[0].item() for state in state] == [1.0, 2.0]


def test_checksums_are_compared_once(folder: Path) -> None:
    """Those of the whole files when the checkpoint is chosen, or those of its boxes while it is read."""
    verified, unverified = (find_checkpoint(folder.parent, verify=verify) for verify in (True, False))
    (data,) = folder.glob("*.distcp")
    content = data.read_bytes()
    number = torch.full((2, 3), 1.0).numpy().tobytes()
    data.write_bytes(content.replace(number, number[:-1] + bytes([number[-1] ^ 1])))
    with expect_error(CheckpointError):
        load_checkpoint(unverified, [part("model.a", (2, 3)), part("model.b", (4,))], SINGLE)
    load_checkpoint(verified, [part("model.a", (2, 3)), part("model.b", (4,))], SINGLE)


def test_everything_that_does_not_fit_is_listed_before_anything_changes(folder: Path) -> None:
    """One message for the whole difference: names, and both shapes."""
    message = refusal(folder, [part("model.a", (3, 2)), part("model.c", (1,)), part("optimizer.exp_avg.c", (1,))])
    check_line(message, "model.a", "[2", "3]", "[3", "2]")
    check_line(message, "model.c", "optimizer.exp_avg.c")
    check_line(message, "model.b")
    assert "--use-checkpoint-args" in message


def test_weights_that_no_model_asks_for_are_not_dropped(folder: Path) -> None:
    """A model of fewer layers than were saved would be loaded without the last ones."""
    check_sentence(refusal(folder, [part("model.a", (2, 3))]), "model.b")


def test_a_file_without_optimizer_state_points_at_the_flag(folder: Path) -> None:
    """Saved with --no-save-optim: the way out is named."""
    state = [part("model.a", (2, 3)), part("model.b", (4,)), part("optimizer.exp_avg.b", (4,))]
    message = refusal(folder, state)
    check_line(message, "optimizer.exp_avg.b", "--no-load-optim")


def test_long_lists_are_cut(folder: Path) -> None:
    """A wrong architecture differs in thousands of names; a few say it all."""
    message = refusal(folder, [part(f"model.x{index}", (1,)) for index in range(50)])
    check_line(message, "more", "42")
    assert len(message) < 600


def test_integers_are_not_read_as_floats(folder: Path) -> None:
    """A conversion between number formats is welcome, one between kinds of numbers is a mix-up."""
    state = [part("model.a", (2, 3), dtype=torch.int64), part("model.b", (4,))]
    check_line(refusal(folder, state), "model.a", "torch.float32", "torch.int64")


def test_alternatives_bridge_precisions(folder: Path) -> None:
    """A bf16 run's masters come from fp32 weights if need be, and an fp32 run's weights from masters."""
    state = [part("model.a", (2, 3)), part("model.b", (4,)), part("optimizer.fp32_param.a", (2, 3))]
    alternatives = {
        "model.b": ("optimizer.fp32_param.b", "model.b"),
        "optimizer.fp32_param.a": ("optimizer.fp32_param.a", "model.a"),
    }
    load_checkpoint(folder, state, SINGLE, alternatives=alternatives)
    assert [state.tensor.flatten()[0].item() for state in state] == [1.0, 4.0, 1.0]


def test_ranks_are_refused_together(folder: Path) -> None:
    """The stage whose names fit learns of the one whose names don't; and surplus is judged over all stages."""

    def load(mesh: Mesh) -> str:
        state = [part("model.a" if mesh.rank("pp") == 0 else "model.wrong", (2, 3))]
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(folder, state, mesh)
        assert not state[0].tensor.any()
        return str(caught.value)

    messages = on_ranks([Mesh.of(pp=2, rank=rank) for rank in range(2)], load)
    assert messages[0] == messages[1]
    check_line(messages[0], "model.wrong", "model.b")


def test_ranks_can_hold_different_names(folder: Path) -> None:
    """Pipeline stages ask for their own layers; together they exhaust the file."""

    def load(mesh: Mesh) -> float:
        state = part("model.a", (2, 3)) if mesh.rank("pp") == 0 else part("model.b", (4,))
        load_checkpoint(folder, [state], mesh)
        return state.tensor.flatten()[0].item()

    assert on_ranks([Mesh.of(pp=2, rank=rank) for rank in range(2)], load) == [1.0, 2.0]


def test_a_damaged_run_file_is_a_sentence(folder: Path) -> None:
    """Not a traceback of the JSON parser, nor of whoever uses what it gave."""
    for change, fact in {
        '"iteration": "abc"': '"abc"',
        '"state": []': "state",
        '"state": {"config": "x"}': '"x"',
        '"format": 99': "99",
        '"format": null': "format",
        '"layout": {"tp": 1.5}': "layout.tp",
    }.items():
        whole = {"format": 1, "iteration": 10, "layout": {}, "versions": {}, "state": {}} | json.loads(f"{{{change}}}")
        (folder / "run.json").write_text(json.dumps(whole))
        with expect_error(CheckpointError, "run.json", fact):
            read_run_document(folder)
    (folder / "run.json").write_text("{")
    with expect_error(CheckpointError, "run.json:1"):
        read_run_document(folder)
    (folder / "run.json").write_text('{"format": 99, "iteration": 1, "layout": {}, "versions": {}, "state": {}}')
    with expect_error(CheckpointError, "99", "1"):
        read_run_document(folder)
    (folder / "run.json").unlink()
    with expect_error(CheckpointError, "run.json"):
        read_run_document(folder)


class Attack:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    @override
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.target}",)


def wanted() -> list[ShardedState]:
    return [part("model.a", (2, 3)), part("model.b", (4,))]


def test_malicious_metadata_is_not_run(folder: Path, tmp_path: Path) -> None:
    """.metadata is a pickle; a downloaded checkpoint must not execute anything through it."""
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "pwned")))
    with expect_error(CheckpointError, "posix.system"):
        load_checkpoint(folder, wanted(), SINGLE)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("module_and_name", ["builtins eval", "torch load", "torch.distributed.checkpoint.api Any"])
def test_only_the_classes_of_metadata_are_known(module_and_name: str, folder: Path) -> None:
    """The list is closed: not even harmless strangers, nor everything of torch."""
    module, name = module_and_name.split()
    (folder / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())
    with expect_error(CheckpointError, f"{module}.{name}"):
        load_checkpoint(folder, wanted(), SINGLE)


def test_malicious_tensors_are_not_run(folder: Path, tmp_path: Path) -> None:
    """Tensor data is a zip with a pickle inside, which a downloaded checkpoint could run something by."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    payload = io.BytesIO()
    torch.save(torch.zeros(2, 3), payload)
    evil = io.BytesIO()
    with zipfile.ZipFile(payload) as source, zipfile.ZipFile(evil, "w") as copy:
        for entry in source.namelist():
            attack = pickle.dumps(Attack(tmp_path / "pwned"), protocol=2)
            copy.writestr(entry, attack if entry.endswith("data.pkl") else source.read(entry))
    (folder / "__0_0.distcp").write_bytes(evil.getvalue())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(evil.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with expect_error(CheckpointError, "__0_0.distcp"):
        load_checkpoint(folder, wanted(), SINGLE)
    assert not (tmp_path / "pwned").exists()


def test_boxes_of_another_shape_are_refused(folder: Path) -> None:
    """A table of contents may list a box as larger than the file has it: a traceback about narrow() came of it."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == "model.a":
            metadata.storage_data[index] = metadata.storage_data[MetadataIndex("model.b", torch.Size([0]))]
            metadata.storage_data[index].length = place.length
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with expect_error(CheckpointError):
        load_checkpoint(folder, wanted(), SINGLE)


def test_pickled_objects_in_place_of_tensors_are_refused(folder: Path) -> None:
    """DCP would unpickle a byte entry without restraint; ours are tensors only."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.b"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with expect_error(CheckpointError):
        load_checkpoint(folder, wanted(), SINGLE)


def test_files_outside_the_folder_are_not_opened(folder: Path, tmp_path: Path) -> None:
    """A table of contents cannot point anywhere else on the disk."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{place.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").rename(tmp_path / "__0_0.distcp")
    with expect_error(CheckpointError):
        load_checkpoint(folder, wanted(), SINGLE)
