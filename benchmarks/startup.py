"""How long a mistyped flag, ``--help`` and the plan of a large run take to answer, from process start to process end.

    python -m benchmarks.startup
    python -m benchmarks.startup --rounds 40 --peer /another/checkout

Medians and least times by the clock and of the processor, over rounds in which the commands take turns. The first round
is not counted: it compiles bytecode, which is kept in a folder of its own. ``--peer``: another checkout to compare.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import resource
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks import results

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "--help": ["pretrain_gpt.py", "--help"],
    "a mistyped flag": ["pretrain_gpt.py", "--num-layer", "3"],
    "--dry-run, 175B on 1,024 ranks": [
        *("pretrain_gpt.py", "@examples/gpt3/gpt3_175b_distributed.flags"),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--dry-run", "--world-size", "1024"),
    ],
}
SECONDS = {"--help": 0.1, "a mistyped flag": 0.1, "--dry-run, 175B on 1,024 ranks": 5.0}
TARGETS = "targets: --help and a mistyped flag 0.1 s, the dry run 5 s"


def timed(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, check=False)
    clock, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Time every command in turn, and print a table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peer", type=Path, help="another checkout")
    options = results.parse(parser, rounds=1)
    folders = [ROOT] if options.peer is None else [ROOT, options.peer.resolve()]
    times: dict[tuple[str, Path], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": bytecode}
        for number in range(options.rounds + 1):
            for folder in folders:
                for name, command in COMMANDS.items():
                    seconds = timed(command, folder, environment | {"PYTHONPATH": str(folder)})
                    times[name, folder] += [seconds] if number else []
    print(f"{'':32}{'clock: median':>15}{'least':>8}{'processor: median':>19}{'least':>8}   (s)")
    for (name, folder), taken in times.items():
        clock, processor = zip(*taken, strict=True)
        figures = (statistics.median(clock), min(clock), statistics.median(processor), min(processor))
        label = name if folder == ROOT else "  the other checkout"
        print("{:32}{:15.3f}{:8.3f}{:19.3f}{:8.3f}".format(label, *figures))
    print(TARGETS)
    medians = {name: statistics.median(clock for clock, _ in times[name, ROOT]) for name in SECONDS}
    results.save(options, {f"{name}, of {SECONDS[name]} s": median / SECONDS[name] for name, median in medians.items()})


if __name__ == "__main__":
    main()
