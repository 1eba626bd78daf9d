"""Preprocessing against a bare loop over the tokenizers library that writes the same tokens.

    python benchmarks/preprocessing.py --megabytes 40

The text is the corpus of tools/make_stdlib_corpus.py, repeated to the size asked, with a tokenizer trained on it; with
--hard it is made of words that hardly repeat, where caches of words are of no use. Every
contender is a process of its own that takes turns with the others; timed is the whole command, from start to exit, and
every .bin file must be the same. Memory is the largest sum over a command's processes (shared pages divided). Printed
are medians over rounds; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import filecmp
import json
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
GIGATOKEN = ("gigatoken", "gigatoken one by one")
BATCH = 1000  # documents the bare loop hands over at once
TARGETS = (
    "targets: at least 0.95 of the bare loop of the engine used (gigatoken where it is installed) at one and two "
    "workers; memory under 300 MB, not growing with the text"
)


@dataclass(frozen=True)
class Run:
    """One command, timed."""

    seconds: float
    cpu_seconds: float  # of all its processes: unlike seconds, hardly touched by what else the machine does
    memory: float  # MB


def bare_loop(source: str, folder: str, output: str, function: str) -> None:
    """What one would write by hand: read lines, encode a batch, append ids; no checks, no index."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    end = tokenizer.token_to_id("<|endoftext|>")
    assert end is not None, "the tokenizer was trained with it"
    encode: Callable[[list[str]], Iterable[Any]]
    if function == "gigatoken":
        import gigatoken

        encode = gigatoken.Tokenizer(tokenizer).encode_batch_list
    elif function == "gigatoken one by one":  # the fastest way to call it, found by trying: arrays, no lists
        import gigatoken

        one = gigatoken.Tokenizer(tokenizer).encode
        encode = lambda texts: map(one, texts)  # noqa: E731
    else:
        encode = lambda texts: [each.ids for each in getattr(tokenizer, function)(texts)]  # noqa: E731
    with open(source, encoding="utf-8") as lines, open(output, "wb") as file:
        while batch := list(islice(lines, BATCH)):
            for ids in encode([json.loads(line)["text"] for line in batch]):
                file.write(np.append(ids, end).astype(np.uint16).tobytes())


