"""What the settings of one train spec alone tell the rest of a run about its model; by default, what is true of GPT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

    from megatron.config.data import DataConfig
    from megatron.config.model import ModelConfig
    from megatron.config.run import RunConfig

Rule = Callable[["RunConfig"], "str | None"]
"""A check of a run: what is wrong in one sentence, or None."""

Group = TypeVar("Group")


@dataclass(frozen=True)
class Outline:
    """The parts of a model, and of the samples it reads, that differ from family to family.

    ``decoder_layers``, ``decoder_length``: layers of a decoder that attends to all the others, and tokens of a sample
    there. ``position_buckets``: rows of the table that each stack has for relative positions. ``token_types``: kinds
    of token with an embedding of their own. ``has_padding``: samples are whole texts, which padding makes as long as
    the longest may be. ``sequences_per_sample``: of ``--seq-length`` tokens. ``predicts_words``: there is an output
    layer for the vocabulary; ``has_word_head``: with a dense layer, a norm and a bias before it;
    ``has_output_bias``: with a bias alone. ``pooled_outputs``: of a head on each sequence's first token.
    """

    title: str = "GPT"
    decoder_layers: int = 0
    decoder_length: int = 0
    position_buckets: int = 0
    token_types: int = 0
    has_padding: bool = False
    sequences_per_sample: int = 1
    predicts_words: bool = True
    has_word_head: bool = False
    has_output_bias: bool = False
    pooled_outputs: int = 0

    @property
    def usual_tokenizer(self) -> str:
        """Whole texts need tokens that begin and end them."""
        return "BertWordPieceLowerCase" if self.has_padding else "GPT2BPETokenizer"


def group_among(groups: Iterable[object], kind: type[Group]) -> Group:
    """The group of class ``kind``, which must be among ``groups``."""
    return next(group for group in groups if isinstance(group, kind))


class TrainSpecConfig:
    """Base of the groups of flags that one train spec adds to those of every model.

    ``family``: name of the family whose model it is, as the registry has it.
    """

    family: ClassVar[str] = "gpt"

    def rules(self) -> Sequence[Rule]:
        """Checks of a run with this group, beside those of every run."""
        return ()

    def remarks(self) -> Sequence[Rule]:
        """What a user should know about settings of such a run that are sound but have no effect, as rules do."""
        return ()

    def resolved(self, model: ModelConfig, data: DataConfig) -> Self:
        """This group with the values that follow from other groups."""
        return self

    @property
    def position_embedding_types(self) -> tuple[str, ...]:
        """Values of ``--position-embedding-type`` that such a model has."""
        return ("learned_absolute", "rope", "none")

    def outline(self, model: ModelConfig) -> Outline:
        """The model that these settings and ``model`` describe."""
        return Outline()

    def shrunk(self, *, decoder_layers: int, decoder_length: int) -> Self:
        """This group for a small model of the same structure."""
        return self

    @property
    def only_evaluates(self) -> bool:
        """Whether nothing is trained."""
        return False

    @property
    def only_reads(self) -> bool:
        """Whether the model is asked and nothing else: no rank holds gradients or an optimizer's state."""
        return False

    @property
    def reads_own_data(self) -> bool:
        """Whether samples come from files of the command's own, not from ``--data-path``."""
        return False

    @property
    def epochs(self) -> int | None:
        """Passes over the command's own data; None where iterations or samples say how long training is."""
        return None

    @property
    def trains_in_epochs(self) -> bool:
        """Whether epochs of the data, not iterations, say how long training is, and when it saves and evaluates."""
        return False
