"""Every setting that changes the function is read or refused, and written or refused: none is dropped on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from megatron.config.flags import flags_of
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.positions import ROTARY_FIELDS
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.formats import config_from_model, format_for, format_of, model_from_config
from megatron.core.conversion.huggingface.listing import published_types
from megatron.core.conversion.megatron_lm import arguments
from megatron.core.conversion.megatron_lm.arguments import arguments_of, model_from_arguments
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.models.gpt import megatron_lm
from megatron.core.models.gpt.huggingface.gemma import GEMMA, GEMMA3
from megatron.core.models.gpt.huggingface.llama import LLAMA
from megatron.core.transformer.positions import rotary_of
from megatron.errors import CheckpointError
from tests.published import FIRST, MODELS
from tests.unit.conversion.megatron_checkpoints import CLASSIC, MODERN, portable

transformers = pytest.importorskip("transformers", reason="its settings are compared with those that are read")

CHANGES: dict[str, Any] = {
    "ffn_hidden_size": 80,
    "kv_channels": 16,
    "multi_latent_attention": True,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 8),
    "mtp_num_layers": 1,
    "position_embedding_offset": 2,
    "position_embedding_type": ("none", "yarn", "dynamic_ntk", "longrope", "alibi"),
    "scale_alibi": True,
    "rotary_percent": 0.5,
    "rotary_base": 5e5,
    "rotary_base_local": 1e3,
    "no_rope_freq": ("2", "[0,1,1,0]"),
    "rotary_interleaved": True,
    "rotary_seq_len_interpolation_factor": 2.0,
    "use_rope_scaling": True,
    **dict.fromkeys(("rope_scaling_factor", "rope_high_freq_factor"), 32.0),
    "rope_low_freq_factor": 0.5,
    **dict.fromkeys(("rotary_scaling_factor", "rotary_attention_factor", "yarn_beta_fast", "yarn_beta_slow"), 5.0),
    "original_max_position_embeddings": 12,
    "yarn_correction_range_round_to_int": False,
    "mscale": (0.0, 0.5),
    "mscale_all_dim": 0.5,
    "longrope_short_factors": 5.0,
    "longrope_long_factors": 5.0,
    "normalization": "other",
    "norm_epsilon": 1e-3,
    "apply_layernorm_1p": True,
    "apply_residual_connection_post_layernorm": True,
    "add_bias_linear": "other",
    "embedding_norm": True,
    "word_embedding_size": 16,
    "first_attention_norm": False,
    "parallel_attention": True,
    "parallel_layernorm": True,
    "add_qkv_bias": True,
    "add_attention_output_bias": True,
    "add_mlp_bias": True,
    "add_output_layer_bias": True,
    "activation": ("gelu", "relu", "squared_relu", "swiglu", "geglu", "geglu_tanh", "gelu_tanh", "quick_geglu"),
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "softmax_scale": 0.5,
    "window_size": ((15, 0), (15, 2)),
    "window_attn_skip_freq": "2",
    "attn_logit_softcapping": 30.0,
    "softmax_type": ("off-by-one", "learnable"),
    "qk_layernorm": True,
    "qk_layernorm_kind": ("per_head", "all_heads"),
    "qk_l2_norm": True,
    "attention_output_gate": True,
    "norm_placement": ("after", "both"),
    "norm_parameters": ("weight", "none"),
    "clip_qkv": 4.0,
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_multiplier"), 0.5),
    "position_embedding_multiplier": 0.5,
    "final_logit_softcapping": 30.0,
    "untie_embeddings_and_output_weights": "other",
    "num_query_groups": 1,
}
OTHER = {"LayerNorm": "RMSNorm", "RMSNorm": "LayerNorm", True: False, False: True}
SCALED_TYPES = ("yarn", "dynamic_ntk", "longrope")
SCALED = {"original_max_position_embeddings": 8, "rotary_scaling_factor": 4.0}
FACTORS = ("longrope_short_factors", "longrope_long_factors")
SIZES = {"num_layers", "hidden_size", "num_attention_heads", "group_query_attention", "vocab_size"}


def changed(base: dict[str, Any], name: str, value: Any) -> ModelConfig:
    """The model of ``base`` with another value of one setting."""
    value = OTHER[getattr(ModelConfig(**base), name)] if value == "other" else value
    more: dict[str, Any] = {"use_rope_scaling": True} if name.startswith("rope_") else {}
    if value in SCALED_TYPES or "rope" not in ROTARY_FIELDS.get(name, ("rope",)):
        kind = value if value in SCALED_TYPES else ROTARY_FIELDS[name][0]
        pairs = ModelConfig(**base).kv_channels // 2
        factors = dict.fromkeys(FACTORS, tuple(1.0 + number for number in range(pairs))) if kind == "longrope" else {}
        more = {"position_embedding_type": kind, **SCALED, **factors}
        value = (value,) * pairs if name in FACTORS else value
    if name == "parallel_layernorm":
        more["parallel_attention"] = True
    if name == "qk_layernorm_kind":
        more["qk_layernorm"] = True
    if name == "window_attn_skip_freq":
        more["window_size"] = (15, 0)
    if name == "rotary_base_local":
        more["window_size"] = (7, 0)
    if name == "scale_alibi":
        more["position_embedding_type"] = "alibi"
    if name == "num_query_groups":
        more["group_query_attention"] = True
    return ModelConfig(**{**base, **more, name: value})


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Several values to try; one that is a tuple is alone in another."""
    return values if isinstance(values, tuple) else (values,)


