"""A family's checkpoints of Megatron-LM: names of tensors and saved arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.megatron_lm.names import Names
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.models.registry import Family, all_families, family_of
from megatron.errors import CheckpointError


class MegatronLMFormat:
    """The checkpoints of one family in Megatron-LM; by default, what is true of a GPT.

    ``names``: of its tensors. ``marker_names``: parts of names of tensors that no other family has. ``replicated``:
    tensors that every tensor-parallel rank has all of. ``layer_count_arguments``: by stack, the argument that holds its
    own number of layers. ``output_has_extra_state``: Megatron-LM's loader asks for a state of kernels beside the output
    weights. ``has_latest_layers``: core's layers of the family can normalize queries and keys, and have YaRN,
    latents, experts and multi-token prediction.
    ``kinds``: types and bounds of the saved arguments that only the family reads.
    """

    names: Names
    marker_names: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    layer_count_arguments: Mapping[str, str] = {}
    output_has_extra_state: bool = False
    has_latest_layers: bool = True
    kinds: Mapping[str, Any] = {}

    def names_of(self, groups: Sequence[object]) -> Names:
        """The names that a model with these settings is written with."""
        return self.names

    def names_in(self, args: Arguments) -> Names:
        """The names in files with these saved arguments."""
        return self.names

    def is_engines(self, groups: Sequence[object]) -> bool:
        """Whether Megatron-LM has such a model with Transformer Engine alone, and numbers its layers in torch_dist."""
        return False

    def check(self, args: Arguments) -> None:
        """Raise CheckpointError for a model that this project doesn't have, or can't read."""

    def groups_from_arguments(
        self, args: Arguments, model: ModelConfig, stored: Collection[str], *, legacy: bool
    ) -> tuple[object, ...]:
        """The settings that only the family has. ``stored``: our names of its tensors. ``legacy``: from before core."""
        return ()

    def default_tensors(self, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Tensors of ours that its files leave out. ``stored``: by our names, a part of each tensor that is there."""
        return {}

    def unsupported(self, portable: PortableModel) -> dict[str, bool]:
        """What no such model of Megatron-LM's has, and whether this one has it."""
        return {}

    def arguments(self, portable: PortableModel) -> dict[str, Any]:
        """The arguments that only the family has."""
        return {}

    def flags(self, groups: Sequence[object]) -> dict[str, Any]:
        """Arguments of the family alone that a training run there needs as flags."""
        return {}

    def notes(self, args: Arguments) -> tuple[str, ...]:
        """What a conversion leaves out, a line each."""
        return ()

    def tensors_to_read(
        self, tensors: Mapping[str, LazyTensor], model: ModelConfig, groups: Sequence[object]
    ) -> Mapping[str, LazyTensor]:
        """The tensors of ours that these of Megatron-LM's mean, which have our names and shapes."""
        return tensors

    def tensors_to_write(self, portable: PortableModel) -> dict[str, LazyTensor]:
        """The tensors that such a model of Megatron-LM's has; CheckpointError for one that can't be left out."""
        return dict(portable.tensors)


def format_of(family: Family) -> MegatronLMFormat:
    """The family's format; CheckpointError for a family that Megatron-LM doesn't have."""
    if not family.has("megatron_lm"):
        raise CheckpointError(
            f"a {family.title} has no format of Megatron-LM: {family.package} has no module megatron_lm"
        )
    found: MegatronLMFormat = family.module("megatron_lm").FORMAT
    return found


def format_for(groups: Sequence[object]) -> MegatronLMFormat:
    """The format of the family that the settings in ``groups`` are of."""
    return format_of(family_of(groups))


def family_among(names: Iterable[str]) -> Family:
    """The family whose tensors have these names of theirs; GPT unless a name belongs to another."""
    known = " ".join(names)
    formats = ((family, format_of(family)) for family in all_families() if family.has("megatron_lm"))
    return next((family for family, each in formats if any(part in known for part in each.marker_names)), family_of(()))
