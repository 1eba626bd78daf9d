"""Texts about pictures are the same on any ranks: the first stage encodes, others get what it hands on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.config.pipeline import stages_of
from megatron.config.vision import VisionConfig
from megatron.core.images.prompts import PromptImages
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import RunnerLimits
from megatron.core.inference.workers import Leader, follow
from megatron.core.models.registry import FAMILIES
from megatron.core.models.vlm.config import VLMConfig
from megatron.core.parallel.messages import Messages
from megatron.core.parallel.model_context import ModelContext
from tests.harness.ranks import run_ranks
from tests.parallel.test_workers import LIMITS, MODEL

VISION = VisionConfig(
    vision_model_type="clip",
    vision_num_layers=2,
    vision_hidden_size=16,
    vision_num_attention_heads=4,
    vision_ffn_hidden_size=16,
    img_h=8,
    img_w=8,
    patch_dim=4,
).resolved(MODEL, (MODEL.num_layers,))
FEATURES = VISION.features_per_tile


def asked(number: int) -> Request:
    """A text with as many tiles as its number."""
    pixels = np.random.default_rng(number).integers(0, 256, (number, 3, 8, 8), np.uint8)
    places = np.array([-1, -1, *range(number * FEATURES), -1], np.int64)
    images = PromptImages(pixels, places, FEATURES) if number else None
    prompt = (3, 7, *[39] * (number * FEATURES), 5)
    return Request(id=str(number), prompt=prompt, max_tokens=5, sampling=Sampling(temperature=0.0), images=images)


def generates(context: ModelContext) -> list[list[int]] | None:
    """Greedy tokens, on rank 0; chunks of prompts cut images."""
    mesh = context.mesh
    stage = stages_of([MODEL.num_layers // mesh.size("pp")] * mesh.size("pp"))[mesh.rank("pp")]
    groups = (VLMConfig(), VISION)
    model = FAMILIES["vlm"].train_spec.build_model(MODEL, groups, context, stage=stage, seed=5).eval()
    limits = RunnerLimits(
        num_blocks=LIMITS.num_blocks,
        block_size=LIMITS.block_size,
        max_requests=LIMITS.max_requests,
        max_length=LIMITS.max_length,
        vocabulary=LIMITS.vocabulary,
        image_shape=(8, 8, FEATURES),
    )
    runner, messages = CachedRunner(model, MODEL, context, limits), Messages(mesh)
    if mesh.world_rank:
        follow([runner], mesh, messages)
        return None
    engine = Engine(Leader(runner, mesh, messages), options=SchedulerOptions(max_tokens=8))
    found = engine.generate([asked(number) for number in (1, 0, 2, 3)])
    engine.close()
    return [[token.id for token in each.tokens] for each in found]


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), pytest.param(2, 1, marks=pytest.mark.slow(reason="as 2, 2"))])
def test_texts_are_those_of_one_rank(tp: int, pp: int) -> None:
    """A rank that got no pixels, or whose stage looked for them, would wait for ever or say something else."""
    found, *_ = run_ranks(generates, tp=tp, pp=pp, dtype=torch.float64)
    assert found == generates(ModelContext.single(dtype=torch.float64))
    assert found is not None and len({tuple(each) for each in found}) == len(found)
