"""FLOPs of hybrids, by Megatron-LM's formula and by what layers compute."""

from __future__ import annotations

import pytest

from megatron.core.models.registry import FAMILIES
from megatron.planning.estimate import flops_per_sample
from megatron.training.reporting.hybrid_flops import megatron_lm_flops
from tests.unit.config.command_lines import parse

FAMILY = FAMILIES["gpt"]


def test_megatron_lms_formula() -> None:
    """Its TFLOP/s of the same run were not comparable with ours."""
    flags = "--hybrid-layer-pattern M*- --mamba-state-dim 16 --mamba-head-dim 32 --mamba-num-groups 2"
    run = parse(flags, without="--num-layers", extra_groups=FAMILY.groups).with_vocab_size(100)
    mamba = 2 * 64 * (2 * 128 + 2 * 2 * 16 + 4) + 7 * 128 * 16 + 2 * 128 * 64
    attention, mlp, logits = 4 * 64 * (64 + 64 + 32 / 2), 16 * 64 * 64, 2 * 64 * 128
    assert megatron_lm_flops(run) == 3 * 32 * (mamba + attention + mlp + logits)
    ours = flops_per_sample(run, FAMILY.train_spec)
    assert ours == pytest.approx(megatron_lm_flops(run), rel=0.2)
    assert megatron_lm_flops(parse(extra_groups=FAMILY.groups).with_vocab_size(100)) is None
