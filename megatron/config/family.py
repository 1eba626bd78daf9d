"""Groups of settings that say something about a run: its family, the parts its models may have, and its purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.flags import Settings
from megatron.config.model import ModelConfig
from megatron.config.positions import ROTARY_TYPES

if TYPE_CHECKING:
    from typing_extensions import Self

Rule = Callable[[Any], "str | None"]
"""A check of a run, of which it is given the RunConfig: what is wrong in one sentence, or None."""


class CheckedSettings(Settings):
    """Base of groups of settings with rules about the run that they are in."""

    @classmethod
    def among(cls, groups: Iterable[object]) -> Self:
        """The group of this class among ``groups``; LookupError where there is none."""
        for group in groups:
            if isinstance(group, cls):
                return group
        raise LookupError(f"there is no {cls.__name__}")

    def rules(self) -> Sequence[Rule]:
        """Checks of a run with this group, in addition to those of every run."""
        return ()

    def remarks(self) -> Sequence[Rule]:
        """Remarks about valid settings that have no effect or an unexpected one."""
        return ()


class Purpose(CheckedSettings):
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

    @property
    def sequences_per_sample(self) -> int:
        """Samples of the model's family that make one of the command's, such as one for each choice."""
        return 1


class PartConfig(CheckedSettings):
    """Base of the settings of a part that models of several families may have, such as experts.

    A family lists the parts that its models may have among its groups. With the default of every field a model has no
    such part. ``stacks`` in methods: numbers of layers of each stack, as ``FamilyConfig.stacks`` gives them.
    ``may_divide_over_expert_ranks``: whether expert-parallel ranks may divide it. ``is_added``: a run adds it to a
    trained model, and no published one has it.
    """

    may_divide_over_expert_ranks: ClassVar[bool] = False
    is_added: ClassVar[bool] = False

    @classmethod
    @override
    def among(cls, groups: Iterable[object]) -> Self:
        """The group of this class among ``groups``; where there is none, that of a model without the part."""
        return next((group for group in groups if isinstance(group, cls)), cls())

    def resolved(self, model: ModelConfig, stacks: Sequence[int]) -> Self:
        """The group with the values that follow from other groups."""
        return self

    def implied(self, stacks: Sequence[int]) -> Mapping[str, Any]:
        """Fields of other parts whose values follow from this part's, once it is resolved."""
        return {}

    @property
    def makes_samples(self) -> bool:
        """Whether the run makes what it learns from, so that it needs no ``--data-path``."""
        return False

    @property
    def averages_answers(self) -> bool:
        """Whether the loss of a step is a mean over answers and not over tokens."""
        return False

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of layers of the pipeline stages, where the part says how the model is cut."""
        return ()

    @property
    def least_layers(self) -> int:
        """Layers of a small model that has all kinds of layers of the part."""
        return 1

    @property
    def divides_over_expert_ranks(self) -> bool:
        """Whether expert-parallel ranks divide it in this run."""
        return False

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The losses that its layers report beside the main loss."""
        return ()

    @property
    def trained_alone(self) -> tuple[str, ...]:
        """Patterns of the names of its parameters, where nothing else of the model is trained unless it is named."""
        return ()

    @property
    def own_layers(self) -> int:
        """Layers of the part that are in none of the family's stacks."""
        return 0

    @property
    def frozen(self) -> tuple[str, ...]:
        """Patterns of the names of parameters, its own or others, that its settings say are not trained."""
        return ()

    @property
    def columns(self) -> Mapping[str, int]:
        """Widths that tensor-parallel ranks split, by name."""
        return {}

    def recompute_modules(self) -> Mapping[str, str]:
        """Choices of ``--recompute-modules`` in this part, each with the flag that adds it where the model lacks it."""
        return {}

    def described(self, run: Any) -> Sequence[str]:
        """Words about the part for the line about the model in reports. ``run``: the RunConfig."""
        return ()

    def shrunk(self, stacks: Sequence[int], small: Sequence[int]) -> Self:
        """The part in a small model of the same structure, whose stacks have ``small`` numbers of layers."""
        return self

    def with_layers(self, num_layers: int, kept: Sequence[int]) -> Self:
        """The part in a decoder that keeps only the layers ``kept`` of its ``num_layers``, in order."""
        return self


class FamilyConfig(CheckedSettings):
    """Base of the settings that name a family of models, with those that it alone has and facts about its models.

    ``name``: as in the registry. ``title``: in messages and ``--model-type``; the name unless given.
    ``position_embedding_types``: values of ``--position-embedding-type`` that such a model has. ``usual_tokenizer``:
    ``--tokenizer-type`` unless given; None: it must be given. ``fields_of_others``: architecture in ``ModelConfig``
    that such a model can't have. ``window_sides``: of a query on which it may see keys of ``--window-size``.
    ``varying_counts``: what makes microbatches differ in the number of tokens that have a loss, if anything does.
    ``pads_samples``: whether samples end with padding whatever the data flags say. ``reads_tokens``: whether
    samples are tokens of a vocabulary, which reports count.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = "model"
    position_embedding_types: ClassVar[tuple[str, ...]] = ("learned_absolute", *ROTARY_TYPES, "none")
    window_sides: ClassVar[int] = 0
    usual_tokenizer: ClassVar[str | None] = None
    fields_of_others: ClassVar[tuple[str, ...]] = ()
    varying_counts: ClassVar[str | None] = None
    pads_samples: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = True

    @override
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls) and "title" not in vars(cls):
            cls.title = cls.name

    def sees_ahead(self, run: Any) -> bool:
        """Whether some queries of causal attention see keys after them, as within an image."""
        return False

    @property
    def image_id(self) -> int | None:
        """The id that stands at places of images, of a model that reads some and has one."""
        return None

    def resolved(self, model: ModelConfig, data: DataConfig) -> Self:
        """The group with the values that follow from other groups."""
        return self

    def stacks(self, model: ModelConfig) -> tuple[int, ...]:
        """Numbers of layers of each stack, in order; pipeline stages divide them as one list."""
        return (model.num_layers,)

    def layers_asked(self, model: ModelConfig) -> str:
        """The flags that set the number of layers, with their values."""
        return f"--num-layers {model.num_layers}"

    def is_reported(self, field: str) -> bool:
        """Whether reports of settings show a value of ``field`` that nobody has given."""
        return True

    def describe_architecture(self) -> str:
        """The model in a line of reports, for a family whose models ``ModelConfig`` doesn't describe; else nothing."""
        return ""

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of ``--seq-length`` tokens in a sample."""
        return 1

    def longest_sequence(self, data: DataConfig) -> int:
        """Length of the longest sequence of a stack, in tokens."""
        return data.seq_length

    def shrunk(self, model: ModelConfig, *, num_layers: int, seq_length: int, multiple: int) -> tuple[int, Self]:
        """``--num-layers`` and this group for a small model of the same structure with ``num_layers`` layers in all.

        ``seq_length``: of the small model, divisible by ``multiple``, as other lengths must be.
        """
        return min(model.num_layers, num_layers), self
