"""The table: every model variant at every layout against one rank. Tolerance 1e-9 in fp64; it only grows."""

from __future__ import annotations

import pytest

from megatron.training.evaluation.parity import TOLERANCE, Observed, compare
from tests.equivalence.flags import (
    CP2,
    CP4,
    FULL,
    FUSED,
    LATENT,
    LATENT_TIED,
    LATER,
    LLAMA,
    LLAMA_TIED,
    OFFLOADED,
    PP2,
    SELECTIVE,
    SMALL,
    SP,
    TP2,
    TP3,
    TP4,
    TP8,
    ZB_H1,
    ZERO,
    ZERO_OVERLAPPED,
)
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

VARIANTS: dict[str, str] = {
    "gpt2 tied": f"{SMALL}",
    "gpt2 untied": f"{SMALL} --untie-embeddings-and-output-weights",
    "llama": f"{LLAMA}",
    "llama tied, qk norm, documents": f"{LLAMA_TIED} --qk-layernorm --reset-attention-mask",
    "geglu, rotary half interleaved, layernorm 1p": (
        f"{SMALL} --activation geglu_tanh --position-embedding-type rope --rotary-percent 0.5 "
        "--rotary-interleaved --apply-layernorm-1p"
    ),
    "bert": f"bert: {SMALL}",
    "bert, residuals behind norms": (
        f"bert: {SMALL} --apply-residual-connection-post-layernorm --activation gelu "
        "--position-embedding-type rope --untie-embeddings-and-output-weights"
    ),
    "parallel, one norm, biases of output, mlp and logits": (
        f"{LLAMA} --parallel-attention --add-attention-output-bias --add-mlp-bias --add-output-layer-bias"
    ),
    "parallel, two norms, norm of the embedding, bias of tied logits": (
        f"{SMALL} --parallel-attention --parallel-layernorm --add-output-layer-bias --embedding-norm"
    ),
    "windows and full attention, soft cap, sinks, documents": (
        f"{LLAMA} --window-size 3 0 --window-attn-skip-freq 2 --attn-logit-softcapping 0.5 "
        "--softmax-type learnable --reset-attention-mask"
    ),
    "alibi, windows, off by one": (
        f"{SMALL} --num-attention-heads 8 --position-embedding-type alibi --scale-alibi --window-size 5 0 "
        "--window-attn-skip-freq [0,1] --softmax-type off-by-one"
    ),
    "quick geglu, clamped, offset": (
        f"{LLAMA} --activation quick_geglu --activation-func-clamp-value 0.3 --glu-linear-offset 1.0"
    ),
    "bert, windows": f"bert: {SMALL} --window-size 4 2 --window-attn-skip-freq [1,0]",
    "bert, windows, muP, z-loss": (
        f"bert: {SMALL} --window-size 4 2 --window-attn-skip-freq [1,0] --use-mup --mup-base-hidden-size 8 "
        "--mup-embedding-mult 3.0 --z-loss-coeff 0.3"
    ),
    "bert, norm of the embedding instead of the first": (
        f"bert: {SMALL} --embedding-norm --no-first-attention-norm --norm-parameters weight"
    ),
    "squared relu, no positions, qkv bias": (
        f"{SMALL} --activation squared_relu --position-embedding-type none --disable-bias-linear --add-qkv-bias"
    ),
    "squared relu, no positions, qkv bias, muP": (
        f"{SMALL} --activation squared_relu --position-embedding-type none --disable-bias-linear --add-qkv-bias "
        "--use-mup --mup-base-hidden-size 8 --mup-output-mult 2.0 --mup-attn-scale-power 0.7 --mup-base-head-dim 4"
    ),
    "norms after, qk norm over all heads": (
        f"{LLAMA} --norm-placement after --qk-layernorm --qk-layernorm-kind all_heads --reset-attention-mask"
    ),
    "norms without bias before and after, qk norm weights per head": (
        f"{SMALL} --norm-placement both --norm-parameters weight --qk-layernorm --qk-layernorm-kind per_head"
    ),
    "post norm, no first norm, narrow words": (
        f"{SMALL} --apply-residual-connection-post-layernorm --no-first-attention-norm --word-embedding-size 8"
    ),
    "output gate, qk norm": f"{LLAMA} --attention-output-gate --qk-layernorm --apply-layernorm-1p",
    "norms without weights, clipped qkv": f"{SMALL} --norm-parameters none --clip-qkv 0.5",
    "qk l2 norm, dynamic NTK, another scale of scores": (
        f"{LLAMA} --position-embedding-type dynamic_ntk --qk-l2-norm --original-max-position-embeddings 4 "
        "--rotary-scaling-factor 4.0 --softmax-scale 0.2"
    ),
    "multipliers, capped logits, llama 3 scaling": (
        f"{LLAMA} --use-rope-scaling --original-max-position-embeddings 8 --embedding-multiplier 5.0 "
        "--residual-multiplier 0.3 --logits-multiplier 2.0 --final-logit-softcapping 1.5 --apply-layernorm-1p"
    ),
    "yarn, layers without rotary positions, another base in windows": (
        f"{LLAMA} --num-layers 4 --position-embedding-type yarn --original-max-position-embeddings 4 "
        "--rotary-scaling-factor 4.0 --no-rope-freq [0,0,1,0] --window-size 3 0 --window-attn-skip-freq 2 "
        "--rotary-base-local 100.0 --reset-attention-mask"
    ),
    "longrope, half of each head": (
        f"{SMALL} --position-embedding-type longrope --original-max-position-embeddings 4 "
        "--rotary-scaling-factor 4.0 --rotary-percent 0.5 --longrope-short-factors 1.0 1.0 "
        "--longrope-long-factors 2.0 3.0"
    ),
    "latent attention, yarn with a factor of scores, documents": (
        f"{LATENT} --position-embedding-type yarn --q-lora-rank 14 --qk-layernorm --add-qkv-bias "
        "--original-max-position-embeddings 4 --rotary-scaling-factor 4.0 --mscale 0.7 --mscale-all-dim 1.3 "
        "--rotary-interleaved --reset-attention-mask"
    ),
    "latent attention without latent queries and norms, wide values, windows, sinks": (
        f"{LATENT} --v-head-dim 12 --window-size 3 0 --window-attn-skip-freq 2 --softmax-type learnable"
    ),
    "future tokens, documents": f"{LLAMA} {LATER} --reset-attention-mask",
    "future tokens, documents, z-loss": f"{LLAMA} {LATER} --reset-attention-mask --z-loss-coeff 0.2",
    "future tokens, tied, norms after, latent attention": (
        f"{LATENT_TIED} {LATER} --norm-placement both --q-lora-rank 14"
    ),
}
THREES: dict[str, str] = {
    "twelve heads": f"{SMALL} --hidden-size 48 --num-attention-heads 12",
    "twelve heads, untied": f"{SMALL} --hidden-size 48 --num-attention-heads 12 --untie-embeddings-and-output-weights",
}
FEW_GROUPS: dict[str, str] = {
    "one group": f"{LLAMA} --num-query-groups 1 --add-qkv-bias",
    "two groups, qk norm, documents": f"{LLAMA_TIED} --num-query-groups 2 --qk-layernorm --reset-attention-mask",
    "two groups, qk norm over all heads": (
        f"{LLAMA} --num-query-groups 2 --qk-layernorm --qk-layernorm-kind all_heads --norm-placement after"
    ),
    "two groups, output gate": f"{LLAMA} --num-query-groups 2 --attention-output-gate --add-qkv-bias",
    "one group, qk norm weights per head": f"{LLAMA} --num-query-groups 1 --qk-layernorm --qk-layernorm-kind per_head",
}
DRAWING: dict[str, str] = {
    "windows, sinks, dropout": (
        f"{LLAMA} --attention-dropout 0.2 --hidden-dropout 0.2 --window-size 3 0 --softmax-type learnable"
    ),
    "gpt2 with dropout": f"{SMALL} --attention-dropout 0.2 --hidden-dropout 0.2",
    "llama with dropout": f"{LLAMA} --attention-dropout 0.2 --hidden-dropout 0.2",
    "bert with dropout": f"bert: {SMALL} --attention-dropout 0.2 --hidden-dropout 0.2",
}

