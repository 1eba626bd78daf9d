"""Command lines drawn at random each run: what their flags build, from data to updated weights, against one rank.

A failure names its seed; ``LAYOUT_SEED=seed`` draws the same again.
"""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
import torch

from megatron.config.run import RunConfig
from megatron.config.shrinking import SMALL_VOCABULARY, on_one_rank, shrunk, without_files
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.parity import Observed, compare, observe
from megatron.training.recipes.gpt import GPTRecipe
from tests.harness import run_ranks

DRAWS, STEPS, MOST_RANKS = 3, 2, 8
MODELS = {
    "gpt2": "--init-method-std 0.2",
    "gpt2 untied": "--init-method-std 0.2 --untie-embeddings-and-output-weights",
    "llama": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4",
    "qwen, tied": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--add-qkv-bias --qk-layernorm --group-query-attention --num-query-groups 2 "
    "--reset-attention-mask --reset-position-ids",
}
BASE = (
    "--num-layers 7 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --lr 1e-2 --train-iters 2 "
    "--mock-data --vocab-size 100 --eval-iters 0 --dry-run"
)


def draw(rng: random.Random) -> tuple[str, RunConfig]:
    """Flags of a layout that fits, and the small run they describe."""
    while True:
        tp, pp, cp = rng.choice([1, 1, 2, 2, 4]), rng.choice([1, 1, 2, 2, 3, 4]), rng.choice([1, 1, 2, 4])
        dp = rng.choice([1, 2, 3, 4])
        if not 1 < tp * pp * cp * dp <= MOST_RANKS:
            continue
        micro = rng.choice([1, 2])
        flags = [
            rng.choice(list(MODELS.values())),
            f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp}",
            f"--micro-batch-size {micro} --global-batch-size {micro * dp * rng.choice([1, 2, 3, 5])}",
            rng.choice(["", "--sequence-parallel"]) if tp > 1 else "",
            rng.choice(["", "", "--use-distributed-optimizer", "--use-distributed-optimizer --overlap-param-gather"]),
            rng.choice(["", "--overlap-grad-reduce"]),
            rng.choice(["", "--recompute-activations", "--recompute-granularity full --recompute-method uniform"]),
            f"--cp-comm-type {rng.choice(['p2p', 'all_gather', 'a2a'])}" if cp > 1 else "",
            rng.choice(["", "--use-tp-pp-dp-mapping"]),
        ]
        if pp > 1:
            flags.append(rng.choice(["", *(f"--pipeline-schedule {name}" for name in ("gpipe", "zb-h1", "zb-v"))]))
            flags.append("" if "zb" in flags[-1] or "gpipe" in flags[-1] else rng.choice(["", VIRTUAL]))
        line = " ".join(filter(None, flags))
        try:
            config = RunConfig.parse(f"{BASE} {line}".split(), world_size=tp * pp * cp * dp)
            return line, shrunk(without_files(config, vocab_size=SMALL_VOCABULARY, steps=STEPS))
        except ConfigError:
            continue


VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"


def observed(context: ParallelContext, config: RunConfig) -> Observed:
    """On a rank of the harness, whose context doesn't know all settings."""
    parallel = config.parallel
    sizes = parallel.hierarchical_context_parallel_sizes or ()
    context = dataclasses.replace(context, cp_comm_types=parallel.cp_comm_type, cp_sizes=tuple(sizes))
    return observe(config, GPTRecipe(), context, steps=STEPS)


@pytest.mark.parametrize("number", range(DRAWS))
def test_drawn_layout_computes_the_model_of_one_rank(number: int) -> None:
    """Combinations that nobody thought of are where silent wrong gradients live."""
    seed = int(os.environ.get("LAYOUT_SEED") or random.SystemRandom().randrange(1 << 32))
    line, config = draw(random.Random(seed + number))
    parallel = config.parallel
    ranks = run_ranks(
        observed,
        config,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        dp=config.data_parallel_size,
        pp_before_dp=not parallel.use_tp_pp_dp_mapping,
        sequence_parallel=parallel.sequence_parallel,
        dtype=torch.float64,
        timeout=120.0,
    )
    alone = observe(on_one_rank(config), GPTRecipe(), ParallelContext.single(dtype=torch.float64), steps=STEPS)
    for each in compare(ranks, alone):
        assert each.where is None, f"LAYOUT_SEED={seed}, draw {number}: {line}: {each}"
