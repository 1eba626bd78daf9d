"""The commands at URLs: a run that saves, goes on, is looked at and converted, without a file on a disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.registry import _registry

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.files.remote_path import path_of
from megatron.core.models.registry import FAMILIES
from megatron.errors import ConfigError
from megatron.training.pretrain import pretrain
from tests.end_to_end.commands import TINY, assert_same_tensors, losses
from tests.harness.bucket import empty_memory
from tests.harness.s3 import credentials, s3_server
from tests.harness.sentences import expect_error

convert, inspect = (import_module(f"tools.checkpoint.{name}") for name in ("convert", "inspect_checkpoint"))
ROOT = "memory://bucket/run"


@pytest.fixture(autouse=True)
def _empty_afterwards() -> Iterator[None]:
    yield
    empty_memory()


def train(capsys: pytest.CaptureFixture[str], flags: str) -> str:
    """What the command printed."""
    assert pretrain(FAMILIES["gpt"], f"{TINY} --train-iters 4 {flags}".split(), prog="pretrain_gpt.py") == 0
    return capsys.readouterr().out


def test_a_run_saves_and_goes_on_at_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a folder: resumed bitwise, the last one kept, progress noted, read by the tools."""
    flags = f"--save {ROOT} --load {ROOT} --save-interval 1 --keep-last-checkpoints 1 --log-progress"
    whole = train(capsys, f"--save {tmp_path / 'whole'} --save-interval 4")
    first = train(capsys, f"{flags} --exit-interval 2")
    second = train(capsys, f"{flags} --async-save")
    assert losses(first) | losses(second) == losses(whole)
    folders = [path.name for path in path_of(ROOT).iterdir() if path.name.startswith("iter_")]
    assert len(folders) == 1
    assert folders[0].startswith("iter_0000004-")
    assert_same_tensors(find_checkpoint(tmp_path / "whole").path, find_checkpoint(ROOT).path)
    assert (path_of(ROOT) / "progress.txt").read_text(encoding="utf-8").count("saved checkpoint") == 4

    assert inspect.main([ROOT, "--verify"]) == 0
    assert capsys.readouterr().out == f"{ROOT}/{folders[0]}: whole\n"
    assert inspect.main(["--diff", ROOT, f"{ROOT}/{folders[0]}"]) == 0
    words = f"--from megatron --load {ROOT} --to megatron-lm --save {tmp_path / 'theirs'}"
    assert convert.main(words.split()) == 0
    assert (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize("flag", ["--save", "--load"])
def test_a_missing_library_is_named(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is trained."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # it may have been imported before
    with expect_error(ConfigError):
        train(capsys, f"{flag} s3://bucket/run --save-interval 5" if flag == "--save" else f"{flag} s3://bucket/run")
    assert "iteration" not in capsys.readouterr().out


def test_the_command_with_data_and_checkpoints_at_s3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data at s3:// ended with "The requested range is not satisfiable"; a storage in memory had hidden it."""
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        for number in range(200):
            writer.add_document([(number + step) % 300 for step in range(40)])
    with s3_server() as server:
        for name, value in credentials(server).items():
            monkeypatch.setenv(name, value)
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        files.mkdir("training")
        files.put([f"{tmp_path}/data.bin", f"{tmp_path}/data.idx"], "training/")
        fsspec.filesystem("s3").clear_instance_cache()
        flags = (
            f"{TINY.replace('--mock-data', '')} --train-iters 4 --split 100,0,0 --tokenizer-type NullTokenizer".split()
        )
        cache = ["--data-cache-path", str(tmp_path / "cache")]
        at_s3 = [
            "--save",
            "s3://training/run",
            "--load",
            "s3://training/run",
            "--save-interval",
            "1",
            "--keep-last-checkpoints",
            "1",
            "--async-save",
        ]
        logs = []
        for more in [
            ["--data-path", f"{tmp_path}/data"],
            ["--data-path", "s3://training/data", *at_s3, "--exit-interval", "2"],
            ["--data-path", "s3://training/data", *at_s3],
        ]:
            assert pretrain(FAMILIES["gpt"], [*flags, *cache, *more], prog="pretrain_gpt.py") == 0
            logs.append(losses(capsys.readouterr().out))
        assert logs[1] | logs[2] == logs[0]
        assert len(files.ls("training/run", refresh=True)) == 2, "one checkpoint and the tracker; the lease is given up"
        fsspec.filesystem("s3").clear_instance_cache()
