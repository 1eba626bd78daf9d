"""Every value of a checkpoint's run.json replaced by another: each ends in one sentence, or is no matter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.core.checkpointing.find import CheckpointFolder
from megatron.core.checkpointing.load import read_run_state
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import CheckpointError, MegatronError
from megatron.training.checkpoints import compatibility, loading
from megatron.training.checkpoints.saving import Saver
from megatron.training.run.run import Run
from tests.harness.runs import TINY_RUN, tiny_run
from tools.checkpoint import inspect_checkpoint

GONE = object()
OTHERS: tuple[Any, ...] = ({}, [], None, 10**30, -1.5, "x", GONE)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Of every value inside a JSON value; of settings, which have tests of their own, and of sizes, the group alone."""
    if path:
        yield path
    if path[:2] == ("state", "config") or path[:1] in (("layout",), ("versions",)):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from paths(each, (*path, key))


def replaced(value: Any, path: tuple[str | int, ...], by: Any) -> Any:
    """A JSON value with what is at ``path`` replaced, or left out."""
    changed = value.copy()
    if len(path) > 1:
        changed[path[0]] = replaced(value[path[0]], path[1:], by)
    elif by is GONE:
        del changed[path[0]]
    else:
        changed[path[0]] = by
    return changed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run in fp16, whose loss scale has a state, of a model that has learned to chat, and its checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    flags = f"--mock-data --fp16 --save {folder} --save-interval 1 --load {folder} --use-checkpoint-opt_param-scheduler"
    run = tiny_run(ParallelContext.single(), flags)
    run.progress.iteration, run.chat_before = 1, ChatSettings(template="{{ messages }}", end_tokens=(2, 5))
    Saver(run).save()
    return run, folder / "iter_0000001"


def test_no_value_ends_in_a_traceback(saved: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """``"state": {}``, an optimizer without its step and a progress of null ended starts and tools in KeyErrors."""
    run, folder = saved
    whole = json.loads((folder / "run.json").read_text())
    found = CheckpointFolder(folder, 1, is_verified=True)
    seen, schedule = set[str](), run.schedule

    def can_load() -> None:
        compatibility.check_loadable(folder, f"{TINY_RUN} --mock-data --fp16 --train-iters 3".split())

    with (
        mock.patch.object(loading, "find_checkpoint", return_value=found),
        mock.patch.object(compatibility, "find_checkpoint", return_value=found),
        mock.patch.object(inspect_checkpoint, "_find", return_value=found),
        mock.patch.object(loading, "load_checkpoint"),
    ):
        for path in paths(whole):
            for other in OTHERS:
                (folder / "run.json").write_text(json.dumps(replaced(whole, path, other)))
                for use in (lambda: loading.load(run), lambda: inspect_checkpoint.main([str(folder)]), can_load):
                    run.schedule = schedule
                    try:
                        use()
                    except MegatronError as error:
                        seen.add(str(error))
                    except Exception as error:
                        pytest.fail(f"{path} as {other!r}: {type(error).__name__}: {error}")
    (folder / "run.json").write_text(json.dumps(whole))
    assert len(seen) > 30
    capsys.readouterr()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("state",), "state lacks recipe, so it is damaged"),
        (("state", "progress"), "state: progress lacks iteration, so it is damaged"),
        (("state", "optimizer"), "state: optimizer lacks step, so it is damaged"),
        (("layout",), None),
    ],
)
def test_an_empty_object(path: tuple[str, ...], words: str | None, saved: tuple[Run, Path], tmp_path: Path) -> None:
    """What is missing is named, with the file."""
    shutil.copytree(saved[1], tmp_path / "iter_0000001")
    file = tmp_path / "iter_0000001" / "run.json"
    file.write_text(json.dumps(replaced(json.loads(file.read_text()), path, {})))
    if words is None:
        read_run_state(file.parent)
        return
    with pytest.raises(CheckpointError, match=f"{file}: {words}"):
        read_run_state(file.parent)
