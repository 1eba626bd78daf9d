"""Experts at every kind of layout against one rank: routers, balancing losses, folded grids, ZeRO, recomputation."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron.core.moe import experts as core_experts
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed
from tests.equivalence.flags import (
    CP2,
    EP2,
    EP4,
    ETP1,
    ETP2,
    EXPERTS,
    FULL,
    FUSED,
    LATENT,
    LATER,
    LLAMA,
    LOOPED,
    OFFLOADED,
    PP2,
    SELECTIVE,
    SMALL,
    SP,
    TP2,
    VEE,
    ZB_H1,
    ZERO,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import at, run_of, train, train_alone, train_at
from tests.harness import run_ranks
from tests.tiers import pairs

GLOBAL = "a loss over all replicas, future tokens, losses of layers"
PADDED = "padding, capacity, bias, losses, shared experts, future tokens"
VARIANTS: dict[str, str] = {
    "softmax, all losses": (
        f"{LLAMA} {EXPERTS} --num-layers 4 --moe-router-load-balancing-type aux_loss seq_aux_loss "
        "--moe-aux-loss-coeff 0.3 0.2 --moe-z-loss-coeff 0.1 --moe-per-layer-logging"
    ),
    GLOBAL: (
        f"{LLAMA} {EXPERTS} {LATER} --num-layers 4 --moe-layer-freq [0]+[1]*3 "
        "--moe-router-load-balancing-type global_aux_loss seq_aux_loss --moe-aux-loss-coeff 0.5 0.1 "
        "--moe-per-layer-logging"
    ),
    "sigmoid, groups, shared experts behind a gate, a dense layer": (
        f"{LLAMA} {EXPERTS} --num-layers 4 --moe-layer-freq [0]+[1]*3 --moe-shared-expert-intermediate-size 24 "
        "--moe-shared-expert-gate --moe-router-topk 4 --moe-router-score-function sigmoid "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4 --moe-router-group-topk 2 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3"
    ),
    "bias that balances, one expert for a token": (
        f"{LLAMA} {EXPERTS} --num-layers 4 --moe-shared-expert-intermediate-size 16 --moe-router-topk 1 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
    ),
    "capacity, all tokens to all ranks": (
        f"{LLAMA} {EXPERTS} --num-layers 4 --moe-router-topk 3 --moe-aux-loss-coeff 0.3 "
        "--moe-expert-capacity-factor 0.8 --moe-token-dispatcher-type allgather"
    ),
    "capacity by position": (
        f"{LLAMA} {EXPERTS} --num-layers 4 --moe-expert-capacity-factor 0.8 --moe-token-drop-policy position"
    ),
    "latent attention, groups, bias, shared experts, future tokens, muP": (
        f"{LATENT} {EXPERTS} {LATER} --num-layers 4 --moe-layer-freq [0]+[1]*3 "
        "--moe-shared-expert-intermediate-size 16 --moe-router-topk 4 --moe-router-score-function sigmoid "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 0.1 --use-mup --mup-base-hidden-size 8 --mup-attn-scale-power 0.7 "
        "--mup-base-head-dim 4"
    ),
    PADDED: (
        f"{LLAMA} {EXPERTS} {LATER} --num-layers 4 --reset-attention-mask --packing best-fit "
        "--moe-layer-freq [0]+[1]*3 --moe-shared-expert-intermediate-size 16 --moe-router-topk 3 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 "
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.3 0.2 "
        "--moe-z-loss-coeff 0.1 --moe-expert-capacity-factor 0.8"
    ),
    "sinkhorn, padding, all tokens to all ranks": (
        f"{LLAMA} {EXPERTS} --num-layers 4 --packing best-fit --moe-router-load-balancing-type sinkhorn "
        "--moe-z-loss-coeff 0.1 --moe-token-dispatcher-type allgather"
    ),
    "biases, softmax before the choice": (
        f"{SMALL} {EXPERTS} --num-layers 4 --moe-layer-freq 2 --moe-ffn-hidden-size 32 --moe-router-pre-softmax"
    ),
}

LAYOUTS: dict[str, str] = {
    "one rank, recompute full": f"{FULL}",
    "dp2 ep2, offloaded": f"--world-size 2 {EP2} {OFFLOADED}",
    "ep2": f"--world-size 2 {EP2}",
    "ep4": f"--world-size 4 {EP4}",
    "tp2 ep2 etp1": f"--world-size 2 {TP2} {EP2} {ETP1}",
    "tp2 sp ep2 etp1": f"--world-size 2 {TP2} {SP} {EP2} {ETP1}",
    "tp2 etp1": f"--world-size 2 {TP2} {ETP1}",
    "tp2 etp2": f"--world-size 2 {TP2}",
    "etp2 over dp": f"--world-size 2 {ETP2}",
    "cp2 ep2": f"--world-size 2 {CP2} {EP2}",
    "ep2 etp2 over all": f"--world-size 4 {CP2} {EP2} {ETP2} {FULL}",
    "tp2 dp2 ep2 zero": f"--world-size 4 {TP2} {EP2} {ETP1} {ZERO_OVERLAPPED} --ddp-bucket-size 1000",
    "tp2 sp dp2 ep2 etp2 zero recompute": (
        f"--world-size 4 {TP2} {SP} {EP2} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 {FULL}"
    ),
    "tp2 sp cp2 dp2 ep4 etp1 zero": f"--world-size 8 {TP2} {SP} {CP2} {EP4} {ETP1} {ZERO} --ddp-bucket-size 1000",
    "pp2 ep2 interleaved": f"--world-size 4 {LOOPED} {EP2}",
    "pp2 ep2 zb-h1": f"--world-size 4 {PP2} {ZB_H1} {EP2} {ZERO_OVERLAPPED} --ddp-bucket-size 3000",
    "pp2 ep2 zb-h1, accumulation fused": (
        f"--world-size 4 {PP2} {ZB_H1} {EP2} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 {FUSED}"
    ),
    "pp2 tp2 sp ep2 etp1 zb-v recompute": f"--world-size 4 {TP2} {SP} {VEE} {EP2} {ETP1} {FULL}",
    "dp2 ep2 recompute moe": f"--world-size 2 {EP2} {SELECTIVE} --recompute-modules core_attn layernorm mlp moe",
    "pp2 tp2 sp ep2 etp1 zb-h1 recompute parts of moe and attention": (
        f"--world-size 4 {TP2} {SP} {PP2} {ZB_H1} {EP2} {ETP1} {SELECTIVE} "
        "--recompute-modules layernorm moe_act shared_experts mla_up_proj"
    ),
    "data outside of the pipeline, tp2 etp1": f"--world-size 4 {TP2} {PP2} --use-tp-pp-dp-mapping {ETP1}",
    "data outside of the pipeline, ep4 over tp2 dp2": f"--world-size 8 {TP2} {PP2} --use-tp-pp-dp-mapping {EP4} {ETP1}",
}


def at_equal_microbatches(variant: str, layout: str) -> str:
    """A loss over the microbatches that all replicas compute at a time is over four samples at every layout."""
    replicas = run_of(VARIANTS[variant], layout)[1].data_parallel_size
    return f"{layout} --micro-batch-size {4 // replicas}" if variant == GLOBAL else layout


RICH = ("tp2 dp2 ep2 zero", "tp2 sp ep2 etp1", "ep2 etp2 over all", "pp2 tp2 sp ep2 etp1 zb-v recompute")
MORE = {
    GLOBAL: ("pp2 ep2 interleaved", "dp2 ep2, offloaded"),
    PADDED: ("tp2 ep2 etp1", "dp2 ep2 recompute moe"),
    "biases, softmax before the choice": ("tp2 etp2",),  # of each expert, once for all of its parts
    "latent attention, groups, bias, shared experts, future tokens, muP": (
        "pp2 tp2 sp ep2 etp1 zb-h1 recompute parts of moe and attention",
    ),
}


def train_in_pieces(context: ParallelContext, row: str, layout: str) -> Observed:
    """With ranks that compute few rows at once."""
    with mock.patch.object(core_experts, "rows_at_once", return_value=5):
        return train(context, row, layout)


def test_experts_in_pieces() -> None:
    """Split backward passes and gradient sync see one gradient of a weight, however many pieces there are."""
    layout, variant = LAYOUTS["pp2 ep2 zb-h1"], "biases, softmax before the choice"
    row = VARIANTS[variant]
    found = run_ranks(train_in_pieces, row, layout, **at(row, layout))
    check(found, [train_alone(row)])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=RICH,
        more=MORE,
        slow=("data outside of the pipeline, ep4 over tp2 dp2",),
        light=[
            name for name, flags in VARIANTS.items() if not any(each in flags for each in ("packing", LATENT, LATER))
        ],
    ),
)
def test_layout_computes_the_model_of_one_rank(variant: str, layout: str) -> None:
    """Experts whose gradient is summed over the wrong ranks, or counted twice in the norm, train another model."""
    row, alone = VARIANTS[variant], at_equal_microbatches(variant, "")
    check(train_at(row, at_equal_microbatches(variant, LAYOUTS[layout])), [train_alone(row, alone)])
