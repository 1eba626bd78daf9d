"""Remarks about settings of experts."""

from __future__ import annotations

import pytest

from megatron.config.moe import MoEConfig
from tests.unit.config.test_rules import parsed

BALANCED = "--num-experts 8 --moe-aux-loss-coeff 0.01"
WITH_BIASES = "--num-experts 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
EXPERT_REMARKS = {
    "--num-experts 8 --moe-router-load-balancing-type seq_aux_loss": (
        "nothing balances the load of experts: --moe-router-load-balancing-type seq_aux_loss has a coefficient of 0; "
        "--moe-aux-loss-coeff 0.01 or --moe-router-enable-expert-bias would"
    ),
    f"{BALANCED} --moe-expert-capacity-factor 1.5": (
        "--moe-expert-capacity-factor: capacity is that of a sequence, so every layout drops the same choices; "
        "Megatron-LM's is that of a rank's tokens"
    ),
    "--num-experts 8 --moe-router-load-balancing-type sinkhorn": (
        "--moe-router-load-balancing-type sinkhorn: logits are normalized over the tokens of a microbatch, so every "
        "layout chooses the same experts; Megatron-LM normalizes those of a rank's tokens"
    ),
    f"{BALANCED} --moe-count-padding": (
        "--moe-count-padding: no effect on samples without padding, which --packing best-fit, --data-order megatron, "
        "--fim-rate, --full-validation and --mtp-num-layers may have"
    ),
    "--num-experts 8 --moe-router-force-load-balancing": (
        "--moe-router-force-load-balancing is for benchmarks: choices of the routers are ignored"
    ),
    f"{WITH_BIASES} --moe-router-pre-softmax": (
        "--moe-router-pre-softmax: no effect with another --moe-router-score-function than softmax"
    ),
    f"{BALANCED} --moe-router-bias-update-rate 0.01": (
        "--moe-router-bias-update-rate: no effect without --moe-router-enable-expert-bias"
    ),
    f"{BALANCED} --moe-per-layer-logging": (
        "--moe-per-layer-logging: no effect without --tensorboard-dir, --wandb-project or --mlflow-experiment"
    ),
}


@pytest.mark.parametrize("changes", EXPERT_REMARKS)
def test_remarks_about_experts(changes: str) -> None:
    """A loss that weighs nothing, or a rate of biases that aren't there, was accepted without a word."""
    assert parsed(f"GPT {changes}", "", 1).notes == (EXPERT_REMARKS[changes],)
    assert len(EXPERT_REMARKS) == len(MoEConfig().remarks())
    assert parsed(f"GPT {BALANCED}", "", 1).notes == ()
    assert parsed(f"GPT {BALANCED} --moe-count-padding --packing best-fit", "", 1).notes == ()
    assert parsed(f"GPT {WITH_BIASES} --moe-router-bias-update-rate 0.01", "", 1).notes == ()
