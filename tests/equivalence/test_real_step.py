"""The step that users run, from data files to updated weights, computes on any layout what it computes on one rank.

The table of ``test_equivalence`` puts microbatches of its own through the same parts. Here ``TrainingData``,
``build_run``, ``train_step``, batch ramp-up and the loss over ranks are the real ones. Tolerance 1e-9 in fp64.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.distributed import grad_sync, param_gather
from megatron.core.ops.compiled import compile_bodies
from megatron.core.parallel.collectives import all_gather_into_async, reduce_scatter_into_async
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.reporting.metrics import StepRecord
from megatron.training.step import train_step
from tests.harness import run_ranks
from tests.harness.runs import tiny_run
from tests.tiers import tiers

STEPS, TOLERANCE = 3, 1e-9

FLAGS = (
    "--tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 "
    "--reset-position-ids --reset-attention-mask --eod-mask-loss "
    "--global-batch-size 8 --rampup-batch-size 4 4 8 --train-samples 24 --eval-iters 1 --split 8,2,0 "
    "--clip-grad 0.5 --lr-warmup-samples 6 "
    "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.7"
)
"""Steps of 4, 4 and 8 samples; losses that count differently on each rank."""

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank, micro-batches of 4": ("--micro-batch-size 4", {}),
    "tp2": ("--tensor-model-parallel-size 2", {"tp": 2}),
    "tp2 sp": ("--tensor-model-parallel-size 2 --sequence-parallel", {"tp": 2, "sequence_parallel": True}),
    "dp2": ("", {"dp": 2}),
    "cp2": ("--context-parallel-size 2", {"cp": 2}),
    "cp2, another way in each layer": ("--context-parallel-size 2 --cp-comm-type all_gather a2a", {"cp": 2}),
    "cp2 tp2 sp": (
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        {"cp": 2, "tp": 2, "sequence_parallel": True},
    ),
    "cp4 heads and rings": (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        {"cp": 4},
    ),
    "cp2 dp2 zero overlapped": (
        "--context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        {"cp": 2, "dp": 2},
    ),
    "pp2": ("--pipeline-model-parallel-size 2", {"pp": 2}),
    "pp4 gpipe, ends alone": (
        "--pipeline-model-parallel-size 4 --pipeline-schedule gpipe --pipeline-model-parallel-layout E|t|t|L",
        {"pp": 4},
    ),
    "pp2 zb-v dp2 zero overlapped": (
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout E|t|t|L "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000",
        {"pp": 2, "dp": 2},
    ),
    "pp2 vpp2 tp2 sp dp2, pipeline ranks side by side": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-tp-pp-dp-mapping "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --no-overlap-p2p-communication",
        {"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True, "pp_before_dp": False},
    ),
    "dp2 overlapped": ("--overlap-grad-reduce --ddp-bucket-size 1000", {"dp": 2}),
    "dp2 zero": ("--use-distributed-optimizer", {"dp": 2}),
    "dp2 zero, padded buckets": ("--use-distributed-optimizer --ddp-pad-buckets-for-high-nccl-busbw", {"dp": 2}),
    "dp2 zero overlapped": (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000",
        {"dp": 2},
    ),
}
FIRST = (
    "one rank, micro-batches of 4",
    "cp2 tp2 sp",
    "cp2 dp2 zero overlapped",
    "pp2 zb-v dp2 zero overlapped",
    "pp4 gpipe, ends alone",
    "dp2 zero, padded buckets",
)
"""Layouts of which the others are parts, or which the equivalence table has."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of short documents, several to a sample, each ending in the tokenizer's last id."""
    prefix, rng = str(tmp_path_factory.mktemp("documents") / "data"), np.random.default_rng(3)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in rng.integers(2, 20, 200):
            writer.add_document([*rng.integers(0, 50, length), 50])
    return prefix


def train(context: ParallelContext, flags: str) -> tuple[list[StepRecord], float]:
    """Records of three steps, and the validation loss after them."""
    run = tiny_run(context, flags)
    batches = run.data.training_batches(0)
    records = [train_step(run, next(batches)) for _ in range(STEPS)]
    return records, evaluate(run, run.data.evaluation_batches("valid", evaluation=0)).means["lm loss"]


@pytest.fixture(scope="module")
def one_rank(data: str) -> tuple[list[StepRecord], float]:
    return train(ParallelContext.single(dtype=torch.float64), f"--data-path {data} {FLAGS}")


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=FIRST))
def test_layout_takes_the_steps_of_one_rank(layout: str, data: str, one_rank: tuple[list[StepRecord], float]) -> None:
    """A wrong sample, count, rate or collective anywhere on the way would train another model at this layout."""
    flags, axes = LAYOUTS[layout]
    expected, validation = one_rank
    for records, loss in run_ranks(train, f"--data-path {data} {FLAGS} {flags}", dtype=torch.float64, **axes):
        for record, wanted in zip(records, expected):
            assert record.losses["lm loss"] == pytest.approx(wanted.losses["lm loss"], abs=TOLERANCE, rel=0)
            assert record.grad_norm == pytest.approx(wanted.grad_norm, abs=TOLERANCE, rel=0)
            assert record.learning_rate == wanted.learning_rate
            assert (record.iteration, record.consumed_samples) == (wanted.iteration, wanted.consumed_samples)
        assert loss == pytest.approx(validation, abs=TOLERANCE, rel=0)


