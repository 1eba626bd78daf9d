"""The steps of benchmarks/gpu.py on a pretended GPU.

They prove that no tensor of another device and no wrong shape is in the way, and count the bytes that a rank holds at
most. Values and speed need a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu_plain import SIZES, Size
from benchmarks.gpu_ranks import WorkerError, on_ranks, warm_processes
from benchmarks.gpu_steps import SPEC, PlainSettings, Way, plain_step, run_of
from megatron.errors import ConfigError
from megatron.planning.estimate import rank_peak
from megatron.rehearsal.accelerator import Waits, pretending, register, unavailable
from megatron.rehearsal.ranks import rehearse_tasks
from megatron.rehearsal.recorder import Memory
from megatron.rehearsal.settings import rehearsed
from megatron.rehearsal.task import Task


@dataclasses.dataclass(frozen=True)
class Counted:
    """Bytes that a rank holds at most, what the estimate says, and the host's waits in a step."""

    highest: int
    estimated: int | None
    waits: int


def rehearse_ours(way: Way, ranks: int, memory: int) -> Counted:
    """The first rank of ours. Raises WorkerError where it fails."""
    run = run_of(way.flags, ranks)
    assert run.model.vocab_size is not None
    small = rehearsed(run, SPEC, vocab_size=run.model.vocab_size, steps=2)
    task = Task(config=small, train_spec=SPEC, rank=0, steps=2, memory=memory)
    (found,) = rehearse_tasks([task], warm_processes())
    if isinstance(found, str):
        raise WorkerError(found)
    if found.refused:
        raise WorkerError("; ".join(found.refused))
    return Counted(found.highest, rank_peak(small, SPEC, 0).total, found.waits.total())


def rehearse_plain(size: Size, settings: PlainSettings, memory: int) -> Counted:
    """One rank of plain PyTorch, in a process of its own: an error in a backward pass ends it."""
    device, waits, held = register(memory=memory), Waits(), Memory()

    def failed(error: Exception) -> None:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")

    with pretending(waits, failed, (held.see,)):
        step = plain_step(size, settings, device, torch.bfloat16)
        for _ in range(2):
            waits.places.clear()
            step()
    return Counted(held.highest, None, waits.places.total())


def rehearse_sizes(
    names: Sequence[str],
    sequence: int | None,
    ways_of: Callable[[Size, argparse.Namespace], list[Way]],
    options: argparse.Namespace,
) -> int:
    """Print the table; 1 where something failed."""
    if reason := unavailable():
        raise ConfigError(f"--rehearse: {reason}")
    memory, failures = options.memory_gb * 1e9, 0
    print("| model | program | settings | counted GB | estimate | counted/estimate | waits a step |")
    print("|---|---|---|--:|--:|--:|--:|")
    for name in names:
        size = dataclasses.replace(SIZES[name], sequence=sequence or SIZES[name].sequence)
        every = ways_of(size, options)
        fitting = [way for way in every if way.estimated <= 0.92 * memory]
        way = fitting[0] if fitting else min(every, key=lambda each: each.estimated)
        about = way.about if fitting else f"{way.about}; does not fit in {options.memory_gb:g} GB"
        rows: list[tuple[str, str, Callable[[], Counted]]] = [
            ("megatron", about, lambda way=way: rehearse_ours(way, options.ranks, 10**12))  # type: ignore[misc]
        ]
        if options.ranks == 1:
            microbatch = run_of(way.flags, 1).training.micro_batch_size
            plain = PlainSettings(options.samples, microbatch, "recomputing layers" in way.about)
            words = f"microbatch {microbatch}{', recomputing layers' * plain.recomputes}"
            rows.append(
                ("plain PyTorch", words, lambda plain=plain, size=size: on_ranks(rehearse_plain, size, plain, 10**12))  # type: ignore[misc]
            )
        for program, settings, count in rows:
            try:
                found = count()
            except WorkerError as error:
                failures += 1
                print(f"| {name} | {program} | {settings}: FAILED: {error} | | | | |", flush=True)
                continue
            cells = (
                "| | "
                if found.estimated is None
                else (f"| {found.estimated / 1e9:.2f} | {found.highest / found.estimated:.3f} ")
            )
            print(f"| {name} | {program} | {settings} | {found.highest / 1e9:.2f} {cells}| {found.waits} |", flush=True)
    return 1 if failures else 0
