"""The line with which check_parity.py says what it compares."""

from __future__ import annotations

from megatron.core.models.registry import FAMILIES
from megatron.planning.shrinking import SMALL_VOCABULARY, shrunk, without_files
from tests.harness.runs import tiny_config
from tools.check_parity import describe


def test_it_names_every_stack_and_part() -> None:
    """A T5 with experts was "2 layers of 16": its decoder, its experts and their ranks were left out."""
    flags = "--mock-data --decoder-num-layers 3 --decoder-seq-length 8 --num-experts 4 --expert-model-parallel-size 2"
    run = tiny_config(f"{flags} --pipeline-model-parallel-size 3", ranks=6, family=FAMILIES["t5"])
    line = describe(shrunk(without_files(run, vocab_size=SMALL_VOCABULARY, steps=3)))
    assert line.startswith("pipeline 3 x data 2 x expert 2: 2 encoder and 2 decoder layers of ")
    assert "4 experts of 64 in 4 layers, 2 for each token" in line
