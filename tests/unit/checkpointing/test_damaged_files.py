"""A checkpoint's small files, damaged value by value: each use ends in one sentence, or is harmless."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron.core.checkpointing import lease
from megatron.core.checkpointing.find import find_checkpoint, is_unused, whole_checkpoints
from megatron.core.checkpointing.folders import TRACKER
from megatron.core.conversion.megatron_lm.files import find_folder
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError
from megatron.training.checkpoints.saving import Saver
from tests.harness.damaged import OTHERS, paths, replaced
from tests.harness.runs import tiny_run
from tests.harness.sentences import check_sentence, expect_error
from tools.checkpoint import inspect_checkpoint


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of a run's first iteration."""
    folder = tmp_path_factory.mktemp("saved")
    run = tiny_run(ParallelContext.single(), f"--mock-data --save {folder} --save-interval 1")
    run.progress.iteration = 1
    Saver(run).save()
    return folder


def uses(root: Path) -> tuple[Callable[[], object], ...]:
    """What looks at a folder of checkpoints."""
    return (
        lambda: find_checkpoint(root),
        lambda: inspect_checkpoint.main([str(root)]),
        lambda: inspect_checkpoint.verify(root, step=None),
        lambda: (is_unused(root), whole_checkpoints(root)),
    )


def test_manifest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A time of saving in the year 10^292 ended the inspection, though the manifest's checksum was right."""
    file = root / "iter_0000001" / "manifest.json"
    text = file.read_text()
    body = {name: value for name, value in json.loads(text).items() if name != "crc32"}
    for path, other in itertools.product(paths(body), (*OTHERS, 1e300, 10**90)):
        damaged = replaced(body, path, other)
        for crc in (zlib.crc32(json.dumps(damaged).encode()), other):
            with suppress(TypeError):  # what is left out is no JSON
                file.write_text(json.dumps({**damaged, "crc32": crc}))
            for use in uses(root):
                with suppress(CheckpointError):
                    use()
    late = {**body, "saved_at": 1e300}
    file.write_text(json.dumps({**late, "crc32": zlib.crc32(json.dumps(late).encode())}))
    with expect_error(CheckpointError, "manifest.json", "saved_at", "1e+300", "0"):
        inspect_checkpoint.main([str(root)])
    file.write_text(text)
    capsys.readouterr()


@pytest.mark.parametrize(
    "content",
    [b"", b"9" * 5000, b"9" * 70000, b"\xff\xfe\x00", b"-1", b"1\x002", b"../x", "²".encode(), b"1.0", b"iter"],
)
def test_tracker(content: bytes, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours is passed over for the newest checkpoint that is whole; Megatron-LM's is refused."""
    (root / TRACKER).write_bytes(content)
    for use in uses(root):
        use()
    assert find_checkpoint(root).iteration == 1
    (tmp_path / TRACKER).write_bytes(content)
    with expect_error(CheckpointError, TRACKER, tmp_path) as caught:
        find_folder(tmp_path)
    assert len(str(caught.value)) < 400
    (root / TRACKER).write_text("1")
    capsys.readouterr()


def test_in_use(tmp_path: Path) -> None:
    """A damaged ``.in_use.json`` never keeps a run from its folder, and what it says of another run can be printed."""
    holder: dict[str, Any] = {"host": "a", "pid": 3, "since": "x", "job": "", "token": "t", "beat": 1.0}
    for path, other in itertools.product(paths(holder), (*OTHERS, True, 2**31, 10**90)):
        for machine in ("b", lease._machine()):
            text = json.dumps(replaced({**holder, "machine": machine}, path, other))
            (tmp_path / lease.IN_USE).write_text(text)
            found = lease._read(tmp_path / lease.IN_USE)
            assert found is not None
            check_sentence(str(lease._in_use(tmp_path, found)))
            lease._is_dead_here(found)
            with lease.held(tmp_path, grace=0):
                pass
