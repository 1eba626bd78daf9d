"""Conversion: the settings in ``config.json``, and which of the published tensors are which of ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron.config.family import group_among
from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count, Layers, Rate, Small, Width
from megatron.core.conversion.huggingface.format import HuggingFaceFormat
from megatron.core.conversion.huggingface.known import Json, Known
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Stacked
from megatron.errors import CheckpointError
from recurrent.config import RecurrentConfig

OURS, THEIRS = "decoder.layers.{n}", "model.layers.{n}"
TABLE = (
    Row("embedding.word_embeddings.weight", ("model.embed.weight",)),
    Row(f"{OURS}.pre_recurrence_layernorm.weight", (f"{THEIRS}.norm1.weight",)),
    Row(
        f"{OURS}.recurrence.linear_in.weight",
        tuple(f"{THEIRS}.{name}.weight" for name in ("value", "forget", "gate")),
        Stacked(3),
    ),
    Row(f"{OURS}.recurrence.linear_out.weight", (f"{THEIRS}.out.weight",)),
    Row(f"{OURS}.pre_mlp_layernorm.weight", (f"{THEIRS}.norm2.weight",)),
    Row(f"{OURS}.mlp.linear_fc1.weight", (f"{THEIRS}.mlp_gate.weight", f"{THEIRS}.mlp_up.weight"), Stacked(2)),
    Row(f"{OURS}.mlp.linear_fc2.weight", (f"{THEIRS}.mlp_down.weight",)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
)


class RecurrentFormat(HuggingFaceFormat):
    """Published with RMSNorm, SwiGLU, tied embeddings, and neither biases nor positions."""

    model_types = ("recurrent",)
    kinds: Mapping[str, Any] = {
        "num_layers": Layers,
        "hidden_size": Width,
        "mlp_size": Width,
        "max_length": Count,
        "norm_eps": Small,
        "forget_floor": Rate,
    }

    def defaults(self, model_type: str) -> Mapping[str, Any]:
        """A config.json says everything."""
        return {}

    def model_from_config(self, known: Known, model_type: str) -> ModelConfig:
        """The architecture."""
        return ModelConfig(
            num_layers=known("num_layers"),
            hidden_size=known("hidden_size"),
            ffn_hidden_size=known("mlp_size"),
            num_attention_heads=1,  # whatever divides: there are no heads
            max_position_embeddings=known("max_length"),
            vocab_size=known("vocab_size"),
            norm_epsilon=known("norm_eps"),
            **_PUBLISHED,
        )

    def groups_from_config(self, known: Known, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """The family's own settings."""
        return (RecurrentConfig(forget_floor=known("forget_floor")),)

    def config_from_model(self, model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
        """The opposite; a model of another architecture is refused."""
        wrong = [name for name, value in _PUBLISHED.items() if getattr(model, name) != value]
        if wrong:
            raise CheckpointError(
                f"models of type recurrent are published with {_PUBLISHED}; this one differs in {wrong}"
            )
        return {
            "architectures": ["RecurrentForCausalLM"],
            "model_type": "recurrent",
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "mlp_size": model.ffn_hidden_size,
            "max_length": model.max_position_embeddings,
            "norm_eps": model.norm_epsilon,
            "forget_floor": group_among(groups, RecurrentConfig).forget_floor,
        }

    def table(self, model_type: str, model: ModelConfig) -> Sequence[Row]:
        """One for all."""
        return TABLE


_PUBLISHED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "position_embedding_type": "none",
    "untie_embeddings_and_output_weights": False,
}

FORMAT = RecurrentFormat()