def function_of(model: ModelConfig) -> dict[str, Any]:
    """The settings that the model computes with; several settings of rotary positions may say the same."""
    settings = {spec.field: getattr(model, spec.field) for spec in flags_of(ModelConfig) if spec.options.architecture}
    others = {name: value for name, value in settings.items() if name not in ROTARY_FIELDS}
    interleaved = model.is_rotary and model.rotary_interleaved
    return {**others, "rotary": [rotary_of(model, number) for number in range(model.num_layers)], "order": interleaved}


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
    unchanged = ModelConfig(**base)
    assert function_of(through(unchanged)) == function_of(unchanged)  # else a refusal of everything would pass
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
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj is_decoder embedding_dropout
decoder_start_token_id slow_but_exact cls_token_id sep_token_id initializer_cutoff_factor mlp_dropout classifier_pooling
deterministic_flash_attn sparse_prediction sparse_pred_ignore_index output_router_logits router_aux_loss_coef
"""
WITH_WINDOW = "layer_types max_window_layers"  # read by transformers together with a sliding window, which is refused


@pytest.mark.parametrize("family", [each.model_type for each in published_types()])
def test_every_setting_of_transformers_is_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers honours and a conversion skips would make another model wherever the proof can't see it."""
    asked: set[str] = set()

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: ConfigReader, name: str, *default: Any) -> Any:
            asked.add(name)
            return method(self, name, *default)

        return wrapped

    monkeypatch.setattr(ConfigReader, "__call__", recorded(ConfigReader.__call__))
    monkeypatch.setattr(ConfigReader, "get", recorded(ConfigReader.get))
    settings = {"sliding_window": None} if family == "mistral" else {}
    config = {**settings_of(family), **settings}
    model_from_config(config, where="x")
    published = format_of(family)
    assert published is not None
    reader = published.reader({"model_type": family, **config}, where="x")
    published.groups_from_config(reader, {"decoder.", *published.types[family].heads}, where="x")
    asked |= {*published.types[family].idle}
    assert config.keys() - asked - {*WITHOUT_EFFECT.split(), *WITH_WINDOW.split()} == set()


def settings_of(family: str) -> dict[str, Any]:
    """transformers' own settings of a type, with those that it has no default for."""
    needed: dict[str, dict[str, Any]] = {
        "deepseek_v2": {"num_experts_per_tok": 2},
        "deepseek_v3": {"num_hidden_layers": 4},  # as many as models of our own have
        "glm4_moe": {"num_hidden_layers": 4, "head_dim": 128},
        # of the width that models of our own have
        "mamba2": {"num_hidden_layers": 4, "hidden_size": 32, "num_heads": 1},
        "bamba": {"num_hidden_layers": 2, "hidden_size": 32, "mamba_n_heads": 4, "head_dim": 8},
        "granitemoehybrid": {"num_hidden_layers": 2, "hidden_size": 32, "mamba_n_heads": 4, "head_dim": 8},
        "internvl": {"vision_config": {"attention_bias": True}},
        "gemma3": {
            "vision_config": {"image_size": 896, "patch_size": 14}
        },  # whose patches the default number of places divides
    }
    found: dict[str, Any] = transformers.AutoConfig.for_model(family, **needed.get(family, {})).to_dict()
    return found


