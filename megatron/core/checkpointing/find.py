"""Choosing the checkpoint to load: the one the tracker names if it is whole, else the newest whole one, else an error.

Rank 0 looks and decides; reading every byte for the checksums is shared out; all ranks end with the same folder.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron.core.checkpointing.agreement import gather_from_all, run_on_first
from megatron.core.checkpointing.folders import TRACKER, is_unfinished, iteration_of
from megatron.core.checkpointing.foreign import foreign_format
from megatron.core.checkpointing.manifest import MANIFEST, METADATA, Manifest, listed, unreadable
from megatron.core.checkpointing.storage import CheckpointReader
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.parallel.mesh import Mesh
from megatron.errors import CheckpointError
from megatron.small_files import read_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint whose files are all there. ``saved_at``: seconds since 1970.

    ``passed_over``: the checkpoints that should have been chosen first, with the reasons against them. ``is_verified``:
    the checksum of every file has been compared with the manifest.
    """

    path: AnyPath
    iteration: int
    saved_at: float = field(default=0.0, compare=False)
    passed_over: tuple[str, ...] = ()
    is_verified: bool = False

    def reader(self) -> CheckpointReader:
        """What reads its tensors."""
        return CheckpointReader(self.path, is_verified=self.is_verified)


def find_checkpoint(
    root: str | AnyPath,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    verify: bool = True,
    flag: str = "--load",
) -> CheckpointFolder:
    """The checkpoint to load from ``root``, which is a folder of checkpoints or one checkpoint itself.

    With ``mesh`` a collective that gives every rank the same answer; without, this process decides alone (tools, and
    reading settings before process groups exist). ``step`` asks for that iteration and no other. ``verify`` reads
    every file and compares checksums; without it only sizes are compared. ``flag``: what the user named ``root`` by;
    empty where it stands alone on the command line.
    Raises CheckpointError that lists what was found and why each was rejected, and one whose exit code says that a
    restart may help where object storage fails: then no older checkpoint is chosen.
    """
    root, mesh = path_of(root), mesh or Mesh.single()
    named = f"{flag} {root}".lstrip()
    survey = run_on_first(lambda: _survey(root, step, named), mesh)
    damaged: list[str] = []
    for found in survey.whole:
        if problems := _damage(found.path, mesh) if verify else []:
            damaged.append(f"{found.path.name}: {listed(problems)}")
            continue
        passed_over = damaged if survey.has_favourite else survey.rejected + damaged
        if passed_over and mesh.world_rank == 0:
            logger.warning("loading %s instead of the requested one: %s", found.path, "; ".join(passed_over))
        return replace(found, passed_over=tuple(passed_over), is_verified=verify)
    reasons = survey.rejected + damaged
    nothing = "the folder holds nothing that looks like a checkpoint"
    if step is None:
        raise CheckpointError(f"{named} holds no usable checkpoint: {'; '.join(reasons) or nothing}")
    others = ", ".join(map(str, sorted(whole_checkpoints(root))))
    reasons += [f"complete iterations: {others or 'none'}"] if others or reasons else [nothing]
    raise CheckpointError(f"{named} holds no usable checkpoint of --ckpt-step {step}: {'; '.join(reasons)}")


def is_unused(root: str | AnyPath) -> bool:
    """Whether ``root`` is missing or holds nothing that looks like a checkpoint, damaged and foreign ones included.

    Nor is it used by a first save that was stopped: nothing was ever called saved there.
    """
    root = path_of(root)
    if not root.exists():
        return True
    is_named = (root / TRACKER).exists() or (root / MANIFEST).exists()
    is_held = any(not is_unfinished(path) for path in _candidates(root))
    return not (is_named or is_held or foreign_format(root))


def whole_checkpoints(root: AnyPath) -> dict[int, AnyPath]:
    """Checkpoints in ``root`` whose files are all there with the right size, by iteration."""
    return {found.iteration: found.path for found in reversed(_look(root).whole)}


