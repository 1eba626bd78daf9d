"""The command line and the tasks behind it know the same names, and what is wrong is said before torch is loaded."""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.flags import flags_of
from megatron.errors import ConfigError
from tasks import main as tasks
from tasks.registry import TASKS
from tasks.result import check_predictions_dir, check_result_file
from tasks.settings import TaskConfig
from tests.end_to_end.commands import ROOT, environment
from tests.harness.sentences import check_line, expect_error


def test_every_name_is_a_task_and_every_task_has_a_name() -> None:
    """A name without a task would be taken and then fail with a traceback."""
    (names,) = [spec.choices for spec in flags_of(TaskConfig) if spec.field == "task"]
    assert set(names) == set(TASKS)
    for task in TASKS.values():
        assert importlib.util.find_spec(task.module) is not None
        assert callable(task.load())


def test_help_and_mistakes_take_no_time() -> None:
    """Somebody who looks up a flag doesn't wait for torch; started from any folder."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, str(ROOT / "tasks/main.py"), "--help"]
    said = subprocess.run(words, env=environment(), cwd="/", capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    check_line(said.stdout, "--overlapping-eval")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--task LM --valid-data a",
        "--task LM --valid-data a --load nowhere",
        "--task RACEE",
    ],
    ids=["nothing", "no model", "no such folder", "no such task"],
)
def test_mistakes_are_told_without_what_follows_from_them(flags: str) -> None:
    """Without a checkpoint nobody knows the architecture; asking for it flag by flag would be the wrong advice."""
    with expect_error(ConfigError) as caught:
        tasks.main(flags.split())
    assert "--num-layers" not in str(caught.value)


def test_the_task_may_stand_in_a_file(tmp_path: Path) -> None:
    """Settings files hold any setting, also the one that decides which others there are."""
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"task": "LAMBADA"}))
    with expect_error(ConfigError, "--task"):
        tasks.main(["--config", str(settings)])


def test_a_result_file_that_cannot_be_written_is_noticed_before_the_work(tmp_path: Path) -> None:
    """Hours of evaluation end in a file or don't begin."""
    with expect_error(ConfigError):
        check_result_file(str(tmp_path))
    (tmp_path / "file").write_text("")
    with expect_error(ConfigError):
        check_result_file(str(tmp_path / "file" / "result.json"))


def test_a_folder_for_predictions_takes_files(tmp_path: Path) -> None:
    """Else all answers would be lost at the very end."""
    check_predictions_dir(str(tmp_path / "new" / "folder"))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch(exist_ok=True)
    for place in (tmp_path / "file", Path("/proc")):  # the latter is a folder, in which nobody makes files
        with expect_error(ConfigError, f"--predictions-dir {place}"):
            check_predictions_dir(str(place))
