"""Models with experts for which no other program has a format are refused by name."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.config.family import FamilyConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.conversion.huggingface.formats import config_from_model
from megatron.core.conversion.megatron_lm.format import format_for
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.conversion.portable import PortableModel
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.t5.config import T5Config
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error

MODEL = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, max_position_embeddings=16, activation="relu"
)
EXPERTS = MoEConfig(num_experts=4, moe_ffn_hidden_size=16)
OWN: list[FamilyConfig] = [BertConfig(), T5Config(decoder_num_layers=2, decoder_seq_length=8)]


@pytest.mark.parametrize("own", OWN)
def test_hugging_face_has_none(own: FamilyConfig) -> None:
    """A folder without the experts would be another model."""
    with expect_error(CheckpointError, own.title):
        config_from_model(MODEL, (own, EXPERTS), dtype="float32", source={}, tokens={})


@pytest.mark.parametrize("own", OWN)
def test_megatron_lm_has_none(own: FamilyConfig) -> None:
    """Neither written, nor read with its experts left out."""
    portable = PortableModel(MODEL, {}, TokenizerConfig(), 16, groups=(own, EXPERTS))
    assert format_for(portable.groups).unsupported(portable)[f"no {own.title} with experts (--num-experts)"]
    saved = Arguments(Namespace(num_experts=4), "theirs")
    with expect_error(CheckpointError, "theirs", own.title, 4):
        format_for((own,)).groups_from_arguments(saved, MODEL, (), legacy=False)
