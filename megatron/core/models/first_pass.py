"""What a train spec may do when the weights are there and nothing is trained yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.files.remote_path import AnyPath
from megatron.core.parallel.context import ParallelContext

T = TypeVar("T")


class OnFirst(Protocol):
    """Calls a function on rank 0."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """The function's result, on all ranks; raises its errors on all of them. A collective."""


@dataclass(frozen=True, kw_only=True)
class FirstPass:
    """A run before its first step on one rank. ``model``: a digest of what the weights were loaded from. ``save``,
    ``load``: folders in which the run saves and from which it goes on. ``state``: of a run that goes on, what its
    checkpoint keeps of the train spec (``TrainSpec.state``).

    ``forward``: passes without gradient over microbatches of this rank, as samples of its data sets stacked by field;
    each goes to ``TrainSpec.loss`` on the last stage. As many on every rank; a collective. ``at_once``: how many
    microbatches to give to it.
    """

    config: RunConfig
    context: ParallelContext
    model: str
    save: AnyPath | None
    load: AnyPath | None
    on_first: OnFirst
    forward: Callable[[Sequence[Mapping[str, Tensor]]], None]
    at_once: int
    state: Mapping[str, Any] = field(default_factory=dict)
