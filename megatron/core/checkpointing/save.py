"""Saving: plan together, write each box once, make it durable, and only then give it a name.

A save has three parts. Planning is collective: ranks agree on who writes which box. Writing is local, so it may happen
in a background thread while training goes on. Publishing is collective again: when every file of every rank is on
disk, rank 0 writes the manifest, renames the folder and moves the tracker. Until the rename (in object storage, until
the manifest) nothing looks like a checkpoint; a failure on any rank leaves the older ones as they were.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from megatron.core.checkpointing.agreement import gather_from_all, run_on_first
from megatron.core.checkpointing.folders import begin, discard, folder_for, publish
from megatron.core.checkpointing.manifest import MANIFEST, METADATA, RUN_FILE, FileRecord, Manifest, checksum
from megatron.core.checkpointing.sharded_view import ShardedView, Staging, sharded_views
from megatron.core.checkpointing.storage import CheckpointWriter
from megatron.core.checkpointing.streamed import SourceError, StreamedBox, table_of, write_boxes
from megatron.core.files.durable import write_durably
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState
from megatron.errors import RESTART_MAY_HELP, CheckpointError, StorageAwayError
from megatron.version import __version__

RUN_FORMAT = 1


def save_checkpoint(
    root: str | AnyPath, iteration: int, state: Iterable[ShardedState], run_state: Mapping[str, Any], mesh: Mesh
) -> AnyPath:
    """Save ``state`` and the JSON mapping ``run_state`` as ``root/iter_…``; durable when this returns. A collective.

    Replicas (data-parallel, tied, tensor-parallel norms) are written once, the writing spread over their ranks.
    What was saved under the same iteration before is replaced.
    Raises CheckpointError on all ranks when any rank cannot write; earlier checkpoints are untouched then.
    """
    return begin_save(root, iteration, state, run_state, mesh).finish()


def begin_save(
    root: str | AnyPath,
    iteration: int,
    state: Iterable[ShardedState],
    run_state: Mapping[str, Any],
    mesh: Mesh,
    *,
    background: Staging | None = None,
    files: Mapping[str, bytes] | None = None,
) -> PendingSave:
    """Plan a save; with memory for a ``background`` one, copy what this rank writes and start writing. A collective.

    Training may go on as soon as this returns in the background case. Call ``finish`` on every rank, at the same point
    of the program, to make the checkpoint durable; at most one save of a root may be pending. ``files``: small ones
    that rank 0 writes beside the tensors, by their paths in the checkpoint.
    """
    pending = PendingSave(path_of(root), take_snapshot(iteration, state, run_state, mesh, files=files))
    with pending.all_or_nothing():
        if background is not None:
            pending.snapshot.copy_into(background)
            pending.write_in_background()
    return pending


def take_snapshot(
    iteration: int,
    state: Iterable[ShardedState],
    run_state: Mapping[str, Any],
    mesh: Mesh,
    *,
    files: Mapping[str, bytes] | None = None,
) -> Snapshot:
    """Plan a save that has no place yet. A collective; see ``begin_save``."""
    snapshot = Snapshot(iteration, run_state, mesh, files or {})
    snapshot.plan(sharded_views(state, mesh))
    return snapshot


def save_streamed(
    root: str | AnyPath,
    iteration: int,
    boxes: Sequence[StreamedBox],
    run_state: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
) -> AnyPath:
    """Save a checkpoint from one process, with tensors that are made one after another while they are written."""
    snapshot = Snapshot(iteration, run_state, Mesh.single(), files or {})
    snapshot.stream(boxes)
    return PendingSave(path_of(root), snapshot).finish()


@dataclass(frozen=True)
class Written:
    """What one rank has put on disk: the places of its boxes, and its files."""

    results: list[WriteResult]
    files: dict[str, FileRecord]


class Snapshot:
    """What a save holds: who writes which box, the table of contents, and small files. It can be written to a place
    several times, as long as its tensors don't change; ``copy_into`` makes it independent of those in training.
    ``taken_at``: seconds since 1970, the same on all ranks.
    """

    def __init__(self, iteration: int, run_state: Mapping[str, Any], mesh: Mesh, files: Mapping[str, bytes]) -> None:
        self.iteration, self.mesh = iteration, mesh
        self.files = {**files, RUN_FILE: _describe_run(iteration, run_state, mesh).encode()}
        self.metadata = Metadata({})
        self.token, self.taken_at = os.urandom(4).hex(), time.time()
        self._planner = SavePlanner(mesh, {})
        self._plan = SavePlan([])
        self._streamed: Sequence[StreamedBox] | None = None

    def plan(self, views: dict[str, ShardedView]) -> None:
        """Agree on who writes which box. A collective; every rank computes the whole plan."""
        self._planner = SavePlanner(self.mesh, views)
        writer = CheckpointWriter(Path())
        writer.set_up_storage_writer(self.mesh.world_rank == 0)
        found = gather_from_all(lambda: (self.token, self.taken_at, self._planner.create_local_plan()), self.mesh)
        self.token, self.taken_at, _ = found[0]
        plans, self.metadata = self._planner.create_global_plan([plan for *_, plan in found])
        self._plan = writer.prepare_global_plan(plans)[self.mesh.world_rank]

    def stream(self, boxes: Sequence[StreamedBox]) -> None:
        """Plan to make and write ``boxes`` in turn, on this one rank."""
        self._streamed, self.metadata = boxes, table_of(boxes)

    def copy_into(self, staging: Staging) -> None:
        """Copy the tensors that this rank writes, which training may then change."""
        views = self._planner.state_dict
        mine = {item.index.fqn for item in self._plan.items}
        self._planner.state_dict = {name: views[name].copied(staging, name) for name in mine}

    @property
    def is_empty(self) -> bool:
        """Whether this rank writes no tensors."""
        return self._streamed is None and not self._plan.items

    def write(self, folder: AnyPath) -> Written:
        """Write this rank's boxes into ``folder``, which exists."""
        writer = CheckpointWriter(folder)
        writer.set_up_storage_writer(self.mesh.world_rank == 0)
        if self._streamed is not None:
            results = write_boxes(writer, folder, self._streamed)
        else:
            results = writer.write_data(self._planner.finish_plan(self._plan), self._planner).wait()
        return Written(results, dict(writer.files.written))

    def describe(self, folder: AnyPath, written: Sequence[Written]) -> Manifest:
        """Write the table of contents and the small files into ``folder``; the manifest of all files."""
        CheckpointWriter(folder).finish(self.metadata, [rank.results for rank in written])
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_durably(folder / name, content)
        files = {name: record for rank in written for name, record in rank.files.items()}
        files |= {name: checksum(folder / name) for name in (METADATA, *self.files)}
        return Manifest(self.iteration, self.taken_at, files)


