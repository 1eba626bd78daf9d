"""Check a launch file before it costs a place in a queue: start its own command with --dry-run --launch-file FILE."""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import subprocess
from pathlib import Path

from megatron.config.flags import Settings, flag, switch
from megatron.config.parse import parse_groups
from megatron.errors import ConfigError, run_command
from megatron.planning.launch.launch_file import LaunchFile
from megatron.planning.launch.read import read_launch_file

ROOT = Path(__file__).resolve().parents[1]


class CheckLaunchConfig(Settings):
    """Which file, and whether the run's files are looked at."""

    launch_file: str = flag("A Slurm batch script, a Kubernetes manifest or a SkyPilot task.")
    check_files: bool = switch(
        "Do not check data, tokenizer, checkpoints and folders, which are on the cluster.", off="--no-check-files"
    )


def script_and_flags(file: LaunchFile) -> list[str]:
    """The training script that a launch file starts, with its flags. Raises ConfigError where it names none."""
    for at, word in enumerate(file.words):
        if word.endswith(".sh") and (ROOT / word).is_file() and "launch.sh" not in word:
            return [each for each in file.words[at:] if "$" not in each]
    raise ConfigError(
        f"--launch-file {file.path} starts no script of this checkout, such as examples/llama/train_llama3_8b.sh; "
        "check the flags of the run itself with --dry-run --launch-file"
    )


def main() -> int:
    """The exit code of the dry run."""
    argv = sys.argv[1:]
    if argv and not argv[0].startswith("-"):
        argv.insert(0, "--launch-file")
    (config,) = parse_groups(argv, CheckLaunchConfig, prog="check_launch.py", about=__doc__ or "")
    path = os.path.abspath(config.launch_file)
    file = read_launch_file(path)
    more = ["--dry-run", "--launch-file", path, *([] if config.check_files else ["--no-check-files"])]
    command = ["bash", *script_and_flags(file), *more]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **file.variables}, check=False).returncode


if __name__ == "__main__":
    run_command(main)
