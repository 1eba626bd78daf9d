"""Saving: plan together, write each box once, make it durable, and only then give it a name.

A save has three parts. Planning is collective: ranks agree on who writes which box. Writing is local, so it may happen
in a background thread while training goes on. Publishing is collective again: when every file of every rank is on
disk, rank 0 writes the manifest, renames the folder and moves the tracker. Until the rename (in object storage, until
the manifest) nothing looks like a checkpoint; a failure on any rank leaves the older ones as they were.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from megatron.core.checkpointing.agreement import gather_from_all, run_on_first
from megatron.core.checkpointing.folders import begin, discard, publish
from megatron.core.checkpointing.manifest import MANIFEST, METADATA, RUN_FILE, FileRecord, Manifest, checksum
from megatron.core.checkpointing.sharded_view import ShardedView, Staging, sharded_views
from megatron.core.checkpointing.storage import CheckpointWriter
from megatron.core.checkpointing.streamed import SourceError, StreamedBox, table_of, write_boxes
from megatron.core.files.durable import write_durably
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState
from megatron.errors import RESTART_MAY_HELP, CheckpointError
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
    views = sharded_views(state, mesh)
    pending = PendingSave(path_of(root), iteration, run_state, mesh, files or {})
    with pending.all_or_nothing():
        pending.plan(views)
        if background is not None:
            pending.write_in_background(background)
    return pending


def save_streamed(
    root: str | AnyPath,
    iteration: int,
    boxes: Sequence[StreamedBox],
    run_state: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
) -> AnyPath:
    """Save a checkpoint from one process, with tensors that are made one after another while they are written."""
    pending = PendingSave(path_of(root), iteration, run_state, Mesh.single(), files or {})
    pending.stream(boxes)
    return pending.finish()


@dataclass(frozen=True)
class _Written:
    """What one rank has put on disk: the places of its boxes, and its files."""

    results: list[WriteResult]
    files: dict[str, FileRecord]


class PendingSave:
    """A planned save, written by ``finish`` or, before that, by a background thread. Making one is a collective."""

    def __init__(
        self, root: AnyPath, iteration: int, run_state: Mapping[str, Any], mesh: Mesh, files: Mapping[str, bytes]
    ) -> None:
        self._root, self._iteration, self._mesh = root, iteration, mesh
        self._files = {**files, RUN_FILE: _describe_run(iteration, run_state, mesh).encode()}
        with _explained(root, iteration):
            self._aside = run_on_first(lambda: begin(root, iteration), mesh)
        self._planner = SavePlanner(mesh, {})
        self._writer = CheckpointWriter(self._aside)
        self._metadata = Metadata({})
        self._plan = SavePlan([])
        self._written: Callable[[], _Written] = self._write
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

    def plan(self, views: dict[str, ShardedView]) -> None:
        """Agree on who writes which box. A collective; every rank computes the whole plan."""
        self._planner = SavePlanner(self._mesh, views)
        self._writer.set_up_storage_writer(self._mesh.world_rank == 0)
        plans = gather_from_all(self._planner.create_local_plan, self._mesh)
        plans, self._metadata = self._planner.create_global_plan(plans)
        self._plan = self._writer.prepare_global_plan(plans)[self._mesh.world_rank]

    def stream(self, boxes: Sequence[StreamedBox]) -> None:
        """Plan to make and write ``boxes`` in turn, on this one rank."""
        self._metadata = table_of(boxes)
        self._writer.set_up_storage_writer(True)

        def write() -> _Written:
            results = write_boxes(self._writer, self._aside, boxes)
            return _Written(results, dict(self._writer.files.written))

        self._written = write

    def write_in_background(self, staging: Staging) -> None:
        """Copy the tensors that this rank writes and start writing the copies."""
        views = self._planner.state_dict
        mine = {item.index.fqn for item in self._plan.items}
        self._planner.state_dict = {name: views[name].copied(staging, name) for name in mine}
        one_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        future = one_thread.submit(self._write)
        one_thread.shutdown(wait=False)
        self._written, self._is_written = future.result, future.done

    def _write(self) -> _Written:
        if not self._plan.items:
            return _Written([], {})
        # Where --save isn't shared by all ranks, _publish raises an error.
        self._aside.mkdir(parents=True, exist_ok=True)
        results = self._writer.write_data(self._planner.finish_plan(self._plan), self._planner).wait()
        return _Written(results, dict(self._writer.files.written))

    def _publish(self, written: list[_Written]) -> AnyPath:
        """Rank 0: everything that makes a folder of files a checkpoint."""
        self._writer.finish(self._metadata, [rank.results for rank in written])
        for name, content in self._files.items():
            (self._aside / name).parent.mkdir(exist_ok=True)
            write_durably(self._aside / name, content)
        files = {name: record for rank in written for name, record in rank.files.items()}
        files |= {name: checksum(self._aside / name) for name in (METADATA, *self._files)}
        manifest = Manifest(self._iteration, time.time(), files)
        if problems := manifest.size_problems(self._aside):
            raise CheckpointError(
                f"rank 0 does not see what other ranks wrote ({', '.join(problems[:3])}): "
                "--save must be on a file system that all ranks share"
            )
        write_durably(self._aside / MANIFEST, manifest.to_json())
        return publish(self._aside, self._iteration)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Leave no trace of a save that fails or is interrupted; the error names what is kept."""
        try:
            with _explained(self._root, self._iteration):
                yield
        except BaseException:
            if self._mesh.world_rank == 0:
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
