"""The settings that only T5 has, with rules about them, and the parts that it may have.

They are those of the decoder, beside the encoder that the other settings describe, and of relative positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.family import Rule
from megatron.config.flags import architecture_flag, architecture_switch, changed, flag
from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.positions import ROTARY_TYPES
from megatron.config.quantization_training import QuantizationTrainingConfig
from megatron.config.rules.positions import beyond_positions
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import multiples_near
from megatron.config.run import RunConfig
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
        return (*super().rules(), *RULES)

    @override
    def stacks(self, model: ModelConfig) -> tuple[int, ...]:
        """The encoder's and the decoder's layers."""
        return model.num_layers, self.decoder_num_layers

    @override
    def layers_asked(self, model: ModelConfig) -> str:
        """``--num-layers`` and ``--decoder-num-layers``."""
        asked = f"{super().layers_asked(model)} + --decoder-num-layers {self.decoder_num_layers}"
        return f"{asked} = {sum(self.stacks(model))}"

    @override
    def longest_sequence(self, data: DataConfig) -> int:
        """The decoder's sequences may be the longer ones."""
        return max(data.seq_length, self.decoder_seq_length)

    @override
    def shrunk(self, model: ModelConfig, *, num_layers: int, seq_length: int, multiple: int) -> tuple[int, Self]:
        """Half of the layers in each stack, or all that a stack has; a decoder of half as many tokens."""
        encoder = max(min(model.num_layers, num_layers // 2), num_layers - self.decoder_num_layers)
        length = multiple * math.ceil(seq_length / 2 / multiple)
        return encoder, dataclasses.replace(self, decoder_num_layers=num_layers - encoder, decoder_seq_length=length)


GROUPS: tuple[type, ...] = (T5Config, MoEConfig, LoraConfig, QuantizationTrainingConfig)


def decoder_fits_positions(run: RunConfig) -> str | None:
    """--decoder-seq-length is at most --max-position-embeddings."""
    return beyond_positions(run, "--decoder-seq-length", run.group(T5Config).decoder_seq_length)


def decoder_divides_over_ranks(run: RunConfig) -> str | None:
    """The decoder's sequence is divisible by the ranks that split the encoder's."""
    t5, parallel = run.group(T5Config), run.parallel
    context, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    pieces = 1 if context == 1 else 2 * context
    parts = context * tensor if parallel.sequence_parallel else 1
    length = t5.decoder_seq_length
    asked = []
    if length % pieces:
        asked.append(f"2 x --context-parallel-size {context}")
    if length % parts:
        asked.append(f"the {parts} ranks that --sequence-parallel divides it over")
    if not asked:
        return None
    return (
        f"--decoder-seq-length {length} is not divisible by {' and by '.join(asked)}; use a length of "
        f"{multiples_near(length, math.lcm(pieces, parts))}"
    )


def relative_settings_need_relative_positions(run: RunConfig) -> str | None:
    """Settings of relative positions need relative positions."""
    t5 = run.group(T5Config)
    if run.model.position_embedding_type == "relative":
        return None
    named = [spec.positive for spec in changed(t5) if spec.field.startswith("relative")]
    if not named:
        return None
    verb = "has" if len(named) == 1 else "have"
    return (
        f"{' and '.join(named)} {verb} no effect with --position-embedding-type {run.model.position_embedding_type}; "
        "use --position-embedding-type relative"
    )


def distances_fill_buckets(run: RunConfig) -> str | None:
    """Each direction has half of the buckets, and the maximum distance exceeds the buckets of single distances."""
    t5 = run.group(T5Config)
    if run.model.position_embedding_type != "relative":
        return None
    buckets, distance = t5.relative_attention_num_buckets, t5.relative_attention_max_distance
    if buckets % 2:
        return (
            f"--relative-attention-num-buckets {buckets} must be even, half of them for each direction; use "
            f"{multiples_near(buckets, 2)}"
        )
    if distance <= buckets // 2:
        return (
            f"--relative-attention-max-distance {distance} is not above half of --relative-attention-num-buckets "
            f"{buckets}, as one bucket per short distance needs; use more than {buckets // 2}"
        )
    return None


def relative_positions_exchange_keys(run: RunConfig) -> str | None:
    """Relative positions exclude exchanges of heads: a rank has the bias of its own queries only."""
    if run.model.position_embedding_type != "relative":
        return None
    kinds = [kind for kind in dict.fromkeys(run.parallel.cp_comm_types) if "a2a" in kind]
    if not kinds:
        return None
    return (
        f"--cp-comm-type {kinds[0]} exchanges heads, which --position-embedding-type relative does not allow; use p2p "
        "or all_gather"
    )


RULES: tuple[Rule, ...] = (
    rule(  # a token beside the two that samples leave free
        "--seq-length {run.data.seq_length} leaves no room for a text; use 3 at least",
        lambda run: run.data.seq_length < 3,
    ),
    decoder_fits_positions,
    decoder_divides_over_ranks,
    rule(
        "T5 replaces masked spans by sentinel tokens, but the tokenizer has none: give --vocab-extra-ids 100",
        lambda run: (
            run.tokenizer.vocab_extra_ids == 0
            and not run.data.mock_data
            and run.tokenizer.tokenizer_type != "HuggingFaceTokenizer"  # which may have its own
        ),
    ),
    relative_settings_need_relative_positions,
    distances_fill_buckets,
    relative_positions_exchange_keys,
    rule(
        "--attention-backend sdpa cannot be combined with --position-embedding-type relative; use --attention-backend "
        "auto",
        lambda run: run.model.position_embedding_type == "relative" and run.model.attention_backend == "sdpa",
    ),
)
