"""Every setting that changes the function is read or refused, and written or refused: none is dropped on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.config.flags import flags_of
from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.format import config_from_model, format_of, model_from_config, model_types
from megatron.core.conversion.huggingface.known import Known
from megatron.core.conversion.megatron_lm.arguments import Arguments, arguments_of, model_from_arguments
from megatron.errors import CheckpointError
from tests.unit.conversion.megatron_checkpoints import CLASSIC, MODERN, portable

transformers = pytest.importorskip("transformers", reason="its settings are compared with those that are read")

CHANGES: dict[str, Any] = {
    "ffn_hidden_size": 80,
    "kv_channels": 16,
    "position_embedding_type": "none",
    "rotary_percent": 0.5,
    "rotary_base": 5e5,
    "rotary_interleaved": True,
    "rotary_seq_len_interpolation_factor": 2.0,
    "use_rope_scaling": True,
    "rope_scaling_factor": 32.0,
    "normalization": "other",
    "norm_epsilon": 1e-3,
    "apply_layernorm_1p": True,
    "apply_residual_connection_post_layernorm": True,
    "add_bias_linear": "other",
    "add_qkv_bias": True,
    "activation": ("gelu", "relu", "squared_relu", "swiglu", "geglu", "geglu_tanh", "gelu_tanh"),
    "softmax_scale": 0.5,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": "other",
    "num_query_groups": 1,
}
OTHER = {"LayerNorm": "RMSNorm", "RMSNorm": "LayerNorm", True: False, False: True}
SIZES = {"num_layers", "hidden_size", "num_attention_heads", "group_query_attention", "vocab_size"}


def changed(base: dict[str, Any], name: str, value: Any) -> ModelConfig:
    """The model of ``base`` with another value of one setting."""
    value = OTHER[getattr(ModelConfig(**base), name)] if value == "other" else value
    more: dict[str, Any] = {"use_rope_scaling": True} if name == "rope_scaling_factor" else {}
    if name == "num_query_groups":
        more["group_query_attention"] = True
    return ModelConfig(**{**base, **more, name: value})


def as_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def function_of(model: ModelConfig) -> dict[str, Any]:
    """The settings that the model computes with."""
    settings = {spec.field: getattr(model, spec.field) for spec in flags_of(ModelConfig) if spec.options.architecture}
    if model.position_embedding_type != "rope":
        settings = {
            name: value for name, value in settings.items() if not name.startswith(("rotary", "rope", "use_rope"))
        }
    return settings


def through_hugging_face(model: ModelConfig) -> ModelConfig:
    found = model_from_config(config_from_model(model, dtype="float32", source={}, tokens={}), where="x")
    return dataclasses.replace(found, rotary_interleaved=model.rotary_interleaved)  # weights are put in the other order


def through_megatron_lm(model: ModelConfig) -> ModelConfig:
    args = Arguments(arguments_of(portable(model, {"x": torch.zeros(1)}), dist=True, own={}, unsupported={}), "x")
    return model_from_arguments(args, vocab_size=101, num_layers=model.num_layers, legacy=False)


@pytest.mark.parametrize("through", [through_hugging_face, through_megatron_lm])
@pytest.mark.parametrize("base", [CLASSIC, MODERN], ids=["classic", "modern"])
def test_every_setting_is_written_or_refused(base: dict[str, Any], through: Callable[[ModelConfig], Any]) -> None:
    """A setting that the target can't say was left out, and its model computed something else."""
    architecture = {spec.field for spec in flags_of(ModelConfig) if spec.options.architecture}
    assert architecture == CHANGES.keys() | SIZES
    for name, value in [(name, each) for name, values in CHANGES.items() for each in as_tuple(values)]:
        model = changed(base, name, value)
        try:
            found = through(model)
        except CheckpointError:
            continue
        assert function_of(found) == function_of(model), name


# Settings of transformers' classes without effect on what they compute: training, generation, other heads.
WITHOUT_EFFECT = """
_name_or_path architectures chunk_size_feed_forward dtype id2label is_encoder_decoder label2id model_type
output_attentions output_hidden_states problem_type return_dict transformers_version use_cache bos_token_id eos_token_id
pad_token_id embd_pdrop classifier_dropout initializer_factor reorder_and_upcast_attn pretraining_tp summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj is_decoder
"""
WITH_WINDOW = "layer_types max_window_layers"  # read by transformers together with a sliding window, which is refused


@pytest.mark.parametrize("family", model_types())
def test_every_setting_of_transformers_is_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers honours and a conversion skips would make another model wherever the proof can't see it."""
    asked: set[str] = set()

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Known, name: str, *default: Any) -> Any:
            asked.add(name)
            return method(self, name, *default)

        return wrapped

    monkeypatch.setattr(Known, "__call__", recorded(Known.__call__))
    monkeypatch.setattr(Known, "get", recorded(Known.get))
    settings = {"sliding_window": None} if family == "mistral" else {}
    config = transformers.AutoConfig.for_model(family, **settings).to_dict()
    model_from_config(config, where="x")
    published = format_of(family)
    assert published is not None
    if family == "t5":
        published.groups_from_config(
            published.known({"model_type": family, **config}, where="x"), {"decoder."}, where="x"
        )
    assert config.keys() - asked - {*WITHOUT_EFFECT.split(), *WITH_WINDOW.split()} == set()


def test_a_group_for_each_head_shares_nothing() -> None:
    """A GPT-2 with --group-query-attention and as many groups as heads was refused as sharing keys and values."""
    model = ModelConfig(
        **{**CLASSIC, "group_query_attention": True, "num_query_groups": CLASSIC["num_attention_heads"]}
    )
    written = config_from_model(model, dtype="float32", source={}, tokens={})
    assert written["model_type"] == "gpt2"
    assert model_from_config(written, where="x").num_query_groups == model.num_query_groups