def train_compiled(context: ParallelContext, flags: str) -> tuple[list[StepRecord], float]:
    """``train`` with the functions of --compile compiled."""
    compile_bodies(True, context.device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler warns of what torch itself does
            return train(context, flags)
    finally:
        compile_bodies(False, context.device)


@pytest.mark.slow  # two ranks and a C++ compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("layout", ["tp2 sp", "cp2"])
def test_compiled_functions_take_the_steps_of_eager_ones(layout: str, data: str) -> None:
    """Norms and rotary tables of a part of the sequence, and recomputed ones."""
    flags, axes = LAYOUTS[layout]
    kinds = "--position-embedding-type rope --normalization RMSNorm --swiglu --recompute-granularity full"
    line = f"--data-path {data} {FLAGS} {kinds}"
    expected, validation = train(ParallelContext.single(dtype=torch.float64), line)
    for records, loss in run_ranks(train_compiled, f"{line} {flags}", dtype=torch.float64, timeout=240, **axes):
        for record, wanted in zip(records, expected):
            assert record.losses["lm loss"] == pytest.approx(wanted.losses["lm loss"], abs=TOLERANCE, rel=0)
            assert record.grad_norm == pytest.approx(wanted.grad_norm, abs=TOLERANCE, rel=0)
        assert loss == pytest.approx(validation, abs=TOLERANCE, rel=0)


def test_the_steps_are_those_that_the_flags_describe(data: str) -> None:
    """Comparing layouts with each other cannot see what is wrong on all of them, such as a rate that is never used."""
    run = tiny_run(ParallelContext.single(dtype=torch.float64), f"--data-path {data} {FLAGS}")
    batches = run.data.training_batches(0)
    with mock.patch.object(run.optimizer, "update", wraps=run.optimizer.update) as update:
        records = [train_step(run, next(batches)) for _ in range(STEPS)]
    assert [record.global_batch_size for record in records] == [4, 4, 8]
    assert [record.consumed_samples for record in records] == [4, 8, 16]
    # Up to 1e-2 at sample 6, then linear to zero at sample 24; the log shows the rate of the step to come.
    rates = [0.0, 1e-2 * 4 / 6, 1e-2 * (1 - 2 / 18), 1e-2 * (1 - 10 / 18)]
    assert [call.kwargs["lr"] for call in update.call_args_list] == pytest.approx(rates[:-1])
    assert [record.learning_rate for record in records] == pytest.approx(rates[1:])
    assert [call.kwargs["weight_decay"] for call in update.call_args_list] == pytest.approx([0.1, 0.2, 0.3])


def test_documents_and_positions_reach_the_model(data: str) -> None:
    """The reset flags would have no effect: on all layouts alike, so that no comparison between them shows it."""
    run = tiny_run(ParallelContext.single(dtype=torch.float64), f"--data-path {data} {FLAGS}")
    microbatch, model = next(run.data.training_batches(0))[0], run.models[0]
    inputs = {name: microbatch.tensors[name] for name in ("tokens", "position_ids", "document_ids")}
    assert inputs["document_ids"].max() > 0, "the samples hold several documents"

    def logits(**given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(**given).logits()
        return found

    taken = run.train_spec.forward(model, {}, microbatch).logits()
    assert torch.equal(taken, logits(**inputs))
    for left_out in ("position_ids", "document_ids"):
        without = {name: tensor for name, tensor in inputs.items() if name != left_out}
        assert not torch.allclose(taken, logits(**without))


def second_step(context: ParallelContext, flags: str) -> list[str]:
    """What happens in it: "reduce" and "gather" start those of a bucket, "gathered" ends one.

    The first step only learns which gradients come.
    """
    run = tiny_run(context, flags)
    batches, seen = run.data.training_batches(0), []

    def seeing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen.append(name)
            return function(*arguments)

        return call

    def start_gather(*arguments: Any) -> Any:
        return mock.Mock(wait=seeing("gathered", all_gather_into_async(*arguments).wait))

    with (
        mock.patch.object(run.grad_sync, "finish", seeing("backward done", run.grad_sync.finish)),
        mock.patch.object(grad_sync, "reduce_scatter_into_async", seeing("reduce", reduce_scatter_into_async)),
        mock.patch.object(param_gather, "all_gather_into_async", seeing("gather", start_gather)),
    ):
        train_step(run, next(batches))
        seen.clear()
        train_step(run, next(batches))
    return seen


@pytest.mark.parametrize("overlap", ["", "--overlap-grad-reduce", "--overlap-grad-reduce --overlap-param-gather"])
def test_overlap_flags_overlap(overlap: str, data: str) -> None:
    """They change no number, so nobody would notice a flag that does nothing."""
    flags = f"--data-path {data} {FLAGS} --use-distributed-optimizer --ddp-bucket-size 1000 {overlap}"
    for seen in run_ranks(second_step, flags, dp=2):
        reduces_in_backward = seen.index("reduce") < seen.index("backward done")
        assert reduces_in_backward == ("--overlap-grad-reduce" in overlap)
        waits_in_update = "gathered" in seen[seen.index("gather") :]
        assert waits_in_update == ("--overlap-param-gather" not in overlap)
        assert seen.count("gathered") == seen.count("gather") > 1