class PendingSave:
    """A snapshot on its way into ``root``, written by ``finish`` or, before that, by a background thread.

    ``attempt``: counts those that failed before. ``is_tried_again``: what it leaves in a storage that is away is
    cleared away by the next one, since the storage would be asked in vain now, for as long as it takes to fail.
    """

    def __init__(self, root: AnyPath, snapshot: Snapshot, *, attempt: int = 0, is_tried_again: bool = False) -> None:
        self.snapshot, self._is_tried_again = snapshot, is_tried_again
        self._root, self._mesh = root, snapshot.mesh
        token = f"{zlib.crc32(f'{snapshot.token}{attempt}'.encode()):08x}"
        self._aside = folder_for(root, snapshot.iteration, token)
        self._written: Callable[[], Written] = self._write
        self._is_written: Callable[[], bool] = lambda: False

    def is_written(self) -> bool:
        """Whether this rank's background writing has ended, well or not, so that ``finish`` won't wait for it here."""
        return self._is_written()

    def finish(self) -> AnyPath:
        """Wait for all ranks' files, publish the checkpoint and return its folder. A collective.

        Raises CheckpointError on all ranks when any rank could not write.
        """
        with self.all_or_nothing():
            written = gather_from_all(lambda: self._written(), self._mesh)
            return run_on_first(lambda: self._publish(written), self._mesh)

    def write_in_background(self) -> None:
        """Start writing, which the snapshot's tensors must not change during."""
        one_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        future = one_thread.submit(self._write)
        one_thread.shutdown(wait=False)
        self._written, self._is_written = future.result, future.done

    def _write(self) -> Written:
        if self._mesh.world_rank == 0:
            begin(self._root, self._aside)
        if self.snapshot.is_empty:
            return Written([], {})
        # Where --save isn't shared by all ranks, _publish raises an error.
        self._aside.mkdir(parents=True, exist_ok=True)
        return self.snapshot.write(self._aside)

    def _publish(self, written: list[Written]) -> AnyPath:
        """Rank 0: everything that makes a folder of files a checkpoint."""
        manifest = self.snapshot.describe(self._aside, written)
        if problems := manifest.size_problems(self._aside):
            raise CheckpointError(
                f"rank 0 does not see what other ranks wrote ({', '.join(problems[:3])}): "
                "--save must be on a file system that all ranks share"
            )
        write_durably(self._aside / MANIFEST, manifest.to_json())
        return publish(self._aside, self.snapshot.iteration)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Leave no trace of a save that fails or is interrupted; the error names what is kept."""
        try:
            with _explained(self._root, self.snapshot.iteration):
                yield
        except BaseException as error:
            is_left = self._is_tried_again and isinstance(error, StorageAwayError)
            if self._mesh.world_rank == 0 and not is_left:
                discard(self._aside)
            raise


class SavePlanner(DefaultSavePlanner):
    """DCP's planner for flat state dicts, which also writes tied parameters once. ``views``: what this rank holds."""

    def __init__(self, mesh: Mesh, views: Mapping[str, ShardedView]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._mesh = mesh
        self.set_up_planner(dict(views), is_coordinator=mesh.world_rank == 0)

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP drops equal boxes of replicas, which are cut alike; tied copies on other stages may be cut otherwise."""
        plans: tuple[list[SavePlan], Metadata] = super().create_global_plan(on_first_stages(all_plans, self._mesh))
        return plans

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The numbers of a box. DCP copies a tensor that is part of a larger storage; most boxes needn't be."""
        box = super().resolve_data(write_item)
        assert isinstance(box, Tensor), "state is tensors only"
        return without_surroundings(box) if box.device.type == "cpu" and box.is_contiguous() else box


def without_surroundings(tensor: Tensor) -> Tensor:
    """A view of a contiguous CPU ``tensor`` whose storage ends where the tensor ends; the memory is shared."""
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def on_first_stages(plans: list[SavePlan], mesh: Mesh) -> list[SavePlan]:
    """The plans of all ranks, each name written only by the first pipeline stage that has it."""
    stages = [mesh.dense.coordinates(rank)["pp"] for rank in range(mesh.world_size)]
    home: dict[str, int] = {}
    for stage, plan in sorted(zip(stages, plans), key=lambda pair: pair[0]):
        for item in plan.items:
            home.setdefault(item.index.fqn, stage)
    return [
        replace(plan, items=[item for item in plan.items if home[item.index.fqn] == stage])
        for stage, plan in zip(stages, plans)
    ]


@contextmanager
def _explained(root: AnyPath, iteration: int) -> Iterator[None]:
    try:
        yield
    except SourceError:
        raise
    except StorageAwayError as error:
        raise StorageAwayError(
            f"iteration {iteration} could not be saved in {root}: {error}. Checkpoints saved before are untouched"
        ) from error
    except CheckpointError as error:
        space = "free space there, or " if error.exit_code == RESTART_MAY_HELP else ""
        raise CheckpointError(
            f"iteration {iteration} could not be saved in {root}: {error}. "
            f"Checkpoints saved before are untouched; {space}point --save at a folder that can be written",
            exit_code=error.exit_code,
        ) from error


def _describe_run(iteration: int, run_state: Mapping[str, Any], mesh: Mesh) -> str:
    """Text of ``run.json``: the caller's state, and what wrote it."""
    axes = {str(axis): size for grid in (mesh.dense, mesh.expert) for axis, size in grid.axes.items()}
    if axes["dc"] == 1:
        del axes["dc"]  # of runs without workers, as in files of older versions
    document = {
        "format": RUN_FORMAT,
        "iteration": iteration,
        "layout": {"world_size": mesh.world_size, **axes},
        "versions": {
            "megatron": __version__,
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        },
        "state": run_state,
    }
    return json.dumps(document, indent=1) + "\n"
