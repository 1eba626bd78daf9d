"""Examples start: their flags resolve to what was reviewed, and the scripts check and launch."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.planning.estimate import flops_per_sample
from tests.end_to_end.commands import run, words_for_python
from tests.golden.regenerate_examples import FLAG_FILES, GOLDEN, example, family_of_example, resolved
from tests.tiers import tiers

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples").rglob("train_*.sh"))
SMALLEST = "train_gpt_345m.sh"
PARAMETERS = {
    "train_gpt2_124m.sh": "124 M",
    "train_gpt_345m.sh": "355 M",
    "train_gpt_1.3b.sh": "1.32 B",
    "train_llama2_7b.sh": "6.74 B",
    "train_llama3_8b.sh": "8.03 B",
    "train_llama3_70b.sh": "70.6 B",
    "train_mixtral_8x7b.sh": "46,702,792,704 in the model (46.7 B), 12,879,925,248 for a token (12.9 B)",
    "train_mixtral_8x22b.sh": "140,630,071,296 in the model (141 B), 39,161,468,928 for a token (39.2 B)",
    "train_qwen3_30b_a3b.sh": "30,532,122,624 in the model (30.5 B), 3,353,032,704 for a token (3.35 B)",
    "train_qwen3_next_80b_a3b.sh": "79,674,391,296 in the model (79.7 B), 3,874,929,408 for a token (3.87 B)",
    "train_deepseek_v2.sh": "235,741,434,880 in the model (236 B), 21,375,800,320 for a token (21.4 B)",
    "train_deepseek_v3.sh": "682,636,487,424 in the model (683 B), 38,240,398,080 for a token (38.2 B)",
    "train_gpt3_175b_distributed.sh": "175 B",
    "train_mamba2_hybrid_800m.sh": "907,127,680 in the model",
    "train_mamba2_hybrid_8b.sh": "8.65 B",
    "train_nemotron_h_8b.sh": "8,100,852,736 in the model (8.1 B)",
    "train_olmo_hybrid_7b.sh": "7,430,870,688 in the model (7.43 B)",
    "train_llava15_7b.sh": "7,050,828,800 in the model (7.05 B)",
    "train_llava15_7b_projector.sh": "7,050,828,800 in the model (7.05 B)",
    "train_bert_340m_distributed.sh": "336,228,158 in the model",
    "train_t5_220m_distributed.sh": "221,748,480 in the model",
}
FEWER = re.compile(r"^# (?:Fewer|Smaller| ) +((?:[A-Z_]+=\d+ ?)+)((?:--\S+ ?(?:\w+ ?)?)*): ([\d.]+ GB)", re.MULTILINE)
TIME = re.compile(r"(\S+) FLOPs: (\S+) days at (\d+) x (\d+) TFLOP/s")


def memory(report: str) -> dict[str, str]:
    """Sizes that a dry run printed, by what they are of."""
    lines = report[report.index("== memory of") :].splitlines()[1:]
    return {name.strip(): size for name, size in (line.rsplit("  ", 1) for line in lines)}


def run_bash(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A bash script as a user starts it, from elsewhere."""
    environment = os.environ | variables
    return subprocess.run(["bash", *words], cwd="/", env=environment, capture_output=True, text=True, check=False)


DryRun = Callable[..., str]


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DryRun:
    """What an example's dry run prints. Bash runs the script; the command that it ends in runs in a forked process."""
    monkeypatch.chdir(ROOT)  # where launch.sh goes

    def printed(script: Path, *words: str, **variables: str) -> str:
        path, check = str(script.relative_to(ROOT)), ("--dry-run", "--no-check-files")
        program, *flags = words_for_python(path, *words, *check, checkout=tmp_path, **variables)
        return run(program, "", *flags)

    return printed


@pytest.mark.parametrize("flag_file", FLAG_FILES, ids=lambda path: path.stem)
def test_flags_resolve_to_what_was_reviewed(flag_file: Path) -> None:
    """A changed default changes every example: it should be seen. See tests/golden/regenerate_examples.py."""
    assert resolved(flag_file) == json.loads(GOLDEN.read_text(encoding="utf-8"))[flag_file.stem]


@pytest.mark.parametrize(
    "script",
    tiers(SCRIPTS, first=[path for path in SCRIPTS if "deepseek" not in path.name]),
    ids=lambda path: path.name,
)
def test_script_checks_without_gpu_or_data_and_its_head_is_true(script: Path, dry_run: DryRun) -> None:
    """The first thing to do with an example, on whatever machine one has; and its head promises what that prints."""
    printed = dry_run(script)
    assert PARAMETERS[script.name] in printed
    head, size = script.read_text(encoding="utf-8"), memory(printed)
    assert f"Memory    {size['together']}" in head
    assert f"of which {size['activations kept for the backward pass']} are activations" in head
    ranks = re.search(r"== layout\n   (\S+) ranks?", printed)
    assert ranks is not None
    assert f"Hardware  {ranks[1].replace(',', '')} GPU" in head
    waiting = re.search(r"ranks wait for (\S+ %)", printed)
    assert waiting is None or waiting[1] in head, waiting


def less_hardware() -> Iterator[tuple[Path, str, str, str]]:
    """Script, variables, flags and promised memory of every advice for less hardware."""
    for script in SCRIPTS:
        advice = FEWER.findall(script.read_text(encoding="utf-8"))
        assert advice, f"{script.name} doesn't say what to do with less hardware"
        yield from ((script, *each) for each in advice)


