"""Training on pairs of answers, at every kind of layout, against one rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.config.run import RunConfig
from megatron.core.models.first_pass import FirstPass
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.compared import ComparedObjective
from megatron.core.objectives.preference import build
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed, observe
from megatron.training.run.run import build_run
from tests.equivalence.families import LENGTH, STEPS, VOCABULARY
from tests.equivalence.flags import CP2, EP2, ETP1, EXPERTS, FULL, FUSED, LLAMA, LOOPED, PP2, SELECTIVE, SP, TP2, ZB_H1
from tests.equivalence.flags import VEE as ZB_V
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import at, run_of
from tests.harness import run_ranks
from tests.harness.pairs import write_pairs
from tests.harness.runs import context_of
from tests.tiers import pairs

SHAPE = f"{LLAMA} --num-layers 4 --pretrained-checkpoint unread"
VARIANTS: dict[str, str] = {
    "dpo": f"{SHAPE} --preference-loss dpo --preference-label-smoothing 0.1 --preference-sft-weight 0.3",
    "orpo, experts": f"{SHAPE} {EXPERTS} --moe-router-topk 2 --preference-loss orpo",
    "ipo, adapters": f"{SHAPE} --preference-loss ipo --preference-beta 0.5 --lora-rank 3",
    "kto": f"{SHAPE} --preference-loss kto --preference-beta 0.5 --undesirable-weight 1.5 --preference-sft-weight 0.2",
}
LAYOUTS: dict[str, str] = {
    "tp2 sp cp2": f"--world-size 4 {TP2} {SP} {CP2} {ETP1} {SELECTIVE}",
    "cp2 dp2 zero 2, one at a time": f"--world-size 4 {CP2} --zero-stage 2 --micro-batch-size 1",
    "tp2 sp ep2 dp2 zero 1": f"--world-size 4 {TP2} {SP} {EP2} {ETP1} --zero-stage 1 {FULL}",
    "tp2 dp2 zero 3": f"--world-size 4 {TP2} {SP} {ETP1} --zero-stage 3 {FULL}",
    "pp2 zb-h1 dp2, accumulation fused": f"--world-size 4 {PP2} {ZB_H1} {FUSED}",
    "pp2 vpp2": f"--world-size 2 {LOOPED} {FULL}",
    "pp2 zb-v cp2": f"--world-size 4 {ZB_V} {CP2}",
}


def train(context: ParallelContext, row: str, layout: str, prefix: str) -> Observed:
    """The table's steps on pairs from files, on this rank."""
    family, config = run_of(row, layout)
    data = replace(config.data, mock_data=False, data_path=(prefix,), split="1,0,0")
    run = build_run(replace(config, data=data), shifted(family.train_spec, config), context_of(config, context))
    return observe(run, steps=STEPS)


def shifted(family: TrainSpec, run: RunConfig) -> ComparedObjective:
    """Compares with an initial model that isn't quite the trained one, so that no reward of the first step is 0. Other
    answers are likelier by now, so KTO's baseline isn't either.
    """
    objective = build(family, run)
    compute = objective.before_training

    def before_training(first: FirstPass) -> Sequence[str]:
        found = compute(first)
        for dataset in objective._datasets:
            dataset.scores.values[:] += 0.1 * np.sin(np.arange(dataset.scores.values.size).reshape(-1, 2)) - 0.1
        return found

    objective.before_training = before_training  # type: ignore[method-assign]
    return objective


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Nine pairs: the second batch begins the second epoch."""
    folder: Path = tmp_path_factory.mktemp("pairs")
    return write_pairs(folder / "pairs", pairs=9, longest=LENGTH, vocab_size=VOCABULARY)


@functools.cache
def reference(variant: str, prefix: str) -> Observed:
    """The table's steps on one rank."""
    return train(ParallelContext.single(dtype=torch.float64), VARIANTS[variant], "", prefix)


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("tp2 sp cp2", "tp2 sp ep2 dp2 zero 1", "pp2 zb-h1 dp2, accumulation fused"),
        more={"kto": ("pp2 zb-h1 dp2, accumulation fused",)},
        # Answers in slices are above, and samples one at a time in test_grpo.py; gradients know no objective.
        slow=("pp2 zb-v cp2", "pp2 vpp2", "kto", "cp2 dp2 zero 2, one at a time"),
    ),
)
def test_layouts_train_on_the_same_preferences(variant: str, layout: str, prefix: str) -> None:
    """Sums over an answer that context-parallel ranks divide, and log-probabilities of the initial model at a layout of
    many stages: a part that is left out gives another loss, gradient or reward. KTO's baseline is of the global batch.
    """
    row = VARIANTS[variant]
    ranks = run_ranks(train, row, LAYOUTS[layout], prefix, **at(row, LAYOUTS[layout]))
    check(ranks, [reference(variant, prefix)])
