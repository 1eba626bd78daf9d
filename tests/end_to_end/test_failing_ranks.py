"""A rank that raises, dies or hangs ends the whole job soon, and the log says which one, where, and why."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.commands import ROOT, TINY, environment

FLAGS = f"{TINY} --train-iters 3 --tokenizer-type NullTokenizer --global-batch-size 12".split()
MISBEHAVING = """
import os, signal, sys, time
import pretrain_gpt
from megatron.training import loop, step

RANK, how, train_step = int(os.environ["RANK"]), sys.argv.pop(1), loop.train_step

def misbehave(run, microbatches):
    if run.progress.iteration == 1 and RANK == 1:
        if how == "raise":
            raise ValueError("a fault of the program")
        if how == "die" or (how == "die once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(1000)
    return train_step(run, microbatches)

loop.train_step = misbehave
pretrain_gpt.main(pretrain_gpt.FAMILIES["gpt"])
"""


@dataclass(frozen=True)
class Ended:
    """Exit codes of the ranks, all they printed, and how long they ran."""

    codes: list[int]
    log: str
    seconds: float


def run_without_launcher(folder: Path, how: str, flags: Sequence[str], *, ranks: int = 3) -> Ended:
    """Start ranks as a batch system does that leaves the others alone when one ends."""
    script = folder / "misbehaving.py"
    script.write_text(MISBEHAVING)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    processes, logs = [], []
    for rank in range(ranks):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
        log = (folder / f"rank{rank}.log").open("w+")
        command = [sys.executable, str(script), how, *flags]
        processes.append(subprocess.Popen(command, env=environment() | variables, stdout=log, stderr=log))
        logs.append(log)
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    text = ""
    for log in logs:
        log.seek(0)
        text += log.read()
        log.close()
    return Ended(codes, text, time.monotonic() - started)


def test_error_on_one_rank_ends_all_with_its_traceback_shown_once(tmp_path: Path) -> None:
    """The others would wait until the time-out and then print tracebacks of their own, about the first one's death."""
    ended = run_without_launcher(tmp_path, "raise", FLAGS)
    assert 0 not in ended.codes
    assert ended.log.count("Traceback") == 1
    assert ended.log.count("ValueError: a fault of the program") == 1
    assert "rank 1 (pp=0 dp=1 cp=0 tp=0) failed in iteration 2" in ended.log
    assert ended.seconds < 60  # of which most is starting, and 30 are promised


def test_killed_rank_ends_all_with_one_sentence(tmp_path: Path) -> None:
    """A rank that ran out of memory says nothing itself."""
    ended = run_without_launcher(tmp_path, "die", FLAGS)
    assert ended.codes[1] == -signal.SIGKILL
    assert 0 not in ended.codes
    assert ended.log.count("lost another rank in iteration 2") == 1
    assert "Traceback" not in ended.log


def test_hanging_rank_is_named_with_phase_and_stack(tmp_path: Path) -> None:
    """Without it a hung job is killed hours later by a person who can't know where to look."""
    ended = run_without_launcher(tmp_path, "hang", [*FLAGS, "--distributed-timeout-minutes", "0.05"])
    assert ended.codes == [1, 1, 1]
    assert ended.log.count("missing: rank 1") == 1
    assert "rank 1: iteration 2" in ended.log
    assert "stack of rank 1 (pp=0 dp=1 cp=0 tp=0):" in ended.log
    assert "time.sleep(1000)" in ended.log
    assert re.search(r"has waited \d+ s in all-reduce over dp, cp", ended.log)


def test_hanging_stage_is_named_by_those_that_wait_for_its_messages(tmp_path: Path) -> None:
    """In a pipeline most ranks wait for neighbours that wait themselves; only one of them is the reason."""
    flags = [*FLAGS, "--distributed-timeout-minutes", "0.05", "--pipeline-model-parallel-size", "2"]
    ended = run_without_launcher(tmp_path, "hang", flags, ranks=2)
    assert ended.codes == [1, 1]
    assert "missing: rank 1" in ended.log
    assert "iteration 2, forward-backward, " in ended.log
    assert "waiting in a send to pipeline rank 1" in ended.log


def test_torchrun_shows_the_traceback_once(tmp_path: Path) -> None:
    """torchrun kills the others; what they say about it would bury the cause."""
    script = tmp_path / "misbehaving.py"
    script.write_text(MISBEHAVING)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launcher, str(script), "raise", *FLAGS],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.count("failed in iteration 2") == 1
    assert done.stdout.count("ValueError: a fault of the program") == 1
    assert done.stdout.count(f'File "{script}"') == 2  # its main program and the fault: one traceback


def test_torchrun_restarts_ranks_after_one_was_killed(tmp_path: Path) -> None:
    """Most restarts failed: the new ranks connected to addresses of dead ones, which torchrun's store still held."""
    script = tmp_path / "misbehaving.py"
    script.write_text(MISBEHAVING)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*launcher, str(script), "die once", *FLAGS],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.findall(r"iteration +(\d+)/", done.stdout) == ["1", "1", "2", "3"]
    assert "failed to connect" not in done.stdout
