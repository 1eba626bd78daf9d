"""The files of a Megatron-LM checkpoint: which format it has, its saved settings, its tensors as they lie there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from megatron.core.checkpointing.folders import TRACKER
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.checkpointing.torch_files import load_torch_file
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.files.remote_path import RemotePath
from megatron.errors import CheckpointError
from megatron.small_files import has_file, read_text

RELEASE = "release"
COMMON = "common.pt"
BACKEND = "metadata.json"
_COMMON_OBJECT = "common_state/shard_0_1"  # where Megatron-LM 0.19 keeps what was in common.pt
Folder = TypeVar("Folder", Path, RemotePath)
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?")


@dataclass(frozen=True)
class StageFiles:
    """A stage's tensors by name, mapped from the files. ``ranks``: those of each tensor-parallel rank. ``experts``:
    those of each expert-parallel rank and, in it, of each of the ranks that split an expert's matrices.
    """

    ranks: list[Mapping[str, Tensor]]
    experts: list[list[Mapping[str, Tensor]]]


@dataclass(frozen=True)
class ShardFiles:
    """The torch format. ``stages``: in the order of their layers. ``version``: of the checkpoint, which decides how
    query, key and value are ordered.
    """

    folder: Path
    args: Arguments
    iteration: int
    version: float
    stages: list[StageFiles]

    def names(self) -> Iterator[str]:
        """Names of all tensors."""
        return (name for stage in self.stages for name in stage.ranks[0])


@dataclass(frozen=True)
class DistFiles:
    """The torch_dist format. ``stored``: logical tensors by key."""

    folder: Path
    args: Arguments
    iteration: int
    stored: StoredTensors
    version: float = 3.0

    def names(self) -> Iterator[str]:
        """Names of all tensors, those of the optimizer's state included."""
        return iter(self.stored.entries)


def open_checkpoint(root: Path, *, step: int | None = None, ignored: Collection[str] = ()) -> ShardFiles | DistFiles:
    """The checkpoint in ``root``, which is a folder of checkpoints or one checkpoint itself.

    ``ignored``: saved arguments that are read as if they weren't there. Raises CheckpointError when there is none, and
    for files that are damaged or would run code.
    """
    folder = find_folder(root, step=step)
    if any(folder.glob("mp_rank_*/model*rng.pt")):
        return _open_shards(folder, ignored)
    if (folder / ".metadata").exists():
        return _open_dist(folder, ignored)
    raise CheckpointError(
        f"{folder} holds neither mp_rank_…/model_optim_rng.pt (torch format) nor .metadata (torch_dist format): "
        "give the folder that Megatron-LM's --save named"
    )


def find_folder(root: Folder, *, step: int | None = None) -> Folder:
    """The folder of one checkpoint: the one that the tracker file names, or of iteration ``step``."""
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a folder: give the folder that Megatron-LM's --save named")
    if step is not None:
        folder = root / f"iter_{step:07d}"
    elif has_file(root / TRACKER, error=CheckpointError):
        named = read_text(root / TRACKER, where=f"{root}: {TRACKER}", error=CheckpointError, most_bytes=1 << 16).strip()
        if named != RELEASE and not re.fullmatch(r"[0-9]{1,18}", named):
            raise CheckpointError(
                f"{root}: {TRACKER} says {named[:20]!r}, which is not an iteration: give --ckpt-step N"
            )
        folder = root / (RELEASE if named == RELEASE else f"iter_{int(named):07d}")
    else:
        return root
    if not folder.is_dir():
        raise CheckpointError(
            f"{root}: there is no {folder.name}" + ("" if step is not None else f", which {TRACKER} names")
        )
    return folder


def _open_shards(folder: Path, ignored: Collection[str]) -> ShardFiles:
    paths = sorted(folder.glob("mp_rank_*/model*rng.pt"))
    contents = {path: _mapping(load_torch_file(path), path) for path in paths}
    args = Arguments(contents[paths[0]].get("args"), str(paths[0]), ignored)
    grid = _Grid.of(folder, args, {_numbers(path): path for path in paths})
    first = contents[paths[0]]
    chunks = sorted(
        (key for key in first if re.fullmatch(r"model\d*", str(key))),
        key=lambda key: int(key.removeprefix("model") or 0),
    )
    flat = {(path, chunk): _flat(contents[path].get(chunk, {})) for path in paths for chunk in chunks}
    stages = [
        StageFiles(
            ranks=[flat[path, chunk] for path in grid.dense(stage)],
            experts=[[flat[path, chunk] for path in each] for each in grid.experts(stage)],
        )
        for chunk in chunks
        for stage in range(grid.pipeline)
    ]
    return ShardFiles(
        folder=folder,
        args=args,
        iteration=_iteration(first, folder),
        version=float(first.get("checkpoint_version", 0)),
        stages=stages,
    )


def _numbers(path: Path) -> tuple[int, ...]:
    """The ranks in a folder's name, tensor-parallel first."""
    match = _RANK.fullmatch(path.parent.name)
    if match is None:
        raise CheckpointError(f"{path.parent} is not called mp_rank_ and the numbers of a rank: copy only such folders")
    return tuple(int(number) for number in match.groups() if number is not None)


