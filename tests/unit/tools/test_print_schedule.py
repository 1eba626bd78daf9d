"""Schedules drawn: the text is what the simulator says, the picture is one, flags that do nothing are refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.harness.sentences import check_line, expect_error
from tools.print_schedule import main


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody chooses a schedule by these numbers."""
    assert main(shlex.split("--pipeline-model-parallel-size 2 --num-microbatches 2 --transfer-time 1")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0  F0 F1 .  .  .  .  B0 -  .  B1 -",
        "rank 1  .  .  F0 B0 -  F1 B1 -",
        "",
        "1f1b: 2 stages on 2 ranks, a step takes 11; ranks wait for 83.3 % of the time they compute",
        "rank 0  stages 0: computes 6, waits 5 (5 in the middle), keeps up to 2 microbatches of a chunk",
        "rank 1  stages 1: computes 6, waits 5 (0 in the middle), keeps up to 1 microbatches of a chunk",
    ]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("kind", ["svg", "png"])
def test_pictures(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every schedule can be drawn."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    picture = tmp_path / "new" / f"schedule.{kind}"
    main(["--pipeline-schedule", name, "--num-microbatches", "3", "--output", str(picture)])
    start = picture.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if kind == "png" else b"<?xml" in start
    check_line(capsys.readouterr().out, picture)


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        (
            "--pipeline-schedule gpipe --num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank",
        ),
        ("--num-microbatches 0", "--num-microbatches"),
        ("--forward-time 0", "--forward-time"),
    ],
)
def test_bad_flags(flags: str, fact: str) -> None:
    """A flag without effect would leave somebody with the wrong picture."""
    with expect_error(ConfigError, fact):
        main(flags.split())


@pytest.mark.parametrize(("name", "most"), [("zb-v", 6), ("interleaved", 4), ("1f1b", 2)])
def test_every_shade_is_explained(name: str, most: int, tmp_path: Path) -> None:
    """Chunks after the first are lighter, and no legend said so."""
    pytest.importorskip("matplotlib", reason="matplotlib, which draws, is optional")
    main(["--pipeline-schedule", name, "--num-microbatches", "3", "--output", str(tmp_path / "schedule.svg")])
    drawing = (tmp_path / "schedule.svg").read_text()
    shades = set(re.findall(r'style="fill: (#\w{6}(?:; opacity: [\d.]+)?); stroke: #ffffff', drawing))
    labels = re.findall(r"<!-- ((?:forward|backward).*) -->", drawing)
    assert len(shades) == len(labels) == most
    assert ("backward, gradients of weights, chunk 1" in labels) == (name == "zb-v")


def test_a_schedule_of_millions_is_refused() -> None:
    """--pipeline-model-parallel-size 1000000 took minutes and gigabytes without a word."""
    for flags in ("--pipeline-model-parallel-size 1000000", "--num-microbatches 1000000 --pipeline-schedule zb-v"):
        with expect_error(ConfigError):
            main(flags.split())


def test_pictures_that_cannot_be_written(tmp_path: Path) -> None:
    """One sentence, not a traceback."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    with expect_error(ConfigError):
        main(["--output", str(tmp_path / "schedule.tapestry")])
