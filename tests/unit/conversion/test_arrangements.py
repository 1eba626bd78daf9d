"""Settings of types whose layers differ in branches and biases: what older files say, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.formats import config_from_model, format_for, model_from_config
from megatron.core.conversion.tables import matches
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error
from tests.published import MODELS

CASES = {case: {"model_type": model_type, **settings} for case, (model_type, settings) in MODELS.items()}


def test_rotary_settings_of_gpt_neox() -> None:
    """Files of transformers 4 say rotary_pct and rotary_emb_base: Pythia would rotate another part of each head."""
    older = {**CASES["gpt_neox"], "rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 5000}
    model = model_from_config(older, where="x")
    assert (model.rotary_percent, model.rotary_base) == (0.5, 5000.0)
    written = config_from_model(model, dtype="float32", source={}, tokens={})
    assert (written["rotary_pct"], written["rotary_emb_base"]) == (0.5, 5000.0)


def test_falcons_norms_that_are_not_said() -> None:
    """Falcon 40B's own file does not say how many its newer decoder has: a norm each for attention and MLP."""
    unsaid = {**CASES["falcon newer"], "num_ln_in_parallel_attn": None}
    assert model_from_config(unsaid, where="x").parallel_layernorm
    assert not model_from_config({**unsaid, "num_ln_in_parallel_attn": 1}, where="x").parallel_layernorm


def test_older_names_of_blooms_settings() -> None:
    """BLOOM 176B's own file says n_embed and num_attention_heads, and lacks today's names."""
    older = {"n_embed": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    today = {name: value for name, value in CASES["bloom"].items() if name not in ("hidden_size", "n_layer", "n_head")}
    model = model_from_config({**today, **older}, where="x")
    assert (model.hidden_size, model.num_layers, model.num_attention_heads) == (48, 3, 6)


def test_falcons_positions_without_alibi() -> None:
    """A setting that is null means what transformers makes of it."""
    assert model_from_config({**CASES["falcon alibi, one group"], "alibi": None}, where="x").is_rotary


def test_norms_of_opt_350m_end_its_layers() -> None:
    """The norm at the end of a layer is the one at the start of our next, and the first layer begins with none."""
    model = model_from_config(CASES["opt 350m, five heads"], where="x")
    assert (model.apply_residual_connection_post_layernorm, model.first_attention_norm) == (True, False)
    assert model.word_embedding_size == 28
    theirs = {match.ours: match.theirs for match in matches(format_for(()).table("opt", model), model, where="x")}
    assert "decoder.layers.0.input_layernorm.weight" not in theirs
    assert theirs["decoder.layers.1.input_layernorm.bias"] == ("model.decoder.layers.0.final_layer_norm.bias",)
    last = f"model.decoder.layers.{model.num_layers - 1}.final_layer_norm.weight"
    assert theirs["decoder.final_layernorm.weight"] == (last,)


def test_lengths_that_yarn_is_scaled_by() -> None:
    """transformers takes the longest for dynamic NTK, whatever the settings say. Without a factor YaRN's is how much
    longer the context has become; the length beside the settings of the rotary positions goes before the one within.
    """
    yarn = {**CASES["llama"], "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 16}}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    assert model_from_config({**yarn, "rope_parameters": dynamic}, where="x").original_max_position_embeddings == 64
    for settings, original in ((yarn, 16), ({**yarn, "original_max_position_embeddings": 8}, 8)):
        model = model_from_config(settings, where="x")
        assert (model.original_max_position_embeddings, model.rotary_scaling_factor) == (original, 64 / original)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_earlier_names_of_longrope(name: str) -> None:
    """The first files of Phi-3 have the lists of factors under these; read as YaRN they would be another model."""
    scaling = {"type": name, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    older = {**CASES["phi3"], "rope_parameters": None, "rope_scaling": scaling}
    model = model_from_config(older, where="x")
    assert (model.position_embedding_type, model.longrope_long_factors) == ("longrope", (2.0,) * 6)


def test_the_base_of_windows_that_is_said_twice() -> None:
    """transformers takes the one of their layers, and then the older setting beside it."""
    full, older = {"rope_type": "default", "rope_theta": 100.0}, {**CASES["gemma3"], "rope_local_base_freq": 5.0}
    for window, base in (({"rope_theta": 7.0}, 7.0), ({}, 5.0)):
        parts = {"full_attention": full, "sliding_attention": {"rope_type": "default", **window}}
        assert model_from_config({**older, "rope_parameters": parts}, where="x").rotary_base_local == base


def test_logits_scaling_comes_back_as_it_was() -> None:
    """49 came back as 49.00000000000001, since ours is its reciprocal."""
    source = {**CASES["granite"], "logits_scaling": 49.0}
    model = model_from_config(source, where="x")
    assert config_from_model(model, dtype="float32", source=source, tokens={})["logits_scaling"] == 49.0


@pytest.mark.parametrize(
    ("case", "settings", "fact"),
    [
        ("falcon newer", {"parallel_attn": False}, "parallel_attn = False"),
        ("falcon multi-query", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
        (
            "opt",
            {"_remove_final_layer_norm": True},
            "_remove_final_layer_norm = True",
        ),
        (
            "qwen3 with windows",
            {"use_sliding_window": False},
            "use_sliding_window = False",
        ),
        (
            "modernbert",
            {"sliding_window": 5},
            "local_attention = 14",
        ),
        (
            "llama 3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_parameters",
        ),
        (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}},
            "rope_scaling",
        ),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention",
        ),
        ("falcon newer", {"num_kv_heads": 3}, "num_attention_heads = 4"),
    ],
)
def test_settings_that_are_refused(case: str, settings: dict[str, Any], fact: str) -> None:
    """What is not available, and settings of which transformers builds another model than it runs."""
    with expect_error(CheckpointError, fact):
        model_from_config({**CASES[case], **settings}, where="x")


def test_layers_that_no_type_has() -> None:
    """Each type has biases and norms of its own: the nearest is named with what differs."""
    model = model_from_config(CASES["llama with attention biases"], where="x")
    starcoder = model_from_config(CASES["starcoder2"], where="x")
    uneven = dataclasses.replace(starcoder, add_bias_linear=False, add_mlp_bias=False)
    found = format_for(()).types["starcoder2"].differences(uneven)
    assert found == ["some linear layers have biases and others have none"]
    for changes in (
        {"word_embedding_size": 24},
        {"add_attention_output_bias": False, "add_mlp_bias": True},
        {"parallel_attention": True},
    ):
        settings = {**vars(model), **changes}
        with expect_error(CheckpointError):
            config_from_model(ModelConfig(**settings), dtype="float32", source={}, tokens={})
