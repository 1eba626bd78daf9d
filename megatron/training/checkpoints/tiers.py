"""Quicker tiers in front of ``--save``: copies that only a restart needs, and which of them it goes on from.

A copy belongs to the checkpoints in ``--save`` that were the newest, or under way, when it was made: its origins. Once
another one is the newest, or none, the copy is of a past that the run has left, and is not used.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron.config.checkpoint import CheckpointConfig
from megatron.core.checkpointing.agreement import run_on_all, run_on_first
from megatron.core.checkpointing.find import CheckpointFolder, find_checkpoint, is_unused
from megatron.core.checkpointing.folders import iteration_of, remove
from megatron.core.checkpointing.node_copies.choosing import partners_of
from megatron.core.checkpointing.node_copies.folder import ORIGINS, NodeFolder, read_origins
from megatron.core.checkpointing.node_copies.loading import find_copy
from megatron.core.checkpointing.node_copies.saving import NodeCopy
from megatron.core.checkpointing.retention import Retention, prune
from megatron.core.checkpointing.save import PendingSave, Snapshot
from megatron.core.checkpointing.sharded_view import Staging
from megatron.core.files.durable import write_durably
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.parallel.byte_links import ByteLinks
from megatron.core.parallel.collectives import all_reduce, broadcast_object, gather_objects
from megatron.core.parallel.environment import launch_environment
from megatron.core.parallel.mesh import WORLD, Mesh
from megatron.errors import CheckpointError, ConfigError, StorageAwayError
from megatron.small_files import read_text
from megatron.training.run.run import Run

_BEGUN = ".run_begun"
"""In ``--save`` before its first checkpoint: the origin of copies that are made before it."""
_MEMORY = "/dev/shm"
_NO_CHECKPOINT = -1


def origin_of(root: AnyPath) -> tuple[str, int]:
    """The origin of copies made now, which the newest checkpoint in ``root`` is, and its iteration.

    Before the first checkpoint, and -1, the origin is what ``_BEGUN`` says; empty where nothing has begun. Raises
    StorageAwayError where that can't be known now.
    """
    if not is_unused(root):
        try:
            newest = find_checkpoint(root, verify=False)
            return named_origin(newest.iteration, newest.saved_at), newest.iteration
        except StorageAwayError:
            raise
        except CheckpointError:
            pass  # a start that reads them says what is wrong
    path = root / _BEGUN
    said = read_text(path, where=str(path), error=CheckpointError, most_bytes=1 << 10) if path.exists() else ""
    return said, _NO_CHECKPOINT


def named_origin(iteration: int, saved_at: float) -> str:
    """The origin that a checkpoint is."""
    return f"checkpoint of iteration {iteration} saved at {saved_at!r}"


def node_path(settings: CheckpointConfig) -> Path | None:
    """Where copies of the run lie on this node; None where none are made there.

    Raises ConfigError for a variable that the node doesn't have.
    """
    if not settings.copies_on_nodes:
        return None
    named = settings.non_persistent_local_ckpt_dir or _MEMORY
    place = os.path.expanduser(os.path.expandvars(named))
    if "$" in place:
        raise ConfigError(
            f"--non-persistent-local-ckpt-dir {named} names a variable that isn't set here; set it on every node, or "
            "name a folder"
        )
    return Path(place) / f"megatron-{settings.saved_place}"


def fallback_path(settings: CheckpointConfig) -> Path:
    """Where a copy is left on this node when ``--save`` stays away."""
    if settings.save_fallback_dir is None and (path := node_path(settings)) is not None:
        return path
    return Path(settings.save_fallback_dir or tempfile.gettempdir()) / f"megatron-{settings.saved_place}"


def global_root(settings: CheckpointConfig) -> AnyPath:
    """Where copies of type global are."""
    named = settings.non_persistent_global_ckpt_dir
    return path_of(settings.save or "") / "non_persistent" if named is None else path_of(named)


def copy_to_load(run: Run) -> CheckpointFolder | None:
    """The newest copy that is newer than all checkpoints in ``--save``, where the run goes on from these; None without.

    A collective. What can't be used is named in the log, and deleted on nodes.
    """
    settings, mesh = run.config.checkpoint, run.context.mesh
    if (
        not settings.resumes_own
        or settings.finetune
        or settings.ckpt_step is not None
        or run.config.training.skip_train
    ):
        return None
    root = path_of(settings.save or "")
    origin, newest = run_on_first(lambda: origin_of(root), mesh)
    if newest == _NO_CHECKPOINT and not run_on_first(lambda: is_unused(root), mesh):
        return None  # none of its checkpoints can be read now: copies of any of them stay
    found = list[tuple[CheckpointFolder, NodeFolder | None]]()
    folders = list[NodeFolder]()
    for path in dict.fromkeys(filter(None, (node_path(settings), fallback_path(settings)))):
        if not any(gather_objects(os.path.isdir(path), mesh)):
            continue
        try:
            folder = run_on_all(lambda: NodeFolder.seen(path, mesh), mesh)  # noqa: B023  # called in this round
        except CheckpointError as error:
            run.reporter.say(f"warning: {error}")
            continue
        copy, remarks = find_copy(folder, mesh, origin=origin, newer_than=newest)
        folders.append(folder)
        for remark in remarks:
            run.reporter.say(f"warning: {remark} ({path})")
        if copy is not None:
            found.append((copy, folder))
    if settings.non_persistent_ckpt_type == "global":
        found += [(each, None) for each in _global_copy(settings, mesh, origin=origin, newer_than=newest)]
    best = max(found, key=lambda each: each[0].iteration, default=(None, None))
    for folder in folders:
        kept = [best[0].iteration] if best[0] is not None and best[1] is folder else []
        run_on_all(lambda: folder.keep(kept) if folder.is_first else None, mesh)  # noqa: B023  # called in this round
    if best[0] is not None:
        instead = f"the checkpoint of iteration {newest}" if newest >= 0 else "a new run"
        run.reporter.say(f"recovering from the copy of iteration {best[0].iteration}, in place of {instead}")
    return best[0]


def _global_copy(settings: CheckpointConfig, mesh: Mesh, *, origin: str, newer_than: int) -> list[CheckpointFolder]:
    root = global_root(settings)
    if run_on_first(lambda: is_unused(root), mesh):
        return []
    try:
        folder = find_checkpoint(root, mesh=mesh, flag="--non-persistent-global-ckpt-dir")
    except CheckpointError:
        return []
    origins = run_on_first(lambda: read_origins(folder.path), mesh)
    return [folder] if origin in origins and folder.iteration > newer_than else []


class Tier:
    """Makes the copies of a run, one at a time, and keeps the newest. Its methods are collectives.

    ``small_files``: what every checkpoint holds beside tensors, on rank 0.
    """

    def __init__(self, run: Run, small_files: Mapping[str, bytes]) -> None:
        self._run, settings, mesh = run, run.config.checkpoint, run.context.mesh
        self._small_files: dict[str, bytes] = broadcast_object(dict(small_files), mesh)
        self._staging = Staging() if settings.async_save else None
        self._under_way: tuple[NodeCopy | PendingSave, Snapshot] | None = None
        self._partners: tuple[int, ...] = (mesh.world_rank,)
        self._links: ByteLinks | None = None
        self._folder: NodeFolder | None = None
        if (path := node_path(settings)) is not None:
            folder = self._folder = run_on_all(lambda: NodeFolder.seen(path, mesh), mesh)
            if settings.replication:
                self._partners = partners_of(mesh.world_rank, jump=self._jump(), factor=settings.replication_factor)
                self._check_partners(folder)
                name = broadcast_object(os.urandom(8).hex(), mesh)
                self._links = ByteLinks(mesh, self._partners, name=name)

    def _jump(self) -> int:
        return self._run.config.checkpoint.replication_jump or launch_environment().local_world_size

    def _check_partners(self, folder: NodeFolder) -> None:
        """Raise ConfigError where partners share a folder, which would be lost with all of its copies."""
        settings, world = self._run.config.checkpoint, len(folder.places)
        jump, factor = self._jump(), settings.replication_factor
        if world % (jump * factor):
            raise ConfigError(
                f"--replication-factor {factor} with parts {jump} ranks apart (--replication-jump) needs a multiple of "
                f"{jump * factor} ranks, and there are {world}; give others, or leave --replication out"
            )
        for rank in range(world):
            partners = partners_of(rank, jump=jump, factor=factor)
            if len({folder.places[each] for each in partners}) < factor:
                raise ConfigError(
                    f"--replication would keep the part of rank {rank} on the ranks {partners}, of which some see the "
                    f"same folder {folder.path}: start ranks on {factor} nodes at least, or give another "
                    "--replication-jump, or leave --replication out"
                )

    def save(self, snapshot: Snapshot, *, origins: Sequence[str]) -> None:
        """Copy a snapshot of the run as it is now; with ``--async-save``, return when it is in memory.

        A copy that can't be made is a warning: the one before stays, and so do checkpoints.
        """
        self.finish()
        settings = self._run.config.checkpoint
        try:
            copy = self._begin(snapshot, origins)
        except CheckpointError as error:
            self._warn(snapshot, error)
            return
        self._under_way = copy, snapshot
        if self._staging is not None:
            snapshot.copy_into(self._staging)
            copy.write_in_background()
        if not settings.async_save:
            self.finish()

    def _begin(self, snapshot: Snapshot, origins: Sequence[str]) -> NodeCopy | PendingSave:
        if self._folder is None:
            snapshot.files = {**snapshot.files, ORIGINS: "\n".join(origins).encode()}
            return PendingSave(global_root(self._run.config.checkpoint), snapshot)
        return NodeCopy(
            self._folder,
            snapshot,
            origins=origins,
            small_files=self._small_files,
            partners=self._partners,
            links=self._links,
        )

    def settle(self) -> None:
        """At a step boundary, finish a copy that every rank has written."""
        if self._under_way is None:
            return
        context = self._run.context
        written = torch.tensor(int(self._under_way[0].is_written()), device=context.device)
        if all_reduce(written, context.mesh, *WORLD, op="min").item():
            self.finish()

    def finish(self) -> None:
        """Wait until the copy that is being written, if any, is whole on every node."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        copy, snapshot = under_way
        settings, mesh = self._run.config.checkpoint, self._run.context.mesh
        try:
            copy.finish()
            if self._folder is None:
                prune(global_root(settings), snapshot.iteration, Retention(keep_last=1), mesh)
        except CheckpointError as error:
            self._warn(snapshot, error)
            return
        place = global_root(settings) if self._folder is None else self._folder.path
        self._run.reporter.say(f"  copied iteration {snapshot.iteration:7d} to {place}{self._where()}")
        self._run.reporter.tell("copied", iteration=snapshot.iteration)

    def _where(self) -> str:
        if self._folder is None:
            return ""
        return " on every node" + (f", each part on {len(self._partners)}" if len(self._partners) > 1 else "")

    def _warn(self, snapshot: Snapshot, error: CheckpointError) -> None:
        iteration = snapshot.iteration
        self._run.reporter.tell("save-failed", iteration=iteration, attempt=1, text=str(error))
        self._run.reporter.say(f"warning: iteration {iteration} could not be copied: {error}; the copy before it stays")

    def clear(self) -> None:
        """Delete the copies: a checkpoint has all that they have, or the run goes back to one."""
        self.finish()
        settings, mesh = self._run.config.checkpoint, self._run.context.mesh
        folder = self._folder
        if folder is not None:
            run_on_all(lambda: folder.keep(()) if folder.is_first else None, mesh)
        elif not run_on_first(lambda: is_unused(global_root(settings)), mesh):
            run_on_first(lambda: _delete_all(global_root(settings)), mesh)

    def remove(self) -> None:
        """Delete the copies and their folder, at the end of the run."""
        self.clear()
        folder = self._folder
        if folder is not None:
            run_on_all(lambda: folder.remove() if folder.is_first else None, self._run.context.mesh)


