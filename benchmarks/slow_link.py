"""Step times of data parallelism and of DiLoCo over a slow link between two network namespaces, and the bytes on it.

    python -m benchmarks.slow_link --megabits-per-second 100

Two ranks of one thread and gloo, each in a namespace of its own, joined by a pair of virtual interfaces (veth). The
kernel limits both ends: netem, with --delay-ms, where it has that module, else tbf, which limits the rate alone. Times
are means over an interval of outer steps. Bytes are those that the interface of rank 0 has sent, headers included,
beside what the formats say. Needs Linux, iproute2 and util-linux, and root or user namespaces.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.collectives import barrier
from megatron.core.parallel.environment import launch_environment
from megatron.core.parallel.launch import parallel_context
from megatron.training.run.run import build_run
from megatron.training.step import train_step

MODEL = (
    "--seq-length 128 --micro-batch-size 2 --global-batch-size 4 --vocab-size 1000 --attention-dropout 0 "
    "--hidden-dropout 0 --mock-data --lr 1e-3 --train-iters 1000 --num-workers 0 --eval-iters 0 --num-attention-heads 4"
)
LARGE = "--num-layers 8 --hidden-size 192"
SMALL = "--num-layers 2 --hidden-size 64"
_STREAMING = "--diloco-workers 2 --diloco-fragments 2 --diloco-overlap-steps 2"
CASES = {
    "data parallelism": "",
    "DiLoCo": "--diloco-workers 2",
    "streaming DiLoCo, fp32": _STREAMING,
    "streaming DiLoCo, fp4": f"{_STREAMING} --diloco-dtype fp4",
}
BYTES = {"": 4.0, "fp4": 0.5 + 4 / 256}
"""Bytes of a number in the formats of ``CASES``."""
_INSIDE = "MEGATRON_SLOW_LINK_INSIDE"
_ENDS = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Measured:
    """Seconds of each step of an interval on average, bytes that rank 0 has sent in it, and the model's parameters."""

    seconds: float
    sent: int
    parameters: int


