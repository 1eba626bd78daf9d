"""T5 as GGUF files: llama.cpp's ``t5``, whose output layer takes hidden states as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.gguf.architecture import Architecture, Metadata
from megatron.core.models.registry import with_all_groups
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.huggingface import T5 as PUBLISHED
from megatron.errors import CheckpointError

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "feed_forward_length": "ffn_hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.key_length": "kv_channels",
    "attention.layer_norm_rms_epsilon": "norm_epsilon",
    "vocab_size": "vocab_size",
}
_BUCKETS, _DECODER = "attention.relative_buckets_count", "decoder_block_count"
_DISTANCE = 128  # beyond which llama.cpp puts all relative positions into one bucket


def _refused(model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
    group = T5Config.among(groups)
    distance, layers = group.relative_attention_max_distance, group.decoder_num_layers
    deeper = f"--decoder-num-layers is {layers}, more than the {model.num_layers} of the encoder (--num-layers)"
    return [
        *[f"--relative-attention-max-distance is {distance} and not {_DISTANCE}"] * (distance != _DISTANCE),
        *[deeper] * (layers > model.num_layers),
    ]


def _unscaled(model: ModelConfig, groups: tuple[object, ...]) -> tuple[ModelConfig, tuple[object, ...]]:
    """What llama.cpp makes of a file without an output layer, as other programs write the original T5: likelier words
    are the same, and their probabilities are not.
    """
    return model, tuple(
        dataclasses.replace(each, scale_output=False) if isinstance(each, T5Config) else each for each in groups
    )


def _own_output(model: ModelConfig, groups: tuple[object, ...]) -> tuple[ModelConfig, tuple[object, ...]]:
    """The model with an output layer of its own, which takes hidden states unscaled."""
    if not T5Config.among(groups).scale_output:
        return model, groups
    return _unscaled(dataclasses.replace(model, untie_embeddings_and_output_weights=True), groups)


ARCHITECTURE = Architecture(
    name="t5",
    types=("t5", "mt5"),
    refuse=_refused,
    has_output=True,
    output_scale=lambda model, groups: model.hidden_size**-0.5 if T5Config.among(groups).scale_output else 1.0,
    has_encoder=True,
    computed=_own_output,
    as_run=_unscaled,
    difference=(
        "llama.cpp doesn't scale the output of a T5: the file has an output layer of its own, the word embedding times "
        "1 / sqrt(hidden size), which computes the same"
    ),
    tolerance=1e-3,  # GELU is looked up in a table of 16 bits
    sensitivity=4.0,  # scores of attention aren't divided by the square root of a head's width
)


class EncoderDecoderFiles:
    """The files of encoder-decoders."""

    architectures: Sequence[Architecture] = (ARCHITECTURE,)

    def written(self, model: ModelConfig, groups: Sequence[object], architecture: Architecture) -> dict[str, Any]:
        """Keys of a model, without its architecture's name in front."""
        group = T5Config.among(groups)
        found: dict[str, Any] = {key: getattr(model, field) for key, field in _SIZES.items()}
        found |= {"attention.value_length": model.kv_channels, "attention.layer_norm_epsilon": model.norm_epsilon}
        return {**found, _BUCKETS: group.relative_attention_num_buckets, _DECODER: group.decoder_num_layers}

    def read(
        self, keys: Metadata, tensors: Collection[str], architecture: Architecture
    ) -> tuple[ModelConfig, tuple[object, ...]]:
        """The settings of a model and of its family's groups; CheckpointError for keys that are missing."""
        for key in _SIZES:
            if key not in keys:
                raise CheckpointError(f"a file of a model has the key {architecture.name}.{key}, and it is missing")
            if isinstance(keys[key], list):
                raise CheckpointError(f"{key} has a number for each layer ({keys[key][:4]}); a T5 has one for all")
        gated = any(name.endswith(".ffn_gate.weight") for name in tensors)
        model = ModelConfig(
            **PUBLISHED.fixed,
            **{field: keys[key] for key, field in _SIZES.items()},
            activation="geglu_tanh" if gated else "relu",
            untie_embeddings_and_output_weights="output.weight" in tensors,
        )
        group = T5Config(
            decoder_num_layers=keys.get(_DECODER, model.num_layers),
            relative_attention_num_buckets=keys.get(_BUCKETS, 32),
            relative_attention_max_distance=_DISTANCE,
            scale_output="output.weight" not in tensors and not gated,
        )
        return model, with_all_groups([group])


FORMAT = EncoderDecoderFiles()
