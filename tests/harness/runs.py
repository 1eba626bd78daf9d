"""Tiny whole runs inside a test: real settings, data, model, optimizer and steps, in the type of the context."""

from __future__ import annotations

from megatron.config.families import FAMILIES, Family
from megatron.config.run import RunConfig
from megatron.core.parallel.context import ParallelContext
from megatron.training.recipes import recipe_of
from megatron.training.run import Run, build_run

GPT = FAMILIES["gpt"]
TINY_RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-2 --init-method-std 0.2 --vocab-size 50 --num-workers 0 "
    "--eval-iters 0"
)


def tiny_config(flags: str, *, ranks: int = 1, family: Family = GPT) -> RunConfig:
    """The run of a tiny command line; ``flags`` replace its own. Three steps unless they say how long."""
    length = "" if "--train-samples" in flags else "--train-iters 3"
    return RunConfig.parse(f"{TINY_RUN} {length} {flags}".split(), world_size=ranks, extra_groups=family.groups)


def tiny_run(context: ParallelContext, flags: str, *, family: Family = GPT) -> Run:
    """A run on this rank, ready for its first step."""
    config = tiny_config(flags, ranks=context.mesh.world_size, family=family)
    return build_run(config, recipe_of(family), context, started=0.0)
