"""A rank that raises, dies or hangs ends the whole job soon, and the log says which one, where, and why."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, TINY, environment
from tests.harness.scripts import Ended, run_script

FLAGS = f"{TINY} --train-iters 3 --tokenizer-type NullTokenizer --global-batch-size 12".split()
MISBEHAVING = """
import os, signal, sys, time
import pretrain_gpt
import tests.mock_data
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


def run_without_launcher(folder: Path, how: str, flags: Sequence[str], *, ranks: int = 3) -> Ended:
    """Start ranks as a batch system does that leaves the others alone when one ends."""
    script = folder / "misbehaving.py"
    script.write_text(MISBEHAVING)
    return run_script(str(script), [how, *flags], ranks=ranks, log=folder / "log", timeout=240, grace=120)


def test_error_on_one_rank_ends_all_with_its_traceback_shown_once(tmp_path: Path) -> None:
    """The others would wait until the time-out and then print tracebacks of their own, about the first one's death."""
    ended = run_without_launcher(tmp_path, "raise", FLAGS)
    assert not {0, -signal.SIGKILL} & {*ended.codes}
    assert ended.output.count("Traceback") == 1
    assert ended.output.count("ValueError: a fault of the program") == 1
    assert "rank 1 (pp=0 dp=1 cp=0 tp=0) failed in iteration 2" in ended.output


def test_killed_rank_ends_all_with_one_sentence(tmp_path: Path) -> None:
    """A rank that ran out of memory says nothing itself."""
    ended = run_without_launcher(tmp_path, "die", FLAGS)
    assert ended.codes[1] == -signal.SIGKILL
    assert not {0, -signal.SIGKILL} & {ended.codes[0], ended.codes[2]}
    assert ended.output.count("lost another rank in iteration 2") == 1
    assert "Traceback" not in ended.output


def test_hanging_rank_is_named_with_phase_and_stack(tmp_path: Path) -> None:
    """Without it a hung job is killed hours later by a person who can't know where to look."""
    ended = run_without_launcher(tmp_path, "hang", [*FLAGS, "--distributed-timeout-minutes", "0.05"])
    assert ended.codes == [1, 1, 1]
    assert ended.output.count("missing: rank 1") == 1
    assert "rank 1: iteration 2" in ended.output
    assert "stack of rank 1 (pp=0 dp=1 cp=0 tp=0):" in ended.output
    assert "time.sleep(1000)" in ended.output
    [waits] = re.findall(r"has waited .*|$", ended.output)[:1]
    assert re.match(r"has waited \d+ s in all-reduce over dp, cp", waits), ended.output[-3000:]


def test_hanging_stage_is_named_by_those_that_wait_for_its_messages(tmp_path: Path) -> None:
    """In a pipeline most ranks wait for neighbours that wait themselves; only one of them is the reason."""
    flags = [*FLAGS, "--distributed-timeout-minutes", "0.05", "--pipeline-model-parallel-size", "2"]
    ended = run_without_launcher(tmp_path, "hang", flags, ranks=2)
    assert ended.codes == [1, 1]
    assert "missing: rank 1" in ended.output
    assert "iteration 2, forward-backward, " in ended.output
    assert "waiting in a send to pipeline rank 1" in ended.output


@pytest.mark.slow  # the quickstart starts torchrun, and ranks that fail are above
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
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.count("failed in iteration 2") == 1
    assert done.stdout.count("ValueError: a fault of the program") == 1
    assert done.stdout.count(f'File "{script}"') == 2  # its main program and the fault: one traceback


@pytest.mark.slow  # tests/unit/parallel/test_launcher.py proves it of the store alone
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
