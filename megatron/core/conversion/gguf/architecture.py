"""An architecture of llama.cpp: its published types, and what a file says of its models.

What the code of an architecture does with every model is a fact; what it reads from a file is a key. A model is written
as an architecture whose file, read back, describes the same model. Families list theirs in a module ``gguf``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.config.model import ModelConfig
from megatron.core.conversion.gguf.transforms import Division, Rule
from megatron.core.models.registry import all_families
from megatron.errors import CheckpointError

Metadata = Mapping[str, Any]
"""Keys and values of a file; those of an architecture without its name in front."""


def _same(model: ModelConfig, groups: tuple[object, ...]) -> tuple[ModelConfig, tuple[object, ...]]:
    return model, groups


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp.

    ``name``: in files. ``types``: published types that are written so, those models whose groups ``fits`` takes; the
    fixed fields are those of the first. ``aliases``: parts of published names that the package's table has otherwise.
    ``facts``: fields that all such models have beside those; ``expert_facts``: the same of experts. ``keys``: settings
    that a file may hold beside those of all decoders. ``write``, ``read``: keys from a model's settings, and fields
    from keys and names of tensors, that no table says; ``groups``: parts of a model beside experts.

    ``read_experts``: fields of experts that no table says, from keys and names of tensors. ``period``: layers with a
    window are all but each ``period``-th (0: all layers); None where there are no windows. ``rules``: how some tensors
    differ from the published type's, also by the family's groups; ``divisions``: those of which a file has several, or
    that it names by the table of another type. ``lacks``: ends of names of tensors that it doesn't have; ``needs``:
    names of some that other models may lack. ``has_output``: whether the output layer is written also where it is the
    word embedding, times ``output_scale``. ``has_encoder``: whether it reads a text and continues another.

    ``refuse``: why a model isn't one of these. ``unread``: fields that need not be found again. ``computed``: what
    llama.cpp computes in place of a model, near enough to be written, and ``difference``: what a user should know of
    it. ``as_run``: the model that llama.cpp runs of a file, where files can't say enough. ``tolerance``: largest
    difference of llama.cpp's logits in fp32, as a part of the largest. ``sensitivity``: how many times more than usual
    models these change where llama.cpp rounds what weights are multiplied by.
    """

    name: str
    types: tuple[str, ...]
    fits: Callable[[Sequence[object]], bool] = lambda groups: True
    aliases: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    keys: Collection[str] = ()
    period: int | None = None
    rules: Callable[[Sequence[object]], Sequence[Rule]] = lambda groups: ()
    divisions: Callable[[Sequence[object]], Sequence[Division]] = lambda groups: ()
    write: Callable[[ModelConfig, Sequence[object]], Metadata] = lambda model, groups: {}
    read: Callable[[Metadata, Collection[str]], Mapping[str, Any]] = lambda keys, tensors: {}
    expert_facts: Mapping[str, Any] = field(default_factory=dict)
    read_experts: Callable[[Metadata, Collection[str]], Mapping[str, Any]] = lambda keys, tensors: {}
    groups: Callable[[Metadata, Collection[str]], Sequence[object]] = lambda keys, tensors: ()
    lacks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    refuse: Callable[[ModelConfig, Sequence[object]], Sequence[str]] = lambda model, groups: ()
    has_output: bool = False
    output_scale: Callable[[ModelConfig, Sequence[object]], float] = lambda model, groups: 1.0
    has_encoder: bool = False
    computed: Callable[[ModelConfig, tuple[object, ...]], tuple[ModelConfig, tuple[object, ...]]] = _same
    difference: str = ""
    as_run: Callable[[ModelConfig, tuple[object, ...]], tuple[ModelConfig, tuple[object, ...]]] = _same
    tolerance: float = 1e-4
    sensitivity: float = 1.0


class GgufFormat(Protocol):
    """What a family's module ``gguf`` has: the architectures of its models, and their settings as keys."""

    @property
    def architectures(self) -> Sequence[Architecture]:
        """All that are written and read."""

    def written(self, model: ModelConfig, groups: Sequence[object], architecture: Architecture) -> dict[str, Any]:
        """Keys of a model, without its architecture's name in front."""

    def read(
        self, keys: Metadata, tensors: Collection[str], architecture: Architecture
    ) -> tuple[ModelConfig, tuple[object, ...]]:
        """The settings of a model and of its family's groups. ``tensors``: names of all, which say what layers have.

        Raises CheckpointError for keys that are missing.
        """


def known_architectures() -> Iterator[tuple[Architecture, GgufFormat]]:
    """The architectures of all families, each with the format that reads it."""
    for family in all_families():
        if family.has("gguf"):
            written: GgufFormat = family.module("gguf").FORMAT
            yield from ((each, written) for each in written.architectures)


def architecture_named(name: str, *, where: str) -> tuple[Architecture, GgufFormat]:
    """The architecture that files call ``name``; CheckpointError for another. ``where``: the file, for messages."""
    known = {each.name: (each, written) for each, written in known_architectures()}
    if name not in known:
        raise CheckpointError(
            f"{where} is a {name} model (general.architecture); GGUF files of {', '.join(known)} are read"
        )
    return known[name]
