"""Several ranks of a rehearsal, each a process of this machine, and what they tell each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.errors import MegatronError, ParallelError

if TYPE_CHECKING:
    from megatron.rehearsal.rank import Rehearsed


def rehearse_ranks(
    config: RunConfig, train_spec: TrainSpec, ranks: Sequence[int], *, steps: int, memory: int
) -> dict[int, Rehearsed]:
    """What each of ``ranks`` did, by world rank.

    The other ranks of the first one's pipeline build their part of the model, as ranks tell each other what they hold;
    a rank that does not even that says what the first of its pipeline stage says. Raises ParallelError with the place
    in the program where a rank failed.
    """
    from megatron.core.parallel.launch import mesh_of

    pipeline = mesh_of(config.parallel, world_size=config.world_size, rank=ranks[0]).members("pp")
    started = {rank: steps if rank in ranks else 0 for rank in sorted({*ranks, *pipeline})}
    stages = {rank: mesh_of(config.parallel, world_size=config.world_size, rank=rank).rank("pp") for rank in started}
    speakers = _speakers(config, stages)
    forked = multiprocessing.get_context("fork")  # ranks begin with torch loaded
    connections: dict[int, Connection] = {}
    processes = []
    for rank, own_steps in started.items():
        ours, theirs = forked.Pipe()
        process = forked.Process(
            target=_run, args=(config, train_spec, rank, speakers, own_steps, memory, theirs), daemon=True
        )
        process.start()
        theirs.close()
        connections[rank] = ours
        processes.append(process)
    try:
        done = _answer(connections)
        return {rank: done[rank] for rank in sorted(ranks)}
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _speakers(config: RunConfig, stages: Mapping[int, int]) -> list[int]:
    """For each world rank the rehearsed rank that answers for it."""
    from megatron.core.parallel.launch import mesh_of

    grid = mesh_of(config.parallel, world_size=config.world_size, rank=0).dense
    of_stage = {stage: rank for rank, stage in reversed([*stages.items()])}
    return [rank if rank in stages else of_stage[grid.coordinates(rank)["pp"]] for rank in range(config.world_size)]


def _answer(connections: Mapping[int, Connection]) -> dict[int, Rehearsed]:
    """Hand round what ranks exchange until each is done."""
    done: dict[int, Rehearsed] = {}
    asked: dict[int, Any] = {}
    while len(done) < len(connections):
        for rank, connection in connections.items():
            if rank in done or rank in asked or not connection.poll(0.01):
                continue
            try:
                kind, value = connection.recv()
            except EOFError:
                raise ParallelError(f"rank {rank} ended in the rehearsal; what it printed is above") from None
            if kind == "failed":
                raise ParallelError(f"rank {rank} fails in the rehearsal: {value}")
            if kind == "done":
                done[rank] = value
            else:
                asked[rank] = value
        if asked and len(asked) + len(done) == len(connections):
            if done:
                raise ParallelError(f"ranks {sorted(asked)} wait for ranks {sorted(done)}, which have ended")
            for each in connections.values():
                each.send(asked)
            asked = {}
    return done


def _run(
    config: RunConfig,
    train_spec: TrainSpec,
    rank: int,
    speakers: Sequence[int],
    steps: int,
    memory: int,
    connection: Connection,
) -> None:
    import torch

    from megatron.rehearsal.rank import rehearse

    def exchange(value: Any) -> list[Any]:
        connection.send(("asks", value))
        told = connection.recv()
        return [told[speaker] for speaker in speakers]

    def failed(error: Exception) -> None:
        connection.send(("failed", _sentence(error)))

    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):
        try:
            found = rehearse(
                config, train_spec, rank=rank, steps=steps, memory=memory, exchange=exchange, failed=failed
            )
        except Exception as error:  # whatever it is, it is what the rehearsal is for
            failed(error)
        else:
            connection.send(("done", found))


def _sentence(error: Exception) -> str:
    """What failed, and the innermost line of the program."""
    if isinstance(error, MegatronError):
        return str(error)
    from megatron.rehearsal.accelerator import is_of_the_program

    frames = [each for each in traceback.extract_tb(error.__traceback__) if is_of_the_program(each.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "outside the program"
    reason, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {reason} ({where})"
