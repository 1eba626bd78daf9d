"""The command ``megatron``: every program has a name, and a wheel holds every program."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
from setuptools import Distribution

from megatron.__main__ import BY_FILE, PROGRAMS, main, programs_folder
from megatron.config.suggestions import did_you_mean
from tests.architecture.source_tree import ROOT, sources


def test_every_program_has_a_name() -> None:
    """A user of a wheel has no checkout to start a file of."""
    programs = {source.path for source in sources() if '__name__ == "__main__"' in source.text}
    started = {path for path in programs if path.startswith(("tools/", "tasks/", "pretrain_"))}
    assert started == set(PROGRAMS.values())


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the first words of its description; a mistake is one sentence with exit code 2."""
    assert programs_folder() == ROOT
    assert said(["megatron", "--help"], monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "  preprocess-data     Turn text into the token files that training reads\n" in shown
    assert max(map(len, shown.splitlines())) <= 145
    assert all(f"  {command} " in shown for command in PROGRAMS)
    assert said(["megatron", "preproces-data"], monkeypatch) == 2
    meant = did_you_mean("preproces-data", {**BY_FILE, **PROGRAMS})
    assert capsys.readouterr().err == (
        f"error: there is no command preproces-data{meant}; megatron --help lists them\n"
    )
    assert said(["megatron", "print_schedule", "--help"], monkeypatch) == 0
    assert capsys.readouterr().out.startswith("usage: print_schedule.py ")


def test_a_command_may_have_the_name_of_its_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documents say python tools/train_tokenizer.py and tools/text_generation_cli.py; of a wheel's commands only
    the first had that name, and the second was "no command".
    """
    assert len(BY_FILE) == len(PROGRAMS) - 1  # all but tasks/main.py
    assert said(["megatron", "text-generation-cli", "--help"], monkeypatch) == 0
    assert capsys.readouterr().out.startswith("usage: text_generation_cli.py ")


@pytest.mark.parametrize("command", sorted({*PROGRAMS} - {"lm-eval"}))  # whose help is the harness's
def test_help_says_what_a_command_does(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only its flags; eight commands, those of training among them, began with "@FILE holds flags"."""
    assert said(["megatron", command, "--help"], monkeypatch) == 0
    paragraphs = [" ".join(each.split()) for each in capsys.readouterr().out.split("\n\n")]
    described = next(each for each in paragraphs if not each.startswith(("usage: ", "[", "@FILE")))
    assert len(described.split()) > 5 and not described.startswith("model type: ")
    source = (ROOT / PROGRAMS[command]).read_text(encoding="utf-8")
    assert command.startswith("pretrain-") or described.split()[:4] == source.removeprefix('"""').split()[:4]


def said(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def build_in(folder: Path, **given: Any) -> dict[str, Any]:
    """Put what a wheel holds into ``folder``; what setup.py says."""
    said: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: said.update(arguments))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
        distribution = Distribution({**said, **given, "script_name": "setup.py"})
        build = distribution.get_command_obj("build_py")
        build.build_lib = str(folder)
        build.ensure_finalized()
        build.run()
    return said


@pytest.mark.slow  # a run on a pretended accelerator
def test_a_rehearsal_runs_from_a_wheel(tmp_path: Path) -> None:
    """It finds the lines of the program by their place in the checkout, which a wheel doesn't have."""
    build_in(tmp_path)
    flags = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 2 --hidden-size 64 --bf16 --lr 1e-3 "
        "--num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 10 --steps 1 --world-size 2 "
        "--tensor-model-parallel-size 2"
    )
    paths = {**os.environ, "PYTHONPATH": str(tmp_path)}
    script = [sys.executable, "-m", "megatron", "rehearse", *flags.split()]
    done = subprocess.run(script, cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "no fault was found" in done.stdout
    assert "megatron/core/parallel/collectives.py:" in done.stdout  # where the host waits


def test_a_wheel_holds_every_program(tmp_path: Path) -> None:
    """Tools and tasks were left out: an installed package could train and do nothing else."""
    given = build_in(tmp_path, packages=["megatron"])
    below = tmp_path / "megatron" / "programs"
    built = {path.relative_to(below).as_posix() for path in below.rglob("*.py")}
    ours = {s.path for s in sources() if s.path.startswith(("tools/", "tasks/", "pretrain_"))}
    assert built == ours
    assert given["entry_points"] == {"console_scripts": ["megatron = megatron.__main__:main"]}
