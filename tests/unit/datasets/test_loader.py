"""Batches are the same however they are loaded, begin anywhere at once, and leave the run's random numbers alone."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from megatron.core.datasets import loader as module
from megatron.core.datasets.loader import Batch, BatchLoader, joined
from megatron.core.datasets.sampler import MicrobatchSampler
from megatron.core.datasets.samples import Sample
from megatron.core.parallel.environment import EXIT_SIGNALS
from megatron.errors import DataError
from tests.harness.data import REPOSITORY
from tests.harness.ranks import fork_server
from tests.harness.sentences import expect_error


class Numbers:
    """A data set whose sample i holds i; sample 13 is bad."""

    digest = "numbers"

    def __init__(self, num_samples: int = 40) -> None:
        self.read: list[int | None] = []
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int | None) -> Sample:
        self.read.append(index)
        if index == 13:
            raise DataError("sample 13 is bad")
        value = -1 if index is None else index
        return {"tokens": np.full(4, value, np.int64), "loss_mask": np.full(4, index is not None, np.float32)}

    def origin(self, index: int) -> str:
        return str(index)

    def describe(self) -> list[str]:
        return []


def build_loader(dataset: Numbers, *, num_workers: int = 0, **order: Any) -> BatchLoader:
    return BatchLoader(dataset, MicrobatchSampler(num_samples=len(dataset), **order), num_workers=num_workers)


def first_tokens(batches: Any) -> list[list[int]]:
    return [batch["tokens"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_do_not_depend_on_workers(num_workers: int) -> None:
    """Tensors [b, S] of the types of the samples, in order, on any number of worker processes."""
    loader = build_loader(Numbers(), consumed=14, micro_batch_size=3, num_workers=num_workers)
    batches: list[Batch] = list(loader)
    assert first_tokens(batches) == [list(range(start, start + 3)) for start in range(14, 38, 3)]
    assert (batches[0]["tokens"].dtype, batches[0]["tokens"].shape) == (torch.int64, (3, 4))
    assert batches[0]["loss_mask"].dtype == torch.float32


def test_more_workers_than_cores_are_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container of one core, each run with the default of --num-workers began with torch's words on DataLoader."""
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 1)
    loader = build_loader(Numbers(), consumed=36, micro_batch_size=2, num_workers=2)
    assert first_tokens(loader) == [[36, 37], [38, 39]]


def test_resuming_reads_nothing_before_its_position() -> None:
    """A run that resumes after a billion samples starts at once."""
    numbers = Numbers(10**12)
    loader = build_loader(numbers, consumed=10**11, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2)
    assert first_tokens(itertools.islice(loader, 2)) == [[10**11 + 2, 10**11 + 3], [10**11 + 6, 10**11 + 7]]
    assert min(index for index in numbers.read if index is not None) == 10**11 + 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_of_the_data_arrives_as_it_is(num_workers: int) -> None:
    """One sentence, not a worker's traceback; and only when its batch is due."""
    batches = iter(build_loader(Numbers(), consumed=8, micro_batch_size=4, num_workers=num_workers))
    assert first_tokens([next(batches)]) == [[8, 9, 10, 11]]
    with expect_error(DataError, "13"):
        next(batches)


def test_padding_counts_for_nothing() -> None:
    """The last validation batch is whole, with a zero mask where there are no samples."""
    batches = list(build_loader(Numbers(6), consumed=0, micro_batch_size=4, pad_to=4))
    assert first_tokens(batches) == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert batches[-1]["loss_mask"][:, 0].tolist() == [1, 1, 0, 0]


def test_samples_with_different_numbers_of_images_make_a_batch() -> None:
    """Without a count of each sample's rows, a text would be told the image of the sample before it."""
    samples: list[Sample] = [
        {"tokens": np.arange(3), "images": np.full((count, 2, 2), count, np.uint8)} for count in (2, 0, 1)
    ]
    batch = joined(samples, ["images"])
    assert batch["tokens"].shape == (3, 3)
    assert batch["images"][:, 0, 0].tolist() == [2, 2, 1] and batch["images"].dtype == np.uint8
    assert batch["images_rows"].tolist() == [2, 0, 1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_numbers_of_the_run_stay_where_they_are(num_workers: int) -> None:
    """Torch's loader draws from the global generator unless it is given its own; then loading would change dropout."""
    before = torch.get_rng_state()
    next(iter(build_loader(Numbers(), consumed=0, micro_batch_size=2, num_workers=num_workers)))
    assert torch.equal(torch.get_rng_state(), before)


class OnGpu(Numbers):
    """A data set that asks for the GPU."""

    @override
    def __getitem__(self, index: int | None) -> Sample:
        torch.cuda.current_device()
        return super().__getitem__(index)


def test_workers_touch_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forks of a process that may have set up CUDA, which can't be used in a fork."""

    def set_up() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "_lazy_init", set_up)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    order = {"consumed": 0, "micro_batch_size": 2}
    assert len(first_tokens(itertools.islice(build_loader(Numbers(), num_workers=1, **order), 2))) == 2
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA"):
        next(iter(build_loader(OnGpu(), num_workers=1, **order)))


