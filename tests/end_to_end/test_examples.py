"""Examples start: their flags resolve to what was reviewed, and the scripts check and launch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.golden.regenerate_examples import FLAG_FILES, GOLDEN, resolved

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "gpt").glob("train_*.sh"))
PARAMETERS = {"train_gpt2_124m.sh": "124 M", "train_gpt_345m.sh": "355 M", "train_llama3_8b.sh": "8.03 B"}


def run_bash(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A bash script as a user starts it, from elsewhere."""
    environment = os.environ | variables
    return subprocess.run(["bash", *words], cwd="/", env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("flag_file", FLAG_FILES, ids=lambda path: path.stem)
def test_flags_resolve_to_what_was_reviewed(flag_file: Path) -> None:
    """A changed default changes every example: it should be seen. See tests/golden/regenerate_examples.py."""
    assert resolved(flag_file) == json.loads(GOLDEN.read_text(encoding="utf-8"))[flag_file.stem]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_checks_without_gpu_or_data(script: Path) -> None:
    """The first thing to do with an example, on whatever machine one has."""
    done = run_bash(str(script), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert PARAMETERS[script.name] in done.stdout


def test_script_hands_on_a_users_mistake() -> None:
    """Flags after the script's name reach the command, and its exit code comes back."""
    done = run_bash(str(ROOT / "examples" / "gpt" / "train_llama3_8b.sh"), "--dry-run", "--num-layer", "3")
    assert done.returncode == 2
    assert "--num-layers" in done.stderr
    assert "Traceback" not in done.stderr


def test_launch_starts_one_process_a_gpu(tmp_path: Path) -> None:
    """The launcher every example uses, here with two processes that say who they are."""
    script = tmp_path / "who.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[2], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'] + sys.argv[1])\n"
    )
    done = run_bash(str(ROOT / "examples" / "launch.sh"), str(script), "--flag", str(tmp_path), GPUS_PER_NODE="2")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["2--flag", "2--flag"]


def test_slurm_job_checks_itself_and_starts_its_tasks(tmp_path: Path) -> None:
    """With a stand-in for srun: the job's command reaches it, after the dry run passed."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "srun $*"\n')
    srun.chmod(0o755)
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"the job runs {python}: make it with bash tools/make_venv.sh")
    done = run_bash(
        str(ROOT / "examples" / "slurm" / "train_gpt.sbatch"),
        "--lr",
        "1e-4",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_NTASKS="32",
        SLURM_NTASKS_PER_NODE="8",
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("srun --kill-on-bad-exit=1 .venv/bin/python pretrain_gpt.py @examples/gpt/llama3_8b.flags")
    assert last.endswith("--exit-signal-handler --lr 1e-4")


def test_every_example_is_tested() -> None:
    """A new example brings its flags and its parameter count."""
    assert {script.name for script in SCRIPTS} == set(PARAMETERS)
    assert {f"train_{path.stem}.sh" for path in FLAG_FILES} == set(PARAMETERS)
