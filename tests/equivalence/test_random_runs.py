"""Command lines drawn at random each run: what their flags build, from data to updated weights, against one rank.

A failure names its seed, that of the order of the tests; ``LAYOUT_SEED=seed`` draws the same again.
"""

from __future__ import annotations

import itertools
import os
import random
import re

import pytest
import torch

from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES, family_of
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError, ParallelError
from megatron.planning.shrinking import SMALL_VOCABULARY, on_one_rank, shrunk, without_files
from megatron.training.evaluation.parity import Observed, observe
from megatron.training.run.run import build_run
from tests.equivalence.test_equivalence import check
from tests.harness import run_ranks
from tests.harness.runs import axes_of, context_of
from tests.selection import LAYOUT_SEED
from tests.tiers import tiers

DRAWS, SOON, STEPS, MOST_RANKS = 4, 1, 2, 8
"""Draws, and how many of them are in the default tier."""
MODELS = {
    "gpt2": "--init-method-std 0.2",
    "gpt2 untied": "--init-method-std 0.2 --untie-embeddings-and-output-weights",
    "llama": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4",
    "qwen, tied": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--add-qkv-bias --qk-layernorm --group-query-attention --num-query-groups 2 "
    "--reset-attention-mask --reset-position-ids",
    "bert": "--init-method-std 0.2",
    "t5": "--position-embedding-type relative --normalization RMSNorm --relu --disable-bias-linear --scale-output "
    "--num-layers 4 --decoder-num-layers 3",
    "t5, learned positions": "--init-method-std 0.2 --num-layers 3 --decoder-num-layers 4",
}
LAYERS = 7
"""Of both stacks together, where there are two."""
BASE = (
    f"--num-layers {LAYERS} --hidden-size 64 --num-attention-heads 8 --seq-length 64 --lr 1e-2 --train-iters 2 "
    "--mock-data --vocab-size 100 --eval-iters 0 --dry-run"
)
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-v", "interleaved")
EXCHANGES = ("p2p", "all_gather", "a2a", "a2a+p2p")
FULL = ("--recompute-method uniform", "--recompute-method uniform --recompute-num-layers 2", "--recompute-method block")
LAYOUT = "--pipeline-model-parallel-layout"
DIVISIONS = (
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "--decoder-first-pipeline-num-layers 2",
    "--decoder-last-pipeline-num-layers 2",
)


def draw(rng: random.Random) -> tuple[str, RunConfig]:
    """Flags of a layout that fits, and the small run they describe."""
    while True:
        tp, pp, cp = rng.choice([1, 1, 2, 2, 4]), rng.choice([1, 1, 2, 2, 3, 4]), rng.choice([1, 1, 2, 4])
        dp = rng.choice([1, 2, 3, 4])
        if not 1 < tp * pp * cp * dp <= MOST_RANKS:
            continue
        micro = rng.choice([1, 2])
        model = rng.choice(list(MODELS))
        flags = [
            MODELS[model],
            f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp}",
            f"--micro-batch-size {micro} --global-batch-size {micro * dp * rng.choice([1, 2, 3, 5])}",
            rng.choice(["", "--sequence-parallel"]) if tp > 1 else "",
            rng.choice(["", "", "--use-distributed-optimizer", "--use-distributed-optimizer --overlap-param-gather"]),
            rng.choice(["", "--overlap-grad-reduce"]),
            rng.choice(["", "--recompute-activations", *(f"--recompute-granularity full {each}" for each in FULL)]),
            rng.choice(["", "--use-tp-pp-dp-mapping"]),
            rng.choice(["", "", "--bf16 --fp32-residual-connection --attention-softmax-in-fp32"]),
            draw_exchange(rng, cp) if cp > 1 else "",
            draw_pipeline(rng, pp) if pp > 1 else "",
        ]
        line = " ".join(filter(None, flags))
        try:
            groups = FAMILIES.get(model.partition(",")[0], FAMILIES["gpt"]).groups
            config = parse_run(f"{BASE} {line}".split(), world_size=tp * pp * cp * dp, extra_groups=groups)
            return f"{model}: {line}", shrunk(without_files(config, vocab_size=SMALL_VOCABULARY, steps=STEPS))
        except ConfigError:
            continue


def draw_exchange(rng: random.Random, cp: int) -> str:
    """How context-parallel ranks attend to each other's keys: in all layers, or in each another way."""
    kinds = " ".join(rng.choice(EXCHANGES) for _ in range(rng.choice([1, 1, LAYERS])))
    inner = rng.choice([size for size in (1, 2, 4) if cp % size == 0])
    levels = f" --hierarchical-context-parallel-sizes {inner} {cp // inner}" if "a2a+p2p" in kinds else ""
    return f"--cp-comm-type {kinds}{levels}"


def draw_pipeline(rng: random.Random, pp: int) -> str:
    """Which schedule, and how layers fall into stages."""
    schedule = rng.choice(SCHEDULES)
    chunks = {"zb-v": 2, "interleaved": rng.choice([2, 3])}.get(schedule, 1)
    flags = [f"--pipeline-schedule {schedule}", rng.choice(["", "--no-overlap-p2p-communication"])]
    division = rng.choice(["", LAYOUT, *DIVISIONS])
    if division == LAYOUT:
        ends = sorted(rng.randint(0, LAYERS) for _ in range(pp * chunks - 1))
        sizes = [stop - start for start, stop in itertools.pairwise([0, *ends, LAYERS])]
        division += f" E{'|'.join('t' * size for size in sizes)}L"
    elif schedule == "interleaved":
        flags.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
    if schedule == "interleaved":
        flags.append(rng.choice(["", f"--microbatch-group-size-per-virtual-pipeline-stage {rng.randint(1, 5)}"]))
    return " ".join(filter(None, [*flags, division]))


def observed(context: ParallelContext, config: RunConfig) -> Observed:
    """What a run on a rank of the harness computes."""
    train_spec = family_of(config.extra).train_spec
    return observe(build_run(config, train_spec, context_of(config, context)), steps=STEPS)


@pytest.mark.parametrize("number", tiers(range(DRAWS), first=range(SOON)))
def test_drawn_layout_computes_the_model_of_one_rank(number: int) -> None:
    """Combinations that nobody thought of are where silent wrong gradients live."""
    seed = int(os.environ[LAYOUT_SEED])
    line, config = draw(random.Random(seed + number))
    try:
        ranks = run_ranks(observed, config, **axes_of(config), dtype=torch.float64, timeout=120.0)
        alone = observed(ParallelContext.single(dtype=torch.float64), on_one_rank(config))
        check(ranks, [alone])
    except (AssertionError, ParallelError) as error:
        raise AssertionError(f"{LAYOUT_SEED}={seed}, draw {number}: {line}") from error


def test_draws_reach_every_way() -> None:
    """A flag that is never drawn, or never fits, would look proven."""
    rng = random.Random(0)
    lines = [draw(rng)[0] for _ in range(400)]
    assert {line.partition(":")[0] for line in lines} == set(MODELS)
    drawn = {word for line in lines for word in line.split()}
    wanted = [*SCHEDULES, *EXCHANGES, LAYOUT, *" ".join(DIVISIONS).split(), "--sequence-parallel"]
    wanted += ["--microbatch-group-size-per-virtual-pipeline-stage", "--no-overlap-p2p-communication"]
    assert [word for word in wanted if word not in drawn] == []
    assert any(re.search(r"cp-comm-type \S+ [^-]", line) for line in lines), "another way in each layer"
    assert any(re.search(r"layout E\||\|L", line) for line in lines), "ends alone"
