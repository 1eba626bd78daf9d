"""Encoders of images in published models: names of their tensors, and which settings are whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config.activation import Activation
from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.conversion.bounds import Count, Small
from megatron.core.conversion.huggingface.config_reader import ConfigReader, Json
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import QUERY_KEY_VALUE, SAME, Transform

OURS, LAYER = "vision_model", "vision_model.encoder.layers.{n}"
ACTIVATIONS: dict[str, Activation] = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Names of activations in ``vision_config``; the first of those with one meaning is written."""
KINDS: dict[str, Any] = {
    **dict.fromkeys(
        ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "num_channels"), Count
    ),
    "layer_norm_eps": Small,
    **dict.fromkeys(("image_size", "patch_size"), Any),
    **dict.fromkeys(("hidden_act", "norm_type", "model_type"), str),
    **dict.fromkeys(("use_qk_norm", "attention_bias", "use_absolute_position_embeddings", "use_mask_token"), bool),
    "use_mean_pooling": bool,
}


def _of(encoder: ModelConfig, transform: Transform) -> Transform:
    """The transform of a tensor of the encoder, in a table whose model is the language model."""
    return Transform(
        lambda parts, model: transform.join(parts, encoder), lambda tensor, model: transform.split(tensor, encoder)
    )


def _reshaped(
    to_theirs: Callable[[Tensor], tuple[int, ...]], to_ours: Callable[[Tensor], tuple[int, ...]]
) -> Transform:
    return Transform(
        lambda parts, model: parts[0].reshape(to_ours(parts[0])),
        lambda tensor, model: [tensor.reshape(to_theirs(tensor))],
    )


def _patches(settings: VisionConfig) -> Transform:
    """The weight of a convolution [h, 3, p, p] as our matrix [h, 3·p·p]; a bias stays as it is."""
    side = settings.patch_dim
    return _reshaped(
        lambda ours: (len(ours), 3, side, side) if ours.dim() == 2 else tuple(ours.shape),
        lambda theirs: (len(theirs), 3 * side * side) if theirs.dim() == 4 else tuple(theirs.shape),
    )


def _beside_unused(fill: Callable[[Tensor], Tensor]) -> Transform:
    """A tensor, and one of its shape behind it that no feature passes: it is written, and not read."""
    return Transform(lambda parts, model: parts[0], lambda tensor, model: [tensor, fill(tensor)])


def clip_rows(settings: VisionConfig, *, prefix: str) -> tuple[Row, ...]:
    """Rows of a CLIP encoder whose names begin with ``prefix``. The norm behind its last layer, which only its pooled
    output passes, is written as one that changes nothing.
    """
    theirs, embeddings = f"{prefix}encoder.layers.{{n}}", f"{prefix}embeddings."
    norms = (("weight", torch.ones_like), ("bias", torch.zeros_like))
    return (
        Row(f"{OURS}.embedding.projection", f"{embeddings}patch_embedding", _patches(settings)),
        Row(f"{OURS}.embedding.positions.class_token", f"{embeddings}class_embedding", is_parameter=True),
        Row(f"{OURS}.embedding.positions.weight", f"{embeddings}position_embedding.weight", is_parameter=True),
        *(
            Row(
                f"{OURS}.pre_layernorm.{kind}",
                (f"{prefix}pre_layrnorm.{kind}", f"{prefix}post_layernorm.{kind}"),
                _beside_unused(fill),
                is_parameter=True,
            )
            for kind, fill in norms
        ),
        *_like_clip(settings, theirs),
    )


def siglip_rows(settings: VisionConfig, *, prefix: str) -> tuple[Row, ...]:
    """Rows of a SigLIP encoder whose names begin with ``prefix``, without the head that pools features."""
    embeddings = f"{prefix}embeddings."
    return (
        Row(f"{OURS}.embedding.projection", f"{embeddings}patch_embedding", _patches(settings)),
        Row(f"{OURS}.embedding.positions.weight", f"{embeddings}position_embedding.weight", is_parameter=True),
        *(() if settings.vision_final_norm else _without_last_norm(settings, prefix)),
        *_like_clip(settings, f"{prefix}encoder.layers.{{n}}"),
        Row(f"{OURS}.encoder.final_layernorm", f"{prefix}post_layernorm"),
    )


