"""The run that a rehearsal makes of a run."""

from __future__ import annotations

from megatron.core.models.registry import FAMILIES
from megatron.rehearsal.settings import rehearsed
from tests.harness.runs import tiny_config


def test_the_schedule_is_left_out_and_the_policy_of_parameters_is_not() -> None:
    """``--lr-multipliers`` began like the flags of the schedule and was left out with them: the rehearsal had other
    buffers, and so other collectives, than the run.
    """
    run = tiny_config("--mock-data --lr-warmup-iters 2 --lr-decay-style cosine --lr-multipliers embedding.*=0.5")
    found = rehearsed(run, FAMILIES["gpt"].train_spec, vocab_size=64, steps=1).optimizer
    assert (found.lr_multipliers, found.lr_warmup_iters) == (("embedding.*=0.5",), 0)
    assert found.lr_decay_style == "constant"
