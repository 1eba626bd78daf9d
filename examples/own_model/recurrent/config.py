"""Settings: one flag beside those of every model, and what such a model can't be combined with. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from megatron.config.family import FamilyConfig, Rule
from megatron.config.flags import flag
from megatron.config.moe import MoEConfig
from megatron.config.run import RunConfig


class RecurrentConfig(FamilyConfig):
    """Flags of pretrain_own.py alone."""

    name: ClassVar[str] = "recurrent"
    title: ClassVar[str] = "Recurrent"
    position_embedding_types: ClassVar[tuple[str, ...]] = ("learned_absolute", "none")
    usual_tokenizer: ClassVar[str | None] = "GPT2BPETokenizer"

    forget_floor: float = flag(
        "Share of its state that a layer keeps at least, from token to token.",
        default=0.5,
        at_least=0,
        below=1,
        architecture=True,  # a checkpoint's weights mean nothing with another value
    )

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules of this family, checked with those of every run before anything starts."""
        return (layers_read_whole_sequences,)


def layers_read_whole_sequences(run: RunConfig) -> str | None:
    """A rank goes through each sequence from its first token to its last."""
    refused = {
        "--context-parallel-size": run.parallel.context_parallel_size > 1,
        "--reset-attention-mask": run.data.reset_attention_mask,
        "--recompute-granularity selective": run.training.recompute_granularity == "selective",
    }
    given = [flag for flag, is_given in refused.items() if is_given]
    return (
        f"a recurrent layer reads whole sequences and has no attention; leave {', '.join(given)} out" if given else None
    )


GROUPS: tuple[type, ...] = (RecurrentConfig, MoEConfig)
