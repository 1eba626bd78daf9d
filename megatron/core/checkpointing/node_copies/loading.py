"""Copies on nodes are found and loaded: boxes that no file of this node holds come from ranks of other nodes."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from megatron.core.checkpointing.agreement import gather_from_all, run_on_all
from megatron.core.checkpointing.find import CheckpointFolder
from megatron.core.checkpointing.node_copies.choosing import candidates, incomplete, sources
from megatron.core.checkpointing.node_copies.folder import NodeFolder
from megatron.core.checkpointing.storage import CheckpointReader, copy_box
from megatron.core.checkpointing.torch_files import load_torch_bytes
from megatron.core.files.durable import write_durably
from megatron.core.parallel.byte_links import ByteLinks
from megatron.core.parallel.collectives import broadcast_object, gather_objects
from megatron.core.parallel.mesh import Mesh
from megatron.errors import CheckpointError

_IN_FLIGHT = 8


@dataclass(frozen=True)
class NodeCheckpoint(CheckpointFolder):
    """A copy on nodes. ``readers``: the rank that reads each file for this one."""

    readers: Mapping[str, int] = field(default_factory=dict, compare=False)
    mesh: Mesh = field(default_factory=Mesh.single, compare=False)

    @override
    def reader(self) -> CheckpointReader:
        return _SharingReader(self)


def find_copy(
    folder: NodeFolder, mesh: Mesh, *, origin: str, newer_than: int
) -> tuple[NodeCheckpoint | None, list[str]]:
    """The newest whole copy of the run, and remarks about those that aren't. A collective.

    ``origin``, ``newer_than``: see ``candidates``.
    """
    found = gather_from_all(lambda: folder.found() if folder.is_first else [], mesh)
    remarks = [
        f"the copy of iteration {iteration} lacks {count} of its files on all nodes"
        for iteration, count in incomplete(found, origin=origin, newer_than=newer_than).items()
    ]
    for iteration, saved_at in candidates(found, origin=origin, newer_than=newer_than):
        files = next(copy.files for copies in found for copy in copies if copy.key == (iteration, saved_at))
        good = gather_from_all(lambda: folder.verified(iteration, saved_at), mesh)  # noqa: B023  # called in this round
        readers = sources(good, folder.places, files)[mesh.world_rank]
        if damaged := sorted(files - readers.keys()):
            remarks.append(f"the copy of iteration {iteration} is damaged: {', '.join(damaged[:3])}")
            continue
        key = iteration, saved_at
        holder = next(rank for rank, copies in enumerate(found) if any(each.key == key for each in copies))
        _describe_here(folder, mesh, iteration, saved_at, holder=holder)
        return (
            NodeCheckpoint(folder.of(iteration), iteration, saved_at, readers=readers, mesh=mesh),
            remarks,
        )
    return None, remarks


def _describe_here(folder: NodeFolder, mesh: Mesh, iteration: int, saved_at: float, *, holder: int) -> None:
    """Give nodes that lack the copy its small files. A collective."""
    small = broadcast_object(folder.small_files(iteration) if mesh.world_rank == holder else {}, mesh, src=holder)

    def write() -> None:
        if folder.is_first and (iteration, saved_at) not in {each.key for each in folder.found()}:
            path = folder.of(iteration)
            path.mkdir(parents=True, exist_ok=True)
            for name, content in small.items():
                (path / name).parent.mkdir(exist_ok=True)
                write_durably(path / name, content)

    run_on_all(write, mesh)


class _SharingReader(CheckpointReader):
    """Reads the boxes of files on this node, and asks other ranks for the others. ``read_data`` is a collective."""

    def __init__(self, copy: NodeCheckpoint) -> None:
        super().__init__(copy.path, is_verified=True)  # files of this node are, and boxes of others by themselves
        self._copy = copy

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        requests: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            requests[item.storage_index].append(item)
        rank = self._copy.mesh.world_rank
        here, there = dict[MetadataIndex, list[ReadItem]](), dict[MetadataIndex, list[ReadItem]]()
        for index, items in requests.items():
            name = self.storage_data[index].relative_path
            is_here = self._copy.readers.get(name, rank) == rank  # others are those of a base
            (here if is_here else there)[index] = items
        failure: Exception | None = None
        try:
            super().read_data(LoadPlan([item for items in here.values() for item in items]), planner)
        except (CheckpointError, OSError) as error:  # others wait for what this rank sends
            failure = error
        self._share(there, planner)
        if failure is not None:
            raise failure
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _share(self, wanted: Mapping[MetadataIndex, list[ReadItem]], planner: LoadPlanner) -> None:
        """Get the wanted boxes from ranks that see their files, and send what others want, in one order for all."""
        mesh, places = self._copy.mesh, self.storage_data
        mine = [(places[index].relative_path, places[index].offset, places[index].length) for index in wanted]
        by_place = dict(zip(mine, wanted))
        everyone = gather_objects([(self._copy.readers[place[0]], *place) for place in mine], mesh)
        transfers = sorted(
            (name, offset, length, source, rank)
            for rank, asked in enumerate(everyone)
            for source, name, offset, length in asked
        )
        if not transfers:
            return
        links = ByteLinks(mesh, range(mesh.world_size), name=broadcast_object(os.urandom(8).hex(), mesh))
        sent, last = list[tuple[object, torch.Tensor]](), (("", -1), torch.empty(0))
        for name, offset, length, source, rank in transfers:
            if source == mesh.world_rank:
                if last[0] != (name, offset):
                    last = (name, offset), self._bytes(name, offset, length)
                sent.append((links.send(last[1], rank), last[1]))
                if len(sent) > _IN_FLIGHT:
                    sent.pop(0)[0].wait()  # type: ignore[attr-defined]
            elif rank == mesh.world_rank:
                data = links.receive(length, source)
                index = by_place[name, offset, length]
                where = f"{name} of rank {source}: {index.fqn}"
                box = load_torch_bytes(io.BytesIO(data.numpy().tobytes()), length, name=where)
                for item in wanted[index]:
                    copy_box(box, item, planner)
        for work, _ in sent:
            work.wait()  # type: ignore[attr-defined]

    def _bytes(self, name: str, offset: int, length: int) -> torch.Tensor:
        with self.open(name) as file:
            file.seek(offset)
            return torch.frombuffer(bytearray(file.read(length)), dtype=torch.uint8)