def _delete_all(root: AnyPath) -> None:
    paths: list[AnyPath] = [*root.iterdir()]
    for path in paths:
        if iteration_of(path) is not None:
            remove(path)


def note_beginning(root: AnyPath) -> str:
    """Write the origin of copies that are made before the first checkpoint, and return it. Rank 0 calls it."""
    said = f"run {os.urandom(8).hex()}"
    write_durably(root / _BEGUN, said)
    return said


def leave_copy(
    run: Run, snapshot: Snapshot, *, origins: Sequence[str], small_files: Mapping[str, bytes]
) -> tuple[bool, str]:
    """Leave a copy in ``--save-fallback-dir`` of every node: whether there is one, and what became of it in words. A
    collective.
    """
    settings, mesh = run.config.checkpoint, run.context.mesh
    if not any(origins):
        return False, f"no copy is left, as nothing has been saved in {settings.save} that it could go on from"
    path = fallback_path(settings)
    shared: dict[str, bytes] = broadcast_object(dict(small_files), mesh)
    try:
        folder = run_on_all(lambda: NodeFolder.seen(path, mesh), mesh)
        NodeCopy(folder, snapshot, origins=origins, small_files=shared).finish()
    except CheckpointError as error:
        return False, f"no copy could be left in {path} either ({error}); name another folder with --save-fallback-dir"
    add = "" if settings.resumes_own else f" with --load {settings.save}"
    return True, (
        f"a copy of iteration {snapshot.iteration} is in {path} on every node: once the storage is back, the same "
        f"command{add} goes on from it on these nodes"
    )


def remove_left_copy(run: Run) -> None:
    """Delete what ``leave_copy`` has left. A collective."""
    mesh, path = run.context.mesh, fallback_path(run.config.checkpoint)
    if any(gather_objects(os.path.isdir(path), mesh)):
        folder = run_on_all(lambda: NodeFolder.seen(path, mesh), mesh)
        run_on_all(lambda: folder.remove() if folder.is_first else None, mesh)