def content_problems(path: AnyPath, *, share: int = 0, shares: int = 1) -> list[str]:
    """Files of a checkpoint whose bytes are not those that were written, and, in the first share, tensors whose files
    the manifest doesn't list. Reads the files of a share whole.
    """
    manifest = Manifest.read(path)
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    problems = manifest.checksum_problems(path, names[share::shares])
    if share == 0 and not problems:
        try:
            CheckpointReader(path).read_metadata()
        except CheckpointError as error:
            problems.append(str(error).removeprefix(f"{path}: "))
        except OSError as error:
            problems.append(f"{METADATA} {unreadable(path, error)}")
    return problems


@dataclass
class _Survey:
    """What a root holds: whole checkpoints, best first, and what is unusable.

    ``has_favourite``: the first is the one that the tracker or the user named.
    """

    whole: list[CheckpointFolder] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    has_favourite: bool = True


def _survey(root: AnyPath, step: int | None, named: str) -> _Survey:
    if not root.is_dir():
        raise CheckpointError(f"{named}: there is no such folder")
    if (root / MANIFEST).exists():
        survey = _Survey()
        _judge(root, survey)
        if survey.whole and step not in (None, survey.whole[0].iteration):
            raise CheckpointError(
                f"{named} is the checkpoint of iteration {survey.whole[0].iteration}, not of --ckpt-step {step}: leave "
                "--ckpt-step out, or name the folder that holds all of a run's"
            )
        return survey
    survey = _look(root, step)
    if step is None:
        _follow_tracker(root, survey)
    if not survey.whole and (hint := foreign_format(root)):
        survey.rejected.append(f"{root.name}: {hint}")
    return survey


def _look(root: AnyPath, step: int | None = None) -> _Survey:
    survey = _Survey()
    for path in _candidates(root):
        if step is None or iteration_of(path) == step:
            _judge(path, survey)
    survey.whole.sort(key=lambda found: found.saved_at, reverse=True)
    return survey


def _candidates(root: AnyPath) -> Iterator[AnyPath]:
    paths: list[AnyPath] = [*root.iterdir()]
    for path in sorted(paths, key=str):
        if (iteration_of(path) is not None or path.name == "release") and path.is_dir():
            yield path


def _judge(path: AnyPath, survey: _Survey) -> None:
    try:
        manifest = Manifest.read(path)
        problems = manifest.size_problems(path)
    except CheckpointError as error:
        problems = [foreign_format(path) or str(error)]
    if problems:
        survey.rejected.append(f"{path.name}: {listed(problems)}")
    else:
        survey.whole.append(CheckpointFolder(path, manifest.iteration, manifest.saved_at))


def _follow_tracker(root: AnyPath, survey: _Survey) -> None:
    """Put the iteration that the tracker names first; where it is missing, that is the first reason."""
    named = ""
    try:
        named = read_text(root / TRACKER, where=TRACKER, error=CheckpointError, most_bytes=1 << 16).strip()
        problem = f"{TRACKER} says {named[:20]!r}, but there is no complete checkpoint of that iteration"
    except FileNotFoundError:
        problem = f"{TRACKER} is missing"
    except OSError as error:
        problem = f"{TRACKER} {unreadable(root, error)}"
    except CheckpointError as error:
        problem = str(error)
    survey.whole.sort(key=lambda found: str(found.iteration) != named)
    survey.has_favourite = any(str(found.iteration) == named for found in survey.whole)
    if not survey.has_favourite and (survey.whole or survey.rejected or named):
        survey.rejected.insert(0, problem)


def _damage(path: AnyPath, mesh: Mesh) -> list[str]:
    """What ``content_problems`` finds, by all ranks together: each reads its share, the largest files dealt first."""

    def check_share() -> list[str]:
        return content_problems(path, share=mesh.world_rank, shares=mesh.world_size)

    return list(itertools.chain.from_iterable(gather_from_all(check_share, mesh)))
