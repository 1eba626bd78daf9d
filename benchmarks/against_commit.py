"""Training of this checkout against that of an earlier commit, on the CPU: one command at the same time, as a ratio.

    python -m benchmarks.against_commit 8ef631c
    python -m benchmarks.against_commit v1.0 --script pretrain_t5.py -- --decoder-seq-length 64

The earlier commit is checked out beside a temporary folder (``git worktree``). Each round trains with both, at the same
time on cores of their own, which they swap from round to round, and compares the medians of their seconds per
iteration, so that whatever else the machine does falls on both; with too few cores they take turns in changing order.
Printed are the median ratio of all rounds and a 95 % interval from their ranks (binomial, without any assumption about
the noise), and whether the losses are equal to the last printed digit. Flags after ``--`` are added to both commands.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import contextlib
import math
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import results

HERE = Path(__file__).resolve().parents[1]
FLAGS = (
    "--mock-data --vocab-size 2000 --tokenizer-type NullTokenizer --num-layers 4 --hidden-size 256 "
    "--num-attention-heads 8 --seq-length 256 --micro-batch-size 2 --global-batch-size 4 --train-iters 25 --lr 1e-3 "
    "--log-interval 1 --eval-iters 0 --num-workers 0"
)
QUICK = "--num-layers 1 --hidden-size 64 --seq-length 64 --train-iters 8"
WARM_UP = 5  # iterations that don't count
_LINE = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)")


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of ``commit``, for the length of a block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "earlier"
        git = ("git", "-C", str(HERE), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def train(
    folder: Path, script: str, flags: Sequence[str], *, ranks: int, cores: Sequence[int] = ()
) -> tuple[float, list[str]]:
    """Median milliseconds of an iteration on ``cores``, or wherever the system puts it, and the printed losses."""
    on_cores = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*on_cores, sys.executable, *launcher, str(folder / script), *FLAGS.split(), *flags],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    found = _LINE.findall(done.stdout)
    if done.returncode or len(found) <= WARM_UP:
        sys.exit(f"{folder / script} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return statistics.median(float(milliseconds) for milliseconds, _ in found[WARM_UP:]), [loss for _, loss in found]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Bounds of the median with at least 95 % confidence where there are 6 values or more (sign test)."""
    count = len(ratios)
    outside, rank = 0.0, 0
    while rank < count // 2 and outside + math.comb(count, rank) / 2**count <= 0.025:
        outside += math.comb(count, rank) / 2**count
        rank += 1
    ordered = sorted(ratios)
    return ordered[max(rank - 1, 0)], ordered[count - max(rank, 1)]


def both(folders: Sequence[Path], script: str, flags: Sequence[str], *, ranks: int) -> list[tuple[float, list[str]]]:
    """``train`` of both folders: at once where there are cores for that, otherwise one after the other."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2 * ranks or shutil.which("taskset") is None:
        return [train(folder, script, flags, ranks=ranks) for folder in folders]
    with ThreadPoolExecutor(2) as threads:
        runs = [
            threads.submit(train, folder, script, flags, ranks=ranks, cores=cores[at * ranks :][:ranks])
            for at, folder in enumerate(folders)
        ]
        return [run.result() for run in runs]


def divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """This program's own words, and those after the first ``--``, which both commands get."""
    at = argv.index("--") if "--" in argv else len(argv)
    return [*argv[:at]], [*argv[at + 1 :]]


def main() -> None:
    """Print each round, and what follows from all."""
    parser = results.parser_of(__doc__)
    parser.add_argument("commit", nargs="?", default="HEAD", help="the earlier one (default HEAD, the last one)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--script", default="pretrain_gpt.py")
    own, flags = divided(sys.argv[1:])
    asked = results.parse(parser, own, rounds=1)
    flags = flags or (QUICK.split() if asked.quick else [])
    if shutil.which("git") is None or not (HERE / ".git").exists():
        results.skip(asked, f"{HERE} is no checkout of git, so it has no earlier commit")
        return
    ratios = []
    with checkout(asked.commit) as earlier:
        for number in range(asked.rounds):
            order = (earlier, HERE) if number % 2 else (HERE, earlier)
            found = dict(zip(order, both(order, asked.script, flags, ranks=asked.ranks)))
            (now, losses), (before, earlier_losses) = found[HERE], found[earlier]
            ratios.append(now / before)
            same = "equal losses" if losses == earlier_losses else f"other losses: {losses[-1]}, {earlier_losses[-1]}"
            print(f"round {number + 1}: {now:.1f} ms, {before:.1f} ms before: {now / before:.3f} ({same})", flush=True)
    low, high = interval(ratios)
    print(f"now / before: median {statistics.median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f}")
    results.save(asked, {f"{asked.script}, median of {len(ratios)} rounds": statistics.median(ratios)})


if __name__ == "__main__":
    main()