def _without_last_norm(settings: VisionConfig, prefix: str) -> tuple[Row, ...]:
    """In place of the row of the patches' matrix: the norm behind the last layer, which no feature passes, is written
    beside it as one that changes nothing.
    """
    ours, theirs = f"{OURS}.embedding.projection", f"{prefix}embeddings.patch_embedding"

    def beside(kind: str, fill: Callable[[Tensor], Tensor]) -> Row:
        patches = _patches(settings)
        transform = Transform(
            lambda parts, model: patches.join(parts[:1], model),
            lambda tensor, model: [*patches.split(tensor, model), fill(tensor)],
        )
        return Row(f"{ours}.{kind}", (f"{theirs}.{kind}", f"{prefix}post_layernorm.{kind}"), transform, True)

    return beside("weight", lambda each: each.new_ones(len(each))), beside("bias", torch.zeros_like)


def _like_clip(settings: VisionConfig, theirs: str) -> Sequence[Row]:
    encoder = encoder_of(settings)
    query_key_value = tuple(f"{theirs}.self_attn.{letter}_proj" for letter in "qkv")
    return (
        Row(f"{LAYER}.input_layernorm", f"{theirs}.layer_norm1"),
        Row(f"{LAYER}.self_attention.linear_qkv", query_key_value, _of(encoder, QUERY_KEY_VALUE)),
        Row(f"{LAYER}.self_attention.linear_proj", f"{theirs}.self_attn.out_proj"),
        Row(f"{LAYER}.pre_mlp_layernorm", f"{theirs}.layer_norm2"),
        Row(f"{LAYER}.mlp.linear_fc1", f"{theirs}.mlp.fc1"),
        Row(f"{LAYER}.mlp.linear_fc2", f"{theirs}.mlp.fc2"),
    )


def internvl_rows(settings: VisionConfig, *, prefix: str) -> tuple[Row, ...]:
    """Rows of an InternViT as transformers' InternVL has it, whose names begin with ``prefix``."""
    theirs, embeddings, encoder = f"{prefix}encoder.layer.{{n}}", f"{prefix}embeddings.", encoder_of(settings)
    attention = f"{theirs}.attention"
    query_key_value = tuple(f"{attention}.{letter}_proj" for letter in "qkv")
    of_token = _reshaped(lambda ours: (1, 1, len(ours)), lambda theirs: (theirs.shape[-1],))
    of_places = _reshaped(lambda ours: (1, *ours.shape), lambda theirs: tuple(theirs.shape[1:]))
    names = f"{OURS}.embedding.positions"
    return (
        Row(f"{OURS}.embedding.projection", f"{embeddings}patch_embeddings.projection", _patches(settings)),
        Row(f"{names}.class_token", f"{embeddings}cls_token", of_token, is_parameter=True),
        Row(f"{names}.weight", f"{embeddings}position_embeddings", of_places, is_parameter=True),
        Row(f"{LAYER}.input_layernorm", f"{theirs}.layernorm_before"),
        Row(f"{LAYER}.self_attention.linear_qkv", query_key_value, _of(encoder, QUERY_KEY_VALUE)),
        Row(f"{LAYER}.self_attention.q_layernorm", f"{attention}.q_norm", SAME),
        Row(f"{LAYER}.self_attention.k_layernorm", f"{attention}.k_norm", SAME),
        Row(f"{LAYER}.self_attention.linear_proj", f"{attention}.projection_layer"),
        Row(f"{LAYER}.self_attn_layer_scale.weight", f"{theirs}.lambda_1", is_parameter=True),
        Row(f"{LAYER}.pre_mlp_layernorm", f"{theirs}.layernorm_after"),
        Row(f"{LAYER}.mlp.linear_fc1", f"{theirs}.mlp.fc1"),
        Row(f"{LAYER}.mlp.linear_fc2", f"{theirs}.mlp.fc2"),
        Row(f"{LAYER}.mlp_layer_scale.weight", f"{theirs}.lambda_2", is_parameter=True),
    )


def encoder_of(settings: VisionConfig) -> ModelConfig:
    """Sizes and choices of the encoder alone."""
    return settings.encoder(ModelConfig(num_layers=1, hidden_size=1, num_attention_heads=1))


