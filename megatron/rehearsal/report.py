"""What a rehearsal found, as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from megatron.config.flags import plural_s
from megatron.config.report import gigabytes
from megatron.config.run import RunConfig
from megatron.core.checkpointing.save import SavePlanner
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.launch import mesh_of
from megatron.planning.estimate import MemoryEstimate, rank_peak
from megatron.rehearsal.comparing import compared, disagreements, incomplete_beginnings, stuck
from megatron.rehearsal.rank import Rehearsed
from megatron.rehearsal.recorder import Operation


def problems(found: Mapping[int, Rehearsed]) -> list[str]:
    """What would fail on accelerators; nothing if nothing would."""
    operations = {rank: each.operations for rank, each in found.items()}
    refused = list(dict.fromkeys(each for rank in found.values() for each in rank.refused))
    dropped = [
        f"rank {rank} never waits for {operation.describe}"
        for rank, asked in operations.items()
        for operation in asked
        if operation.waited is None
    ]
    wrong = [*refused, *dropped[:4], *incomplete_beginnings(operations)]
    if unmatched := disagreements(operations):
        return [*wrong, *unmatched]
    end = stuck(operations)
    return [*wrong, *([f"the ranks wait for ever: {end}"] if end else []), *unsaved(found)]


def unsaved(found: Mapping[int, Rehearsed]) -> list[str]:
    """What a checkpoint of all ranks would lack or hold twice; nothing where not all ranks are rehearsed."""
    ranks = [found[rank] for rank in sorted(found)]
    if not ranks or len(ranks) < ranks[0].world_size:
        return []
    mesh = mesh_of(ranks[0].parallel, world_size=len(ranks), rank=0)
    try:
        plans, _ = SavePlanner(mesh, {}).create_global_plan([each.save for each in ranks])
    except ValueError as error:
        return [f"a checkpoint would lack boxes or hold them twice: {error}"]
    boxes = Counter((item.index.fqn, item.index.offset) for plan in plans for item in plan.items)
    return [
        f"a checkpoint's {name} is written {times} times at {at}" for (name, at), times in boxes.items() if times > 1
    ]


def report(
    config: RunConfig, train_spec: TrainSpec, found: Mapping[int, Rehearsed], *, remarks: Sequence[str] = ()
) -> str:
    """Sections of text: what would fail, ``remarks``, and for each rehearsed rank its waits, operations and memory."""
    wrong, (whole, used) = problems(found), compared({rank: each.operations for rank, each in found.items()})
    unseen = f"; --ranks all compares the other {used - whole}" if whole < used else ""
    in_turn = stuck({rank: each.operations for rank, each in found.items()}, one_queue=True) is None
    sections = [
        "\n   ".join(
            [
                f"== rehearsal of {len(found):,} of {config.world_size:,} rank{plural_s(config.world_size)}, without "
                "values, on a pretended accelerator",
                *(wrong or ["no fault was found"]),
                f"{whole} of {used} process group{plural_s(used)} compared{unseen}",
                *remarks,
                *(["every operation would end even if a device ran one at a time"] if whole and in_turn else []),
            ]
        )
    ]
    for rank, each in found.items():
        mesh = mesh_of(config.parallel, world_size=config.world_size, rank=rank)
        sections.append(
            "\n   ".join(
                [
                    f"== rank {rank} ({mesh.describe()}), its last step, of {config.num_microbatches(0)} microbatches",
                    *_waits(each.waits),
                    *_operations(each.last_step),
                    *_memory(each, rank_peak(config, train_spec, mesh.rank("pp"))),
                ]
            )
        )
    return "\n\n".join(sections)


def _memory(counted: Rehearsed, estimate: MemoryEstimate) -> list[str]:
    """Counted bytes, and in brackets the estimate: in all, and by kind."""
    of_optimizer = counted.states - counted.weights - counted.gradients
    kinds = {
        "weights": (counted.weights, estimate.weights),
        "gradients": (counted.gradients, estimate.gradients),
        "optimizer": (of_optimizer, estimate.main_params + estimate.moments),
        "activations and copies": (counted.highest - counted.states, estimate.total - estimate.states),
    }
    return [
        f"memory: at most {gigabytes(counted.highest)} (estimated {gigabytes(estimate.total)}), between steps "
        f"{gigabytes(counted.states)} ({gigabytes(estimate.states)})",
        ", ".join(f"{name} {gigabytes(here)} ({gigabytes(there)})" for name, (here, there) in kinds.items()),
    ]


def _waits(places: Counter[str]) -> list[str]:
    if not places:
        return ["the host never waits for the device"]
    number = sum(places.values())
    return [
        f"the host waits for the device {number} time{plural_s(number)}: "
        + ", ".join(f"{place}{f' ({times} times)' if times > 1 else ''}" for place, times in places.items())
    ]


def _operations(operations: Sequence[Operation]) -> list[str]:
    """A line for each kind of operation and group of ranks."""
    sizes: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for each in operations:
        sizes[each.name, each.communicator.members].append(each.elements * each.dtype.itemsize)
    lines = []
    for (name, members), moved in sizes.items():
        ranks = f"{len(members):,} ranks from {members[0]} to {members[-1]}"
        if len(members) <= 4:
            ranks = f"ranks {', '.join(map(str, members))}"
        lines.append(f"{len(moved):,} x {name} among {ranks}: {sum(moved) / 1e6:,.3f} MB")
    return lines
