"""A score is a fact about the model: no layout and no micro-batch size may change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.parallel.context import ParallelContext
from tests.harness.evaluation import OPENINGS, WIKITEXT, SmallGPT2, run_task, small_gpt2
from tests.harness.ranks import run_ranks
from tests.tiers import tiers

LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "dp3": ({"dp": 3}, "--micro-batch-size 5"),
    "tp2 sp": ({"tp": 2, "sequence_parallel": True}, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp4": ({"pp": 4}, "--pipeline-model-parallel-size 4 --micro-batch-size 1"),
    "cp2": ({"cp": 2}, "--context-parallel-size 2 --micro-batch-size 3"),
    "cp2 a2a": ({"cp": 2}, "--context-parallel-size 2 --cp-comm-type a2a"),
    "interleaved": (
        {"pp": 2},
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 4",
    ),
    "zero-bubble V": ({"pp": 2}, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "tp2 pp2": ({"tp": 2, "pp": 2}, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "tp2 sp cp2 dp2": (
        {"tp": 2, "cp": 2, "dp": 2, "sequence_parallel": True},
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --micro-batch-size 2",
    ),
    "tp2 sp pp2 cp2": (
        {"tp": 2, "pp": 2, "cp": 2, "sequence_parallel": True},
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
}
TASKS = (
    "--task WIKITEXT103 --overlapping-eval 10 --valid-data {}/wiki.tokens",
    "--task LAMBADA --strict-lambada --valid-data {}/passages.jsonl",
    "--task LM --valid-data {}/passages.jsonl {}/wiki.tokens",
)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> SmallGPT2:
    pytest.importorskip("transformers", reason="converts a model of transformers")
    folder = tmp_path_factory.mktemp("tasks")
    samples = [" ".join(opening.split()[: 2 + cut]) for opening in OPENINGS for cut in range(len(opening.split()) - 1)]
    (folder / "passages.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in samples))
    (folder / "wiki.tokens").write_text(WIKITEXT)
    return small_gpt2(folder)


def all_metrics(context: ParallelContext, folder: Path, native: Path, flags: str) -> list[dict[str, float]]:
    return [
        dict(run_task(context, *task.format(folder, folder).split(), "--load", str(native), *flags.split()).metrics)
        for task in TASKS
    ]


@pytest.fixture(scope="module")
def alone(gpt2: SmallGPT2) -> list[dict[str, float]]:
    return all_metrics(ParallelContext.single(), gpt2.native.parent, gpt2.native, "")


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=("dp3", "tp2 sp", "cp2 a2a", "zero-bubble V")))
def test_every_layout_gives_the_same_scores(layout: str, gpt2: SmallGPT2, alone: list[dict[str, float]]) -> None:
    """On every rank: to 1e-6, and predictions and counts exactly."""
    axes, flags = LAYOUTS[layout]
    for rank in run_ranks(all_metrics, gpt2.native.parent, gpt2.native, flags, **axes):
        assert rank == [pytest.approx(metrics, rel=1e-6) for metrics in alone]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_no_batch_size_changes_them(size: int, gpt2: SmallGPT2, alone: list[dict[str, float]]) -> None:
    """Neighbours in a batch, and padding, mean nothing to a sample."""
    found = all_metrics(ParallelContext.single(), gpt2.native.parent, gpt2.native, f"--micro-batch-size {size}")
    assert found == [pytest.approx(metrics, rel=1e-6) for metrics in alone]
