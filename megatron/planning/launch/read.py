"""Any launch file, by what is in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.planning.launch.kubernetes import read_manifest
from megatron.planning.launch.launch_file import LaunchFile
from megatron.planning.launch.skypilot import read_task
from megatron.planning.launch.slurm import read_batch_script
from megatron.small_files import parse_yaml, read_text


def read_launch_file(path: str) -> LaunchFile:
    """The launch file at ``path``. Raises ConfigError for one that is of no known kind, and for what can't be read."""
    where = f"--launch-file {path}"
    text = read_text(Path(path), where=where, error=ConfigError)
    if text.startswith("#!"):
        if "#SBATCH" not in text:
            raise ConfigError(f"{where} is a script without #SBATCH lines; name a Slurm batch script")
        return read_batch_script(path, text)
    documents = [each for each in _documents(text, where) if each is not None]
    if not all(isinstance(each, Mapping) for each in documents) or not documents:
        raise ConfigError(f"{where} is not a Slurm batch script, a Kubernetes manifest or a SkyPilot task")
    if any("apiVersion" in each for each in documents):
        return read_manifest(path, documents)
    if "run" in documents[0]:
        return read_task(path, documents[0])
    raise ConfigError(
        f"{where} has neither apiVersion, as a Kubernetes manifest has, nor run, as a SkyPilot task has; name one of "
        "these, or a Slurm batch script"
    )


def _documents(text: str, where: str) -> list[Any]:
    """The YAML documents of a file; errors name its lines."""
    found, line = [], 0
    for each in re.split(r"^---[ \t]*$", text, flags=re.MULTILINE):
        found.append(parse_yaml("\n" * line + each, where=where, error=ConfigError))
        line += each.count("\n")
    return found
