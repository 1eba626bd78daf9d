"""Tensors can be written and read one at a time: memory holds the one at hand, never the model."""

from __future__ import annotations

import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import load_checkpoint, read_run_document
from megatron.core.checkpointing.save import save_checkpoint, save_streamed
from megatron.core.checkpointing.storage import CheckpointWriter
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.checkpointing.streamed import StreamedBox, write_boxes
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error

VALUES = {
    "model.wide": torch.randn(5, 7),
    "model.narrow": torch.randn(4, 3, 2).bfloat16(),
    "model.scalar": torch.tensor(3.0),
}


def whole(name: str, value: Tensor) -> StreamedBox:
    return StreamedBox.whole(name, tuple(value.shape), value.dtype, lambda: value)


def test_streamed_checkpoints_are_checkpoints(tmp_path: Path) -> None:
    """Checked, named by the tracker, and loaded by training like any other."""
    save_streamed(tmp_path, 3, [whole(*item) for item in VALUES.items()], {"from": "elsewhere"})
    folder = find_checkpoint(tmp_path)
    assert (folder.iteration, read_run_document(folder)["state"]) == (3, {"from": "elsewhere"})
    state = [
        ShardedState(name, torch.full_like(value, -1), Sharding(tuple(value.shape))) for name, value in VALUES.items()
    ]
    load_checkpoint(folder, state, Mesh.single())
    assert all(torch.equal(part.tensor, VALUES[part.name]) for part in state)


def test_only_the_tensor_being_written_is_in_memory(tmp_path: Path) -> None:
    """torch's own writer keeps all tensors of a file; a 140 GB model would then need 140 GB."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def make() -> Tensor:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        tensor = torch.zeros(1000)
        alive.append(weakref.ref(tensor))
        return tensor

    boxes = [StreamedBox.whole(f"model.{number}", (1000,), torch.float32, make) for number in range(20)]
    save_streamed(tmp_path, 0, boxes, {})
    assert len(alive) == 20
    assert most <= 1


def test_files_have_a_size_limit(tmp_path: Path) -> None:
    """So that ranks share the reading and checking of a large converted model."""
    writer = CheckpointWriter(tmp_path)
    write_boxes(writer, tmp_path, [whole(f"t{n}", torch.zeros(500)) for n in range(6)], file_size=5000)
    assert sorted(writer.files.written) == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]


def test_views_are_written_alone(tmp_path: Path) -> None:
    """A row of a large matrix takes the space of a row."""
    row = torch.zeros(1000, 1000)[3]
    save_streamed(tmp_path, 0, [whole("model.row", row)], {})
    assert (tmp_path / "iter_0000000/__0_0.distcp").stat().st_size < 10_000


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """A source that turns out to be damaged half-way must not leave half a checkpoint."""

    def fail() -> Tensor:
        raise CheckpointError("the source is damaged")

    boxes = [whole("model.a", torch.ones(3)), StreamedBox.whole("model.b", (1,), torch.float32, fail)]
    with expect_error(CheckpointError):
        save_streamed(tmp_path, 0, boxes, {})
    assert not list(tmp_path.iterdir())


@pytest.fixture
def stored(tmp_path: Path) -> StoredTensors:
    state = [ShardedState(name, value, Sharding(tuple(value.shape))) for name, value in VALUES.items()]
    return StoredTensors(save_checkpoint(tmp_path, 1, state, {}, Mesh.single()))


def test_tensors_are_read_by_name(stored: StoredTensors) -> None:
    assert {name: (entry.shape, entry.dtype) for name, entry in stored.entries.items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in VALUES.items()
    }
    assert all(torch.equal(stored.read(name), value) for name, value in VALUES.items())


def test_one_layer_of_a_stack_is_read_alone(tmp_path: Path) -> None:
    """Megatron-LM stacks all layers in one tensor, here cut in boxes that no layer boundary follows."""
    value = torch.arange(4 * 3 * 5.0).view(4, 3, 5)

    def box(i: int, j: int, height: int) -> StreamedBox:
        def make() -> Tensor:
            return value[i : i + 2, j : j + height]

        return StreamedBox("model.stack", (4, 3, 5), torch.float32, (i, j, 0), (2, height, 5), make)

    boxes = [box(i, j, height) for i in (0, 2) for j, height in ((0, 1), (1, 2))]
    stored = StoredTensors(save_streamed(tmp_path, 0, boxes, {}))
    assert torch.equal(stored.read("model.stack"), value)
    assert all(torch.equal(stored.read("model.stack", at=layer), value[layer]) for layer in range(4))


def test_a_missing_box_is_noticed(tmp_path: Path) -> None:
    """A table of contents that lacks a box would otherwise give uninitialised numbers."""
    save_streamed(tmp_path, 0, [whole("model.w", torch.ones(4, 2))], {})
    folder = tmp_path / "iter_0000000"
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.w"].chunks.clear()  # type: ignore[union-attr]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with expect_error(CheckpointError, "model.w", "[4", "2]", "0"):
        StoredTensors(folder).read("model.w")
