"""Every value of a checkpoint's run.json replaced by another: each ends in one sentence, or is no matter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.core.checkpointing.find import CheckpointFolder
from megatron.core.checkpointing.load import read_run_state
from megatron.core.models.registry import saved_run
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import CheckpointError, ConfigError, MegatronError
from megatron.training.checkpoints import compatibility, loading
from megatron.training.checkpoints.saving import Saver
from megatron.training.run.run import Run
from tests.harness.damaged import OTHERS, paths, replaced
from tests.harness.runs import TINY_RUN, tiny_run
from tests.harness.sentences import expect_error
from tools.checkpoint import inspect_checkpoint


def main_paths(whole: Any) -> list[tuple[str | int, ...]]:
    """Places of all values but settings, which have a test of their own, and sizes, whose group is replaced."""
    groups = (("state", "config"), ("layout",), ("versions",))
    return [path for path in paths(whole) if not any(path[: len(each)] == each != path for each in groups)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run in fp16, whose loss scale has a state, of a model that has learned to chat, and its checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    flags = f"--mock-data --fp16 --save {folder} --save-interval 1 --load {folder} --use-checkpoint-opt_param-scheduler"
    run = tiny_run(ParallelContext.single(), flags)
    run.progress.iteration, run.chat_before = 1, ChatSettings(template="{{ messages }}", end_tokens=(2, 5))
    Saver(run).save()
    return run, folder / "iter_0000001"


@pytest.mark.parametrize("each", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_no_value_ends_in_a_traceback(each: int, saved: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """``"state": {}``, an optimizer without its step and a progress of null ended starts and tools in KeyErrors.

    Of all damages and uses one in ``each`` is tried.
    """
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
        uses = (lambda: loading.load(run), lambda: inspect_checkpoint.main([str(folder)]), can_load)
        tried = [(path, other, use) for path in main_paths(whole) for other in OTHERS for use in uses]
        for path, other, use in tried[::each]:
            (folder / "run.json").write_text(json.dumps(replaced(whole, path, other)))
            run.schedule = schedule
            try:
                use()
            except MegatronError as error:
                seen.add(str(error))
            except Exception as error:
                pytest.fail(f"{path} as {other!r}: {type(error).__name__}: {error}")
    (folder / "run.json").write_text(json.dumps(whole))
    assert len(seen) > 120 // each
    capsys.readouterr()


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        (("state",), "model"),
        (("state", "progress"), "iteration"),
        (("state", "optimizer"), "step"),
        (("layout",), None),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_an_empty_object(path: tuple[str, ...], missing: str | None, saved: tuple[Run, Path], tmp_path: Path) -> None:
    """What is missing is named, with the file."""
    shutil.copytree(saved[1], tmp_path / "iter_0000001")
    file = tmp_path / "iter_0000001" / "run.json"
    file.write_text(json.dumps(replaced(json.loads(file.read_text()), path, {})))
    if missing is None:
        read_run_state(file.parent)
        return
    with expect_error(CheckpointError, file, *path, missing):
        read_run_state(file.parent)


@pytest.mark.parametrize("each", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_settings(each: int, saved: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Lists in place of sizes, nulls, and groups of another type ended in TypeErrors, or in words about flags alone.

    Of the damages one in ``each`` is tried, at every use and with every value in turn.
    """
    run, folder = saved
    whole = json.loads((folder / "run.json").read_text())
    found, schedule, seen = CheckpointFolder(folder, 1, is_verified=True), run.schedule, set[str]()
    given = ["--use-checkpoint-args", "--use-checkpoint-opt_param-scheduler", "--mock-data", "--fp16"]
    given += ["--train-iters", "3", "--micro-batch-size", "1", "--lr", "0.1"]
    uses: tuple[Callable[[], object], ...] = (
        lambda: loading.load(run),
        lambda: inspect_checkpoint.main([str(folder)]),
        lambda: saved_run(read_run_state(folder)["config"], name="gpt", where=str(folder)),
        lambda: compatibility.check_loadable(folder, given),
    )
    with (
        mock.patch.object(loading, "find_checkpoint", return_value=found),
        mock.patch.object(compatibility, "find_checkpoint", return_value=found),
        mock.patch.object(inspect_checkpoint, "_find", return_value=found),
        mock.patch.object(loading, "load_checkpoint"),
    ):
        settings = (path for path in paths(whole["state"]["config"]) if len(path) <= 2)
        damages = [(path, other) for path in settings for other in OTHERS]
        for number, (path, other) in enumerate(damages[::each]):
            (folder / "run.json").write_text(json.dumps(replaced(whole, ("state", "config", *path), other)))
            run.schedule = schedule
            try:
                uses[number % len(uses)]()
            except MegatronError as error:
                seen.add(f"{error.exit_code}: {error}")
            except Exception as error:
                pytest.fail(f"{path} as {other!r}: {type(error).__name__}: {error}")
    (folder / "run.json").write_text(json.dumps(whole))
    assert len(seen) > 300 // each and all(sentence.startswith("2: ") for sentence in seen)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("path", "by", "facts"),
    [
        (("model", "num_layers"), [], ["--num-layers"]),
        (("moe", "moe_layer_freq"), None, ["null"]),
        (("model", "hidden_size"), "x", ["--hidden-size", "'x'"]),
    ],
)
def test_one_wrong_setting(path: tuple[str, str], by: Any, facts: list[str], saved: tuple[Run, Path]) -> None:
    """The file and the key are named: nobody gave the flag."""
    config = replaced(read_run_state(saved[1])["config"], path, by)
    with expect_error(ConfigError, saved[1], ".".join(path), *facts):
        saved_run(config, name="gpt", where=str(saved[1]))
