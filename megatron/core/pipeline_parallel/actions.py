"""Actions of a pipeline schedule, which is a list of actions for each rank, and the placement of stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

Kind = Literal["F", "B", "I", "W"]
_WORDS: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True, slots=True)
class Action:
    """Run one microbatch through one model chunk of this rank.

    ``F``: forward. ``B``: the whole backward pass: ``I``, the gradients of the stage inputs, then ``W``, the gradients
    of weights. The stage before waits for ``I`` only, so ``W`` can fill bubbles.
    """

    kind: Kind
    chunk: int
    microbatch: int

    @override
    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"

    @property
    def pass_name(self) -> Literal["forward", "backward"]:
        """The pass to which it belongs."""
        return "forward" if self.kind == "F" else "backward"

    @property
    def words(self) -> str:
        """The action in words for reports: ``forward of microbatch 3 in chunk 0``."""
        return f"{_WORDS[self.kind]} of microbatch {self.microbatch} in chunk {self.chunk}"


@dataclass(frozen=True)
class StageLocation:
    """The place of a stage: a pipeline rank, and the number of one of the rank's chunks."""

    rank: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """The location of every stage, in the order of the model."""

    locations: tuple[StageLocation, ...]

    @classmethod
    def looped(cls, num_ranks: int, num_chunks: int = 1) -> Placement:
        """Stages on ranks in turn, one round a chunk: 0 1 2 3 0 1 2 3."""
        return cls(tuple(StageLocation(rank, chunk) for chunk in range(num_chunks) for rank in range(num_ranks)))

    @classmethod
    def vee(cls, num_ranks: int) -> Placement:
        """Down the ranks and up again, 0 1 2 3 3 2 1 0: the last stage beside the first (arXiv:2405.15362)."""
        down = [StageLocation(rank, 0) for rank in range(num_ranks)]
        return cls((*down, *(StageLocation(rank, 1) for rank in reversed(range(num_ranks)))))

    @property
    def num_stages(self) -> int:
        """Parts of the model."""
        return len(self.locations)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return 1 + max(location.rank for location in self.locations)

    @property
    def num_chunks(self) -> int:
        """Stages of a rank."""
        return 1 + max(location.chunk for location in self.locations)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that ``rank`` holds, by chunk."""
        mine = {location.chunk: stage for stage, location in enumerate(self.locations) if location.rank == rank}
        return [mine[chunk] for chunk in range(len(mine))]


@dataclass(frozen=True)
class PipelineSchedule:
    """The order in which each rank runs its actions, ``orders[rank]``, and the placement of stages."""

    name: str
    orders: tuple[tuple[Action, ...], ...]
    placement: Placement
