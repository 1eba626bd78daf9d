"""Functions on ranks of this machine, each in a process of its own.

One that crashes or runs out of memory takes no other with it, and its peak of memory is its own.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, cast

PRELOADED = ["benchmarks.gpu_steps", "benchmarks.gpu_checks", "megatron.rehearsal.rank"]
GRACE = 10.0  # seconds in which the rank that failed first may still say so


class WorkerError(Exception):
    """A rank's error, in a line."""


class WorkerMemoryError(WorkerError):
    """A worker whose device has no memory left."""


def warm_processes() -> ForkServerContext:
    """Processes forked from one that has imported what ranks need, and has touched no device."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    return processes


def on_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 1, timeout: float = 1800.0) -> Any:
    """What ``function(*arguments)`` returns on rank 0 of ``ranks`` processes with torchrun's variables.

    Raises WorkerError when a rank raises, dies or takes longer than ``timeout`` seconds; all others are ended then.
    """
    processes = warm_processes()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers, started = dict[Connection, int](), list[Any]()
    for rank in range(ranks):
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=_work, args=(theirs, rank, ranks, port, function, arguments))
        process.start()
        theirs.close()
        answers[ours] = rank
        started.append(process)
    results, failed = dict[int, Any](), list[tuple[int, str, bool]]()
    try:
        while answers:
            ready = cast(list[Connection], wait([*answers], GRACE if failed else timeout))
            if not ready:
                break
            for connection in ready:
                rank = answers.pop(connection)
                try:
                    sentence, is_memory, result = connection.recv()
                except EOFError:
                    started[rank].join()
                    sentence, is_memory, result = f"its process ended with code {started[rank].exitcode}", False, None
                if sentence is None:
                    results[rank] = result
                else:
                    failed.append((rank, sentence, is_memory))
    finally:
        for process in started:
            if failed or answers:
                process.kill()
            process.join()
    if failed:
        rank, sentence, is_memory = max(failed, key=lambda each: (each[2], not each[1].startswith("its process")))
        raise (WorkerMemoryError if is_memory else WorkerError)(f"rank {rank}: {sentence}" if ranks > 1 else sentence)
    if answers:
        raise WorkerError(f"no answer within {timeout:.0f} s from ranks {', '.join(map(str, answers.values()))}")
    return results[0]


def _work(
    answer: Connection, rank: int, ranks: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    found: tuple[str | None, bool, Any]
    try:
        found = None, False, function(*arguments)
    except Exception as error:  # whatever it is, it goes into the table
        line, *_ = str(error).strip().splitlines() or [""]
        is_memory = isinstance(error, torch.OutOfMemoryError)
        found = f"{type(error).__name__}: {line}", is_memory, None
    answer.send(found)
    answer.close()