@dataclass(frozen=True)
class _Grid:
    """Which files hold what. ``ranks``: by tensor-, pipeline- and expert-parallel rank.

    The ranks of a stage are a grid twice: tensor-parallel ranks are neighbours for dense layers, and the
    ``expert_tensor`` ranks that split an expert are neighbours for experts. Those with the first copy of their experts
    save a file, so with fewer ranks to an expert than to a dense layer not every pair of numbers has one.
    """

    ranks: Mapping[tuple[int, int, int], Path]
    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int

    @classmethod
    def of(cls, folder: Path, args: Arguments, found: Mapping[tuple[int, ...], Path]) -> _Grid:
        """Raises CheckpointError for files that are missing, and for names that the settings contradict.

        With one stage, or without expert parallelism, names leave out a number; the settings say which.
        """
        expert = args("expert_model_parallel_size", 1)
        has_stages = args("pipeline_model_parallel_size", 1) > 1 if expert > 1 else True
        ranks: dict[tuple[int, int, int], Path] = {}
        for numbers, path in found.items():
            tensor, *others = numbers
            if len(others) > has_stages + (expert > 1):
                raise CheckpointError(
                    f"{path.parent} is a folder of an expert-parallel rank, and the saved settings say "
                    f"expert_model_parallel_size {expert}: copy the checkpoint again"
                )
            pipeline = others[0] if has_stages and others else 0
            ranks[tensor, pipeline, others[-1] if expert > 1 and others else 0] = path
        sizes = [1 + max(rank[axis] for rank in ranks) for axis in (0, 1)]
        if expert > 1:
            named = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
            sizes = [max(size, args(name, 1)) for size, name in zip(sizes, named)]
        split = (args("expert_tensor_parallel_size", None) if expert > 1 else None) or sizes[0]
        grid = cls(ranks, sizes[0], sizes[1], expert, split)
        if split > sizes[0]:
            raise CheckpointError(
                f"{folder} was saved with expert_tensor_parallel_size {split} and tensor_model_parallel_size "
                f"{sizes[0]}, so several ranks saved into one folder and some of the experts are lost: convert a "
                "torch_dist checkpoint"
            )
        if absent := grid._absent():
            raise CheckpointError(
                f"{folder} lacks the files of ranks {', '.join(absent[:5])}: copy all mp_rank folders (a model with "
                "different layouts of encoder and decoder can only be read from torch_dist)"
            )
        return grid

    def _absent(self) -> list[str]:
        pairs = {(tensor, expert) for each in self._pairs() for tensor, expert in each}
        found = {rank[:2] for rank in self.ranks}
        absent = [
            f"tp {tensor} pp {stage}" + (f" ep {expert}" if self.expert > 1 else "")
            for tensor, expert in sorted(pairs)
            for stage in range(self.pipeline)
            if (tensor, stage, expert) not in self.ranks
        ]
        dense = ((tensor, stage) for tensor in range(self.tensor) for stage in range(self.pipeline))
        return absent or [f"tp {tensor} pp {stage}" for tensor, stage in dense if (tensor, stage) not in found]

    def _pairs(self) -> list[list[tuple[int, int]]]:
        """Tensor- and expert-parallel numbers of the files with the experts of each expert-parallel rank."""
        each = range(self.expert_tensor)
        return [[((rank * len(each) + part) % self.tensor, rank) for part in each] for rank in range(self.expert)]

    def dense(self, stage: int) -> list[Path]:
        """A file with the dense layers of each tensor-parallel rank."""
        held = ((tensor, rank) for tensor in range(self.tensor) for rank in range(self.expert))
        first: dict[int, Path] = {}
        for tensor, rank in held:
            if (path := self.ranks.get((tensor, stage, rank))) is not None:
                first.setdefault(tensor, path)
        return list(first.values())

    def experts(self, stage: int) -> list[list[Path]]:
        """The files that split the experts of each expert-parallel rank."""
        return [[self.ranks[tensor, stage, rank] for tensor, rank in each] for each in self._pairs()]


def _open_dist(folder: Path, ignored: Collection[str]) -> DistFiles:
    stored = StoredTensors(folder, foreign=True)
    if has_file(folder / COMMON, error=CheckpointError):
        common = _mapping(load_torch_file(folder / COMMON), folder / COMMON)
    elif _COMMON_OBJECT in stored.objects:
        common = _mapping(stored.read_object(_COMMON_OBJECT), folder)
    else:
        raise CheckpointError(f"{folder} has no {COMMON}, which holds the settings: copy the whole folder")
    args = Arguments(common.get("args"), str(folder / COMMON), ignored)
    return DistFiles(folder, args, _iteration(common, folder), stored)


def _mapping(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not what Megatron-LM saves")
    return content


def _iteration(content: Mapping[str, Any], folder: Path) -> int:
    iteration = content.get("iteration", 0)
    return iteration if isinstance(iteration, int) and folder.name != RELEASE else 0


def _flat(nested: Any, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of nested mappings by their names joined with dots."""
    found: dict[str, Tensor] = {}
    for name, value in nested.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
    return found
