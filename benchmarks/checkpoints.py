"""Saving and loading against torch.save and plain files, the pause of a background save, and planning for many ranks.

    python benchmarks/checkpoints.py --megabytes 512 --folder /path/on/the/disk

Contenders take turns; printed are medians. Every writer syncs its file. Planning is computed for every rank of a job of
up to 1,024 ranks in this one process, from shapes alone.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks import results
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import load_checkpoint
from megatron.core.checkpointing.save import SavePlanner, begin_save, save_checkpoint
from megatron.core.checkpointing.sharded_view import Staging, sharded_views
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding, StackedPart

LAYERS, HIDDEN, VOCABULARY = 32, 4096, 128_256
JOBS = {8: (8, 1), 64: (8, 2), 256: (8, 4), 1024: (8, 8)}
"""Ranks: tensor- and pipeline-parallel sizes; the rest is data parallelism with sharded optimizer state."""


def seconds(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def tensors_of(megabytes: int) -> dict[str, Tensor]:
    """Random fp32 numbers of ``megabytes`` MiB in all, in 16 tensors."""
    size = megabytes * (1 << 20) // 4 // 16
    return {f"model.{number}": torch.randn(size) for number in range(16)}


def state_of(tensors: dict[str, Tensor]) -> list[ShardedState]:
    """The tensors as the checkpoint code takes them."""
    return [ShardedState(name, tensor, Sharding(tuple(tensor.shape))) for name, tensor in tensors.items()]


def torch_save(tensors: dict[str, Tensor], path: Path) -> None:
    """``torch.save``, and sync."""
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def plain_write(tensors: dict[str, Tensor], path: Path) -> None:
    """The numbers one after another, and sync."""
    with path.open("wb") as file:
        for tensor in tensors.values():
            file.write(tensor.numpy().data.cast("B"))
        file.flush()
        os.fsync(file.fileno())


def plain_read(tensors: dict[str, Tensor], path: Path) -> None:
    """Read the file back into the tensors."""
    with path.open("rb") as file:
        for tensor in tensors.values():
            file.readinto(tensor.numpy().data.cast("B"))


def throughput(megabytes: int, folder: Path, rounds: int) -> dict[str, float]:
    """The table of speed; ours as ratios to torch's."""
    tensors, mesh = tensors_of(megabytes), Mesh.single()
    state = state_of(tensors)
    root, other, plain = folder / "ours", folder / "torch.pt", folder / "plain.bin"
    times: dict[str, list[float]] = {}

    def take(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(work))

    staging = Staging()

    def background() -> None:
        pending = begin_save(root, 2, state, {}, mesh, background=staging)
        times.setdefault("pause of a background save", []).append(time.perf_counter() - began)
        pending.finish()

    for _ in range(rounds):
        take("save: ours", lambda: save_checkpoint(root, 1, state, {}, mesh))
        take("save: torch.save", lambda: torch_save(tensors, other))
        take("save: plain file", lambda: plain_write(tensors, plain))
        take("find: compare checksums", lambda: find_checkpoint(root, mesh=mesh))
        load = partial(load_checkpoint, find_checkpoint(root, mesh=mesh), state, mesh)
        take("load: ours, found before", load)
        take("load: torch.load", lambda: torch.load(other, weights_only=True))
        take("load: plain file", lambda: plain_read(tensors, plain))
        began = time.perf_counter()
        take("background save, in all", background)
        shutil.rmtree(root)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, median in medians.items():
        print(f"  {name:28}{median * 1e3:8.0f} ms{megabytes * 1.048576 / median:8.0f} MB/s")
    share = medians["pause of a background save"] / medians["save: ours"]
    print(f"  a background save stops training for {share:.0%} of what a save takes")
    return {
        "save": medians["save: torch.save"] / medians["save: ours"],
        "load": medians["load: torch.load"] / medians["load: ours, found before"],
    }


