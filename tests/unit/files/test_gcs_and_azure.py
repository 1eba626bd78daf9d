"""Google's and Azure's storage through the real client libraries: paths, a checkpoint, and what a user gets wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
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
from tests.harness.azure import azure_server
from tests.harness.gcs import gcs_server
from tests.harness.place import check_methods
from tests.harness.sentences import expect_error

SINGLE = Mesh.single()


@pytest.fixture(params=["gs", "az"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotePath]:
    """A place in a bucket of a server."""
    scheme: str = request.param
    running = gcs_server(bucket="bucket") if scheme == "gs" else azure_server(tmp_path, bucket="bucket")
    with running as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        files = fsspec.get_filesystem_class(scheme)
        files.clear_instance_cache()
        path = path_of(f"{scheme}://bucket/run")
        assert isinstance(path, RemotePath)
        yield path
        files.clear_instance_cache()


def test_the_methods_of_a_path(place: RemotePath) -> None:
    """What checkpoints and data ask of a place."""
    check_methods(place)


def test_checkpoints_are_saved_pruned_and_loaded(place: RemotePath) -> None:
    """The last one counts, and others are deleted as asked."""
    for iteration in (10, 20, 30):
        state = [ShardedState("model.w", torch.full((8,), float(iteration)), Sharding((8,)))]
        save_checkpoint(place, iteration, state, {}, SINGLE)
        prune(place, iteration, Retention(keep_last=2), SINGLE)
    assert len([path for path in place.iterdir() if path.is_dir()]) == 2
    found, state = find_checkpoint(place), [ShardedState("model.w", torch.zeros(8), Sharding((8,)))]
    load_checkpoint(found, state, SINGLE)
    assert (found.iteration, state[0].tensor.tolist()) == (30, [30.0] * 8)


def test_a_missing_bucket_is_said(place: RemotePath) -> None:
    """It comes as an HTTP error whose text is the service's whole answer."""
    nowhere = str(place).replace("bucket", "buckte")
    with expect_error(OSError):
        path_of(f"{nowhere}/a").write_text("x", encoding="utf-8")
    with expect_error(CheckpointError, nowhere):
        find_checkpoint(path_of(nowhere))