GEMMAS = {"activation": "geglu_tanh", "embedding_multiplier": CLASSIC["hidden_size"] ** 0.5}
# Fields beside those that all models of a type have, without which a model isn't of the type.
NEEDED: dict[str, dict[str, Any]] = {
    **{name: {"embedding_multiplier": CLASSIC["hidden_size"] ** 0.5} for name in ("gemma", "gemma2", "gemma3_text")},
    **{name: {"position_embedding_offset": 2} for name in ("roberta", "xlm-roberta", "camembert")},
    "falcon": {"position_embedding_type": "rope"},  # or ALiBi
    "mixtral": {"ffn_hidden_size": 14336},  # the width of its experts
    "olmoe": {"ffn_hidden_size": 2048},
    "gpt_oss": {"ffn_hidden_size": 2880, "activation_func_clamp_value": 7.0},
    **{key: {"norm_epsilon": 1e-06} for key in ("deepseek_v2", "deepseek_v3")},
    "nemotron_h": {"untie_embeddings_and_output_weights": True},
    "mamba2": {"num_attention_heads": 1, "ffn_hidden_size": 32},
    "granitemoehybrid": {"position_embedding_type": "none", "ffn_hidden_size": 1024},  # of its shared expert
    "olmo_hybrid": {"position_embedding_type": "none"},
    "mt5": {"untie_embeddings_and_output_weights": True},  # the files say it, and no setting
    "llava": {**LLAMA.merged("fixed"), "activation": "swiglu"},  # their language models
    "llava_next": {**LLAMA.merged("fixed"), "activation": "swiglu"},
    "internvl": {**LLAMA.merged("fixed"), "activation": "swiglu", "add_qkv_bias": True},
    **{name: {**each.merged("fixed"), **GEMMAS} for name, each in (("paligemma", GEMMA), ("gemma3", GEMMA3))},
}


@pytest.mark.parametrize("family", [each.model_type for each in published_types()])
def test_a_model_of_our_own_is_written_in_full(family: str) -> None:
    """A StableLM with --rotary-percent 1 came back with a quarter of each head rotated, as did a Nemotron and a Phi: a
    setting at our default was left out, and the type has another default.
    """
    published = format_of(family)
    assert published is not None
    described = published.types[family]
    theirs = {**settings_of(family), "model_type": family}
    heads = {"decoder.", *described.heads}
    groups = published.groups_from_config(published.reader(theirs, where="x"), heads, where="x")
    base = {**CLASSIC, **described.merged("fixed"), **NEEDED.get(family, {})}
    if described.activations:
        base["activation"] = described.activations[theirs[described.activation]]
    parts = (1.0, 0.5) if "rotary_percent" in described.converted() else (1.0,)
    for model in [ModelConfig(**{**base, "rotary_percent": part}) for part in parts]:
        written = config_from_model(model, groups, dtype="float32", source={"model_type": family}, tokens={})
        assert written["model_type"] == family
        for config in (written, transformers.AutoConfig.for_model(**written).to_dict()):
            found = model_from_config(config, where="x")
            assert function_of(dataclasses.replace(found, rotary_interleaved=False)) == function_of(model)


OLDER: list[tuple[str, Any]] = [
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    ("rope_theta", 777.0),
    ("partial_rotary_factor", 0.5),
    ("sliding_window", 5),
    ("use_sliding_window", True),
    ("use_sliding_window", False),
]
"""Settings beside those of a file that transformers 5 has written, or in place of ``LATER``."""
LATER = ("rope_parameters", "layer_types", "sliding_window")
THEIR_OWN = {
    ("olmo3", "rope_theta"),  # transformers 5 has it in full attention alone, 4 had it in all layers
    ("deepseek_v3", "num_key_value_heads"),  # nothing reads it, and its default is that of 128 heads
}