EVERY_VARIANT = VARIANTS | THREES | FEW_GROUPS | DRAWING

LAYOUTS: dict[str, str] = {
    "one rank, accumulation": "--micro-batch-size 1",
    "one rank, one microbatch": "--micro-batch-size 8",
    "one rank, recompute full": f"{FULL}",
    "one rank, recompute in runs of 2": f"{FULL} --recompute-method uniform --recompute-num-layers 2",
    "one rank, recompute block": f"{FULL} --recompute-method block --recompute-num-layers 1",
    "one rank, recompute selective": f"{SELECTIVE} --recompute-modules core_attn layernorm",
    "tp2": f"--world-size 2 {TP2} --micro-batch-size 4",
    "tp4": f"--world-size 4 {TP4} --micro-batch-size 4",
    "tp2 sp": f"--world-size 2 {TP2} {SP} --micro-batch-size 4",
    "tp4 sp": f"--world-size 4 {TP4} {SP} --micro-batch-size 4",
    "tp2 sp recompute full": f"--world-size 2 {TP2} {SP} --micro-batch-size 4 {FULL}",
    "tp2 recompute selective": (
        f"--world-size 2 {TP2} --micro-batch-size 4 {SELECTIVE} --recompute-modules core_attn layernorm"
    ),
    "tp2 sp offloaded": f"--world-size 2 {TP2} {SP} --micro-batch-size 4 {OFFLOADED}",
    "cp2 offloaded": f"--world-size 2 {CP2} --micro-batch-size 4 {OFFLOADED}",
    "dp2": "--world-size 2",
    "dp4, fully masked rank": "--world-size 4 --micro-batch-size 1",
    "dp2 overlapped, small buckets": "--world-size 2 --overlap-grad-reduce --ddp-bucket-size 1000",
    "dp2 zero": f"--world-size 2 {ZERO}",
    "dp4 zero overlapped, small buckets": f"--world-size 4 {ZERO_OVERLAPPED} --ddp-bucket-size 1000",
    "tp2 dp2": f"--world-size 4 {TP2}",
    "tp2 sp dp2 zero recompute": f"--world-size 4 {TP2} {SP} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 {FULL}",
    "one rank, accumulation fused": f"{FUSED} --micro-batch-size 1",
    "tp2 sp dp2 zero, accumulation fused": (
        f"--world-size 4 {TP2} {SP} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 {FUSED}"
    ),
    "cp2": f"--world-size 2 {CP2} --micro-batch-size 4",
    "cp4": f"--world-size 4 {CP4} --micro-batch-size 4",
    "cp2 gather": f"--world-size 2 {CP2} --cp-comm-type all_gather --micro-batch-size 4",
    "cp4 heads": f"--world-size 4 {CP4} --cp-comm-type a2a --micro-batch-size 4",
    "cp4 heads and rings": (
        f"--world-size 4 {CP4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 --micro-batch-size 4"
    ),
    "cp2 another way in each layer": f"--world-size 2 {CP2} --cp-comm-type a2a p2p --micro-batch-size 4",
    "cp2 recompute full": f"--world-size 2 {CP2} --micro-batch-size 4 {FULL}",
    "cp2 heads, recompute selective": (
        f"--world-size 2 {CP2} --cp-comm-type a2a --micro-batch-size 4 {SELECTIVE} "
        "--recompute-modules core_attn layernorm"
    ),
    "cp2 recompute selective": (
        f"--world-size 2 {CP2} --micro-batch-size 4 {SELECTIVE} --recompute-modules core_attn layernorm"
    ),
    "cp2 tp2": f"--world-size 4 {TP2} {CP2} --micro-batch-size 4",
    "cp2 tp2 sp": f"--world-size 4 {TP2} {SP} {CP2} --micro-batch-size 4",
    "cp2 tp2 heads": f"--world-size 4 {TP2} {CP2} --cp-comm-type a2a --micro-batch-size 4",
    "cp2 dp2, fully masked ranks": f"--world-size 4 {CP2} --micro-batch-size 1",
    "cp2 dp2 zero overlapped, small buckets": (
        f"--world-size 4 {CP2} --cp-comm-type all_gather {ZERO_OVERLAPPED} --ddp-bucket-size 1000"
    ),
    "cp2 tp2 sp dp2 zero recompute": f"--world-size 8 {TP2} {SP} {CP2} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 {FULL}",
}
RICH = (
    "cp2 tp2 sp",
    "tp2 sp dp2 zero recompute",
    "cp2 tp2 heads",
    "tp2 sp dp2 zero, accumulation fused",
    "cp2 dp2 zero overlapped, small buckets",
    "tp2 sp offloaded",
)
"""Every variant is checked at one of them in the default tier."""
LIGHT = ("gpt2 tied", "gpt2 untied", "llama", "bert", "squared relu, no positions, qkv bias")
FEW_GROUPS_LAYOUTS: dict[str, str] = {
    "tp2": f"--world-size 2 {TP2} --micro-batch-size 4",
    "tp4": f"--world-size 4 {TP4} --micro-batch-size 4",
    "tp4 sp dp2 zero, small buckets": f"--world-size 8 {TP4} {SP} {ZERO} --ddp-bucket-size 1000",
    "tp8 recompute": f"--world-size 8 {TP8} --micro-batch-size 4 {FULL}",
    "cp2 tp4": f"--world-size 8 {TP4} {CP2} --micro-batch-size 4",
    "cp2 tp4 heads": f"--world-size 8 {TP4} {CP2} --cp-comm-type a2a --micro-batch-size 4",
    "cp4 heads": f"--world-size 4 {CP4} --cp-comm-type a2a --micro-batch-size 4",
}
THREES_LAYOUTS: dict[str, str] = {
    "tp2": f"--world-size 2 {TP2} --micro-batch-size 4",
    "tp3": f"--world-size 3 {TP3} --micro-batch-size 4",
    "tp4": f"--world-size 4 {TP4} --micro-batch-size 4",
    "tp3 cp2": f"--world-size 6 {TP3} {CP2} --micro-batch-size 4",
}


