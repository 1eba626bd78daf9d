"""Checkpoints of runs that keep the optimizer's numbers in other formats or places, at other layouts, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.commands import assert_same_tensors
from tests.harness import run_ranks
from tests.parallel.test_layout_pairs import BASE, MODELS, load_and_save, step_and_save

AWARE = "--use-precision-aware-optimizer"


OFFLOADED = "--optimizer-cpu-offload --optimizer-offload-fraction 0.4"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(AWARE, "", id="remainders", marks=pytest.mark.slow),  # below with main memory
        pytest.param("", AWARE, id="into remainders", marks=pytest.mark.slow),
        pytest.param(AWARE, OFFLOADED, id="remainders to main memory"),
        pytest.param(OFFLOADED, "", id="main memory", marks=pytest.mark.slow),
    ],
)
def test_masters_are_the_same_at_another_layout(first: str, second: str, tmp_path: Path) -> None:
    """fp32 masters kept as remainders or in main memory would be lost, rounded, or put beside other weights."""
    flags = f"{BASE} {MODELS['llama']} --bf16 --use-distributed-optimizer"
    one, other = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
    run_ranks(step_and_save, "llama", f"{flags} {one} {first} --save {tmp_path / 'a'}", tp=2, dp=2)
    folders = f"--load {tmp_path / 'a'} --save {tmp_path / 'b'}"
    run_ranks(load_and_save, "llama", f"{flags} {other} {second} {folders}", pp=2, dp=3)
    assert_same_tensors(tmp_path / "a" / "iter_0000001", tmp_path / "b" / "iter_0000001")
