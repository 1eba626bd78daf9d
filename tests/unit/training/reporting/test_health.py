"""The health file: what a supervisor reads of a run, and what it makes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron.core.parallel.context import ParallelContext
from megatron.errors import DataError
from megatron.training.loop import train_and_save
from megatron.training.reporting.health import HealthFile, health_file
from tests.harness.runs import tiny_run
from tests.harness.sentences import check_sentence, expect_error
from tools.check_health import unhealthy

FLAGS = "--mock-data --log-interval 1 --health-file"


def test_file_says_how_far_the_run_is(tmp_path: Path) -> None:
    """A supervisor that sees only the process restarts nothing that hangs; the file has time, place and losses."""
    path = tmp_path / "health" / "file.json"
    run = tiny_run(ParallelContext.single(), f"{FLAGS} {path}")
    with health_file(run):
        before = json.loads(path.read_text())
        assert (before["state"], before["iteration"], before["pid"]) == ("running", 0, os.getpid())
        train_and_save(run)
    after = json.loads(path.read_text())
    assert (after["state"], after["iteration"], after["consumed_samples"]) == ("finished", 3, 24)
    assert after["losses"]["lm loss"] > 0
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_file_is_kept_fresh_and_a_failure_is_told(tmp_path: Path) -> None:
    """An old file means a dead process, so that a living one writes it again and again."""
    path = tmp_path / "file.json"
    run = tiny_run(ParallelContext.single(), f"{FLAGS} {path}")

    def fail() -> None:
        with health_file(run, seconds=0.01):
            path.unlink()
            while not path.exists():
                pass
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert json.loads(path.read_text())["state"] == "failed"


def test_only_the_first_rank_of_a_node_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a node would overwrite each other's file."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with health_file(tiny_run(ParallelContext.single(), f"{FLAGS} {tmp_path / 'file'}")):
        assert not (tmp_path / "file").exists()


def test_a_folder_that_cannot_be_written_is_named_and_a_later_failure_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk beside the run must not end it; a wrong path should, at once."""
    (tmp_path / "file").write_text("")
    with expect_error(DataError, "--health-file", exit_code=2):
        HealthFile(tmp_path / "file" / "health.json", dict).start()
    folder = tmp_path / "folder"
    health = HealthFile(folder / "health.json", dict, seconds=100)
    health.start()
    (folder / "health.json").unlink()
    folder.rmdir()
    health.stop("finished")
    assert "training continues" in caplog.text


@pytest.mark.parametrize(
    ("told", "facts"),
    [
        ({"state": "running"}, []),
        ({"state": "finished", "time": 0}, []),
        ({"state": "failed"}, ["iteration 3"]),
        ({"state": "running", "time": 900}, ["100 s", "60 s"]),
        ({"state": "running", "since": 500}, ["500 s", "300 s"]),
        ({"state": 5, "time": "x"}, ["ValueError"]),
        (None, ["--health-file"]),
    ],
)
def test_verdict_of_the_probe(told: dict[str, object] | None, facts: list[str], tmp_path: Path) -> None:
    """Kubernetes and Docker restart what is not healthy, and nothing else."""
    path = tmp_path / "health.json"
    if told is not None:
        path.write_text(json.dumps({"time": 990, "since": 990, "place": "iteration 3", **told}))
    reason = unhealthy(str(path), max_age=60, max_standstill=300, now=1000)
    assert bool(reason) == bool(facts)
    if facts:
        check_sentence(reason, *facts)
