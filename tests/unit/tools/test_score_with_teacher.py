"""tools/score_with_teacher.py: where its folder can't be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.harness.runs import TINY_RUN
from tests.harness.sentences import expect_error
from tools import score_with_teacher


@pytest.mark.parametrize("place", ["file", "file/folder", "full", "s3://bucket/scores"])
def test_a_folder_that_cannot_be_made(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the way ended in a traceback, and a URL became a local folder called s3:."""
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "scores.json").touch()
    monkeypatch.chdir(tmp_path)
    flags = f"{TINY_RUN} --train-iters 1 --mock-data --tokenizer-type NullTokenizer --teacher-load {tmp_path}/teacher"
    with expect_error(ConfigError, f"--scores {place}"):
        score_with_teacher.main([*flags.split(), "--scores", place])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "full"]
