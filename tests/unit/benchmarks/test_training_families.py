"""What the training-step benchmark compares is the same model on the same words: else its ratios would say nothing."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.training_families import CASES, Shape
from benchmarks.training_step import build_step, megatron_step

pytest.importorskip("transformers", reason="the peers are the dev extra's")

SMALL = Shape(layers=2, hidden=32, heads=4, sequence=32, batch=4, vocabulary=256)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", CASES)
def test_contenders_learn_the_same(family: str, dtype: str) -> None:
    """Losses begin at guessing, equally, and fall by a step."""
    case = CASES[family]
    steps = {"megatron": megatron_step(SMALL, dtype, case)}
    steps |= {f"{peer} autocast": build_step(f"{peer} autocast", SMALL, dtype, case) for peer in case.peers}
    guessing = math.log(SMALL.vocabulary) + (math.log(2) if family == "BERT" else 0.0)
    for name, step in steps.items():
        first = step()
        assert first == pytest.approx(guessing, abs=0.15), name
        assert step() < first, name


@pytest.mark.parametrize("family", CASES)
def test_contenders_are_of_one_size(family: str) -> None:
    """A peer with fewer parameters would be faster for another reason."""
    from megatron.config.model import ModelConfig
    from megatron.core.parallel.model_context import ModelContext

    case = CASES[family]
    config = ModelConfig(
        num_layers=SMALL.layers,
        hidden_size=SMALL.hidden,
        num_attention_heads=SMALL.heads,
        max_position_embeddings=SMALL.sequence,
        vocab_size=SMALL.vocabulary,
        **case.settings,
    )
    ours, _ = case.ours(SMALL, config, ModelContext.single(dtype=torch.float32))
    for peer, build in case.peers.items():
        assert size(build(SMALL)[0]) == size(ours), peer


def size(model: torch.nn.Module) -> int:
    """Numbers of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
