"""Google Cloud Storage through the real client library: the paths, a checkpoint, and what a user gets wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import load_checkpoint
from megatron.core.checkpointing.retention import Retention, prune
from megatron.core.checkpointing.save import save_checkpoint
from megatron.core.files.remote_path import RemotePath, path_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import CheckpointError
from tests.harness.gcs import gcs_server
from tests.harness.place import check_methods

SINGLE = Mesh.single()


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with gcs_server(bucket="bucket") as variables:
        import gcsfs

        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield
        gcsfs.GCSFileSystem.clear_instance_cache()


def place(name: str) -> RemotePath:
    path = path_of(f"gs://bucket/{name}")
    assert isinstance(path, RemotePath)
    return path


def test_the_methods_of_a_path() -> None:
    """What checkpoints and data ask of a place."""
    check_methods(place("run"))


def test_checkpoints_are_saved_pruned_and_loaded() -> None:
    """The last one counts, and others are deleted as asked."""
    root = place("run")
    for iteration in (10, 20, 30):
        state = [ShardedState("model.w", torch.full((8,), float(iteration)), Sharding((8,)))]
        save_checkpoint(root, iteration, state, {}, SINGLE)
        prune(root, iteration, Retention(keep_last=2), SINGLE)
    assert len([path for path in root.iterdir() if path.is_dir()]) == 2
    found, state = find_checkpoint(root), [ShardedState("model.w", torch.zeros(8), Sharding((8,)))]
    load_checkpoint(found, state, SINGLE)
    assert (found.iteration, state[0].tensor.tolist()) == (30, [30.0] * 8)


def test_a_missing_bucket_is_said() -> None:
    """It comes as an HTTP error whose text is the service's whole answer."""
    with pytest.raises(OSError, match="the bucket does not exist; make it first"):
        path_of("gs://buckte/run/a").write_text("x", encoding="utf-8")
    with pytest.raises(CheckpointError, match="gs://buckte/run: there is no such folder"):
        find_checkpoint(path_of("gs://buckte/run"))