ROWS: dict[str, Callable[..., tuple[Row, ...]]] = {
    "clip": clip_rows,
    "siglip": siglip_rows,
    "internvit": internvl_rows,
    "internvit300M": internvl_rows,
}
"""Rows by ``--vision-model-type``."""
TOWERS = {
    "clip": "clip_vision_model",
    "siglip": "siglip_vision_model",
    "internvit": "internvl_vision",
    "internvit300M": "internvl_vision",
}
"""``model_type`` of a ``vision_config`` by ``--vision-model-type``."""


def read_vision(reader: ConfigReader) -> dict[str, Any]:
    """Fields of ``VisionConfig`` from a ``vision_config``; CheckpointError for one that isn't available."""
    model_type = reader.one_of("model_type", {"clip_vision_model": "clip", "siglip_vision_model": "siglip"} | _INTERNVL)
    reader.expect(num_channels=3)
    if model_type == "internvit":
        reader.expect(use_absolute_position_embeddings=True, use_mask_token=False, use_mean_pooling=True)
        combination = reader("norm_type"), reader("use_qk_norm"), reader("attention_bias")
        types = {("rms_norm", True, False): "internvit", ("layer_norm", False, True): "internvit300M"}
        if combination not in types:
            raise reader.refuse(
                "norm_type", "an encoder has RMSNorm, norms of queries and keys and no bias of them, or none of these"
            )
        model_type = types[combination]
    image, patch = (_side(reader, name) for name in ("image_size", "patch_size"))
    return {
        "vision_model_type": model_type,
        "vision_num_layers": reader("num_hidden_layers"),
        "vision_hidden_size": reader("hidden_size"),
        "vision_num_attention_heads": reader("num_attention_heads"),
        "vision_ffn_hidden_size": reader("intermediate_size"),
        "vision_activation": reader.one_of("hidden_act", ACTIVATIONS),
        "vision_norm_epsilon": reader("layer_norm_eps"),
        "patch_dim": patch,
        **dict.fromkeys(("img_h", "img_w", "vision_position_size"), image),
    }


_INTERNVL = {"internvl_vision": "internvit"}


def write_vision(vision: VisionConfig, source: Json) -> dict[str, Any]:
    """The ``vision_config`` of an encoder, with what the ``source`` has of settings that have no field here."""
    names = [theirs for theirs, ours in ACTIVATIONS.items() if ours == vision.vision_activation]
    written, tower = source.get("hidden_act"), TOWERS[str(vision.vision_model_type)]
    found = {
        "model_type": tower,
        "num_hidden_layers": vision.vision_num_layers,
        "hidden_size": vision.vision_hidden_size,
        "intermediate_size": vision.vision_ffn_hidden_size,
        "num_attention_heads": vision.vision_num_attention_heads,
        "hidden_act": written if written in names else names[0],
        "layer_norm_eps": vision.vision_norm_epsilon,
        "image_size": vision.vision_position_size,
        "patch_size": vision.patch_dim,
        "num_channels": 3,
    }
    if tower == "clip_vision_model":
        return {**found, "projection_dim": source.get("projection_dim", 768)}
    if tower == "siglip_vision_model":
        return {**found, "vision_use_head": False}
    is_large = vision.vision_model_type == "internvit"
    return {
        **found,
        "image_size": [vision.vision_position_size] * 2,
        "patch_size": [vision.patch_dim] * 2,
        "norm_type": "rms_norm" if is_large else "layer_norm",
        "use_qk_norm": is_large,
        "attention_bias": not is_large,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
    }


def _side(reader: ConfigReader, name: str) -> int:
    """The side of squares, which InternVL's settings say twice."""
    found = reader(name)
    sides = found if isinstance(found, list) else [found, found]
    if len(sides) != 2 or sides[0] != sides[1] or not isinstance(sides[0], int) or not 0 < sides[0] <= 65536:
        raise reader.refuse(name, "images and patches are squares here")
    return sides[0]


_USUAL = {"num_channels": 3}
DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {
        **_USUAL,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "siglip_vision_model": {
        **_USUAL,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "internvl_vision": {
        **_USUAL,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": [448, 448],
        "patch_size": [14, 14],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "norm_type": "layer_norm",
        "use_qk_norm": False,
        "attention_bias": False,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
    },
}
"""What transformers takes for missing settings, by ``model_type``."""
