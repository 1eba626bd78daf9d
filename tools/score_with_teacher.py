"""Score a run's samples with a teacher once, and store its distributions, from which any number of runs can learn.

Takes the flags of the pretraining command, with --teacher-load, and --model-type where it is not GPT; started by
torchrun at any layout. The run then takes --teacher-scores FOLDER in place of --teacher-load.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from megatron.config.distillation import DistillationConfig
from megatron.config.flags import Settings, flag
from megatron.config.typed_spellings import errors_as_typed
from megatron.core.files.remote_path import RemotePath, path_of
from megatron.core.files.writable import try_to_write
from megatron.core.models.registry import family_of
from megatron.core.parallel.environment import errors_once_per_node, launch_environment
from megatron.errors import ConfigError, run_command
from megatron.training.pretrain import parse_any_family


class ScoreConfig(Settings):
    """What is stored, and where."""

    scores: str = flag("New or empty folder for the distributions, on a disk.")
    top_k: int = flag("Likeliest ids stored for each token; all others count as one.", default=64, at_least=1)
    scores_dtype: Literal["float16", "float32", "float64"] = flag("Type of log-probabilities.", default="float16")


def main(argv: Sequence[str]) -> int:
    """Score, and say what was stored."""
    config = parse_any_family(argv, ScoreConfig, prog="score_with_teacher.py", about=__doc__ or "")
    asked = config.group(ScoreConfig)
    with errors_once_per_node(), errors_as_typed(config):
        if not config.part(DistillationConfig).teacher[0]:
            raise ConfigError("there is no teacher; name its checkpoint with --teacher-load")
        place = _new_folder(asked.scores)
    from megatron.core.parallel.launch import parallel_context
    from megatron.training.teacher_scoring import score

    launch = launch_environment()
    say: Callable[[str], None] = print if launch.rank == 0 else lambda line: None
    precision, seed = config.precision.params_dtype, config.training.seed
    joined = parallel_context(config.parallel, launch, params_dtype=precision, seed=seed)
    with errors_as_typed(config), joined as context:
        family = family_of(config.extra).train_spec
        header = score(config, family, context, place, top_k=asked.top_k, log_probs=asked.scores_dtype, say=say)
    size = sum(path.stat().st_size for path in place.iterdir()) / 1e6 if launch.rank == 0 else 0.0
    say(f"wrote {place}, {size:,.1f} MB, {header.top_k:,} ids a token: train with --teacher-scores {place}")
    return 0


def _new_folder(scores: str) -> Path:
    """The folder that --scores names, of this machine's file systems, into which files can be written."""
    place = path_of(scores)
    if isinstance(place, RemotePath):
        raise ConfigError(
            f"--scores {scores} is in object storage, where runs cannot read parts of a file as they need them; name a "
            "folder of a disk"
        )
    try:
        if place.exists() and any(place.iterdir()):
            raise ConfigError(f"--scores {place} exists; name a new folder, nothing is overwritten")
        try_to_write(place, make=False)
    except OSError as error:
        raise ConfigError(
            f"--scores {place} cannot be written: {error.filename}: {error.strerror}; name a new folder"
        ) from None
    return place


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
