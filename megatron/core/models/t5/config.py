"""What only T5 has: a decoder beside the encoder that the other settings describe, and relative positions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.family import Rule
from megatron.config.flags import architecture_flag, architecture_switch, flag
from megatron.config.model import ModelConfig
from megatron.config.positions import ROTARY_TYPES
from megatron.core.models.sentences import SentenceConfig

if TYPE_CHECKING:
    from typing_extensions import Self


class T5Config(SentenceConfig):
    """Flags of pretrain_t5.py alone. ``--num-layers`` and ``--seq-length`` are the encoder's."""

    name: ClassVar[str] = "t5"
    title: ClassVar[str] = "T5"
    window_sides: ClassVar[int] = 0
    # A pattern of layers is of one stack.
    fields_of_others: ClassVar[tuple[str, ...]] = (
        *SentenceConfig.fields_of_others,
        "embedding_norm",
        "first_attention_norm",
        "no_rope_freq",
    )
    position_embedding_types: ClassVar[tuple[str, ...]] = ("learned_absolute", *ROTARY_TYPES, "none", "relative")

    decoder_seq_length: int = flag(
        "Tokens of one decoder sample.",
        derived="a quarter of --seq-length",
        follows=("seq_length",),
        at_least=1,
        from_checkpoint=True,
    )
    decoder_num_layers: int = architecture_flag(
        "Layers of the decoder.",
        derived="as many as the encoder's",
        follows=("num_layers",),
        at_least=1,
        at_most=10_000,
    )
    relative_attention_num_buckets: int = architecture_flag(
        "Number of buckets of relative positions.", default=32, at_least=4
    )
    relative_attention_max_distance: int = architecture_flag(
        "Distance beyond which all relative positions share one bucket.", default=128, at_least=2
    )
    scale_output: bool = architecture_switch(
        "Multiply the input of the output layer by 1 / sqrt(hidden size), as the original T5 does with tied embeddings."
    )

    @override
    def resolved(self, model: ModelConfig, data: DataConfig) -> Self:
        """The group with defaults filled in: as many decoder as encoder layers, and sequences a quarter as long."""
        layers, length = self.decoder_num_layers, self.decoder_seq_length
        return dataclasses.replace(
            self,
            decoder_num_layers=model.num_layers if layers is None else layers,
            decoder_seq_length=max(data.seq_length // 4, 1) if length is None else length,
        )

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules of the families that learn from sentences, and T5's own."""
        from megatron.core.models.t5.rules import RULES

        return (*super().rules(), *RULES)

    @override
    def num_layers(self, model: ModelConfig) -> int:
        """The encoder's and the decoder's."""
        return model.num_layers + self.decoder_num_layers

    @override
    def layers_asked(self, model: ModelConfig) -> str:
        """``--num-layers`` and ``--decoder-num-layers``."""
        return (
            f"{super().layers_asked(model)} + --decoder-num-layers {self.decoder_num_layers} = {self.num_layers(model)}"
        )

    @override
    def longest_sequence(self, data: DataConfig) -> int:
        """The decoder's sequences may be the longer ones."""
        return max(data.seq_length, self.decoder_seq_length)

    @override
    def shrunk(self, model: ModelConfig, *, num_layers: int, seq_length: int, multiple: int) -> tuple[int, Self]:
        """A decoder of the rest of the layers, and half as many tokens."""
        encoder = model.num_layers if num_layers == self.num_layers(model) else min(model.num_layers, num_layers // 2)
        length = multiple * math.ceil(seq_length / 2 / multiple)
        return encoder, dataclasses.replace(self, decoder_num_layers=num_layers - encoder, decoder_seq_length=length)


GROUPS: tuple[type, ...] = (T5Config,)