@pytest.mark.parametrize(
    ("script", "variables", "flags", "promised"),
    [
        # The schedules of many nodes take seconds to lay out.
        pytest.param(*each, marks=[] if re.match("GPUS_PER_NODE=|NODES=1 ", f"{each[1]} ") else pytest.mark.slow)
        for each in less_hardware()
    ],
)
def test_advice_for_less_hardware_is_true(
    script: Path, variables: str, flags: str, promised: str, dry_run: DryRun
) -> None:
    """Whoever has fewer GPUs follows it word for word."""
    settings = dict(each.split("=") for each in variables.split())
    assert memory(dry_run(script, *flags.split(), **settings))["together"] == promised


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_time_in_the_head_follows_from_the_settings(script: Path) -> None:
    """A month of GPUs is planned on it."""
    name = script.stem.removeprefix("train_")
    run = example(script.with_name(f"{name}.flags"))
    flops = flops_per_sample(run, family_of_example(script).train_spec) * run.train_samples
    found = TIME.search(script.read_text(encoding="utf-8"))
    assert found is not None
    said, days, gpus, tflops = found.groups()
    assert said == f"{flops:.1e}".replace("+", "")
    assert int(gpus) == run.world_size
    assert days == f"{flops / (int(gpus) * int(tflops) * 1e12) / 86400:.1f}"


@pytest.mark.parametrize(
    "script", tiers([f"gpt3/{SMALLEST}", "bert/train_bert_340m_distributed.sh"], first=[f"gpt3/{SMALLEST}"])
)
def test_script_starts_the_python_of_the_checkout(script: str, dry_run: DryRun) -> None:
    """Started as a user does, a script prints what it prints to the tests here, which start no Python."""
    path = ROOT / "examples" / script
    done = run_bash(str(path), "--dry-run", "--no-check-files")
    assert done.returncode == 0, done.stderr
    assert done.stdout == dry_run(path)


def test_script_hands_on_a_users_mistake() -> None:
    """Flags after the script's name reach the command, and its exit code comes back."""
    done = run_bash(str(ROOT / "examples" / "llama" / "train_llama3_8b.sh"), "--dry-run", "--num-layer", "3")
    assert done.returncode == 2
    assert "--num-layers" in done.stderr
    assert "Traceback" not in done.stderr


def paths_of(script: Path) -> list[str]:
    """The paths that a script takes before its flags, by name."""
    found = re.search(r"^paths='(.+)'$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1].split()


@pytest.mark.parametrize(
    "script", tiers(SCRIPTS, first=[path for path in SCRIPTS if path.name == SMALLEST]), ids=lambda path: path.name
)
def test_script_takes_paths_where_megatron_lm_does(script: Path, dry_run: DryRun) -> None:
    """Megatron-LM's documented lines name no flag: bash examples/NAME/train_NAME.sh CHECKPOINT_PATH … DATA_PATH."""
    names = paths_of(script)
    printed = dry_run(script, *(f"/my/{name}" for name in names))
    assert "given twice" not in printed
    used = dict(re.findall(r"^ +(--\S+) +(/my/\S+) +flag$", printed, re.MULTILINE))
    assert used.pop("--save") == used.pop("--load") == "/my/CHECKPOINT_PATH"
    assert used.pop("--tensorboard-dir") == "/my/TENSORBOARD_LOGS_PATH"
    assert used == {"--" + name.lower().replace("_", "-"): f"/my/{name}" for name in names[2:]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("c t v m", "give no path, or all 5 (CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE DATA_PATH)"),
        ("c t v m d e --lr 1", "before the flags; got 6: c t v m d e"),
        ("c t '' m d", "VOCAB_FILE, path 3 of 5"),
    ],
)
def test_script_refuses_paths_that_would_be_taken_for_others(words: str, message: str) -> None:
    """An unset variable in the line would move every path after it by one: the merges would be read as the data."""
    done = run_bash(str(ROOT / "examples" / "gpt3" / "train_gpt3_175b_distributed.sh"), *shlex.split(words))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_blend_is_one_path_and_paths_may_be_variables(dry_run: DryRun) -> None:
    """ "0.3 A 0.7 B" in DATA_PATH is two data sets, as it is where the shell splits it."""
    script = ROOT / "examples" / "bert" / "train_bert_340m_distributed.sh"
    paths = dict(zip(paths_of(script), ("c", "t", "v", "0.3 A 0.7 B")))
    settings = dry_run(script, *paths.values())
    assert settings == dry_run(script, **paths)
    assert "data-path 0.3 A 0.7 B" in " ".join(settings.split())


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


def test_launch_starts_the_tasks_of_a_slurm_job(tmp_path: Path) -> None:
    """On several nodes srun does what torchrun does on one."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "srun $*"\n')
    srun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_bash(str(ROOT / "examples" / "launch.sh"), "pretrain_gpt.py", "--lr", "1", LAUNCH="srun", PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("srun --kill-on-bad-exit=0 --wait=60 ")
    assert done.stdout.endswith(" pretrain_gpt.py --lr 1\n")


def test_every_example_is_tested() -> None:
    """A new example brings its flags and its parameter count."""
    assert {script.name for script in SCRIPTS} == set(PARAMETERS)
    assert {f"train_{path.stem}.sh" for path in FLAG_FILES} == set(PARAMETERS)
