"""Phi-3, Phi-3.5 and Phi-4: Llama with fused matrices, whose rotary positions are plain or LongRoPE's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.biases import NO_BIASES
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.rotary import partial_rotary, read_rotary, written_rotary
from megatron.core.conversion.huggingface.windows import WINDOW
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import FUSED_QUERY_KEY_VALUE
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS

_ORIGINAL = "original_max_position_embeddings"
_OF_TYPE = {"su": "longrope", "yarn": "longrope"}  # earlier names


def _read(reader: ConfigReader) -> dict[str, Any]:
    rotary = read_rotary(reader, partial=True, kinds=("default", "longrope"), renamed=_OF_TYPE)
    reader.expect(resid_pdrop=0.0, embd_pdrop=0.0)
    return rotary


def _write(model: ModelConfig) -> dict[str, Any]:
    """transformers 4 takes LongRoPE's settings with these three names only, and the original length beside them."""
    found = written_rotary(model, partial=True)
    scaling = found["rope_scaling"]
    if scaling is None:
        return found
    kept = {"type": "longrope", **{name: scaling[name] for name in ("short_factor", "long_factor")}}
    for name in ("factor", "attention_factor"):
        if name in scaling:
            kept[name] = scaling[name]
    return {**found, "rope_scaling": kept, _ORIGINAL: model.original_max_position_embeddings}


def _refuse(model: ModelConfig) -> list[str]:
    plain = model.use_rope_scaling or model.rotary_seq_len_interpolation_factor
    other = model.position_embedding_type not in ("rope", "longrope") or plain
    wrong = ["rotary positions are neither plain nor LongRoPE's"] * bool(other)
    # transformers checks the number of LongRoPE's factors against this width
    wide = model.kv_channels != model.hidden_size // model.num_attention_heads
    scaled = wide and model.position_embedding_type == "longrope"
    return [*wrong, *["heads with LongRoPE are not hidden size / heads wide"] * scaled]


_ROTARY = replace(partial_rotary(), read=_read, write=_write, refuse=_refuse)
PHI3 = replace(
    LLAMA,
    architecture="Phi3ForCausalLM",
    table=(
        *(row for row in LLAMA.table if not row.ours.endswith(("linear_qkv", "linear_fc1"))),
        Row(f"{OURS}.self_attention.linear_qkv", f"{THEIRS}.self_attn.qkv_proj", FUSED_QUERY_KEY_VALUE),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.gate_up_proj"),
    ),
    features=(_ROTARY, NO_BIASES, WINDOW),
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 4096,
        _ORIGINAL: 4096,
        "rms_norm_eps": 1e-5,
    },
    kinds=dict.fromkeys(("resid_pdrop", "embd_pdrop"), float),
    about="Phi-3 and 3.5 (dense), Phi-4 and Phi-4 mini; LongRoPE, rotation of a part of each head, sliding windows",
    example="microsoft/Phi-4-mini-instruct",
)
TYPES: dict[str, ModelType] = {"phi3": PHI3}
