"""What only T5 has: a decoder beside the encoder that the other settings describe, and relative positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron.config.data import DataConfig
from megatron.config.flags import check_flags, flag
from megatron.config.model import ModelConfig
from megatron.config.train_spec import Outline, Rule
from megatron.core.models.sentences import SentenceConfig

if TYPE_CHECKING:
    from typing_extensions import Self


@check_flags
@dataclass(frozen=True, kw_only=True)
class T5Config(SentenceConfig):
    """Flags of pretrain_t5.py alone. ``--num-layers`` and ``--seq-length`` are the encoder's."""

    family: ClassVar[str] = "t5"

    decoder_seq_length: int = flag(
        "Tokens of one decoder sample.",
        default=None,
        derived="a quarter of --seq-length",
        follows=("seq_length",),
        at_least=1,
        from_checkpoint=True,
    )
    decoder_num_layers: int = flag(
        "Layers of the decoder.",
        default=None,
        derived="as many as the encoder's",
        follows=("num_layers",),
        at_least=1,
        architecture=True,
    )
    relative_attention_num_buckets: int = flag(
        "Number of buckets of relative positions.", default=32, at_least=4, architecture=True
    )
    relative_attention_max_distance: int = flag(
        "Distance beyond which all relative positions share one bucket.", default=128, at_least=2, architecture=True
    )
    scale_output: bool = flag(
        "Multiply the input of the output layer by 1 / sqrt(hidden size), as the original T5 does with tied "
        "embeddings.",
        default=False,
        architecture=True,
    )

    def resolved(self, model: ModelConfig, data: DataConfig) -> Self:
        """With a decoder as deep as the encoder, and a quarter as long, unless its own flags say otherwise."""
        layers, length = self.decoder_num_layers, self.decoder_seq_length
        return dataclasses.replace(
            self,
            decoder_num_layers=model.num_layers if layers is None else layers,
            decoder_seq_length=max(data.seq_length // 4, 1) if length is None else length,
        )

    def rules(self) -> Sequence[Rule]:
        """Those of sentences, and its own."""
        from megatron.core.models.t5.rules import RULES

        return (*super().rules(), *RULES)

    @property
    def position_embedding_types(self) -> tuple[str, ...]:
        """Relative ones, too."""
        return (*super().position_embedding_types, "relative")

    def outline(self, model: ModelConfig) -> Outline:
        """Two stacks; a tied output has a bias of its own where linear layers have one."""
        relative, tied = model.position_embedding_type == "relative", not model.untie_embeddings_and_output_weights
        return Outline(
            title="T5",
            decoder_layers=self.decoder_num_layers,
            decoder_length=self.decoder_seq_length,
            position_buckets=self.relative_attention_num_buckets if relative else 0,
            has_padding=True,
            has_output_bias=tied and model.add_bias_linear,
        )

    def shrunk(self, *, decoder_layers: int, decoder_length: int) -> Self:
        """With a decoder of this size."""
        return dataclasses.replace(self, decoder_num_layers=decoder_layers, decoder_seq_length=decoder_length)


GROUPS: tuple[type, ...] = (T5Config,)
