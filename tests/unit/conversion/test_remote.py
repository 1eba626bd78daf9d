"""Models in object storage convert like those on a disk, and what fails on the way leaves nothing there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.native import read_native
from megatron.core.files.remote_path import RemotePath
from megatron.errors import CheckpointError
from tests.harness import bucket
from tests.harness.sentences import expect_error
from tests.unit.conversion.test_families import assert_same_bytes

pytest.importorskip("transformers", reason="conversion is proven with the dev extra's transformers")
Folder = Callable[[str], Path]


def at(folder: Path) -> RemotePath:
    """The place of the test's store that keeps its objects in ``folder``."""
    return RemotePath(bucket.url(folder))


def test_there_and_back(model_folder: Folder, tmp_path: Path) -> None:
    """From a model in storage, over checkpoints in storage of both Megatrons, to the same bytes."""
    names = ("hf", "ours", "theirs", "again", "back")
    published, ours, theirs, again, back = (at(tmp_path / "store" / name) for name in names)
    shutil.copytree(model_folder("gpt2"), tmp_path / "store/hf")
    said: list[str] = []
    convert(Conversion("hf", published, "megatron", ours), said.append)
    assert said[0].startswith(f"{published}: ") and said[1].startswith("proof: largest difference")
    convert(Conversion("megatron", ours, "megatron-lm", theirs), said.append)
    convert(Conversion("megatron-lm", theirs, "megatron", again), said.append)
    convert(Conversion("megatron", again, "hf", back, max_shard_size=40_000), said.append)
    assert_same_bytes(model_folder("gpt2"), tmp_path / "store/back")
    assert read_native(again).tokenizer.tokenizer_type == read_native(ours).tokenizer.tokenizer_type


def test_what_fails_leaves_nothing(model_folder: Folder, tmp_path: Path) -> None:
    """Half a model in storage would be taken for one by whoever finds it."""
    seen: list[str] = []

    def full(name: str, path: str) -> None:
        seen.append(f"{name} {Path(path).name}")
        if name == "put" and path.endswith("manifest.json"):
            raise bucket.ServiceError("the bucket is full")

    job = Conversion("hf", model_folder("gpt2"), "megatron", at(tmp_path / "store/ours"), skip_proof=True)
    with bucket.failing(full), expect_error(CheckpointError, exit_code=1):
        convert(job, lambda words: None)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    puts = [each for each in seen if each.startswith("put")]
    assert puts[-1] == "put manifest.json" and len(puts) > 3
    convert(job, lambda words: None)
    with expect_error(CheckpointError):
        convert(job, lambda words: None)


def test_what_cannot_be_taken_back_is_said(model_folder: Folder, tmp_path: Path) -> None:
    """A service that is gone takes no deletions, either; "nothing was left" would be untrue."""

    def gone(name: str, path: str) -> None:
        if name == "delete" or (name == "put" and path.endswith("manifest.json")):
            raise bucket.ServiceError("the service is gone")

    job = Conversion("hf", model_folder("gpt2"), "megatron", at(tmp_path / "store/ours"), skip_proof=True)
    with bucket.failing(gone), expect_error(CheckpointError, tmp_path.name) as caught:
        convert(job, lambda words: None)
    assert "nothing was left" not in str(caught.value)
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
