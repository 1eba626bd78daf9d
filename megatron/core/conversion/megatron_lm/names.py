"""Megatron-LM's names of our tensors: of its core models, with Transformer Engine (and in torch_dist), and before core.

A row holds our name and theirs, ``{n}`` standing for the layer's number; rows are read in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LAYERS = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Spelling:
    """``core``: with norms as modules of their own. ``fused``: with norms inside the matrix that follows them.

    ``legacy``: of the models before core, as today's checkpoints spell them; see ``_todays`` for older ones.
    """

    ours: str
    core: str
    fused: str
    legacy: str


def _everywhere(name: str, legacy: str) -> Spelling:
    return Spelling(name, name, name, f"language_model.{legacy}")


def _layer(name: str, legacy: str, *, fused: str | None = None) -> Iterator[Spelling]:
    for kind in ("weight", "bias"):
        ours = f"decoder.layers.{{n}}.{name}.{kind}"
        inside = f"decoder.layers.{{n}}.{fused}_{kind}" if fused else ours
        yield Spelling(ours, ours, inside, f"language_model.encoder.layers.{{n}}.{legacy}.{kind}")


SPELLINGS = (
    _everywhere("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    _everywhere("embedding.position_embeddings.weight", "embedding.position_embeddings.weight"),
    *_layer("input_layernorm", "input_norm", fused="self_attention.linear_qkv.layer_norm"),
    *_layer("self_attention.linear_qkv", "self_attention.query_key_value"),
    *_layer("self_attention.q_layernorm", "self_attention.q_layernorm"),
    *_layer("self_attention.k_layernorm", "self_attention.k_layernorm"),
    *_layer("self_attention.linear_proj", "self_attention.dense"),
    *_layer("pre_mlp_layernorm", "post_attention_norm", fused="mlp.linear_fc1.layer_norm"),
    *_layer("mlp.linear_fc1", "mlp.dense_h_to_4h"),
    *_layer("mlp.linear_fc2", "mlp.dense_4h_to_h"),
    _everywhere("decoder.final_layernorm.weight", "encoder.final_norm.weight"),
    _everywhere("decoder.final_layernorm.bias", "encoder.final_norm.bias"),
    _everywhere("output_layer.weight", "output_layer.weight"),
)

_OURS = {their: row.ours for row in SPELLINGS for their in (row.core, row.fused, row.legacy)}
_CORE = {row.ours: row.core for row in SPELLINGS}
_STACKED = {row.ours: row.fused.replace("layers.{n}.", "layers.") for row in SPELLINGS}
_FROM_STACKED = {key: ours for ours, key in _STACKED.items() if "{n}" in ours}

# What a model's tensors are mixed with: states of fp8 kernels, buffers, and the last stage's copy of tied embeddings.
_NOT_WEIGHTS = re.compile(r"(.*\._extra_state.*|.*\.inv_freq|word_embeddings_for_head\.weight)")


def is_weight(name: str) -> bool:
    """Whether a name of theirs is one of a model's weights."""
    return not _NOT_WEIGHTS.fullmatch(name)


def our_name(theirs: str, *, first_layer: int = 0) -> str | None:
    """Our name of a tensor whose stage begins with layer ``first_layer``; None for one that our model doesn't have."""
    name = _todays(theirs)
    layer = _LAYERS.search(name)
    ours = _OURS.get(_LAYERS.sub("layers.{n}.", name, count=1))
    if ours is None or layer is None:
        return ours
    return ours.format(n=int(layer[1]) + first_layer)


def core_name(ours: str) -> str:
    """Their core models' name, which is ours: the same in both directions."""
    layer = _LAYERS.search(ours)
    return _CORE[_LAYERS.sub("layers.{n}.", ours, count=1)].format(n=layer[1] if layer else "")


def stacked_name(ours: str) -> tuple[str, int | None]:
    """The key of a torch_dist folder that holds our tensor, and which layer of the stack it is, if it is a stack."""
    layer = _LAYERS.search(ours)
    key = _STACKED[_LAYERS.sub("layers.{n}.", ours, count=1)]
    return key, int(layer[1]) if layer else None


def our_names_of_stack(key: str, num_layers: int) -> list[str] | None:
    """Our names of the layers in a stacked tensor of a torch_dist folder; None for a key that is no stack of ours."""
    ours = _FROM_STACKED.get(key)
    return None if ours is None else [ours.format(n=number) for number in range(num_layers)]


def _todays(name: str) -> str:
    """Names of older legacy checkpoints in today's spelling."""
    if not name.startswith("language_model."):
        return name
    name = name.replace("language_model.transformer.", "language_model.encoder.")
    name = name.replace(".attention.", ".self_attention.")
    return re.sub(r"\b(input|post_attention|final)_layernorm\b", r"\1_norm", name)
