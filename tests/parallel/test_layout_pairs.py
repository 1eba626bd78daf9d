"""A real model's checkpoint through random pairs of layouts: what another layout loads and saves again is the same."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.core.models.registry import FAMILIES, Family
from megatron.core.parallel.context import ParallelContext
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.step import train_step
from tests.end_to_end.commands import assert_same_tensors
from tests.harness import run_ranks
from tests.harness.runs import GPT, tiny_run
from tests.tiers import tiers

MOST_RANKS, PAIRS = 8, 8
FIRST_SEED = 3148  # from which on each model's pairs are of every way to split
MODELS = {
    "gpt2": "--vocab-size 51",
    "llama": "--vocab-size 53 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --ema-decay 0.9",
    "bert": "--vocab-size 57",
    "t5": "--vocab-size 59 --decoder-num-layers 4 --position-embedding-type relative --normalization RMSNorm --relu "
    "--disable-bias-linear",
}
BASE = (
    "--mock-data --num-layers 5 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 12 "
    "--train-iters 9 --save-interval 100"
)


def draw_layout(rng: random.Random) -> tuple[dict[str, int], str]:
    """Sizes of the axes and the flags that say so."""
    while True:
        tp, pp, cp, dp = (
            rng.choice([1, 2, 4]),
            rng.choice([1, 2, 2, 4]),
            rng.choice([1, 1, 2]),
            rng.choice([1, 2, 3, 4]),
        )
        if tp * pp * cp * dp <= MOST_RANKS:
            break
    flags = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp}"
    if pp == 2:
        flags += rng.choice(["", " --num-virtual-stages-per-pipeline-rank 2", " --pipeline-schedule zb-v"])
    flags += rng.choice(["", " --use-distributed-optimizer"])
    return {"tp": tp, "pp": pp, "cp": cp, "dp": dp}, flags


def family_of_model(model: str) -> Family:
    """GPT's, unless it is one by name."""
    return FAMILIES.get(model, GPT)


def step_and_save(context: ParallelContext, model: str, flags: str) -> None:
    """A checkpoint whose moments are not zero."""
    with contextlib.redirect_stdout(io.StringIO()):
        run = tiny_run(context, flags, family=family_of_model(model))
        batches = run.data.training_batches(0)
        train_step(run, next(batches))
        run.progress.iteration = 1
        Saver(run).save()


def load_and_save(context: ParallelContext, model: str, flags: str) -> None:
    """The same checkpoint, as this layout writes it."""
    with contextlib.redirect_stdout(io.StringIO()):
        run = tiny_run(context, flags, family=family_of_model(model))
        load(run)
        Saver(run).save()


def draw_pair(number: int) -> tuple[str, list[tuple[dict[str, Any], str]]]:
    """A model, which take turns, and what it is saved and loaded by."""
    rng = random.Random(FIRST_SEED + number)
    return list(MODELS)[number % len(MODELS)], [draw_layout(rng), draw_layout(rng)]


@pytest.mark.parametrize("number", tiers(range(PAIRS), first=(0, 3)))
def test_what_another_layout_writes_is_the_same(number: int, tmp_path: Path) -> None:
    """Weights, fp32 main_params and moments, element by element, of whatever split into whatever other one."""
    model, ((saved, first), (loaded, second)) = draw_pair(number)
    flags = f"{BASE} {MODELS[model]}"
    run_ranks(step_and_save, model, f"{flags} {first} --save {tmp_path / 'a'}", **saved)
    run_ranks(load_and_save, model, f"{flags} {second} --load {tmp_path / 'a'} --save {tmp_path / 'b'}", **loaded)
    assert_same_tensors(tmp_path / "a" / "iter_0000001", tmp_path / "b" / "iter_0000001")


@pytest.mark.parametrize("model", tiers(["t5", "bert"], first=["t5"]))
def test_experts_that_another_layout_writes_are_the_same(model: str, tmp_path: Path) -> None:
    """Experts, routers and biases of both stacks of a T5, and of a BERT, divided over other ranks than before."""
    experts = "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    flags = f"{BASE} {MODELS[model]} {experts}"
    first = f"{flags} --expert-model-parallel-size 2 --save {tmp_path / 'a'}"
    run_ranks(step_and_save, model, first, dp=2, ep=2)
    second = f"{flags} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
    second += f" --expert-tensor-parallel-size 1 --load {tmp_path / 'a'} --save {tmp_path / 'b'}"
    run_ranks(load_and_save, model, second, tp=2, pp=2, etp=1)
    assert_same_tensors(tmp_path / "a" / "iter_0000001", tmp_path / "b" / "iter_0000001")


def test_groups_that_ranks_share_are_the_same(tmp_path: Path) -> None:
    """Input matrices and convolutions of state-space layers, whose B and C two ranks hold and others divide."""
    flags = (
        f"{BASE} --vocab-size 51 --hybrid-layer-pattern MM*-M --mamba-num-groups 2 --mamba-head-dim 8 "
        "--mamba-state-dim 3 --position-embedding-type none --use-distributed-optimizer"
    )
    first = f"{flags} --tensor-model-parallel-size 4 --save {tmp_path / 'a'}"
    run_ranks(step_and_save, "gpt2", first, tp=4, dp=2)
    second = f"{flags} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --load {tmp_path / 'a'}"
    run_ranks(load_and_save, "gpt2", f"{second} --save {tmp_path / 'b'}", tp=2, pp=2)
    assert_same_tensors(tmp_path / "a" / "iter_0000001", tmp_path / "b" / "iter_0000001")


@pytest.mark.parametrize("model", MODELS)
def test_pairs_of_each_model_are_of_every_way(model: str) -> None:
    """A family that is only ever copied between replicas would look proven."""
    pairs = [pair for name, pair in map(draw_pair, range(PAIRS)) if name == model]
    assert all(saved != loaded for (saved, _), (loaded, _) in pairs)
    sizes = [layout for pair in pairs for layout, _ in pair]
    flags = " ".join(words for pair in pairs for _, words in pair)
    assert all(max(layout[axis] for layout in sizes) > 1 for axis in ("tp", "pp", "cp", "dp"))
    assert "--use-distributed-optimizer" in flags
    assert "--num-virtual-stages-per-pipeline-rank" in flags or "zb-v" in flags
