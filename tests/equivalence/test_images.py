"""Rows of the table with images: an encoder in front of a decoder of any kind, frozen or not, at every kind of layout.

Microbatches with and without images come in turn, and a data-parallel rank may have none.
"""

from __future__ import annotations

import pytest

from tests.equivalence.flags import (
    CP2,
    EXPERTS,
    FULL,
    HYBRID,
    LLAMA,
    LOOPED,
    PP2,
    PP4,
    SELECTIVE,
    SMALL,
    SP,
    TP2,
    VEE,
    ZB_H1,
    ZERO_2,
    ZERO_3,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.test_freezing import frozen_in
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

MAMBA = "--mamba-state-dim 3 --mamba-head-dim 4 --mamba-num-heads 8 --mamba-num-groups 2"
VARIANTS: dict[str, str] = {
    "clip, llama": f"vlm: {LLAMA} --num-layers 4 --vision-model-type clip --disable-vision-class-token",
    "internvit, pixel shuffle, gpt2 tied": (
        f"vlm: {SMALL} --num-layers 4 --vision-model-type internvit --pixel-shuffle --vision-projection-norm "
        "--embedding-multiplier 3.0"
    ),
    "siglip, affine, experts, frozen language model": (
        f"vlm: {LLAMA} --num-layers 4 {EXPERTS} --vision-model-type siglip --vision-projection-type affine --freeze-LM"
    ),
    "clip, frozen but for the projector": (
        f"vlm: {LLAMA} --num-layers 4 --vision-model-type clip --freeze-LM --freeze-ViT --disable-vision-class-token"
    ),
    "internvit 300M with interpolated positions, hybrid, frozen encoder": (
        f"vlm: {HYBRID} {MAMBA} --hybrid-layer-pattern M*E- --vision-model-type internvit300M --freeze-ViT "
        "--vision-position-size 12 --disable-vision-class-token"
    ),
    "clip, llama, vector at ends of rows": (
        f"vlm: {LLAMA} --num-layers 4 --vision-model-type clip --disable-vision-class-token --image-grids 1x2"
    ),
    "clip, llama, frozen encoder and projector": (
        f"vlm: {LLAMA} --num-layers 4 --vision-model-type clip --freeze-ViT --freeze-vision-projection "
        "--disable-vision-class-token"
    ),
}
LAYOUTS: dict[str, str] = {
    "dp4, rank without images": "--world-size 4 --micro-batch-size 1",
    "tp2 sp dp2 zero, recompute full": (
        f"--world-size 4 {TP2} {SP} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 {FULL} --micro-batch-size 2"
    ),
    "cp2 tp2 sp": f"--world-size 4 {TP2} {SP} {CP2} --micro-batch-size 4",
    "cp2 tp2, recompute selective": f"--world-size 4 {TP2} {CP2} {SELECTIVE}",
    "pp2 cp2, dp outside": f"--world-size 8 {PP2} {CP2} --use-tp-pp-dp-mapping",
    "pp2 tp2 sp zb-h1": f"--world-size 4 {TP2} {SP} {PP2} {ZB_H1} --micro-batch-size 1",
    "pp2 zb-v dp2 zero": f"--world-size 4 {VEE} {ZERO_OVERLAPPED} --ddp-bucket-size 1000",
    "pp2 vpp2": f"--world-size 2 {LOOPED} --micro-batch-size 1 {FULL}",
    "pp4": f"--world-size 4 {PP4}",
    "zero 2 tp2 dp2": f"--world-size 4 {TP2} {ZERO_2} --micro-batch-size 1",
    "zero 3 dp2 cp2": f"--world-size 4 {CP2} {ZERO_3} --micro-batch-size 1 {FULL}",
    "zero 3 pp2 dp2": f"--world-size 4 {PP2} {ZERO_3} --micro-batch-size 1",
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("cp2 tp2 sp", "tp2 sp dp2 zero, recompute full", "pp2 tp2 sp zb-h1"),
        slow=(
            "clip, llama, vector at ends of rows",
            "pp2 cp2, dp outside",
            "pp4",
            "pp2 vpp2",
            # Weights and gradients in parts know no images.
            "zero 2 tp2 dp2",
            "zero 3 pp2 dp2",
            "zero 3 dp2 cp2",
        ),
        light=("clip, llama",),
    ),
)
def test_layout_trains_the_images_of_one_rank(variant: str, layout: str) -> None:
    """Features at places of other ranks, gradients of a part of the places alone, or a rank that misses a collective
    since it has no image would train another model, or none.
    """
    outcomes = train_at(VARIANTS[variant], LAYOUTS[layout])
    check(outcomes, [train_alone(VARIANTS[variant])])
    assert bool(frozen_in(VARIANTS[variant], outcomes)) == ("freeze" in VARIANTS[variant])


AHEAD: dict[str, str] = {
    "siglip, places of an image see each other": (
        f"vlm: {LLAMA} --num-layers 4 --vision-model-type siglip --vision-projection-type rms-affine "
        "--vision-pool-size 2 --image-attention bidirectional --window-size 5 0 --window-attn-skip-freq 2"
    ),
    "siglip, prompts see themselves": (
        f"vlm: {LLAMA} --num-layers 4 --vision-model-type siglip --vision-projection-type affine "
        "--image-attention prefix"
    ),
}
AHEAD_LAYOUTS: dict[str, str] = {
    "pp2 tp2 sp": f"--world-size 4 {TP2} {SP} {PP2} --micro-batch-size 1",
    "cp2 tp2 sp": f"--world-size 4 {TP2} {SP} {CP2} --cp-comm-type a2a --micro-batch-size 4",
    "zero 3 dp2, recompute full": f"--world-size 2 {ZERO_3} --micro-batch-size 2 {FULL}",
    "pp2 vpp2": f"--world-size 2 {LOOPED} --micro-batch-size 1",
}


@pytest.mark.slow(reason="attention to later places is proven by logits and gradients of transformers' Gemma 3")
@pytest.mark.parametrize("variant", AHEAD)
@pytest.mark.parametrize("layout", AHEAD_LAYOUTS)
def test_layout_sees_the_later_places_of_one_rank(variant: str, layout: str) -> None:
    """A stage without the places, or a rank with a part of them, would compute causal attention."""
    check(train_at(AHEAD[variant], AHEAD_LAYOUTS[layout]), [train_alone(AHEAD[variant])])
