"""Batches as tensors, read ahead by worker processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from megatron.core.datasets.sampler import MicrobatchSampler
from megatron.core.datasets.samples import Sample, SampleDataset
from megatron.core.parallel.environment import EXIT_SIGNALS
from megatron.errors import RESTART_MAY_HELP, DataError

Batch = dict[str, Tensor]

_PREFETCHED = 4  # batches each worker reads ahead
_LOOK_SECONDS = 2.0  # between a worker's checks that the trainer is alive
_SIGNAL_SECONDS = 1.0  # until a worker's death has been signalled to the trainer


class BatchLoader:
    """Microbatches of a rank in the order of ``sampler``; reading starts at its ``consumed`` immediately.

    Each batch maps names to tensors [micro_batch_size, S]. ``ragged``: fields of which samples have different numbers
    of rows, as of images; a batch has the rows of all samples one after the other, and ``rows_field`` how many are of
    each. Batches don't depend on ``num_workers``; 0 reads in this process. A DataError in a worker is raised here.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        sampler: MicrobatchSampler,
        *,
        num_workers: int = 0,
        ragged: Collection[str] = (),
    ) -> None:
        self._loader = _Loader(
            _Batches(dataset, ragged),
            batch_size=None,  # the sampler's elements are batches
            sampler=sampler,
            num_workers=num_workers,
            prefetch_factor=_PREFETCHED if num_workers else None,
            # Workers look for their parent, which must be this process. Python 3.14, and any process of a fork server,
            # would fork them from that server.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
            worker_init_fn=partial(_ignore_signals, os.getpid()),
            persistent_workers=num_workers > 0,  # the next iteration needn't start new ones
            generator=torch.Generator(),  # loading must not use the run's random numbers
        )

    def __iter__(self) -> Iterator[Batch]:
        with _signals_blocked():
            batches = iter(self._loader)
        while True:
            try:
                try:
                    batch = next(batches, None)
                except (ConnectionError, EOFError):  # a worker died while it sent a batch
                    time.sleep(_SIGNAL_SECONDS)  # torch's signal handler interrupts this with an error that says why
                    raise
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


class _Loader(DataLoader[Any]):
    """torch's, without its warning that names itself where there are fewer cores than ``--num-workers``."""

    @override
    def check_worker_number_rationality(self) -> None:
        """Any number works."""


class _Batches(Dataset[Any]):
    """Batches by their sample numbers; an error of the data is returned, as torch would wrap its message."""

    def __init__(self, dataset: SampleDataset, ragged: Collection[str]) -> None:
        self._dataset, self._ragged = dataset, ragged

    @override
    def __getitem__(self, indices: Sequence[int | None]) -> Sample | DataError:
        try:
            samples = [self._dataset[index] for index in indices]
        except DataError as error:
            return error
        return joined(samples, self._ragged)


def joined(samples: Sequence[Sample], ragged: Collection[str] = ()) -> Sample:
    """A batch of samples: each field stacked, and ``ragged`` ones concatenated, with their numbers of rows."""
    found = {name: np.stack([sample[name] for sample in samples]) for name in samples[0] if name not in ragged}
    for name in (name for name in samples[0] if name in ragged):
        parts = [sample[name] for sample in samples]
        found |= {name: np.concatenate(parts), rows_field(name): np.array([len(part) for part in parts])}
    return found


def rows_field(name: str) -> str:
    """The field of a batch that says how many rows of the ragged field ``name`` each sample has, int64 [b]."""
    return f"{name}_rows"


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals, so that workers start with them blocked: one before ``_ignore_signals`` would end a worker."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals(trainer: int, _: int) -> None:
    """In a worker: terminals and launchers signal every process, but the trainer ends its workers after saving."""
    sys.excepthook = _excepthook
    hook = staticmethod(lambda error, _: _excepthook(type(error), error, error.__traceback__))
    Queue._on_queue_feeder_error = hook  # type: ignore[attr-defined]
    for number in set(EXIT_SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_trainer, args=(trainer,), daemon=True).start()


def _end_with_trainer(trainer: int) -> None:
    """End this process when the trainer asks for it, or has died, even before this process started."""
    while os.getppid() == trainer:
        came = signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS)
        if came is not None and came.si_pid == trainer:
            break
    os._exit(0)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback when the trainer ends while a thread of multiprocessing sends it a batch."""
    if not isinstance(error, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)
