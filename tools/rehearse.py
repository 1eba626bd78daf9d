"""Rehearse a training run on a pretended accelerator: the real program with shapes and no values, on one CPU machine.

Takes the flags of a pretraining command, --world-size, and --model-type where it is not GPT. It builds the model, takes
steps and evaluates as one rank of every pipeline stage, or as all ranks, and reports where a tensor is on the wrong
device, where the host waits for the device, what ranks send each other, whether that fits together and can end by the
rules of NCCL, and the highest number of bytes that a rank holds. It trains on mock data from initial weights: files of
data and checkpoints are neither read nor written.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from collections.abc import Sequence
from typing import Literal

from megatron.config.flags import Settings, flag, switch
from megatron.core.models.registry import family_of
from megatron.errors import ConfigError, run_command
from megatron.training.pretrain import parse_any_family


class RehearsalConfig(Settings):
    """What is rehearsed."""

    rank: int = flag("The rank that is rehearsed.", default=0, at_least=0)
    ranks: Literal["one", "pipeline", "all"] = flag(
        "Which ranks are rehearsed: --rank alone, all stages of its pipeline, or all ranks. What ranks ask of each "
        "other is compared where all those concerned are rehearsed.",
        default="pipeline",
    )
    steps: int = flag("Optimizer steps; what is reported is the last.", default=2, at_least=1)
    every_microbatch: bool = switch(
        "Rehearse all microbatches of the last step, and not the fewest with which every pipeline stage keeps as much "
        "as with all."
    )


def main(argv: Sequence[str]) -> int:
    """Rehearse and print what was found; 1 when something would fail."""
    config = parse_any_family([*argv, "--dry-run"], RehearsalConfig, prog="rehearse.py", about=__doc__ or "")
    wanted = config.group(RehearsalConfig)
    if wanted.rank >= config.world_size:
        raise ConfigError(
            f"--rank {wanted.rank} is not one of {config.world_size} ranks: give --world-size, or a lower --rank"
        )

    from megatron.config.vocabulary import vocabulary_size
    from megatron.core.objectives.choice import objective_of
    from megatron.core.parallel.launch import mesh_of
    from megatron.core.tokenizers.build import built_size
    from megatron.rehearsal.accelerator import unavailable
    from megatron.rehearsal.ranks import rehearse_ranks
    from megatron.rehearsal.report import problems, report
    from megatron.rehearsal.settings import left_out, rehearsed

    if reason := unavailable():
        raise ConfigError(f"{reason}")
    train_spec, remarks = objective_of(config, family_of(config.extra).train_spec), left_out(config)
    config = rehearsed(
        config,
        train_spec,
        vocab_size=vocabulary_size(config, built_size),
        steps=wanted.steps,
        full=wanted.every_microbatch,
    )
    pipeline = mesh_of(config.parallel, world_size=config.world_size, rank=wanted.rank).members("pp")
    ranks = {"one": [wanted.rank], "pipeline": pipeline, "all": range(config.world_size)}[wanted.ranks]
    found = rehearse_ranks(
        config, train_spec, ranks, steps=wanted.steps, memory=round(1e9 * (config.command.device_memory_gb or 80))
    )
    print(report(config, train_spec, found, remarks=remarks))
    return 1 if problems(found) else 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
