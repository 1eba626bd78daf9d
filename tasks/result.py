"""The result of a task, and the file that records it with its data, checkpoint and settings."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron
from megatron.config.run import RunConfig
from megatron.core.files.durable import write_errors
from megatron.core.files.writable import why_not_writable
from megatron.errors import ConfigError
from tasks.settings import TaskConfig

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.core.checkpointing.find import CheckpointFolder
    from megatron.core.files.remote_path import AnyPath
    from megatron.core.parallel.context import ParallelContext

_READ_SIZE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Results of a task. ``lines``: to print. ``metrics``: the same numbers by name. ``data``: every file that was
    read.

    ``checkpoint``: of the model; None for weights that were trained just now and not saved.
    """

    lines: tuple[str, ...]
    metrics: Mapping[str, float]
    data: tuple[Path, ...]
    checkpoint: CheckpointFolder | None


def framed(line: str) -> tuple[str, ...]:
    """A line between two rules, as Megatron-LM prints results."""
    return "-" * (len(line) + 1), line, "-" * (len(line) + 1)


def check_result_file(path: str | None, *, make: bool = True) -> None:
    """Raise ConfigError when ``--result-file`` cannot be written, before the work. ``make``: make its folder."""
    if path is None:
        return
    if Path(path).is_dir():
        raise ConfigError(f"--result-file {path} is a folder; name a file in it")
    reason = why_not_writable(Path(path).parent, make=make)
    if reason is None and Path(path).exists() and not os.access(path, os.W_OK):
        reason = "this user may not write it"
    if reason is not None:
        raise ConfigError(f"--result-file {path} cannot be written: {reason}; name another file")


def check_predictions_dir(path: str | None, *, make: bool = True) -> None:
    """Raise ConfigError when ``--predictions-dir`` cannot be written, before the work. ``make``: make it."""
    if path is None:
        return
    reason = why_not_writable(Path(path), make=make)
    if reason is not None:
        raise ConfigError(f"--predictions-dir {path} takes no files: {reason}; name another folder")


def write_result(result: TaskResult, config: RunConfig, context: ParallelContext, *, seconds: float) -> None:
    """Write ``--result-file``, if it is given. ``seconds``: wall time since the start of the command.

    Raises DataError when it cannot be written.
    """
    name = config.group(TaskConfig).result_file
    if name is not None:
        path, text = Path(name), json.dumps(_document(result, config, context, seconds), indent=1) + "\n"
        with write_errors(path, remedy="name another --result-file"):
            path.write_text(text, encoding="utf-8")


def _document(result: TaskResult, config: RunConfig, context: ParallelContext, seconds: float) -> dict[str, Any]:
    from megatron.training.run.agreement import code_digest

    mesh = context.mesh
    axes = {axis: mesh.size(axis) for axis in ("tp", "pp", "cp", "dp")}
    layout = {
        **axes,
        "sequence_parallel": context.sequence_parallel,
        "micro_batch_size": config.training.micro_batch_size,
    }
    return {
        "task": config.group(TaskConfig).task,
        "metrics": dict(result.metrics),
        "data": [_file(path) for path in result.data],
        "checkpoint": None if result.checkpoint is None else checkpoint_facts(result.checkpoint),
        "layout": layout,
        "versions": _versions(),
        "code": code_digest(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(seconds, 3),
        "config": config.to_json(),
    }


def checkpoint_facts(folder: CheckpointFolder) -> dict[str, Any]:
    """Path, iteration and digest of a checkpoint: of its manifest, which has the checksum of every file."""
    from megatron.core.checkpointing.manifest import MANIFEST

    digest = _file(folder.path / MANIFEST)["sha256"]
    return {"path": _place(folder.path), "iteration": folder.iteration, "sha256 of manifest": digest}


def _versions() -> dict[str, str]:
    import numpy
    import torch

    found = {"megatron": megatron, "torch": torch, "numpy": numpy}
    return {"python": platform.python_version(), **{name: str(module.__version__) for name, module in found.items()}}


def _file(path: AnyPath) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_SIZE):
            digest.update(block)
            size += len(block)
    return {"path": _place(path), "bytes": size, "sha256": digest.hexdigest()}


def _place(path: AnyPath) -> str:
    """The absolute path, or the URL."""
    return str(path.resolve() if isinstance(path, Path) else path)
