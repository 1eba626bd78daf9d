"""Conversion: the settings in ``config.json``, and which of the published modules are which of ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Rate
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import stacked
from recurrent.config import RecurrentConfig

OURS, THEIRS = "decoder.layers.{n}", "model.layers.{n}"
RECURRENT = ModelType(
    architecture="RecurrentForCausalLM",
    table=(
        Row("embedding.word_embeddings", "model.embed"),
        Row(f"{OURS}.pre_recurrence_layernorm", f"{THEIRS}.norm1"),
        Row(
            f"{OURS}.recurrence.linear_in",
            tuple(f"{THEIRS}.{name}" for name in ("value", "forget", "gate")),
            stacked(3),
        ),
        Row(f"{OURS}.recurrence.linear_out", f"{THEIRS}.out"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.norm2"),
        Row(f"{OURS}.mlp.linear_fc1", (f"{THEIRS}.mlp_gate", f"{THEIRS}.mlp_up"), stacked(2)),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp_down"),
        Row("decoder.final_layernorm", "model.norm"),
    ),
    settings={
        "num_layers": "num_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "mlp_size",
        "max_position_embeddings": "max_length",
        "vocab_size": "vocab_size",
        "norm_epsilon": "norm_eps",
    },
    by_code=("num_attention_heads", "kv_channels", "num_query_groups"),  # there are no heads
    read=lambda reader: {"num_attention_heads": 1},  # which divides every width
    kinds={"forget_floor": Rate},
    fixed={
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "position_embedding_type": "none",
        "untie_embeddings_and_output_weights": False,
    },
)


class RecurrentFormat(HuggingFaceFormat):
    """Published with RMSNorm, SwiGLU, tied embeddings, and neither biases nor positions."""

    types: Mapping[str, ModelType] = {"recurrent": RECURRENT}

    @override
    def groups_from_config(self, reader: ConfigReader, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """The family's own settings."""
        return (RecurrentConfig(forget_floor=reader("forget_floor")),)

    @override
    def settings_of_groups(self, groups: Sequence[object], model_type: str, model: ModelConfig) -> dict[str, Any]:
        """The family's own settings."""
        return {"forget_floor": RecurrentConfig.among(groups).forget_floor}


FORMAT = RecurrentFormat()
