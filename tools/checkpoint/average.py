"""Average the weights of several checkpoints of a run, or take the moving average that a run with --ema-decay saved.

The result is a checkpoint of weights, which any run, tool or conversion loads at any layout; an optimizer starts anew
from it (--finetune, or --no-load-optim to continue counting iterations).
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import math
from collections.abc import Sequence

from megatron.config.flags import COUNT, Settings, flag, switch
from megatron.config.parse import parse_groups
from megatron.core.files.remote_path import path_of
from megatron.errors import ConfigError, kept_on_interrupt, run_command


class AverageConfig(Settings):
    """Which checkpoints become one."""

    load: tuple[str, ...] = flag(
        "Folder of the run, or of each of several runs of one model, of which the newest count."
    )
    save: str = flag("New folder for the average.")
    ckpt_steps: tuple[int, ...] = flag(
        "Iterations of the one --load folder that are averaged.", default=(), at_least=0, at_most=COUNT
    )
    last: int | None = flag(
        "Average the newest checkpoints of the one --load folder, this many.", default=None, at_least=1
    )
    weights: tuple[float, ...] = flag(
        "A weight for each checkpoint, in their order, of which only the proportions count; equal unless given.",
        default=(),
        at_least=0,
    )
    load_ema: bool = switch("Take each checkpoint's moving average of the weights.")


def main(argv: Sequence[str]) -> int:
    """Average, and write the result."""
    (config,) = parse_groups(argv, AverageConfig, prog="average.py", about=__doc__ or "")
    check(config)
    from megatron.core.conversion.averaging import averaged
    from megatron.core.conversion.convert import check_target
    from megatron.core.conversion.native import read_native, write_native
    from megatron.core.conversion.remote import becoming

    save, chosen = path_of(config.save), choose(config)
    shares = config.weights or (1.0,) * len(chosen)
    if len(shares) != len(chosen):
        raise ConfigError(f"--weights gives {len(shares)} numbers for {len(chosen)} checkpoints; give one for each")
    check_target(save)
    named = [
        (f"iteration {step} of {load}", read_native(path_of(load), step=step, averaged=config.load_ema))
        for load, step in chosen
    ]
    total = math.fsum(shares)
    made = averaged(named, [share / total for share in shares])
    with (
        kept_on_interrupt(lambda: f"nothing is written to --save {save}"),
        becoming(save, say=print, check=lambda: check_target(save)) as aside,
    ):
        write_native(made, aside, final=save)
    for (name, _), share in zip(named, shares, strict=True):
        print(f"{share / total:.4f} of {name}")
    print(f"wrote {save}: {made.num_parameters:,} parameters, weights only, no optimizer state, no schedule")
    print("a run starts from it with --finetune, or with --no-load-optim to continue counting iterations")
    return 0


def check(config: AverageConfig) -> None:
    """Raise ConfigError for flags that say different things."""
    if len(config.load) > 1 and (config.ckpt_steps or config.last):
        asked = "--ckpt-steps" if config.ckpt_steps else "--last"
        raise ConfigError(f"{asked} chooses among the checkpoints of one folder, and --load names {len(config.load)}")
    if config.ckpt_steps and config.last:
        raise ConfigError("--ckpt-steps and --last both choose checkpoints; keep one")
    if config.weights and not any(config.weights):
        raise ConfigError("--weights are all 0; give at least one that is more")


def choose(config: AverageConfig) -> list[tuple[str, int]]:
    """Folder and iteration of each checkpoint, in the order of the weights.

    Raises ConfigError where there are fewer than asked for, CheckpointError where there are none.
    """
    from megatron.core.checkpointing.find import find_checkpoint, whole_checkpoints

    if config.ckpt_steps:
        return [(config.load[0], step) for step in config.ckpt_steps]
    if config.last is None:
        return [(load, find_checkpoint(load, verify=False).iteration) for load in config.load]
    held = sorted(whole_checkpoints(path_of(config.load[0])))
    if len(held) < config.last:
        raise ConfigError(f"--last {config.last} asks for more checkpoints than the {len(held)} in {config.load[0]}")
    return [(config.load[0], step) for step in held[-config.last :]]


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
