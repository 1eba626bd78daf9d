"""Batches as tensors, read ahead by worker processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron.core.datasets.sampler import MicrobatchSampler
from megatron.core.datasets.samples import SampleDataset
from megatron.core.parallel.environment import EXIT_SIGNALS
from megatron.errors import RESTART_MAY_HELP, DataError

Batch = dict[str, Tensor]

_PREFETCHED = 4  # batches each worker reads ahead
_LOOK_SECONDS = 2.0  # between a worker's looks whether the trainer is alive
_TOLD_SECONDS = 1.0  # until the trainer has heard of a worker's death


class BatchLoader:
    """Microbatches of a rank, in order: iterating begins at the sampler's ``consumed``, at once whatever its value.

    Each batch maps names to tensors [micro_batch_size, S]. Batches don't depend on ``num_workers``; 0 reads in this
    process. ``pin_memory``: put batches where a GPU fetches them faster. A DataError of a worker arrives as it is.
    """

    def __init__(
        self, dataset: SampleDataset, sampler: MicrobatchSampler, *, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        self.sampler = sampler
        self._loader: DataLoader[Any] = DataLoader(
            _Batches(dataset),
            batch_sampler=sampler,
            collate_fn=_unchanged,
            num_workers=num_workers,
            prefetch_factor=_PREFETCHED if num_workers else None,
            pin_memory=pin_memory,
            worker_init_fn=partial(_leave_signals_to_the_trainer, os.getpid()),
            persistent_workers=num_workers > 0,  # whoever iterates again needn't wait for new ones
            generator=torch.Generator(),  # its own: loading must not move the run's random numbers
        )

    def __iter__(self) -> Iterator[Batch]:
        with _no_signal_yet():
            batches = iter(self._loader)
        while True:
            try:
                batch = _next(batches)
            except (RuntimeError, ConnectionError, EOFError) as error:
                if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
                    raise
                raise DataError(
                    f"a process of --num-workers died ({str(error).partition('. ')[0]}): a bus error means that a "
                    "data file was cut short or its disk failed, a kill that memory ran out; check both and run "
                    "again",
                    exit_code=RESTART_MAY_HELP,
                ) from error
            if batch is None:
                return
            if isinstance(batch, DataError):
                raise batch
            yield batch


def build_loader(
    dataset: SampleDataset,
    *,
    consumed: int,
    micro_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    shuffle_seed: int | None = None,
    pad_to: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> BatchLoader:
    """Loader of this rank's microbatches after ``consumed`` samples of the run; see MicrobatchSampler."""
    sampler = MicrobatchSampler(
        num_samples=len(dataset),
        consumed=consumed,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        shuffle_seed=shuffle_seed,
        pad_to=pad_to,
    )
    return BatchLoader(dataset, sampler, num_workers=num_workers, pin_memory=pin_memory)


class _Batches(Dataset[Any]):
    """Whole batches of a data set; an error of the data is handed over as a value, since torch would wrap its text."""

    def __init__(self, dataset: SampleDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int | None) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int | None]) -> Batch | DataError:
        try:
            samples = [self._dataset[index] for index in indices]
        except DataError as error:
            return error
        return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


def _next(batches: Iterator[Any]) -> Any:
    """The next batch, or None at the end."""
    try:
        return next(batches, None)
    except (ConnectionError, EOFError):  # a worker died while it handed a batch over
        time.sleep(_TOLD_SECONDS)  # torch's signal handler interrupts this with an error that says of what
        raise


def _unchanged(batch: Any) -> Any:
    return batch


@contextmanager
def _no_signal_yet() -> Iterator[None]:
    """Workers begin with signals blocked: they would die of one before ``_leave_signals_to_the_trainer``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to_the_trainer(trainer: int, _: int) -> None:
    """Terminals, torchrun and Slurm signal every process of a run; the trainer ends its workers when it has saved."""
    sys.excepthook = _quiet_about_a_dead_trainer
    hook = staticmethod(lambda error, _: _quiet_about_a_dead_trainer(type(error), error, error.__traceback__))
    Queue._on_queue_feeder_error = hook  # type: ignore[attr-defined]
    for number in set(EXIT_SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_the_trainer_says_so, args=(trainer,), daemon=True).start()


def _end_when_the_trainer_says_so(trainer: int) -> None:
    """Also when it died, be it before this process had begun."""
    while os.getppid() == trainer:
        came = signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS)
        if came is not None and came.si_pid == trainer:
            break
    os._exit(0)


def _quiet_about_a_dead_trainer(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """multiprocessing's threads that hand batches over show a traceback when the trainer ends in the middle of one."""
    if not isinstance(error, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)
