"""Long work on rank 0 alone, during which the ranks keep meeting: it is no stall, and may ask all ranks for help."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.parallel.collectives import broadcast
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import WORLD

T = TypeVar("T")
Help = Callable[[int], Any]

_BEAT = 1.0
"""Seconds between two meetings while nothing is asked."""
_DONE, _NOTHING = -1, -2


def _no_help(number: int) -> Any:
    raise AssertionError("this work asks for nothing")


def work_on_first(work: Callable[[Help], T], context: ParallelContext, *, help: Help = _no_help) -> T:
    """Rank 0's ``work(ask)`` on all ranks, from a thread of rank 0. A collective; fails everywhere when it fails there.

    ``ask(number)`` in it calls ``help(number)`` on all ranks at once, a collective of any kind, and returns rank 0's
    result.
    """
    mesh = context.mesh
    if mesh.world_size == 1:
        return run_on_first(lambda: work(help), mesh)
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    outcome: Future[T] = Future()

    def ask(number: int) -> Any:
        asked.put(number)
        return answers.get()

    def run() -> None:
        try:
            outcome.set_result(work(ask))
        except BaseException as error:
            outcome.set_exception(error)
        asked.put(_DONE)

    if mesh.world_rank == 0:
        threading.Thread(target=run, daemon=True, name="work of rank 0").start()
    number = torch.zeros((), dtype=torch.int64, device=context.device)
    while number.item() != _DONE:
        if mesh.world_rank == 0:
            try:
                number.fill_(asked.get(timeout=_BEAT))
            except queue.Empty:
                number.fill_(_NOTHING)
        broadcast(number, mesh, *WORLD)
        if number.item() >= 0:
            answer = help(int(number.item()))
            answers.put(answer)
    return run_on_first(outcome.result, mesh)