def model_on(mesh: Mesh) -> dict[str, Sharding]:
    """Parameters of a Llama-like model on this rank's stage."""
    stage, stages = mesh.rank("pp"), mesh.size("pp")
    found = {}
    for layer in range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages):
        prefix = f"decoder.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = Sharding((HIDDEN,))
        found[f"{prefix}.pre_mlp_layernorm.weight"] = Sharding((HIDDEN,))
        found[f"{prefix}.self_attention.linear_qkv.weight"] = Sharding((3 * HIDDEN, HIDDEN), {0: "tp"})
        found[f"{prefix}.self_attention.linear_proj.weight"] = Sharding((HIDDEN, HIDDEN), {1: "tp"})
        found[f"{prefix}.mlp.linear_fc1.weight"] = Sharding(
            (7 * HIDDEN, HIDDEN), {0: "tp"}, parts=(StackedPart(7 * HIDDEN // 2),) * 2
        )
        found[f"{prefix}.mlp.linear_fc2.weight"] = Sharding((HIDDEN, 7 * HIDDEN // 2), {1: "tp"})
    if stage in (0, stages - 1):
        found[f"matrix of stage {stage}"] = Sharding((VOCABULARY, HIDDEN), {0: "tp"})
    return found


def planned_state(mesh: Mesh) -> list[ShardedState]:
    """Weights, and each data-parallel rank's range of masters and moments; shapes without memory."""
    here, replicas, state = model_on(mesh), mesh.size("dp"), []
    for name, sharding in here.items():
        size = torch.Size(sharding.local_shape(mesh)).numel()
        state.append(ShardedState(f"model.{name}", torch.empty(size, device="meta"), sharding))
        share = -(-size // replicas)
        start, stop = min(size, share * mesh.rank("dp")), min(size, share * (mesh.rank("dp") + 1))
        for kind in ("fp32_param", "exp_avg", "exp_avg_sq") if start < stop else ():
            own = torch.empty(stop - start, device="meta")
            state.append(ShardedState(f"optimizer.{kind}.{name}", own, sharding, (start, stop)))
    return state


def planning(num_ranks: int) -> None:
    """One row of the second table: what a rank computes alone, what all exchange, and what each computes from that."""
    tp, pp = JOBS[num_ranks]
    plans: list[SavePlan] = []
    local, planners = [], []
    for rank in range(num_ranks):
        mesh = Mesh.of(tp=tp, pp=pp, dp=num_ranks // tp // pp, rank=rank)

        def plan(mesh: Mesh = mesh) -> None:
            planners.append(SavePlanner(mesh, dict(sharded_views(planned_state(mesh), mesh))))
            plans.append(planners[-1].create_local_plan())

        local.append(seconds(plan))
    coordinator = planners[0]
    exchanged = len(pickle.dumps(plans))
    together = statistics.median(seconds(lambda: coordinator.create_global_plan(plans)) for _ in range(5))
    items = sum(len(each.items) for each in plans)
    print(
        f"  {num_ranks:5} ranks{items:9} boxes{statistics.median(local) * 1e3:9.1f} ms{exchanged / 1e6:9.1f} MB"
        f"{together:9.2f} s{together / items * 1e6:9.1f} us a box"
    )


def main() -> None:
    parser = results.parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", choices=JOBS, default=[*JOBS], help="of jobs that are planned")
    parser.add_argument("--folder", type=Path, help="where files are written; default: the system's temporary folder")
    options = results.parse(parser, megabytes=4, rounds=1, ranks=[8])
    print("planning      all ranks     one rank   exchanged  together")
    for (
        num_ranks
    ) in options.ranks:  # first: in a process that has held much memory, a hundred thousand small objects cost more
        planning(num_ranks)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(f"{options.megabytes} MiB of parameters, one process")
        ratios = throughput(options.megabytes, Path(folder), options.rounds)
    results.save(options, ratios)


if __name__ == "__main__":
    main()