def variants_of(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each setting left out, and older settings; with the one that differs."""
    for left_out in config:
        yield left_out, {name: value for name, value in config.items() if name != left_out}
    for name, value in OLDER:
        yield name, {**config, name: value}
        without = {each: said for each, said in config.items() if each not in LATER}
        yield name, {**without, name: value}


@pytest.mark.parametrize("case", FIRST.values())
def test_a_file_means_what_transformers_makes_of_it(case: str) -> None:
    """A setting that is left out, or said twice in the ways of two versions, was read as another model: rope_scaling
    beside rope_parameters was ignored, as was YaRN, gpt-oss's default; windows of a Qwen2-MoE were in other layers.
    """
    family = MODELS[case][0]
    whole = transformers.AutoConfig.for_model(family, **deepcopy(MODELS[case][1])).to_dict()
    for name, config in variants_of({**whole, "model_type": family}):
        if name in ("model_type", "architectures") or (family, name) in THEIR_OWN:
            continue
        try:
            ours = function_of(model_from_config(config, where="x"))
        except CheckpointError:  # refused by name
            continue
        try:
            theirs = transformers.AutoConfig.for_model(**deepcopy(config)).to_dict()
        except Exception:  # whatever transformers raises for settings that it refuses
            continue
        assert ours == function_of(model_from_config({**theirs, "model_type": family}, where="x")), name


def test_special_tokens_that_nobody_knows() -> None:
    """transformers takes 32000 as Phi-3's padding: a model of fewer words without a tokenizer could not be loaded."""
    published = format_for(())
    for family in published.types:
        config = settings_of(family)
        model, told = model_from_config(config, where="x"), {"pad_token_id": 7}
        groups = published.groups_from_config(published.reader(config, where="x"), (), where="x")
        known = config_from_model(model, groups, dtype="float32", source={"model_type": family}, tokens=told)
        unknown = config_from_model(model, groups, dtype="float32", source={"model_type": family}, tokens={})
        assert (known["pad_token_id"], unknown["pad_token_id"]) == (7, None)


@pytest.mark.parametrize(
    ("family", "name"), [("gpt2", "embd_pdrop"), ("phi", "embd_pdrop"), ("starcoder2", "embedding_dropout")]
)
def test_the_dropout_of_embeddings_comes_back(family: str, name: str) -> None:
    """Ours has the rate of the layers; that of a source was overwritten with it."""
    config = {**transformers.AutoConfig.for_model(family).to_dict(), "resid_pdrop": 0.1, "residual_dropout": 0.1}
    model = model_from_config(config, where="x")
    for source, rate in (({**config, name: 0.0}, 0.0), ({"model_type": family}, 0.1)):
        assert config_from_model(model, dtype="float32", source=source, tokens={})[name] == rate


def test_the_original_length_of_the_source_is_not_kept() -> None:
    """After training with another --original-max-position-embeddings the source's own stayed beside rope_scaling, and
    both transformers and the converter prefer it there.
    """
    scaled = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}
    model = ModelConfig(**{**MODERN, **scaled, "original_max_position_embeddings": 8})
    source = {"model_type": "llama", "original_max_position_embeddings": 16}
    written = config_from_model(model, dtype="float32", source=source, tokens={})
    for config in (written, transformers.AutoConfig.for_model(**written).to_dict()):
        assert model_from_config(config, where="x").original_max_position_embeddings == 8


def test_a_group_for_each_head_shares_nothing() -> None:
    """A GPT-2 with --group-query-attention and as many groups as heads was refused as sharing keys and values."""
    model = ModelConfig(
        **{**CLASSIC, "group_query_attention": True, "num_query_groups": CLASSIC["num_attention_heads"]}
    )
    written = config_from_model(model, dtype="float32", source={}, tokens={})
    assert written["model_type"] == "gpt2"
    assert model_from_config(written, where="x").num_query_groups == model.num_query_groups


def test_what_a_conversion_reads_is_taken_from_its_checkpoint() -> None:
    """--mtp-loss-scaling-factor of a converted checkpoint was not: the first gradient norm was off by up to 0.1.

    The size to which a vocabulary is padded changes no number, and follows from the layout.
    """
    converted = {*arguments._SAME, *arguments._COMPUTED, *arguments._BY_CODE, *megatron_lm._SAME, *CHANGES}
    converted |= {"mtp_loss_scaling_factor"}
    specs = {spec.field: spec.options for group in (ModelConfig, MoEConfig) for spec in flags_of(group)}
    lost = {name for name, has in specs.items() if not (has.architecture or has.from_checkpoint)}
    assert lost & converted == {"make_vocab_size_divisible_by"}