def draws_the_same(layout: str) -> bool:
    """Whether samples have the masks that they have on one rank: not where their heads, sequences or microbatches are
    divided otherwise.
    """
    return not any(flag in layout for flag in ("--tensor-model", "--context-parallel", "--micro-batch-size"))


"""Dropout on heads differs between tensor-parallel ranks, so only these layouts draw what one rank draws."""
SAME_DROPOUT = [name for name, layout in LAYOUTS.items() if draws_the_same(layout)]

"""Layouts that draw the same masks, those of the first: which keys a rank drops depends on how it meets them."""
SAME_DROPOUT_OVER_SLICES = {
    "p2p": [
        LAYOUTS["cp2"],
        LAYOUTS["cp2 recompute full"],
        LAYOUTS["cp2 recompute selective"],
        f"--world-size 4 {CP2} {ZERO}",
    ],
    "heads": [
        f"--world-size 2 {CP2} --cp-comm-type a2a",
        LAYOUTS["cp2 heads, recompute selective"],
        f"--world-size 4 {CP2} --cp-comm-type a2a {FULL}",
    ],
    "gather": [LAYOUTS["cp2 gather"], f"--world-size 4 {CP2} --cp-comm-type all_gather {FULL}"],
}


def ranks_of(variant: str, layout: str) -> list[Observed]:
    """The table's steps at a layout, by rank."""
    return train_at(EVERY_VARIANT[variant], layout)


