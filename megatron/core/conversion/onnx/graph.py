"""What a family says of its models as ONNX graphs: functions of tensors by name, and how a proof asks them.

A graph is our own model at one rank, traced by torch's exporter with a cache of texts of its own (``texts``); see
docs/design/0029-onnx.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.questions import Answer, Question
from megatron.core.models.registry import family_of
from megatron.errors import CheckpointError

Named = Mapping[str, Tensor]
"""Tensors at an end of a graph, by name."""
Run = Callable[[str, Named], Named]
"""``run(graph, inputs)``: the outputs of one of a folder's graphs, by its name."""


@dataclass(frozen=True)
class Graph:
    """A graph of a folder.

    ``name``: of its file, without ``.onnx``. ``compute``: outputs by name of inputs by name. ``inputs``: an example, in
    which no free size is 0 or 1. ``free``: the dimensions of each input that have any size, with the size's name.
    ``sums``: sizes that are sums of others.
    """

    name: str
    compute: Callable[[Named], Named]
    inputs: Named
    free: Mapping[str, Mapping[int, str]]
    sums: Collection[str] = ()


class OnnxFormat(Protocol):
    """What a family's module ``onnx`` has."""

    def refuse(self, model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
        """Why a model has no graph; nothing where it has one."""

    def graphs(self, stage: nn.Module, portable: PortableModel) -> Sequence[Graph]:
        """The graphs of a whole model, ``stage``."""

    def answers(self, run: Run, question: Question, right: Answer) -> Sequence[tuple[Answer, Answer]]:
        """Answers of the graphs to a question that is asked in several ways (texts of two lengths, alone and together,
        whole and in parts), each after the part of the answer ``right`` that it should be.
        """


def onnx_format(portable: PortableModel) -> OnnxFormat:
    """The format of a model's family; CheckpointError for a model that has no graph."""
    family = family_of(portable.groups)
    reasons = ["its family has no graphs"]
    if family.has("onnx"):
        found: OnnxFormat = family.module("onnx").FORMAT
        reasons = list(found.refuse(portable.model, portable.groups))
        if not reasons:
            return found
    raise CheckpointError(
        f"this {family.title} can't be written as ONNX: {'; '.join(reasons)}; a folder that vLLM and transformers read "
        "is written by --to hf"
    )
