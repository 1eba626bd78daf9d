"""The quickstart is the first thing anybody runs: every command it prints must work, twice, in any folder."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, environment, quickstart
from tests.end_to_end.forked_python import run_bash

pytest.importorskip("matplotlib", reason="the quickstart's last step draws a picture")

ITERATIONS = 40


@pytest.fixture(scope="module", params=["forked", pytest.param("started", marks=pytest.mark.slow)])
def python(request: pytest.FixtureRequest) -> str:
    """How the script's Python is run: a start takes 3 seconds of CPU, and there are a dozen."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"quick start, {python}")  # a space, as in many a home folder


@pytest.fixture(scope="module")
def said(python: str, folder: Path) -> str:
    """What the whole script prints, run for a few iterations in a folder with a space; if started, without a home."""
    if python == "started":
        return quickstart("examples/quickstart.sh", folder, iterations=ITERATIONS)
    variables = {"QUICKSTART_DIR": str(folder / "run"), "QUICKSTART_ITERATIONS": str(ITERATIONS)}
    return run_bash("examples/quickstart.sh", folder, variables=environment() | variables)


def test_everything_it_names_at_the_end_is_there(said: str, folder: Path) -> None:
    ending = said[said.index("== Done in") :]
    for name in ("checkpoints", "tensorboard", "loss.png", "perplexity.txt", "sample.txt"):
        assert f"{folder}/run/{name}" in ending
        assert (folder / "run" / name).exists()
    assert (folder / "run/loss.png").read_bytes().startswith(b"\x89PNG")


def test_stops_half_way_and_goes_on_from_its_checkpoint(said: str) -> None:
    """Every iteration once: a resume that started over would still look fine at the end."""
    logged = [int(number) for number in re.findall(r"\] iteration +(\d+)/ *40 \|", said)]
    assert logged == list(range(1, ITERATIONS + 1))
    assert "exiting program at iteration 20" in said
    assert re.search(r"successfully loaded checkpoint from .* at iteration 20", said)


def test_the_loss_falls_and_it_says_from_what_to_what(said: str) -> None:
    found = re.search(r"The loss fell: training lm loss from (\S+) \(iteration 1\) to (\S+) \(40\)", said)
    assert found is not None
    assert 8.8 < float(found[1]) < 9.3  # guessing among 8,192 tokens costs ln 8192 = 9.01
    assert float(found[2]) < float(found[1]) - 1.0


def test_perplexity_and_text_are_reported(said: str, folder: Path) -> None:
    figures = (folder / "run/perplexity.txt").read_text()
    assert re.search(r"^ validation results on LM \| avg loss: \d\.\d{4}E\+00 \| ppl: ", figures, re.MULTILINE)
    assert re.search(r" \| bits per byte: [1-9]\.\d+ \| ", figures)
    assert "Return a new" in (folder / "run/sample.txt").read_text()


def test_commands_are_printed_as_one_would_type_them(said: str, folder: Path) -> None:
    """One of them is pasted back into a shell, folder with a space and all."""
    (shown,) = re.findall(r"^\$ (\.venv/bin/python tools/plot_loss\.py (?:.*\\\n)*.*) \| tee .*$", said, re.MULTILINE)
    again = folder / "again.png"
    pasted = shown.replace(f"{folder}/run/loss.png", str(again))
    subprocess.run(["bash", "-c", pasted], cwd=ROOT, env={**os.environ}, check=True, capture_output=True)
    assert again.exists()