def layout_for(row: str, layout: str) -> str:
    """A layout for a model of two layers or four, where each layer may have its own way."""
    in_four = "--cp-comm-type a2a p2p p2p a2a"
    return layout.replace("--cp-comm-type a2a p2p", in_four) if "--num-layers 4" in row else layout


def check(outcomes: list[Observed], expected: list[Observed]) -> None:
    """Compare what two layouts computed: initial weights bit for bit, everything else to the tolerance."""
    assert TOLERANCE <= 1e-9
    for each in compare(outcomes, expected):
        assert each.where is None, f"{each.kind} differ by up to {each.largest:.2e}, first in {each.where}"


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=RICH,
        more={
            "llama": ("tp4", "cp2 tp2 sp dp2 zero recompute"),
            "alibi, windows, off by one": ("cp4 heads and rings",),
        },
        # Others contain them.
        slow=(
            "bert, windows",
            "future tokens, documents",
            "tp2",
            "tp2 sp",
            "dp2",
            "dp2 zero",
            "tp2 dp2",
            "cp2",
            "cp2 tp2",
            "tp2 sp recompute full",
            "cp2 recompute full",
        ),
        light=LIGHT,
    ),
)
def test_layout_computes_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A wrong or missing collective anywhere would train another model at this layout."""
    check(ranks_of(variant, layout_for(EVERY_VARIANT[variant], LAYOUTS[layout])), [train_alone(EVERY_VARIANT[variant])])


LATENT_LAYOUTS: dict[str, str] = {
    "cp2 tp2 sp": f"--world-size 4 {TP2} {SP} {CP2} --micro-batch-size 4",
    "cp4": f"--world-size 4 {CP4} --micro-batch-size 4",
    "cp2 pp2 zb-h1 heads again": (
        f"--world-size 4 {CP2} {PP2} {ZB_H1} --micro-batch-size 4 {SELECTIVE} --recompute-modules mla_up_proj"
    ),
    "cp2 recompute heads and scores": (
        f"--world-size 2 {CP2} --micro-batch-size 4 {SELECTIVE} --recompute-modules mla_up_proj core_attn"
    ),
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        *(
            pytest.param(
                "latent attention, yarn with a factor of scores, documents",
                layout,
                marks=pytest.mark.slow if layout == "cp2 tp2 sp" else [],  # the next variant is there, too
            )
            for layout in LATENT_LAYOUTS
        ),
        ("latent attention without latent queries and norms, wide values, windows, sinks", "cp2 tp2 sp"),
    ],
)
def test_latents_on_a_ring_compute_the_model_of_one_rank(variant: str, layout: str) -> None:
    """Each rank makes keys and values of the latents that it gets; their weight's gradient comes from all of them."""
    check(ranks_of(variant, LATENT_LAYOUTS[layout]), [train_alone(EVERY_VARIANT[variant])])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        FEW_GROUPS,
        FEW_GROUPS_LAYOUTS,
        rich=("tp4 sp dp2 zero, small buckets", "tp4", "cp2 tp4 heads", "cp2 tp4"),
        slow=("tp2", "cp4 heads", "tp8 recompute"),
    ),
)
def test_more_ranks_than_groups_compute_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A shared key/value head whose gradient isn't summed, or is counted by each rank, trains another model."""
    check(ranks_of(variant, FEW_GROUPS_LAYOUTS[layout]), [train_alone(EVERY_VARIANT[variant])])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(THREES, THREES_LAYOUTS, rich=("tp3 cp2", "tp3")),
)
def test_a_prime_vocabulary_divides_over_any_ranks(variant: str, layout: str) -> None:
    """Padding differs with the number of ranks; a word of it that got probability would change the loss."""
    check(ranks_of(variant, THREES_LAYOUTS[layout]), [train_alone(EVERY_VARIANT[variant])])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        DRAWING,
        SAME_DROPOUT,
        rich=("one rank, recompute full", "dp2 zero"),
    ),
)
def test_dropout_is_a_function_of_sample_and_layer(variant: str, layout: str) -> None:
    """Recomputation would draw other masks than the forward pass, and data-parallel replicas the same ones."""
    check(ranks_of(variant, layout_for(EVERY_VARIANT[variant], LAYOUTS[layout])), [train_alone(EVERY_VARIANT[variant])])


@pytest.mark.parametrize(
    ("variant", "way"),
    pairs(DRAWING, SAME_DROPOUT_OVER_SLICES, rich=("gather", "p2p", "heads"), slow=("bert with dropout",)),
)
def test_dropout_over_slices_is_replayed(variant: str, way: str) -> None:
    """Backward and recomputation would drop other probabilities than the forward pass, or replicas draw by rank."""
    layouts = [f"{layout} --micro-batch-size 2" for layout in SAME_DROPOUT_OVER_SLICES[way]]
    first, *others = (ranks_of(variant, layout) for layout in layouts)
    for outcomes in others:
        check(outcomes, first)
