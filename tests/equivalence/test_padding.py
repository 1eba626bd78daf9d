"""Padding is nothing to experts: steps on padded samples are those on the same text without padding, at every layout.

Each sample holds a document of 26 tokens and one of 16, which fill 40 positions: ``--seq-length 40`` has no padding,
44 has some at the end of each sample. Tolerance 1e-9 in fp64.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.moe.router import Router
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.step import train_step
from tests.harness import run_ranks
from tests.harness.runs import tiny_run
from tests.tiers import pairs

TOLERANCE = 1e-9
FULLEST, IN_TURN = "capacity, bias, groups, shared experts, future tokens", "experts in turn"
"""A token's turn is that on its rank, so layouts differ."""
FULL, PADDED = "--seq-length 40", "--seq-length 44"
FLAGS = (
    "--tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 --packing best-fit --split 8,2,0 "
    "--position-embedding-type rope --swiglu --disable-bias-linear --clip-grad 0.5 --full-validation --eval-iters 1 "
    "--num-experts 8 --moe-ffn-hidden-size 16 --moe-per-layer-logging --moe-z-loss-coeff 0.1"
)
LOSSES = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.3 0.2"
VARIANTS = {
    "losses": LOSSES,
    "a loss over all replicas": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.3",
    FULLEST: (
        "--moe-expert-capacity-factor 1.0 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 "
        "--moe-router-score-function sigmoid --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
        f"--moe-shared-expert-intermediate-size 16 --mtp-num-layers 2 {LOSSES}"
    ),
    "capacity by position, all tokens to all ranks": (
        "--moe-expert-capacity-factor 0.8 --moe-token-drop-policy position --moe-token-dispatcher-type allgather "
        f"--moe-router-topk 3 {LOSSES}"
    ),
    "sinkhorn": "--moe-router-load-balancing-type sinkhorn --mtp-num-layers 1",
    "sinkhorn, one expert for a token": "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
    IN_TURN: "--moe-router-force-load-balancing",
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank, recompute full": ("--recompute-granularity full", {}),
    "one rank, recompute moe": ("--recompute-granularity selective --recompute-modules moe moe_act", {}),
    "ep2": ("--expert-model-parallel-size 2", {"dp": 2, "ep": 2}),
    "tp2 etp1 ep2": (
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
        {"tp": 2, "ep": 2, "etp": 1},
    ),
    "tp2 etp2": ("--tensor-model-parallel-size 2", {"tp": 2}),
    "cp2 ep2": ("--context-parallel-size 2 --expert-model-parallel-size 2", {"cp": 2, "ep": 2}),
    "tp2 sp cp2 ep4 etp1": (
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --expert-model-parallel-size 4",
        {"tp": 2, "sequence_parallel": True, "cp": 2, "ep": 4, "etp": 1},
    ),
    "pp2 dp2 ep2 zero": (
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer",
        {"pp": 2, "dp": 2, "ep": 2},
    ),
}
RICH = ("cp2 ep2", "pp2 dp2 ep2 zero", "tp2 etp1 ep2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of documents of 26 and of 16 tokens, equally many."""
    prefix, rng = str(tmp_path_factory.mktemp("documents") / "data"), np.random.default_rng(3)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in [26, 16] * 70:
            writer.add_document(rng.integers(0, 50, length))
    return prefix


def steps(context: ParallelContext, flags: str) -> list[dict[str, float]]:
    """What each of three steps and the validation after them report, and the biases of this rank's experts."""
    run = tiny_run(context, flags)
    batches, found = run.data.training_batches(0), list[dict[str, float]]()
    for _ in range(3):
        record = train_step(run, next(batches))
        assert record.grad_norm is not None
        metrics = {f"{name} {at}": each for name, row in record.layer_metrics.items() for at, each in enumerate(row)}
        found.append({**record.losses, **metrics, "grad norm": record.grad_norm})
    found.append(dict(evaluate(run, run.data.evaluation_batches("valid", evaluation=0)).means))
    routers = [module for model in run.models for module in model.modules() if isinstance(module, Router)]
    biases = {each.metric_name: each.expert_bias for each in routers if each.expert_bias is not None}
    found.append({f"{name} {at}": bias for name, row in biases.items() for at, bias in enumerate(row.tolist())})
    return found


def check(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """``found`` has what ``expected`` has, but for the biases of other stages."""
    for each, wanted in zip(found, expected, strict=True):
        assert each == pytest.approx({name: wanted[name] for name in each}, abs=TOLERANCE, rel=TOLERANCE)
    assert all({*each} == {*wanted} for each, wanted in zip(found[:-1], expected))


def line(data: str, variant: str, length: str, *, replicas: int = 1) -> str:
    """Flags of a run whose replicas compute four samples at a time where a loss is over those, else two each."""
    size = 4 // replicas if "global_aux_loss" in VARIANTS[variant] else 2
    return f"--data-path {data} {FLAGS} {VARIANTS[variant]} {length} --micro-batch-size {size}"


@functools.cache
def unpadded(data: str, variant: str) -> list[dict[str, float]]:
    """On one rank, without padding."""
    return steps(ParallelContext.single(dtype=torch.float64), line(data, variant, FULL))


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_changes_nothing(variant: str, data: str) -> None:
    """Rows of padding chose experts, took their capacity, moved losses and biases, and filled the report."""
    found = steps(ParallelContext.single(dtype=torch.float64), line(data, variant, PADDED))
    check(found, unpadded(data, variant))


def choices(flags: str) -> list[float]:
    """How many a step's tokens make in each layer."""
    step = steps(ParallelContext.single(dtype=torch.float64), flags)[0]
    chosen = ([step[f"experts of layer {layer} {expert}"] for expert in range(8)] for layer in range(4))
    return [sum(each) for each in chosen]


def test_each_row_of_text_counts_once(data: str) -> None:
    """Of the last tokens of a document, later ones aren't known: zeros, or words of another document, were routed."""
    flags = f"--data-path {data} {FLAGS} {LOSSES} --mtp-num-layers 2 --moe-router-topk 2 {PADDED}"
    samples, documents, text = 8, 2, 40
    assert choices(flags) == [2 * samples * rows for rows in (text, text, text - documents, text - 2 * documents)]
    assert choices(f"{flags} --moe-count-padding") == [2 * samples * 44] * 4


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        [each for each in VARIANTS if each != IN_TURN],
        LAYOUTS,
        rich=RICH,
        # test_experts.py has them.
        slow=[*(each for each in LAYOUTS if each not in RICH), "sinkhorn", FULLEST],
    ),
)
def test_padding_changes_nothing_at_any_layout(variant: str, layout: str, data: str) -> None:
    """Ranks hold different shares of the padding: one of them may have no text of a sample, and others nothing else."""
    more, axes = LAYOUTS[layout]
    flags = f"{line(data, variant, PADDED, replicas=axes.get('dp', 1))} {more}"
    for found in run_ranks(steps, flags, dtype=torch.float64, **axes):
        check(found, unpadded(data, variant))


def validation(flags: str) -> dict[str, float]:
    """What the first validation reports."""
    run = tiny_run(ParallelContext.single(dtype=torch.float64), flags)
    return evaluate(run, run.data.evaluation_batches("valid", evaluation=0)).means


def test_samples_that_fill_a_batch_count_for_nothing(data: str) -> None:
    """--full-validation fills its last batch with a copy of a sample, which routers' losses of validation contained."""
    flags = f"--data-path {data} {FLAGS} {FULL} --packing stream --moe-router-load-balancing-type seq_aux_loss "
    flags += "--moe-aux-loss-coeff 0.3"
    batches = [validation(f"{flags} --global-batch-size {size}") for size in (2, 8)]
    assert batches[0] == pytest.approx(batches[1], rel=1e-12)
