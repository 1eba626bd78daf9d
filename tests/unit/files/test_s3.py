"""Object storage through the real client library: a server that speaks S3's protocol, and its faults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint, is_unused
from megatron.core.checkpointing.load import load_checkpoint
from megatron.core.checkpointing.retention import Retention, prune
from megatron.core.checkpointing.save import begin_save, save_checkpoint
from megatron.core.checkpointing.sharded_view import Staging
from megatron.core.datasets import remote
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.files.remote_path import RemotePath, path_of
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.training.pretrain import pretrain
from tests.harness.place import check_methods
from tests.harness.s3 import S3Server, credentials, s3_server
from tests.harness.sentences import expect_error

SINGLE = Mesh.single()
DOCUMENTS = [[number % 50] * (7 + number % 5) for number in range(400)]


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server with a bucket ``bucket``, and a client that tries twice."""
    import s3fs

    for name, value in {**credentials(running), "AWS_MAX_ATTEMPTS": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    if not files.exists("bucket"):
        files.mkdir("bucket")
    yield running
    files.rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def state(value: float) -> list[ShardedState]:
    return [ShardedState("model.w", torch.full((8,), value), Sharding((8,)))]


def loaded(root: RemotePath) -> tuple[int, float]:
    states, found = state(float("nan")), find_checkpoint(root)
    load_checkpoint(found, states, SINGLE)
    return found.iteration, states[0].tensor[0].item()


def place(name: str) -> RemotePath:
    path = path_of(f"s3://bucket/{name}")
    assert isinstance(path, RemotePath)
    return path


def test_the_methods_of_a_path(server: S3Server) -> None:
    """Ranges were passed by position, where this library has a version: all of a file but its first bytes was read."""
    check_methods(place("run"))


def test_data_are_read_as_from_a_disk(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every document, in blocks, through throttling and a connection that is cut once; and what else can happen."""
    monkeypatch.setattr(remote, "BLOCK", 512)
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    for ending in (".bin", ".idx"):
        with place(f"data{ending}").open("wb") as sink:
            sink.write((tmp_path / f"data{ending}").read_bytes())
    data = IndexedDataset("s3://bucket/data", cache=tmp_path / "cache")
    faults = iter(["throttled", "cut"])
    with server.failing(lambda method, path: next(faults, None)):
        assert [each.tolist() for each in data[:]] == DOCUMENTS
    assert list(faults) == []
    sizes = [path.stat().st_size for path in tmp_path.glob("cache/data-*.bin")]
    assert sizes == [(tmp_path / "data.bin").stat().st_size]
    with expect_error(DataError, "s3://bucket/nothing.idx"):
        IndexedDataset("s3://bucket/nothing", cache=tmp_path)
    fresh = IndexedDataset("s3://bucket/data", cache=tmp_path / "other")
    for kind in ("denied", "expired"):
        with server.failing(lambda method, path, kind=kind: kind), expect_error(DataError, "s3://bucket/data.bin"):  # type: ignore[misc]
            fresh[0]


def test_the_life_of_a_checkpoint(server: S3Server) -> None:
    """Saved, saved in the background, replaced, found, loaded and pruned."""
    root = place("run")
    assert is_unused(root)
    save_checkpoint(root, 10, state(1.0), {}, SINGLE)
    begin_save(root, 20, state(2.0), {}, SINGLE, background=Staging()).finish()
    save_checkpoint(root, 20, state(3.0), {}, SINGLE)
    assert loaded(root) == (20, 3.0)
    assert prune(root, 20, Retention(keep_last=1), SINGLE) == [10]
    assert loaded(root) == (20, 3.0)
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1


def test_a_save_survives_what_passes(server: S3Server) -> None:
    """A service that throttles or cuts a request once is asked again; what it does for good is one sentence."""
    root = place("run")
    save_checkpoint(root, 10, state(1.0), {}, SINGLE)
    seen: set[str] = set()

    def once(method: str, path: str) -> str | None:
        if f"{method} {path}" in seen:
            return None
        seen.add(f"{method} {path}")
        return "throttled"

    with server.failing(once):
        save_checkpoint(root, 20, state(2.0), {}, SINGLE)
    assert loaded(root) == (20, 2.0)
    for kind in ("throttled", "denied", "expired"):
        start = time.monotonic()

        def fault(method: str, path: str, kind: str = kind) -> str | None:
            return kind if method == "PUT" and path.endswith(".distcp") else None

        code = 1 if kind == "throttled" else 2
        with server.failing(fault), expect_error(CheckpointError, "iteration 30", "s3://bucket/run", exit_code=code):
            save_checkpoint(root, 30, state(3.0), {}, SINGLE)
        assert time.monotonic() - start < 60
        assert loaded(root) == (20, 2.0)
        assert len([path for path in root.iterdir() if path.is_dir()]) == 2


def test_what_the_user_got_wrong(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that doesn't exist was made without a word: the next run looked for its checkpoints in the other one."""
    import s3fs

    nowhere = path_of("s3://buckte/run")
    with expect_error(CheckpointError):
        save_checkpoint(nowhere, 10, state(1.0), {}, SINGLE)
    assert not s3fs.S3FileSystem().exists("buckte")
    words = (
        "--mock-data --vocab-size 60 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3"
    )
    flags = [*words.split(), "--micro-batch-size", "1", "--train-iters", "1", "--dry-run", "--save"]
    with expect_error(ConfigError, "--save s3://buckte/run"):
        pretrain(FAMILIES["gpt"], [*flags, str(nowhere)], prog="pretrain_gpt.py")
    assert pretrain(FAMILIES["gpt"], [*flags, str(place("run"))], prog="pretrain_gpt.py") == 0
    with expect_error(CheckpointError, "s3://buckte/run"):
        find_checkpoint(nowhere)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OSError, match="(?i)credentials"):
        place("a").write_text("x", encoding="utf-8")


def test_a_service_that_is_gone_or_slow_ends_the_wait(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of silence, or a traceback of the library."""
    import s3fs

    place("a").write_text("x", encoding="utf-8")
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    server.slow_seconds = 3.0
    with server.failing(lambda method, path: "slow"), pytest.raises(OSError, match="(?i)time"):
        place("a").read_bytes()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    s3fs.S3FileSystem.clear_instance_cache()
    with expect_error(OSError):
        place("a").read_bytes()
