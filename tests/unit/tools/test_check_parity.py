"""The line with which check_parity.py says what it compares."""

from __future__ import annotations

from megatron.core.models.registry import FAMILIES
from megatron.errors import ConfigError
from megatron.planning.shrinking import SMALL_VOCABULARY, shrunk, without_files
from tests.harness.runs import TINY_RUN, tiny_config
from tests.harness.sentences import check_sentence, expect_error
from tools.check_parity import describe, main


def test_it_names_every_stack_and_part() -> None:
    """A T5 with experts was "2 layers of 16": its decoder, its experts and their ranks were left out."""
    flags = "--mock-data --decoder-num-layers 3 --decoder-seq-length 8 --num-experts 4 --expert-model-parallel-size 2"
    run = tiny_config(f"{flags} --pipeline-model-parallel-size 3", ranks=6, family=FAMILIES["t5"])
    line = describe(shrunk(without_files(run, vocab_size=SMALL_VOCABULARY, steps=3)))
    assert line.startswith("pipeline 3 x data 2 x expert 2: 2 encoder and 2 decoder layers of ")
    check_sentence(line, "4", "64", "4", "2")


def test_workers_that_train_apart_are_refused() -> None:
    """It reported wrong gradients: workers read samples of their own, and differ until they meet."""
    flags = f"{TINY_RUN} --train-iters 3 --mock-data --tokenizer-type NullTokenizer --world-size 2 --diloco-workers 2"
    with expect_error(ConfigError, "--diloco-workers 2"):
        main(flags.split())
