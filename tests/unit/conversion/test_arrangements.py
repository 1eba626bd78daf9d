"""Settings of types whose layers differ in branches and biases: what older files say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.format import config_from_model, model_from_config
from megatron.errors import CheckpointError
from tests.published import MODELS

CASES = {case: {"model_type": model_type, **settings} for case, (model_type, settings) in MODELS.items()}


def test_rotary_settings_of_gpt_neox() -> None:
    """Files of transformers 4 say rotary_pct and rotary_emb_base: Pythia would rotate another part of each head."""
    older = {**CASES["gpt_neox"], "rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 5000}
    model = model_from_config(older, where="x")
    assert (model.rotary_percent, model.rotary_base) == (0.5, 5000.0)
    written = config_from_model(model, dtype="float32", source={}, tokens={})
    assert (written["rotary_pct"], written["rotary_emb_base"]) == (0.5, 5000.0)


def test_older_names_of_blooms_settings() -> None:
    """BLOOM 176B's own file says n_embed and num_attention_heads, and lacks today's names."""
    older = {"n_embed": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    today = {name: value for name, value in CASES["bloom"].items() if name not in ("hidden_size", "n_layer", "n_head")}
    model = model_from_config({**today, **older}, where="x")
    assert (model.hidden_size, model.num_layers, model.num_attention_heads) == (48, 3, 6)


def test_falcons_positions_without_alibi() -> None:
    """A setting that is null means what transformers makes of it."""
    assert model_from_config({**CASES["falcon alibi, one group"], "alibi": None}, where="x").is_rotary


@pytest.mark.parametrize(
    ("case", "settings", "words"),
    [
        ("falcon newer", {"parallel_attn": False}, "parallel_attn = False: the newer decoder"),
        ("falcon multi-query", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2: only the newer decoder"),
        (
            "opt",
            {"_remove_final_layer_norm": True},
            "_remove_final_layer_norm = True: this project supports only False",
        ),
        ("falcon newer", {"num_kv_heads": 3}, "num_kv_heads = 3: num_attention_heads = 4 is not divisible by it"),
    ],
)
def test_settings_that_are_refused(case: str, settings: dict[str, Any], words: str) -> None:
    """What is not available, and settings of which transformers builds another model than it runs."""
    with pytest.raises(CheckpointError, match=words):
        model_from_config({**CASES[case], **settings}, where="x")


def test_layers_that_no_type_has() -> None:
    """Each type has biases and norms of its own: the nearest is named with what differs."""
    model = model_from_config(CASES["llama with attention biases"], where="x")
    for changes, words in (
        ({"word_embedding_size": 24}, "word embeddings have another width than hidden states"),
        ({"add_attention_output_bias": False, "add_mlp_bias": True}, "the output layer of attention has none"),
        ({"parallel_attention": True}, "attention and MLP are computed in parallel"),
    ):
        settings = {**vars(model), **changes}
        with pytest.raises(CheckpointError, match=words):
            config_from_model(ModelConfig(**settings), dtype="float32", source={}, tokens={})
