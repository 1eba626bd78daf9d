"""Several ranks of rehearsals, one after the other, in processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.errors import MegatronError, ParallelError
from megatron.rehearsal.task import Task

if TYPE_CHECKING:
    from megatron.rehearsal.rank import Rehearsed


def rehearse_ranks(
    config: RunConfig, train_spec: TrainSpec, ranks: Sequence[int], *, steps: int, memory: int
) -> dict[int, Rehearsed]:
    """What each of ``ranks`` did, by world rank. Raises ParallelError with the line of the program that failed."""
    # The first fake tensor loads it, which takes seconds: once here, not in every forked process.
    import torch._dynamo  # noqa: F401

    tasks = [Task(config=config, train_spec=train_spec, rank=rank, steps=steps, memory=memory) for rank in ranks]
    found = {}
    for task, outcome in zip(tasks, rehearse_tasks(tasks, multiprocessing.get_context("fork"))):
        if isinstance(outcome, str):
            raise ParallelError(outcome)
        found[task.rank] = outcome
    return found


def rehearse_tasks(tasks: Sequence[Task], processes: BaseContext) -> list[Rehearsed | str]:
    """What the rank of each task did, or a sentence that says where it failed."""
    count = min(len(tasks), os.cpu_count() or 1)
    outcomes: dict[int, Rehearsed | str] = {}
    workers: dict[Any, tuple[Any, list[int]]] = {}

    def start(numbers: list[int]) -> None:
        ours, theirs = processes.Pipe()
        # A rank that fails in a backward pass ends its process; another one goes on with the rest.
        process: Any = processes.Process(  # type: ignore[attr-defined]
            target=_work, args=([(number, tasks[number]) for number in numbers], theirs), daemon=True
        )
        process.start()
        theirs.close()
        workers[ours] = process, numbers

    for first in range(count):
        start([*range(first, len(tasks), count)])
    try:
        while workers:
            ready: list[Any] = wait([*workers])
            for connection in ready:
                try:
                    number, outcome = connection.recv()
                    outcomes.setdefault(number, outcome)
                except EOFError:
                    _, numbers = workers.pop(connection)
                    done = [number for number in numbers if number in outcomes]
                    left = [number for number in numbers if number not in outcomes]
                    if left and not (done and isinstance(outcomes[done[-1]], str)):
                        number = left.pop(0)
                        outcomes[number] = f"rank {tasks[number].rank} ended in the rehearsal; what it printed is above"
                    if left:
                        start(left)
    finally:
        for process, _ in workers.values():
            process.terminate()
            process.join()
    return [outcomes[number] for number in range(len(tasks))]


def _work(tasks: Sequence[tuple[int, Task]], connection: Connection) -> None:
    import torch

    from megatron.rehearsal.rank import rehearse

    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):
        for number, task in tasks:
            outcome: Rehearsed | str

            def failed(error: Exception, task: Task = task, number: int = number) -> None:
                connection.send((number, f"rank {task.rank} fails in the rehearsal: {_sentence(error)}"))

            try:
                outcome = rehearse(task, failed=failed)
            except Exception as error:  # whatever it is, it is what the rehearsal is for
                failed(error)
            else:
                connection.send((number, outcome))


def _sentence(error: Exception) -> str:
    """What failed, and the innermost line of the program."""
    if isinstance(error, MegatronError):
        return str(error)
    from megatron.rehearsal.accelerator import is_of_the_program

    frames = [each for each in traceback.extract_tb(error.__traceback__) if is_of_the_program(each.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "outside the program"
    reason, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {reason} ({where})"