def commands(source: Path, folder: Path, workers: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Contender -> command and environment; each writes ``folder/NAME_text_document.bin``."""
    threads = {"TOKENIZERS_PARALLELISM": "true" if workers > 1 else "false", "RAYON_NUM_THREADS": str(workers)}
    bare = {
        name: [sys.executable, __file__, "--bare", str(source), str(folder), f"{folder}/{name}_text_document.bin", name]
        for name in ("encode_batch", "encode_batch_fast", *(GIGATOKEN if find_spec("gigatoken") else []))
    }
    ours = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py"), "--input", str(source)]
    ours += [
        "--output-prefix",
        f"{folder}/ours",
        "--workers",
        str(workers),
        "--append-eod",
        "--log-interval",
        "10000000",
    ]
    ours += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    return {"ours": (ours, {}), **{name: (command, threads) for name, command in bare.items()}}


def timed(command: list[str], variables: dict[str, str]) -> Run:
    """Run a command to its end."""
    start, cpu = time.perf_counter(), cpu_of_children()
    process = subprocess.Popen(command, env={**ENVIRONMENT, **variables}, stdout=subprocess.DEVNULL)
    memory = 0.0
    while process.poll() is None:
        memory = max(memory, sum(map(proportional_mb, family(process.pid))))
        time.sleep(0.1)
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return Run(time.perf_counter() - start, cpu_of_children() - cpu, memory)


def cpu_of_children() -> float:
    """Seconds of processor time of everything that was run so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def family(pid: int) -> list[int]:
    """A process and what it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in family(int(child)))]


def proportional_mb(pid: int) -> float:
    """Resident memory of a process, shared pages divided among those who share them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def hard_text(*, characters: int) -> str:
    """Lines of words of 2 to 12 random letters, 300 words each."""
    random = np.random.default_rng(0)
    letters = random.integers(ord("a"), ord("z") + 1, characters, dtype=np.uint8)
    ends = np.cumsum(random.integers(3, 14, characters // 8))
    letters[ends[ends < characters]] = ord(" ")
    words = letters.tobytes().decode().split()
    lines = (" ".join(words[start : start + 300]) for start in range(0, len(words), 300))
    return "".join(f'{{"text": "{line}"}}\n' for line in lines)


def prepare(folder: Path, megabytes: int, *, hard: bool) -> tuple[Path, Path]:
    """The text at full size and at a quarter, and the tokenizer beside it."""
    tools = {
        name: [sys.executable, str(REPOSITORY / "tools" / f"{name}.py")]
        for name in ("make_stdlib_corpus", "train_tokenizer")
    }
    corpus = folder / "train.jsonl"
    if not (folder / "tokenizer.json").exists():
        run = [*tools["make_stdlib_corpus"], "--output-dir", str(folder)]
        subprocess.run(run, env=ENVIRONMENT, check=True)
        run = [*tools["train_tokenizer"], "--input", str(corpus), "--output-dir", str(folder), "--vocab-size", "8192"]
        subprocess.run(run, env=ENVIRONMENT, check=True)
    content = corpus.read_bytes()
    sizes = {"quarter.jsonl": megabytes / 4, "full.jsonl": megabytes}
    for name, size in sizes.items():
        if hard:
            (folder / name).write_text(hard_text(characters=round(size * 1e6)))
            continue
        with (folder / name).open("wb") as file:
            for _ in range(max(1, round(size * 1e6 / len(content)))):
                file.write(content)
    return folder / "full.jsonl", folder / "quarter.jsonl"


def compare(folder: Path, source: Path, *, workers: int, rounds: int) -> dict[str, list[Run]]:
    """Time the contenders in turns, and check that they wrote the same."""
    runs: dict[str, list[Run]] = {}
    for _ in range(rounds):
        for name, (command, variables) in commands(source, folder, workers).items():
            runs.setdefault(name, []).append(timed(command, variables))
    for name in runs:
        same = filecmp.cmp(folder / "ours_text_document.bin", folder / f"{name}_text_document.bin", shallow=False)
        assert same, f"{name} wrote other tokens"
    return runs


def main() -> None:
    """Print a table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--folder", help="where text and results go; kept, so that the next run starts sooner")
    parser.add_argument("--megabytes", type=int, default=40, help="size of the text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--hard", action="store_true", help="text of words that hardly repeat")
    parser.add_argument("--bare", nargs=4, help=argparse.SUPPRESS)
    arguments = results.parse(parser, megabytes=1, rounds=1, workers=[1])
    ratios = {}
    if arguments.bare:
        bare_loop(*arguments.bare)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        full, quarter = prepare(folder, arguments.megabytes, hard=arguments.hard)
        print(f"{full.stat().st_size / 1e6:.0f} MB of JSON lines, {arguments.rounds} rounds; {TARGETS}")
        columns = f"{'tokens/s':>11}{'seconds':>9}{'cpu':>8}{'memory':>9}{'ours is':>9}{'by cpu':>9}"
        print(f"{'workers':>7}  {'contender':<18}{columns}")
        for workers in arguments.workers:
            runs = compare(folder, full, workers=workers, rounds=arguments.rounds)
            tokens = (folder / "ours_text_document.bin").stat().st_size / 2
            for name, each in runs.items():
                print(f"{workers:>7}  {name:<18}{row(each, runs['ours'], tokens)}")
                if name != "ours":
                    ratios[f"{name}, {workers} workers"] = times_as_fast(each, runs["ours"])
            command, variables = commands(quarter, folder, workers)["ours"]
            print(f"{workers:>7}  {'ours, a quarter':<18}{'':>28}{timed(command, variables).memory:>6.0f} MB")
    engine = "gigatoken" if find_spec("gigatoken") else "encode_batch"  # the one used is the goal's
    results.save(arguments, ratios, watched=[name for name in ratios if not name.startswith(engine)])


def times_as_fast(runs: list[Run], ours: list[Run]) -> float:
    """Median of rounds: a contender's time over ours."""
    return statistics.median(run.seconds / own.seconds for run, own in zip(runs, ours))


def row(runs: list[Run], ours: list[Run], tokens: float) -> str:
    """Medians of a contender, and how many times as fast ours is: by the clock, by processor time."""
    seconds = statistics.median(run.seconds for run in runs)
    cpu = statistics.median(run.cpu_seconds for run in runs)
    ratio = times_as_fast(runs, ours)
    by_cpu = statistics.median(run.cpu_seconds / own.cpu_seconds for run, own in zip(runs, ours))
    memory = max(run.memory for run in runs)
    return f"{tokens / seconds:>11,.0f}{seconds:>9.2f}{cpu:>8.2f}{memory:>6.0f} MB{ratio:>8.2f}x{by_cpu:>8.2f}x"


if __name__ == "__main__":
    main()