def test_each_iteration_begins_anew() -> None:
    """Evaluating twice from one loader reads the same batches."""
    loader = build_loader(Numbers(12), consumed=4, micro_batch_size=4)
    assert first_tokens(loader) == first_tokens(loader) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_shuffled_loading_goes_on_for_ever() -> None:
    """The cyclic loader makes pass after pass, each sample once in each."""
    loader = build_loader(Numbers(12), consumed=0, micro_batch_size=4, shuffle_seed=3)
    batches = first_tokens(itertools.islice(loader, 6))
    for one_pass in (batches[:3], batches[3:]):
        assert sorted(itertools.chain(*one_pass)) == list(range(12))


def test_workers_survive_signals_to_the_whole_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is told to end while an evaluation starts its workers: torch's loop died of it, and the run with it."""
    prepare = module._ignore_signals

    def told_to_end_at_once(trainer: int, number: int) -> None:
        for each in (*EXIT_SIGNALS, *EXIT_SIGNALS):
            os.kill(os.getpid(), each)
        prepare(trainer, number)
        for each in EXIT_SIGNALS:
            os.kill(os.getpid(), each)

    monkeypatch.setattr(module, "_ignore_signals", told_to_end_at_once)
    batches = build_loader(Numbers(8), consumed=0, micro_batch_size=4, num_workers=2)
    assert first_tokens(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*EXIT_SIGNALS}


def test_a_worker_that_begins_after_its_trainer_died_ends() -> None:
    """It waited for ever with SIGTERM blocked, and kept the pipe of ``pretrain_gpt.py | tail`` open."""
    program = (
        "import os, time\nfrom megatron.core.datasets import loader\ntrainer, loader._LOOK_SECONDS = os.getpid(), 0.1\n"
        "if os.fork(): os._exit(0)\n"
        "while os.getppid() == trainer: time.sleep(0.01)\n"
        "loader._ignore_signals(trainer, 0); time.sleep(1000)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, timeout=240, check=True)


def test_workers_do_not_tell_of_a_dead_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer that was told to end left a traceback of each worker that was handing a batch over."""
    for error in (EOFError(), ConnectionResetError(), ValueError("a defect")):
        module._excepthook(type(error), error, None)
    assert capsys.readouterr().err == "ValueError: a defect\n"


def hand_over_to_nobody(log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    module._ignore_signals(os.getppid(), 0)
    queue: Any = multiprocessing.Queue()
    queue._reader.close()
    queue.put(bytes(1_000_000))
    queue.close()
    queue.join_thread()


def test_the_thread_that_hands_over_is_quiet_when_the_trainer_is_gone(tmp_path: Path) -> None:
    """Ctrl-C on one rank ended in a BrokenPipeError of its workers' threads."""
    process = fork_server().Process(target=hand_over_to_nobody, args=(str(tmp_path / "log"),), daemon=True)
    process.start()
    process.join(60)
    assert (process.exitcode, (tmp_path / "log").read_text()) == (0, "")


class Deadly(Numbers):
    """Data whose third sample ends the process that reads it."""

    @override
    def __getitem__(self, index: int | None) -> Sample:
        if index == 3:
            os.kill(os.getpid(), signal.SIGBUS)
        return super().__getitem__(index)


def read_with_a_worker(result: str) -> None:
    batches = build_loader(Numbers(8), consumed=0, micro_batch_size=4, num_workers=1)
    Path(result).write_text(str(first_tokens(batches)))


def test_a_trainer_that_a_fork_server_started_has_workers(tmp_path: Path) -> None:
    """They were forked from the server, took the trainer for dead and ended, as in Python 3.14 everywhere."""
    result = tmp_path / "result"
    process = fork_server().Process(target=read_with_a_worker, args=(str(result),), daemon=False)
    process.start()
    process.join(50)
    assert process.exitcode == 0
    assert result.read_text() == "[[0, 1, 2, 3], [4, 5, 6, 7]]"


def test_a_worker_that_dies_is_explained() -> None:
    """A disk that fails under a map ends a worker with SIGBUS; torch guesses at shared memory, in a traceback."""
    how = r"(?<=DataLoader worker )\(pid(\(s\))? \d+\)[^)]*"  # torch sees the signal, or the end, whichever comes first
    with expect_error(DataError, "--num-workers", "DataLoader", exit_code=1, hide=[how]):
        list(build_loader(Deadly(), consumed=0, micro_batch_size=1, num_workers=1))


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), ConnectionResetError(104, "Connection reset by peer"), EOFError()]
)
def test_a_worker_that_dies_while_it_hands_a_batch_over(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker that was killed then, the run ended in a traceback, or without a word: at a broken pipe."""
    monkeypatch.setattr(module, "_SIGNAL_SECONDS", 0.0)

    def handed_over() -> Iterator[None]:
        raise error
        yield

    batches = build_loader(Numbers(), consumed=0, micro_batch_size=1, num_workers=1)
    monkeypatch.setattr(batches, "_loader", handed_over())
    with expect_error(DataError, "--num-workers", exit_code=1, hide=[r"pid\(s\) \d+"]):
        next(iter(batches))
