"""Layouts drawn at random each run, so that what is compared with one rank isn't only what somebody thought of.

A failure names its seed, that of the order of the tests; ``LAYOUT_SEED=seed`` draws the same again.
"""

from __future__ import annotations

import os
import random

import pytest

from megatron.config.parallel import CpCommType, head_exchange_size
from megatron.errors import ParallelError
from tests.equivalence.families import GLOBAL_BATCH, LENGTH
from tests.equivalence.flags import EXPERTS, LLAMA_TIED, SMALL
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import run_of, train_alone, train_at
from tests.selection import LAYOUT_SEED
from tests.tiers import tiers

DRAWS, SOON, MOST_RANKS = 6, 1, 8
"""Draws, and how many of them are in the default tier."""

RECOMPUTATION = (
    "",
    "--recompute-granularity selective",
    "--recompute-granularity selective --recompute-modules mlp",
    "--recompute-granularity full",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
)
OF_EXPERTS = (
    "--recompute-granularity selective --recompute-modules moe mlp",
    "--recompute-granularity selective --recompute-modules core_attn moe_act shared_experts",
)


def draw_model(rng: random.Random) -> str:
    """A small model without dropout, in half of the cases with experts."""
    some = [
        f"--num-layers {rng.randint(4, 8)}",
        rng.choice(["", "--untie-embeddings-and-output-weights"]),
        draw_experts(rng),
        rng.choice(["", "--reset-attention-mask"]),
    ]
    if rng.random() < 0.5:
        return " ".join(filter(None, [SMALL, "--num-attention-heads 8", *some]))
    groups = [f"--num-query-groups {rng.choice([1, 2, 4, 8])}", rng.choice(["", "--qk-layernorm"])]
    return " ".join(filter(None, [LLAMA_TIED, *groups, *some]))


def draw_experts(rng: random.Random) -> str:
    """Flags of experts, of which some layers have none. A loss over microbatches depends on how many there are, so
    losses are over sequences and tokens.
    """
    if rng.random() < 0.5:
        return ""
    is_sigmoid = rng.random() < 0.5
    flags = [
        EXPERTS,
        f"--moe-layer-freq {rng.choice([1, 2])} --moe-router-topk {rng.choice([2, 4])}",
        f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff {rng.choice([0.0, 0.3])}",
        rng.choice(["", "--moe-z-loss-coeff 0.1"]),
        "--moe-router-score-function sigmoid" if is_sigmoid else "",
        rng.choice(["", "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"]) if is_sigmoid else "",
        rng.choice(["", "", "--moe-expert-capacity-factor 0.9"]),
        rng.choice(["", "--moe-shared-expert-intermediate-size 16"]),
        rng.choice(["", "", "--moe-token-dispatcher-type allgather"]),
        "--moe-router-num-groups 4 --moe-router-group-topk 2" if rng.random() < 0.3 else "",
    ]
    return " ".join(filter(None, flags))


def draw_layout(rng: random.Random, row: str) -> str:
    """A layout of up to eight ranks that fits the row's model."""
    model = run_of(row)[1].model
    while True:
        tp, cp, dp, pp = (rng.choice([1, 1, 2, 2, 4]) for _ in range(4))
        if 1 < tp * cp * dp * pp <= MOST_RANKS:
            break
    schedules = {
        "": 1,
        "--pipeline-schedule gpipe": 1,
        "--num-virtual-stages-per-pipeline-rank 2": 2,
        "--pipeline-schedule zb-h1": 1,
        "--pipeline-schedule zb-v": 2,
    }
    fitting = [name for name, chunks in schedules.items() if pp * chunks <= model.num_layers]
    sharded, has_experts = rng.random() < 0.5, EXPERTS in row
    sizes = [(ep, etp) for ep in (1, 2, 4, 8) for etp in (1, 2, 4) if tp * cp * dp % (ep * etp) == 0]
    ep, etp = rng.choice(sizes)
    micro = rng.choice([size for size in (1, 2, 4) if GLOBAL_BATCH % (size * dp) == 0])
    words = [
        f"--world-size {tp * cp * dp * pp} --tensor-model-parallel-size {tp} --context-parallel-size {cp}",
        f"--pipeline-model-parallel-size {pp} --micro-batch-size {micro}",
        rng.choice(fitting) if pp > 1 else "",
        rng.choice(["", "", "--no-overlap-p2p-communication"]) if pp > 1 else "",
        rng.choice(["", "", "--use-tp-pp-dp-mapping"]),
        "--sequence-parallel" if tp > 1 and LENGTH // cp % tp == 0 and rng.random() < 0.6 else "",
        "--use-distributed-optimizer" if sharded else "",
        rng.choice(["", "--overlap-grad-reduce --overlap-param-gather" if sharded else "--overlap-grad-reduce"]),
        rng.choice(["", "--ddp-bucket-size 1000", "--ddp-bucket-size 3000"]),
        rng.choice([*RECOMPUTATION, *(OF_EXPERTS if has_experts else ())]),
        draw_exchange(rng, cp, tp, row) if cp > 1 else "",
        f"--expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp}" if has_experts else "",
    ]
    return " ".join(filter(None, words))


def draw_exchange(rng: random.Random, cp: int, tp: int, row: str) -> str:
    """How context-parallel ranks attend to each other's keys: in all layers, or in each another way."""
    model = run_of(row)[1].model
    levels = rng.choice([(size, cp // size) for size in (1, 2, 4) if cp % size == 0])
    every: tuple[CpCommType, ...] = ("p2p", "all_gather", "a2a", "a2a+p2p")
    heads, groups = model.num_attention_heads // tp, max(1, model.num_query_groups // tp)
    fitting = [kind for kind in every if heads_fit(heads, groups, head_exchange_size(kind, cp, levels))]
    kinds = [rng.choice(fitting) for _ in range(rng.choice([1, model.num_layers]))]
    sizes = f" --hierarchical-context-parallel-sizes {levels[0]} {levels[1]}" if "a2a+p2p" in kinds else ""
    return f"--cp-comm-type {' '.join(kinds)}{sizes}"


def heads_fit(heads: int, groups: int, ranks: int) -> bool:
    """Whether ranks that exchange heads get whole ones."""
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


@pytest.mark.parametrize("number", tiers(range(DRAWS), first=range(SOON)))
def test_a_random_layout_computes_the_model_of_one_rank(number: int) -> None:
    """Ways to divide work that are right alone, and in every pair, may be wrong together."""
    seed = int(os.environ[LAYOUT_SEED])
    rng = random.Random(seed + number)
    row = draw_model(rng)
    layout = draw_layout(rng, row)
    reference = train_alone(row, f"--micro-batch-size {GLOBAL_BATCH}")
    try:
        check(train_at(row, layout), [reference])
    except (AssertionError, ParallelError) as error:
        raise AssertionError(f"{LAYOUT_SEED}={seed}, draw {number}: {row} at {layout}") from error
