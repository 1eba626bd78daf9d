"""This rank's place among all ranks, and the process group of any union of axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.config.parallel import GroupName
from megatron.core.parallel.activity import Activity
from megatron.core.parallel.grid import LEVELS, Axis, RankGrid
from megatron.core.torch_release import require_torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

require_torch()

# Unions of axes by Megatron-LM's names of process groups.
GROUPS: dict[GroupName, tuple[Axis, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("cp", "tp"),
    "ep": ("ep",),
    "ep_tp": ("etp",),
    "ep_dp": ("edp",),
}

EXPERT_AXES = frozenset(("edp", "edp_out", "edp_in", "ep", "etp"))

_IN_LEVELS = frozenset(axis for levels in LEVELS.values() for axis in levels)

WORLD: tuple[Axis, ...] = ("dc", "pp", "dp", "cp", "tp")
"""All ranks of a run."""

# Unions that reach over pipeline stages and are not the whole world.
SPANNING: tuple[tuple[Axis, ...], ...] = (
    ("pp",),
    ("pp", "tp"),
    ("pp", "dp", "cp"),
    ("pp", "dp", "cp", "tp"),
    ("dc", "pp", "dp", "cp"),
)


@dataclass
class Mesh:
    """A rank's coordinates on two grids over the same ranks: dense ``dc pp dp cp tp``, expert ``dc pp edp ep etp``.

    ``dc`` divides the ranks into the workers of ``megatron.core.diloco``, which all other axes lie inside of.

    ``copies``: parts of a worker's replicas, the outer level of two; the ranks of a part divide what a copy of the
    model has, see ``levels``. Neighbouring ranks are in one part, of dense and expert axes alike.

    ``pp`` may be combined with axes of either grid; mixing dense and expert axes in one union is a programming error.
    The expert grid numbers ranks stage by stage, also where ``pp`` isn't the slowest dense axis: a rank has one stage,
    and expert axes divide the ranks of a stage. ``activity``: what the rank is doing. ``urgent``:
    members of groups whose NCCL kernels start before others that wait. ``timeout``: of operations in groups made here;
    None: torch's for the backend, 10 minutes with NCCL.
    """

    dense: RankGrid
    expert: RankGrid
    world_rank: int = 0
    copies: int = 1
    activity: Activity = field(default_factory=Activity, repr=False, compare=False)
    urgent: frozenset[tuple[int, ...]] = frozenset()
    timeout: timedelta | None = None
    _groups: dict[tuple[int, ...], ProcessGroup] = field(default_factory=dict, repr=False)
    _whole: Mesh | None = field(default=None, repr=False, compare=False)
    _members: dict[tuple[Axis, ...], tuple[int, ...]] = field(default_factory=dict, repr=False)
    _sizes: dict[tuple[Axis, ...], int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.dense.size != self.expert.size:
            raise ValueError(f"the dense grid holds {self.dense.size} ranks and the expert grid {self.expert.size}")
        self._dense_levels, self._expert_levels = (grid.in_levels(self.copies) for grid in (self.dense, self.expert))

    @classmethod
    def single(cls) -> Mesh:
        """A world of one rank: tests, tools and notebooks need no launcher and no environment."""
        return cls.of()

    @classmethod
    def of(
        cls,
        *,
        tp: int = 1,
        cp: int = 1,
        dp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        dc: int = 1,
        copies: int = 1,
        rank: int = 0,
        pp_before_dp: bool = True,
    ) -> Mesh:
        """A mesh from axis sizes; ``pp_before_dp=False`` is Megatron's ``--use-tp-pp-dp-mapping`` order."""
        expert_tp = tp if etp is None else etp
        edp, rest = divmod(tp * cp * dp, ep * expert_tp)
        if rest:
            raise ValueError(f"tp·cp·dp = {tp * cp * dp} ranks cannot be divided into ep·etp = {ep * expert_tp}")
        outer: dict[Axis, int] = {"pp": pp, "dp": dp} if pp_before_dp else {"dp": dp, "pp": pp}
        dense = RankGrid({"dc": dc, **outer, "cp": cp, "tp": tp})
        return cls(dense, RankGrid({"dc": dc, "pp": pp, "edp": edp, "ep": ep, "etp": expert_tp}), rank, copies)

    @property
    def world_size(self) -> int:
        """Number of ranks in the run."""
        return self.dense.size

    def seen_by(self, rank: int) -> Mesh:
        """The coordinates of another rank, which asks for no groups."""
        return Mesh(self.dense, self.expert, rank, self.copies)

    def of_whole_sequences(self) -> Mesh:
        """The mesh for a part of the model in which no rank has slices of sequences: context-parallel ranks are more
        replicas of it. Tensor-parallel groups are the same.
        """
        if self.size("cp") == 1:
            return self
        axes, names = dict(self.dense.axes), list(self.dense.axes)
        before = names[names.index("cp") - 1]
        axes |= {before: axes[before] * axes["cp"], "cp": 1}
        return replace(self, dense=RankGrid(axes), _members={}, _sizes={}, _whole=self._whole or self)

    def levels(self, axes: tuple[Axis, ...]) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """Axes of replicas as two levels: that of the ranks of one copy, and that of the copies, none for one copy."""
        if self.copies == 1:
            return axes, ()
        inner = tuple(LEVELS[axis][1] if axis in LEVELS else axis for axis in axes)
        return inner, tuple(LEVELS[axis][0] for axis in axes if axis in LEVELS)

    def _grid(self, axes: tuple[Axis, ...]) -> RankGrid:
        of_experts = EXPERT_AXES.intersection(axes)
        if _IN_LEVELS.intersection(axes):
            return self._expert_levels if of_experts else self._dense_levels
        return self.expert if of_experts else self.dense

    def members(self, *axes: Axis) -> tuple[int, ...]:
        """World ranks of the group of this rank over ``axes``."""
        if axes not in self._members:
            grid = self._grid(axes)
            if not EXPERT_AXES.intersection(axes):
                self._members[axes] = grid.members(self.world_rank, *axes)
            else:
                numbers = grid.members(self.expert_number, *axes)
                self._members[axes] = tuple(
                    self.dense.rank_at(self._stage_by_stage.coordinates(number)) for number in numbers
                )
        return self._members[axes]

    @property
    def expert_number(self) -> int:
        """This rank's number on the expert grid."""
        return self._stage_by_stage.rank_at(self.dense.coordinates(self.world_rank))

    @property
    def _stage_by_stage(self) -> RankGrid:
        return RankGrid({axis: self.dense.axes[axis] for axis in WORLD})

    def size(self, *axes: Axis) -> int:
        """Number of ranks in the group over ``axes``."""
        if axes not in self._sizes:  # layers ask several times a pass
            grid = self._grid(axes)
            self._sizes[axes] = math.prod(grid.axes[axis] for axis in axes)
        return self._sizes[axes]

    def rank(self, *axes: Axis) -> int:
        """This rank's position in the group over ``axes``."""
        return self.members(*axes).index(self.world_rank) if self.size(*axes) > 1 else 0

    def group(self, *axes: Axis) -> ProcessGroup | None:
        """Process group over ``axes``; None when it holds one rank."""
        return self.group_of(self.members(*axes))

    def group_of(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Process group of these world ranks; None for one rank.

        Created at first use, by its members alone; axes with the same ranks share it. Torch names a group by the number
        of groups that the rank has made before, and stages may need different groups (one with embeddings alone has no
        attention). So groups that span stages are made first, while all ranks have made none.
        """
        if len(ranks) == 1:
            return None
        if self._whole is not None:
            return self._whole.group_of(ranks)
        first = [self.members(*axes) for axes in SPANNING] if not self._groups and self.size("pp") > 1 else []
        for members in (*first, ranks):
            if members in self._groups or len(members) == 1:
                continue
            if len(members) == self.world_size and dist.group.WORLD is not None and members not in self.urgent:
                self._groups[members] = dist.group.WORLD
            else:
                options = (
                    dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if members in self.urgent else None
                )
                self._groups[members] = dist.new_group(
                    list(members), timeout=self.timeout, use_local_synchronization=True, pg_options=options
                )
        return self._groups[ranks]

    def forget_groups(self) -> None:
        """Drop all process groups, before they are destroyed."""
        self._groups.clear()

    def describe(self) -> str:
        """Coordinates for messages, e.g. ``pp=1 dp=0 cp=0 tp=3``; with several workers ``dc=1 pp=1 ...``."""
        shown = (
            each for each in self.dense.coordinates(self.world_rank).items() if each[0] != "dc" or self.size("dc") > 1
        )
        return " ".join(f"{axis}={index}" for axis, index in shown)
