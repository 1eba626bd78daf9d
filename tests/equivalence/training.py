"""Steps of a row of the table: what a command line builds and trains, on any number of ranks, in fp64."""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from megatron.config.parse import parse_run
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.core.conversion.portable import PortableModel, fill
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed, observe
from megatron.training.run.run import build_run
from tests.equivalence.families import GLOBAL_BATCH, LENGTH, ROW_FAMILIES, STEPS, VOCABULARY, Family
from tests.harness import run_ranks
from tests.harness.runs import axes_of, context_of

EVERY_ROW = (
    f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --seq-length {LENGTH} --num-workers 0 "
    f"--global-batch-size {GLOBAL_BATCH} --micro-batch-size 2 --train-iters {STEPS} --eval-iters 0 --seed 7 "
    "--attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion "
    "--lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --clip-grad 0.5 --dry-run"
)
"""Flags of all rows, which a row's own replace."""


def fitted(layout: str, row: str) -> str:
    """The layout without what the row's model doesn't have: experts to divide, modules to recompute."""
    absent = {
        "layernorm": "--norm-placement after" in row or "--apply-residual-connection-post-layernorm" in row,
        "shared_experts": "--moe-shared-expert-intermediate-size" not in row,
        "mla_up_proj": "--multi-latent-attention" not in row,
    }
    for module in (name for name, is_absent in absent.items() if is_absent):
        layout = re.sub(rf"(--recompute-modules .*?) ?\b{module}\b", r"\1", layout)
    return layout if "--num-experts" in row else re.sub(r"--expert-model-parallel-size \d+", "", layout)


def run_of(row: str, layout: str = "", *, published: PortableModel | None = None) -> tuple[Family, RunConfig]:
    """The run of a row, FLAGS or ``FAMILY: FLAGS``, with the flags of a layout. ``published``: the model, in place of
    the row's.
    """
    named, _, flags = row.rpartition(": ")
    family = ROW_FAMILIES[named or "gpt"]
    words = shlex.split(f"{EVERY_ROW} {family.flags} {flags} {fitted(layout, row)}")
    config = parse_run(words, extra_groups=family.groups)
    extra = (*family.settings, *config.extra)
    model = config.model
    if published is not None:
        model, extra = published.model, tuple(published.groups)
    # Types are those of the context.
    return family, replace(config, model=model, extra=extra, precision=PrecisionConfig())


def train(context: ParallelContext, row: str, layout: str = "", published: PortableModel | None = None) -> Observed:
    """The table's steps of AdamW on this rank."""
    family, config = run_of(row, layout, published=published)
    run = build_run(config, family.train_spec, context_of(config, context), started=0.0)
    run.train_spec.load_beside(run.models, context.mesh)
    if published is not None:
        fill(chain(run.model_state(), run.optimizer.master_entries()), published, context.mesh)
    return observe(run, steps=STEPS)


@functools.lru_cache(maxsize=64)
def train_alone(row: str, layout: str = "") -> Observed:
    """The table's steps on one rank, which tests of other layouts share."""
    return train(ParallelContext.single(dtype=torch.float64), row, layout)


def train_at(row: str, layout: str, published: PortableModel | None = None) -> list[Observed]:
    """The table's steps at a layout, by rank."""
    return run_ranks(train, row, layout, published, **at(row, layout))


def at(row: str, layout: str) -> dict[str, Any]:
    """The ranks of a row at a layout, for ``run_ranks``."""
    return axes_of(run_of(row, layout)[1]) | {"dtype": torch.float64}
