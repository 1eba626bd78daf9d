"""tools/check_parity.py: a user's layout is proved, and one with a fault is caught by the name of a parameter."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.end_to_end.commands import TINY, run
from tests.harness.sentences import check_line, expect_error
from tests.tiers import tiers
from tools import check_parity

TOOL = "tools/check_parity.py"
SHRUNKEN = "--shrink --mock-data --tokenizer-model unused --vocab-file unused --merge-file unused"
FAULTY = """
import sys
import torch
from megatron.core.transformer import norm
from megatron.errors import run_command
from tools import check_parity

class Partial(norm.Norm):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        for parameter in self.parameters():  # its gradient is this rank's part, and nobody adds the others'
            object.__setattr__(parameter.sharding, "partial_grad", ())

from megatron.core.transformer import layer
layer.Norm = Partial
run_command(lambda: check_parity.main(sys.argv[1:]))
"""


EXAMPLES = (
    "@examples/llama/llama3_8b.flags --world-size 4",
    "@examples/llama/llama3_70b.flags --world-size 8 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 8",
    "@examples/gpt3/gpt_345m.flags --world-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 "
    "--tensor-model-parallel-size 2 --fp32-residual-connection --attention-softmax-in-fp32",
    "@examples/bert/bert_340m_distributed.flags --model-type BERT --world-size 4 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2",
    "@examples/t5/t5_220m_distributed.flags --model-type T5 --world-size 4 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --sequence-parallel",
)
FIRST = EXAMPLES[2:3]
"""All ways of dividing work are in the equivalence table."""


@pytest.mark.parametrize("flags", tiers(EXAMPLES, first=FIRST))
def test_layouts_of_the_examples_are_equal_to_one_rank(flags: str) -> None:
    """The command that a user trusts before a month of training."""
    said = run(TOOL, f"{SHRUNKEN} {flags}")
    assert said.count("  equal") == 5
    assert said.rstrip().endswith("== equal (tolerance 1e-09; initial weights bit for bit)")


def test_user_s_own_model_is_compared_without_shrinking() -> None:
    """Without --shrink it is the model of the flags, whose vocabulary is given."""
    said = run(TOOL, f"{TINY} --train-iters 3 --world-size 2 --tensor-model-parallel-size 2 --sequence-parallel")
    check_line(said, "tensor", "2", "2", "32", "4")
    assert "== equal" in said


def test_fault_is_named(tmp_path: Path) -> None:
    """A norm whose gradient is never summed over tensor-parallel ranks: no error shows it, and no look at a curve."""
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    flags = f"{TINY} --train-iters 3 --world-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    said = run(str(script), flags, expect=1)
    assert "layernorm" in said
    assert "Traceback" not in said


def test_more_ranks_than_a_machine_has_processes_for_are_refused() -> None:
    """--world-size 1000000 began to start a million processes."""
    flags = "--vocab-size 100 --train-iters 2 --world-size 1000000 --global-batch-size 2000000"
    with expect_error(ConfigError, "1000000", "--world-size 256"):
        check_parity.main([*TINY.split(), *flags.split()])


def test_layout_that_does_not_fit_is_refused_in_a_sentence() -> None:
    """Before any process is started."""
    said = run(TOOL, f"{TINY} --train-iters 3 --world-size 3 --tensor-model-parallel-size 3", expect=2)
    check_line(said, "--num-attention-heads 4", "--tensor-model-parallel-size 3")


def test_a_launcher_is_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each process started ranks of its own, and the comparison hung or lost ranks."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with expect_error(ConfigError, "check_parity.py", "--world-size 2"):
        check_parity.main([])
