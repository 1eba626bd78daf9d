"""Facts about a run that depend on its family, from the family's own settings; the defaults are those of GPT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from typing_extensions import override

from megatron.config.flags import Settings
from megatron.config.positions import ROTARY_TYPES

if TYPE_CHECKING:
    from typing_extensions import Self

    from megatron.config.data import DataConfig
    from megatron.config.model import ModelConfig
    from megatron.config.run import RunConfig

Rule = Callable[["RunConfig"], "str | None"]
"""A check of a run: what is wrong in one sentence, or None."""


def rule(sentence: str, when: Callable[[RunConfig], object]) -> Rule:
    """The rule that returns ``sentence`` where ``when(run)`` holds; ``{run.optimizer.lr}`` stands for that setting."""
    return lambda run: sentence.format(run=run) if when(run) else None


Group = TypeVar("Group")


def group_among(groups: Iterable[object], kind: type[Group]) -> Group:
    """The group of class ``kind``, one of ``groups``."""
    return next(group for group in groups if isinstance(group, kind))


class Purpose:
    """What a command does with the model: the base of settings of commands that don't pretrain it in iterations."""

    @property
    def only_evaluates(self) -> bool:
        """Whether nothing is trained."""
        return False

    @property
    def only_reads(self) -> bool:
        """Whether there is no training at all, so no rank holds gradients or optimizer state."""
        return False

    @property
    def reads_own_data(self) -> bool:
        """Whether samples come from files of the command's own, not from ``--data-path``."""
        return False

    @property
    def epochs(self) -> int | None:
        """Passes over the command's own data; None where training is counted in iterations or samples."""
        return None

    @property
    def trains_in_epochs(self) -> bool:
        """Whether length, saving and evaluation of the run are in epochs, not in iterations."""
        return False


class FamilyConfig(Settings):
    """Base of the groups of flags that one family adds to those of every model.

    ``name``: of the family, as in the registry. ``title``: in messages and ``--model-type``; the name unless given.
    ``position_embedding_types``: values of ``--position-embedding-type`` that such a model has. ``usual_tokenizer``:
    ``--tokenizer-type`` unless given. ``fields_of_others``: architecture in ``ModelConfig`` that such a model can't
    have. ``window_sides``: of a query on which it may see keys of ``--window-size``. ``varying_counts``: what makes
    microbatches differ in the number of tokens that have a loss, if anything does.
    """

    name: ClassVar[str] = "gpt"
    position_embedding_types: ClassVar[tuple[str, ...]] = ("learned_absolute", *ROTARY_TYPES, "alibi", "none")
    window_sides: ClassVar[int] = 1
    title: ClassVar[str] = "GPT"
    usual_tokenizer: ClassVar[str] = "GPT2BPETokenizer"
    fields_of_others: ClassVar[tuple[str, ...]] = ()
    varying_counts: ClassVar[str | None] = None

    @override
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls) and "title" not in vars(cls):
            cls.title = cls.name

    def rules(self) -> Sequence[Rule]:
        """Checks of a run with this group, in addition to those of every run."""
        return ()

    def remarks(self) -> Sequence[Rule]:
        """Remarks about valid settings that have no effect or an unexpected one."""
        return ()

    def resolved(self, model: ModelConfig, data: DataConfig) -> Self:
        """The group with the values that follow from other groups."""
        return self

    def num_layers(self, model: ModelConfig) -> int:
        """Layers of all stacks; pipeline stages divide them as one list."""
        return model.num_layers

    def layers_asked(self, model: ModelConfig) -> str:
        """The flags that set the number of layers, with their values."""
        return f"--num-layers {model.num_layers}"

    def is_reported(self, field: str) -> bool:
        """Whether reports of settings show a value of ``field`` that nobody has given."""
        return True

    def describe_architecture(self) -> str:
        """The model in a line of reports, for a family whose models ``ModelConfig`` doesn't describe; else nothing."""
        return ""

    def more_parts(self, model: ModelConfig) -> Sequence[str]:
        """What the line about the model in reports says besides what all models have."""
        return ()

    def longest_sequence(self, data: DataConfig) -> int:
        """Length of the longest sequence of a stack, in tokens."""
        return data.seq_length

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of ``--seq-length`` tokens in a sample."""
        return 1

    def shrunk(self, model: ModelConfig, *, num_layers: int, seq_length: int, multiple: int) -> tuple[int, Self]:
        """``--num-layers`` and this group for a small model of the same structure with ``num_layers`` layers in all.

        ``seq_length``: of the small model, divisible by ``multiple``, as other lengths must be.
        """
        return min(model.num_layers, num_layers), self
