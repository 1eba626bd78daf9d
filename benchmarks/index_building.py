"""Building the sample index of large data and reading samples through it, against megatron-core's compiled helper.

    python benchmarks/index_building.py --folder /a/disk/with/2/GB
    python benchmarks/index_building.py --folder /another/with/3/GB --documents 100_000_000 --longest 19 --epochs 1

Writes 5 million documents of 1 billion tokens (kept for the next time), or as many as asked, then times, each in a
process of its own so that peak memory is its own: opening the files and building the index of a run of one epoch and of
sixteen, and reading a sample of 2,048 tokens. Printed are medians over rounds in which the contenders take turns. The
peer takes part when MEGATRON_CORE_PATH names a folder made by ``pip install --no-deps --target FOLDER
"megatron-core==0.12.*"``.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import importlib
import json
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import results

SEQUENCE = 2048
DOCUMENTS, LONGEST = 5_000_000, 399
EPOCHS = (1, 16)
TARGET, TARGET_OF_SAMPLE = 0.5, 40e-6  # seconds
QUICK: dict[str, Any] = {
    "folder": Path(tempfile.gettempdir()) / "index_building_quick",
    "rounds": 1,
    "documents": 50_000,
    "epochs": [1],
}
TARGETS = "targets: one epoch under 0.5 s and 200 MB, sixteen no more; a sample under 40 us"


def write_data(prefix: str, *, documents: int, longest: int) -> None:
    """Documents of 1 to ``longest`` random tokens."""
    import numpy as np

    from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter

    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents // 50_000):
            lengths = random.integers(1, longest + 1, 50_000)
            writer.add_documents(random.integers(0, 50_000, lengths.sum(), dtype=np.uint16), lengths)


def peak_mb() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(prefix: str, epochs: int) -> dict[str, float]:
    """This library: files opened and checked, digest taken, index of the first epoch built; nothing cached."""
    import numpy as np

    from megatron.core.datasets.index_cache import IndexCache
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.sample_order import EpochOrder
    from megatron.core.models.gpt.data import GPTDataset, SampleLayout

    np.random.RandomState(0)
    before, start = peak_mb(), time.perf_counter()
    documents = IndexedDataset(prefix)
    opened = time.perf_counter()
    num_samples = epochs * (documents.num_tokens // SEQUENCE)
    order = EpochOrder(
        documents.lengths, seed=1234, seq_length=SEQUENCE, num_samples=num_samples, cache=IndexCache(None)
    )
    dataset = GPTDataset(documents, order, layout=SampleLayout(seq_length=SEQUENCE, eod=0))
    dataset[0]
    built = time.perf_counter()
    return {
        "open": opened - start,
        "open and index": built - start,
        "memory": peak_mb() - before,
        "sample": time_of_sample(dataset.__getitem__),
    }


def megatron_core(prefix: str, epochs: int) -> dict[str, float]:
    """The peer: its builder of a data set for as many samples, with no cache to read and no attention masks."""
    sys.path.insert(0, os.environ["MEGATRON_CORE_PATH"])
    builder = importlib.import_module("megatron.core.datasets.blended_megatron_dataset_builder")
    peer = importlib.import_module("megatron.core.datasets.gpt_dataset")

    class Tokenizer:
        eod, pad, unique_identifiers = 0, None, {"class": "Tokenizer"}

    config = peer.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    shutil.rmtree(Path(prefix) / "cache", ignore_errors=True)  # what an earlier round left beside the data
    tokens = os.path.getsize(f"{prefix}.bin") // 2
    before, start = peak_mb(), time.perf_counter()
    sizes = [epochs * (tokens // SEQUENCE) - 1, None, None]
    dataset = builder.BlendedMegatronDatasetBuilder(peer.GPTDataset, sizes, lambda: True, config).build()[0]
    dataset[0]
    return {
        "open and index": time.perf_counter() - start,
        "memory": peak_mb() - before,
        "sample": time_of_sample(dataset.__getitem__),
    }


def time_of_sample(read: Callable[[int], Any], *, count: int = 2000) -> float:
    """Median seconds of one of ``count`` samples, read twice so that the file is in memory."""
    for index in range(count):
        read(index)
    times = []
    for index in range(count):
        start = time.perf_counter()
        read(index)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


CONTENDERS = {"ours": ours, "megatron-core": megatron_core}


def measure(contender: str, prefix: str, epochs: int) -> dict[str, float]:
    """One measurement in a fresh process."""
    repository = Path(__file__).resolve().parents[1]
    command = [sys.executable, __file__, "--child", contender, "--prefix", prefix, "--epochs", str(epochs)]
    # The peer is called megatron too: its process must not see this repository.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository) if contender == "ours" else ""}
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Measure in turns and print medians."""
    parser = results.parser_of(__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "index_building", help="for 2 GB of data"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="how many to write")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the longest one")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, nargs="+", default=EPOCHS, help="lengths of the runs")
    arguments = results.parse(parser, **QUICK)
    if arguments.child:
        print(json.dumps(CONTENDERS[arguments.child](arguments.prefix, *arguments.epochs)))
        return 0
    prefix = str(arguments.folder / "documents")
    if not Path(f"{prefix}.idx").exists():
        write_data(prefix, documents=arguments.documents, longest=arguments.longest)
    contenders = [name for name in CONTENDERS if name == "ours" or os.environ.get("MEGATRON_CORE_PATH")]
    runs: dict[tuple[str, int], list[dict[str, float]]] = {
        (name, epochs): [] for name in contenders for epochs in arguments.epochs
    }
    for _ in range(arguments.rounds):
        for (name, epochs), turns in runs.items():
            turns.append(measure(name, prefix, epochs))
    tokens = os.path.getsize(f"{prefix}.bin") // 2
    print(f"{arguments.documents:,} documents, {tokens:,} tokens, samples of {SEQUENCE:,}; {arguments.rounds} rounds")
    print(TARGETS)
    ratios = {}
    for (name, epochs), turns in runs.items():
        median = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        parts = f", of which {median['open']:.3f} s open and check" if "open" in median else ""
        print(
            f"{name:13} {epochs:2} epochs: {median['open and index']:6.3f} s{parts}; "
            f"{median['memory']:5.0f} MB; {median['sample'] * 1e6:5.1f} us a sample"
        )
        ratios[f"{name}, open and index {epochs} epochs, of {TARGET} s"] = median["open and index"] / TARGET
        ratios[f"{name}, a sample after {epochs} epochs, of {TARGET_OF_SAMPLE * 1e6:.0f} us"] = (
            median["sample"] / TARGET_OF_SAMPLE
        )
    is_larger = arguments.documents > DOCUMENTS  # than what the targets are for
    results.save(arguments, ratios, watched=[name for name in ratios if is_larger or not name.startswith("ours")])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
