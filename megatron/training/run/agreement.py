"""Comparisons between ranks: settings, code, stages, the number of parameters, weights of replicas."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.distributed.buffers import tied_holders
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.collectives import all_reduce, gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import RESTART_CANNOT_HELP, ParallelError
from megatron.planning.estimate import model_parameters
from megatron.version import CODE


def check_ranks_agree(config: RunConfig, context: ParallelContext) -> None:
    """Raise ParallelError when a rank's settings, code or torch differ from rank 0's. A collective."""
    mine = {"settings": config.digest, "code of megatron": code_digest(), "torch version": torch.__version__}
    everyone = gather_objects(mine, context.mesh)
    for what, expected in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs[what] != expected]
        if others:
            named = ", ".join(map(str, others[:8])) + (" …" if len(others) > 8 else "")
            raise ParallelError(
                f"ranks disagree on the {what}: rank 0 has {expected[:12]}, rank {others[0]} has "
                f"{everyone[others[0]][what][:12]} (other than rank 0: {named}); start every rank with the same "
                "command and the same installation",
                exit_code=RESTART_CANNOT_HELP,
            )


def code_digest() -> str:
    """SHA-256 of the package's sources."""
    digest = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_stages(config: RunConfig, stages: Sequence[Stage], context: ParallelContext) -> None:
    """Raise ParallelError unless this rank's pipeline holds each layer and both ends once. A collective."""
    everyone = gather_objects(list(stages), context.mesh)
    held = [stage for rank in context.mesh.members("pp") for stage in everyone[rank]]
    layers = sorted(number for stage in held for number in stage.layers)
    ends = [sum(stage.is_first for stage in held), sum(stage.is_last for stage in held)]
    if layers != list(range(config.num_layers)) or ends != [1, 1]:
        raise ParallelError(
            f"the pipeline's ranks hold layers {layers}, {ends[0]} embeddings and {ends[1]} outputs of a model with "
            f"{config.num_layers} layers; this is a bug, please report it with your settings"
        )


def check_parameter_count(
    config: RunConfig, train_spec: TrainSpec, layout: Mapping[str, Sharding], context: ParallelContext
) -> int:
    """Number of parameters over all ranks; each logical element counts once. A collective.

    ``layout``: this rank's parameters. Raises ParallelError unless it is the number in the whole model.
    """
    holders = tied_holders(layout.values(), context.mesh)
    mine = {
        name: sharding.counted_elements(context.mesh)
        for name, sharding in layout.items()
        if context.mesh.rank(*sharding.reduce) == 0
        if sharding.tied is None or holders[sharding.tied][0] == context.mesh.world_rank
    }
    held = torch.tensor(sum(mine.values()), dtype=torch.int64, device=context.device)
    total = int(all_reduce(held, context.mesh, "pp", "dp", "cp", "tp").item())
    expected = model_parameters(config, train_spec)
    if total != expected:
        raise ParallelError(
            f"the ranks hold {total:,} parameters and the settings describe {expected:,}: a layer is lost or held "
            "twice; this is a bug, please report it with the settings above"
        )
    return total


def check_replicas_agree(
    state: Iterable[ShardedState],
    context: ParallelContext,
    *,
    iteration: int,
    fault: Callable[[Sequence[str], str], None] = lambda places, what: None,
) -> None:
    """Raise ParallelError when data-parallel replicas of a parameter are not bitwise equal: it names the ranks that
    differ from most. ``fault``: called on the first of the replicas with the host of each rank that differs. A
    collective.
    """
    entries = {entry.name: entry for entry in state}
    mine: dict[str, bytes] = {}
    for name, entry in entries.items():
        # A copy: memory that numpy has seen can't be freed any more as that of ZeRO 3 is.
        data = entry.tensor.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8).numpy()
        mine[name] = hashlib.blake2b(data.data, digest_size=16).digest()
        del data
    everyone = gather_objects((mine, socket.gethostname()), context.mesh)
    for name in mine:
        members = context.mesh.members(*entries[name].sharding.reduce)
        digests = [everyone[rank][0][name] for rank in members]
        if len(set(digests)) == 1:
            continue
        usual = max(digests, key=digests.count)
        is_majority = 2 * digests.count(usual) > len(digests)
        odd = [rank for rank, digest in zip(members, digests) if digest != usual or not is_majority]
        named = " and ".join(f"rank {rank} ({everyone[rank][1]})" for rank in odd)
        if is_majority and context.mesh.world_rank == members[0]:
            fault([everyone[rank][1] for rank in odd], f"other weights after iteration {iteration}")
        others = f"those of {digests.count(usual)} replicas, which agree" if is_majority else "each other"
        raise ParallelError(
            f"after iteration {iteration} the weights of {named} differ from {others}, first in {name}: a device "
            f"computed wrong results{'' if is_majority else ', and with so few replicas it is unknown which'}; resume "
            "from the last good checkpoint, on other hardware"
        )
