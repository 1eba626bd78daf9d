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
from megatron.core.conversion.megatron_lm.arguments import Arguments
from megatron.core.files.remote_path import RemotePath
from megatron.errors import CheckpointError

RELEASE = "release"
COMMON = "common.pt"
BACKEND = "metadata.json"
_COMMON_OBJECT = "common_state/shard_0_1"  # where Megatron-LM 0.19 keeps what was in common.pt
Folder = TypeVar("Folder", Path, RemotePath)
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?")


@dataclass(frozen=True)
class ShardFiles:
    """The torch format. ``stages``: in the order of their layers, a mapping of names to tensors per tensor-parallel
    rank, mapped from the files. ``version``: of the checkpoint, which decides how query, key and value are ordered.
    """

    folder: Path
    args: Arguments
    iteration: int
    version: float
    stages: list[list[Mapping[str, Tensor]]]

    def names(self) -> Iterator[str]:
        """Of all tensors."""
        return (name for stage in self.stages for name in stage[0])


@dataclass(frozen=True)
class DistFiles:
    """The torch_dist format. ``stored``: logical tensors by key."""

    folder: Path
    args: Arguments
    iteration: int
    stored: StoredTensors
    version: float = 3.0

    def names(self) -> Iterator[str]:
        """Of all tensors, those of the optimizer's state included."""
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
    elif (root / TRACKER).is_file():
        named = (root / TRACKER).read_text(encoding="utf-8").strip()
        if named != RELEASE and not named.isdecimal():
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
    ranks: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*/model*rng.pt")):
        match = _RANK.fullmatch(path.parent.name)
        if match is None or match[3]:
            raise CheckpointError(f"{path.parent} is a mixture of experts, which is not available yet")
        ranks[int(match[1]), int(match[2] or 0)] = path
    tensor, pipeline = (1 + max(rank[axis] for rank in ranks) for axis in (0, 1))
    absent = [f"tp {t} pp {p}" for t in range(tensor) for p in range(pipeline) if (t, p) not in ranks]
    if absent:
        raise CheckpointError(
            f"{folder} lacks the files of ranks {', '.join(absent[:5])}: copy all mp_rank folders (a model with "
            "different layouts of encoder and decoder can only be read from torch_dist)"
        )
    contents = {rank: _mapping(load_torch_file(path), path) for rank, path in ranks.items()}
    first = contents[0, 0]
    chunks = sorted(
        (key for key in first if re.fullmatch(r"model\d*", str(key))),
        key=lambda key: int(key.removeprefix("model") or 0),
    )
    stages: list[list[Mapping[str, Tensor]]] = [
        [_flat(contents[t, p].get(chunk, {})) for t in range(tensor)] for chunk in chunks for p in range(pipeline)
    ]
    return ShardFiles(
        folder=folder,
        args=Arguments(first.get("args"), str(ranks[0, 0]), ignored),
        iteration=_iteration(first, folder),
        version=float(first.get("checkpoint_version", 0)),
        stages=stages,
    )


def _open_dist(folder: Path, ignored: Collection[str]) -> DistFiles:
    stored = StoredTensors(folder, foreign=True)
    if (folder / COMMON).is_file():
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
