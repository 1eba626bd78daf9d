"""What a sample costs, and whether a training step waits for the next batch.

    python -m benchmarks.samples

Writes made-up sentences, then makes GPT, BERT and T5 samples of 512 tokens one after the other (milliseconds of
processor time and by the clock), and iterates over the loader's batches of 8 with a step of 50 ms between them: the
time a step waits with two workers should be that of mock data, nothing. At the end pretrain_gpt.py trains a
small model, in turns on mock data and on the sentences: the time of a step should be the same. (Of BERT and T5 it
depends on how much is padding and how much is hidden, so there the wait tells.)
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from megatron.config.data import DataConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.loader import BatchLoader
from megatron.core.datasets.sampler import MicrobatchSampler
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.bert.data import build_bert_splits
from megatron.core.models.gpt.data import build_gpt_splits
from megatron.core.models.t5.data import build_t5_splits

REPOSITORY = Path(__file__).resolve().parents[1]
SEQUENCE, SAMPLES, STEP = 512, 2000, 0.05
ROUNDS, STEPS = 5, 6
SMALL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --micro-batch-size 8 --lr 1e-4 --eval-iters 0 "
    f"--log-interval {STEPS} --train-iters {2 * STEPS} --num-workers 2 --seq-length {SEQUENCE} "
    "--tokenizer-type BertWordPieceLowerCase"
)
QUICK = "--seq-length 64 --train-iters 4 --log-interval 2"
TARGET = 0.5  # milliseconds of a sample
TARGETS = "targets: BERT and T5 under 0.5 ms; no step waits"


class Tokenizer:
    """A stand-in for BERT's tokenizer, as far as data sets use it: 30,624 ids, a fifth of which continue a word."""

    name, fingerprint, vocab_size = "BertWordPieceLowerCase", "", 30_624
    pad, cls, sep, mask, bos, eos, eod = 0, 101, 102, 103, 30_522, 30_523, 102
    sentinels, decoder_start = tuple(range(30_524, 30_624)), bos

    def continuations(self) -> list[bool]:
        goes_on = np.random.default_rng(0).random(self.vocab_size) < 0.2
        goes_on[:1000] = False
        found: list[bool] = goes_on.tolist()
        return found


def write_sentences(prefix: str, documents: int) -> None:
    """Documents of up to 60 sentences of 5 to 60 tokens."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            lengths = random.integers(5, 60, random.integers(2, 60))
            writer.add_documents(random.integers(1000, 30_000, lengths.sum()), lengths, [len(lengths)])


def datasets(prefix: str, samples: int) -> Iterator[tuple[str, Any]]:
    """Training data of each family."""
    tokenizer: Any = Tokenizer()
    arguments: dict[str, Any] = {"seed": 1, "sizes": SplitSizes(40 * samples, 0, 0), "tokenizer": tokenizer}
    stored = DataConfig(seq_length=SEQUENCE, train_data_path=(prefix,))
    mock = DataConfig(seq_length=SEQUENCE, mock_data=True)
    packed = DataConfig(seq_length=SEQUENCE, train_data_path=(prefix,), packing="best-fit")
    yield "GPT, mock data", build_gpt_splits(mock, **arguments).train
    yield "GPT", build_gpt_splits(stored, **arguments).train
    yield "GPT, best-fit", build_gpt_splits(packed, **arguments).train
    yield "BERT", build_bert_splits(stored, **arguments).train
    yield "T5", build_t5_splits(stored, decoder_seq_length=128, **arguments).train


def per_sample(dataset: Any, clock: Callable[[], float], samples: int) -> float:
    """Milliseconds of a sample: the least of five times a part of them, as other work only adds."""
    times = []
    for start in range(0, samples, samples // 5):
        began = clock()
        for index in range(start, start + samples // 5):
            dataset[index]
        times.append((clock() - began) / (samples // 5))
    return min(times) * 1e3


def waiting(dataset: Any, *, steps: int) -> float:
    """Median milliseconds a step waits for its batch."""
    waits = []
    sampler = MicrobatchSampler(num_samples=len(dataset), consumed=0, micro_batch_size=8)
    batches = iter(BatchLoader(dataset, sampler, num_workers=2))
    for _ in range(steps):
        began = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - began)
        time.sleep(STEP)
    return statistics.median(waits) * 1e3


def time_of_a_step(flags: str) -> float:
    """Milliseconds, of a command's second half."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *SMALL.split(), *flags.split()]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(re.findall(r"elapsed time per iteration \(ms\): (\S+)", ran.stdout)[-1])


def steps(prefix: str, rounds: int, flags: str) -> tuple[float, float]:
    """Median milliseconds of a training step on mock data and on the sentences, taken in turns."""
    vocabulary = Path(f"{prefix}.vocab.txt")
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(30_000))]))
    kinds = (f"--mock-data --vocab-file {vocabulary}", f"--data-path {prefix} --split 1,0,0 --vocab-file {vocabulary}")
    times = [[time_of_a_step(f"{kind} {flags}") for kind in kinds] for _ in range(rounds)]
    mock, stored = (statistics.median(each) for each in zip(*times))
    return mock, stored


def main() -> None:
    """Print a table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--documents", type=int, default=20_000, help="how many are written (default 20,000)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"that are made (default {SAMPLES:,})")
    parser.add_argument("--steps", type=int, default=60, help="that wait for batches (default 60)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of training (default {ROUNDS})")
    options = results.parse(parser, documents=400, samples=100, steps=4, rounds=1)
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "sentences")
        write_sentences(prefix, options.documents)
        print(f"samples of {SEQUENCE} tokens; {TARGETS}")
        print(f"{'':<16}{'ms, processor':>14}{'ms, clock':>11}{'ms a step waits':>17}")
        for name, dataset in datasets(prefix, options.samples):
            dataset[0]
            processor, clock = (
                per_sample(dataset, each, options.samples) for each in (time.process_time, time.perf_counter)
            )
            print(f"{name:<16}{processor:>14.3f}{clock:>11.3f}{waiting(dataset, steps=options.steps):>17.2f}")
            ratios[f"{name}, of {TARGET} ms"] = processor / TARGET
        mock, stored = steps(prefix, options.rounds, QUICK if options.quick else "")
        print(f"training GPT: {mock:.1f} ms a step on mock data, {stored:.1f} on files: {stored / mock:.3f} of it")
    results.save(options, ratios | {"a step on files": stored / mock})


if __name__ == "__main__":
    main()