def why_not() -> str | None:
    """What this machine lacks, if anything."""
    if lacking := [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(lacking)} missing: network namespaces need util-linux and iproute2"
    tried = subprocess.run(
        ["unshare", "-r", "-n", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip().splitlines()[-1]}"
    return None


def run_command(*words: str, inside: int | None = None) -> None:
    """Run a command of iproute2 here or in the namespace of the process ``inside``."""
    prefix = [] if inside is None else ["nsenter", "-t", str(inside), "-n"]
    subprocess.run([*prefix, *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def other_namespace() -> Iterator[int]:
    """A process in a second namespace, joined to this one by v0, here, and v1, there."""
    with subprocess.Popen(["unshare", "-n", "sleep", "infinity"]) as sleeper:
        try:
            mine = os.readlink("/proc/self/ns/net")
            while os.readlink(f"/proc/{sleeper.pid}/ns/net") == mine:
                time.sleep(0.01)
            run_command("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
            run_command("ip", "link", "set", "v1", "netns", str(sleeper.pid))
            for number, inside in enumerate((None, sleeper.pid)):
                run_command("ip", "link", "set", "lo", "up", inside=inside)
                run_command("ip", "addr", "add", f"{_ENDS[number]}/24", "dev", f"v{number}", inside=inside)
                run_command("ip", "link", "set", f"v{number}", "up", inside=inside)
            yield sleeper.pid
        finally:
            sleeper.kill()


def slow_down(other: int, megabits: float, delay_ms: float) -> str:
    """Limit both ends of the link; how that was done."""
    rate = f"{megabits:g}mbit"
    kinds = {
        f"netem, {delay_ms:g} ms each way": ["netem", "rate", rate, "delay", f"{delay_ms:g}ms", "limit", "10000"],
        "tbf (no netem here, so without a delay)": ["tbf", "rate", rate, "burst", "256kb", "latency", "500ms"],
    }
    for name, words in kinds.items():
        try:
            for number, inside in enumerate((None, other)):
                run_command("tc", "qdisc", "replace", "dev", f"v{number}", "root", *words, inside=inside)
        except subprocess.CalledProcessError:
            continue
        return name
    raise OSError("tc has neither netem nor tbf here")


def speed_up(other: int) -> None:
    """Take the limits away."""
    for number, inside in enumerate((None, other)):
        with contextlib.suppress(subprocess.CalledProcessError):  # without one there is nothing to delete
            run_command("tc", "qdisc", "del", "dev", f"v{number}", "root", inside=inside)


def measure(other: int, flags: str, interval: int, port: int) -> Measured:
    """Train over the link as it is now."""
    ranks = []
    for rank, prefix in enumerate(([], ["nsenter", "-t", str(other), "-n"])):
        where = {"MASTER_ADDR": _ENDS[0], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": f"v{rank}"}
        numbers = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        words = [sys.executable, "-m", "benchmarks.slow_link", "--rank-of", flags, "--interval", str(interval)]
        env = os.environ | where | numbers | {"OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([*prefix, *words], env=env, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise OSError(f"a rank failed with {flags or 'data parallelism'}")
    return Measured(**json.loads(said[0].splitlines()[-1]))


def train_as_rank(flags: str, interval: int) -> Measured:
    """Steps of this rank: some to begin with, then an interval, in which every fragment is sent and applied once."""
    config = parse_run(flags.split(), world_size=2, extra_groups=GPT_GROUPS)
    with parallel_context(config.parallel, launch_environment(), params_dtype="fp32", seed=1) as context:
        run = build_run(config, GPTSpec(), context, started=0.0)
        batches = run.data.training_batches(0)
        for _ in range(interval + config.diloco.diloco_overlap_steps + 1):
            train_step(run, next(batches))
        barrier(context.mesh)
        sent, start = bytes_sent(), time.perf_counter()
        for _ in range(interval):
            train_step(run, next(batches))
        run.optimizer.gather.finish()
        barrier(context.mesh)
        seconds = (time.perf_counter() - start) / interval
        parameters = sum(parameter.numel() for model in run.models for parameter in model.parameters())
        return Measured(seconds, bytes_sent() - sent, parameters)


def bytes_sent() -> int:
    """Bytes that this rank's end of the link has sent so far."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{interface}:"))
    return int(counts[8])


def main() -> None:
    """Enter a namespace, measure all cases on a free link and on a slow one, and print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval", type=int, default=20, help="steps between outer steps")
    parser.add_argument("--megabits-per-second", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one way; where the kernel has netem")
    parser.add_argument("--model", default=LARGE, help="flags of the model's size")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = results.parse(parser, rounds=1, interval=8, model=SMALL)
    if options.rank_of is not None:
        print(json.dumps(vars(train_as_rank(options.rank_of, options.interval))))
    elif (reason := None if _INSIDE in os.environ else why_not()) is not None:
        results.skip(options, reason)
    elif _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        sys.stdout.flush()
        os.execvp("unshare", ["unshare", "-r", "-n", sys.executable, "-m", "benchmarks.slow_link", *sys.argv[1:]])
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Measure all cases in turns, and print the table."""
    found: dict[tuple[str, bool], list[Measured]] = defaultdict(list)
    port = 29_500
    with other_namespace() as other:
        for _ in range(options.rounds):
            for is_slow in (False, True):
                speed_up(other)
                if is_slow:
                    how = slow_down(other, options.megabits_per_second, options.delay_ms)
                for name, flags in CASES.items():
                    more = f"--diloco-sync-interval {options.interval}" if flags else ""
                    port += 1  # a port of its own, which no earlier run still holds
                    words = f"{MODEL} {options.model} {flags} {more}"
                    found[name, is_slow].append(measure(other, words, options.interval, port))
    print(f"slow: {options.megabits_per_second:g} Mbit/s by {how}; outer steps every {options.interval} steps\n")
    print("| | free, ms a step | slow, ms a step | slow over free | kB a step | by formula |")
    print("|---|--:|--:|--:|--:|--:|")
    slow, ratios = {}, {}
    for name, flags in CASES.items():
        free, slow[name] = (statistics.median(each.seconds for each in found[name, kind]) for kind in (False, True))
        sent = statistics.median(each.sent for each in found[name, True]) / options.interval
        size = BYTES["fp4" if flags.endswith("fp4") else ""]
        formula = found[name, True][0].parameters * size / (options.interval if flags else 1)
        over = slow[name] / free
        print(
            f"| {name} | {1000 * free:.0f} | {1000 * slow[name]:.0f} | {over:.2f} | {sent / 1e3:.0f} | "
            f"{formula / 1e3:.0f} |"
        )
    for name in CASES:
        if name != "data parallelism":
            ratios[name] = slow[name] / slow["data parallelism"]
            print(f"{name}: a step on the slow link takes {ratios[name]:.2f} of data parallelism's")
    results.save(options, ratios)


if __name__ == "__main__":
    main()
