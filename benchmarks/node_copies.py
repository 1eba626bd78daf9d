"""Copies in the memory of a node against checkpoints on a disk: the pause of training, and the time of a recovery.

    python -m benchmarks.node_copies --megabytes 512 --folder /path/on/the/disk

Contenders take turns; printed are medians. Files on the disk are synced; both compare checksums before they load.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import results
from benchmarks.checkpoints import seconds, state_of, tensors_of
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import load_checkpoint
from megatron.core.checkpointing.node_copies.folder import NodeFolder
from megatron.core.checkpointing.node_copies.loading import find_copy
from megatron.core.checkpointing.node_copies.saving import NodeCopy
from megatron.core.checkpointing.save import begin_save, save_checkpoint, take_snapshot
from megatron.core.checkpointing.sharded_view import Staging
from megatron.core.parallel.mesh import Mesh

ORIGIN = "a benchmark"


def compare(megabytes: int, disk: Path, memory: Path, rounds: int) -> dict[str, float]:
    """The table; the ratios of it."""
    state, mesh = state_of(tensors_of(megabytes)), Mesh.single()
    folder, times = NodeFolder.seen(memory, mesh), dict[str, list[float]]()
    on_disk, in_memory = Staging(), Staging()

    def take(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(work))

    def copy(iteration: int) -> NodeCopy:
        return NodeCopy(folder, take_snapshot(iteration, state, {}, mesh), origins=[ORIGIN], small_files={})

    def pause_on_disk() -> Callable[[], object]:
        pending = begin_save(disk, 2, state, {}, mesh, background=on_disk)
        times.setdefault("disk, --async-save: pause", []).append(time.perf_counter() - began)
        return pending.finish

    def pause_in_memory() -> Callable[[], object]:
        pending = copy(2)
        pending.snapshot.copy_into(in_memory)
        pending.write_in_background()
        times.setdefault("memory, --async-save: pause", []).append(time.perf_counter() - began)
        return pending.finish

    def recover() -> None:
        found, _ = find_copy(folder, mesh, origin=ORIGIN, newer_than=0)
        assert found is not None, "the copy was made before"
        load_checkpoint(found, state, mesh)

    for number in range(rounds + 1):
        take("disk: pause", lambda: save_checkpoint(disk, 1, state, {}, mesh))
        take("memory: pause", lambda: copy(1).finish())
        take("disk: recovery", lambda: load_checkpoint(find_checkpoint(disk, mesh=mesh), state, mesh))
        take("memory: recovery", recover)
        for pause in (pause_on_disk, pause_in_memory):
            began = time.perf_counter()
            pause()()
        shutil.rmtree(disk)
        if number == 0 and rounds > 1:
            times.clear()  # memory is allocated for the first time
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, median in medians.items():
        print(f"  {name:28}{median * 1e3:8.0f} ms{megabytes * 1.048576 / median:8.0f} MB/s")
    return {
        "pause": medians["disk: pause"] / medians["memory: pause"],
        "recovery": medians["disk: recovery"] / medians["memory: recovery"],
    }


def main() -> None:
    parser = results.parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk; default: the system's temporary folder")
    options = results.parse(parser, megabytes=4, rounds=1)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as memory,
    ):
        print(f"{options.megabytes} MiB of state, one process")
        ratios = compare(options.megabytes, Path(disk) / "run", Path(memory) / "run", options.rounds)
    results.save(options, ratios)


if __name__ == "__main__":
    main()
