"""Batches of lines to arrays of token ids, by several workers at once and in the order of the lines."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.engine import OWN, Engine, build_engine
from megatron.core.tokenizers.line_batches import LineBatch, Position
from megatron.core.tokenizers.sentences import SentenceRules, split_all
from megatron.core.tokenizers.text_files import BadLine, read_documents
from megatron.errors import RESTART_MAY_HELP, DataError

BATCHES_AHEAD = 2  # per worker: one being encoded and one waiting, so that no worker waits for the reader


@dataclass(frozen=True)
class Encoding:
    """How lines become ids; small, because it is sent to the workers with every batch.

    ``sentences``: each sentence is a sequence of its own; None: each document is one.
    """

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool
    dtype: str
    sentences: SentenceRules | None = None
    engine: str = OWN


@dataclass(frozen=True)
class EncodedTexts:
    """Token ids of many texts. ``tokens``: all ids end to end. ``lengths``: ids of each sequence. ``sequences``:
    sequences of each document.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int64]

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """Ids of each document."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[np.cumsum(self.sequences)]
        lengths: NDArray[np.int64] = np.diff(ends, prepend=0)
        return lengths


@dataclass(frozen=True)
class EncodedBatch:
    """The documents of a batch of lines of the file ``path`` under each key; ``end``: where in the input they end."""

    path: str
    texts: dict[str, EncodedTexts]
    bad: list[BadLine]
    num_bytes: int  # of the lines
    num_lines: int
    bytes_read: int  # as in LineBatch
    end: Position


def encode_in_order(
    batches: Iterable[LineBatch], encoding: Encoding, *, workers: int
) -> Generator[EncodedBatch, None, None]:
    """Encode with ``workers``, a thread of this process and further processes, in the order of ``batches``.

    The result does not depend on ``workers``. At most ``BATCHES_AHEAD`` batches per worker are in memory. Raises
    DataError when a worker dies. No process outlives the generator: exhaust it or close it.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core
    running: deque[Future[EncodedBatch]] = deque()
    crew = _Crew(workers, encoding)
    try:
        for batch in batches:
            running.append(crew.submit(batch))
            if len(running) >= crew.most_ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            f"one of the {workers - 1} worker processes was killed, by hand or by the system for lack of memory; run "
            "again, with fewer --workers if memory is short.",
            exit_code=RESTART_MAY_HELP,
        ) from None
    finally:
        crew.dismiss()


class _Crew:
    """A thread, which encodes immediately, and ``workers`` - 1 processes, which are used once they have started.

    The libraries release Python's lock while they encode, or take so little time that it doesn't matter, so the thread
    encodes while this process reads and writes.
    """

    def __init__(self, workers: int, encoding: Encoding) -> None:
        self._encoding = encoding
        self._thread = ThreadPoolExecutor(1)
        self._in_thread: deque[Future[EncodedBatch]] = deque()
        self._in_processes: deque[Future[EncodedBatch]] = deque()
        self._processes: ProcessPoolExecutor | None = None
        self._num_processes = workers - 1
        self._starting: list[Future[None]] = []
        if workers > 1:
            # Not forked: a fork copies the locks of other threads, and the tokenizers library has threads.
            spawn = multiprocessing.get_context("spawn")
            self._processes = ProcessPoolExecutor(self._num_processes, spawn, initializer=_start_worker)
            # New processes inherit the mask: they can't ignore Ctrl-C by themselves before they have imported anything.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._starting = [self._processes.submit(_get_ready, encoding) for _ in range(self._num_processes)]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def most_ahead(self) -> int:
        """Batches that may be in progress."""
        return BATCHES_AHEAD * (1 + self._num_processes * self._have_started())

    def submit(self, batch: LineBatch) -> Future[EncodedBatch]:
        """Give the batch to the least loaded worker."""
        for queue in (self._in_thread, self._in_processes):
            while queue and queue[0].done():
                queue.popleft()
        room = self._num_processes * max(len(self._in_thread), 1) - len(self._in_processes)
        if self._processes is not None and room > 0 and self._have_started():
            self._in_processes.append(self._processes.submit(encode_batch, batch, self._encoding))
            return self._in_processes[-1]
        self._in_thread.append(self._thread.submit(encode_batch, batch, self._encoding))
        return self._in_thread[-1]

    def _have_started(self) -> bool:
        if self._starting and all(future.done() for future in self._starting):
            for future in self._starting:
                future.result()
            self._starting = []
        return not self._starting

    def dismiss(self) -> None:
        """End all workers and cancel what they have not begun."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._processes is not None:
            self._processes.shutdown(wait=True, cancel_futures=True)


@lru_cache(maxsize=1)
def shared_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of this process, built once."""
    return build_tokenizer(config)


def _engine_of(encoding: Encoding) -> Engine:
    tokenizer, parts = shared_tokenizer(encoding.tokenizer), encoding.sentences is not None
    return build_engine(encoding.engine, tokenizer, encoding.dtype, parts=parts)


def encode_batch(batch: LineBatch, encoding: Encoding) -> EncodedBatch:
    """Documents of one batch; an empty text has no ids, and no end of document either."""
    tokenizer = shared_tokenizer(encoding.tokenizer)
    documents = read_documents(batch, encoding.keys)
    try:
        encoded = {key: _encode_texts(texts, encoding) for key, texts in documents.texts.items()}
    except DataError:
        documents.drop_unless(tokenizer.tokenize)
        encoded = {key: _encode_texts(texts, encoding) for key, texts in documents.texts.items()}
    lines = batch.end.line - batch.first_line
    return EncodedBatch(batch.path, encoded, documents.bad, len(batch.data), lines, batch.bytes_read, batch.end)


def _encode_texts(texts: Sequence[str], encoding: Encoding) -> EncodedTexts:
    """Ids of documents; a sequence without ids is left out, and the last one of a document gets its end."""
    engine = _engine_of(encoding)
    pieces, counts = split_all(texts, encoding.sentences)
    ids = engine.encode(pieces)
    kept = ids.lengths > 0
    lengths, tokens = ids.lengths[kept], ids.flat
    sequences = np.bincount(np.repeat(np.arange(len(texts)), counts)[kept], minlength=len(texts))
    if encoding.append_eod:
        last = np.cumsum(sequences)[sequences > 0] - 1
        tokens = np.insert(tokens, np.cumsum(lengths)[last], shared_tokenizer(encoding.tokenizer).eod)
        lengths[last] += 1
    return EncodedTexts(tokens, lengths.astype(np.int32), sequences)


def _get_ready(encoding: Encoding) -> None:
    """Build the engine in a worker; every batch needs it."""
    _engine_of(encoding)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this worker with its parent: a killed parent closes no queue, so its workers would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are children"
    wait([parent.sentinel])
    os._exit(1)
