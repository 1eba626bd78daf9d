"""A worker of DiLoCo that is lost under an elastic torchrun, and comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import read_run_state
from megatron.errors import CheckpointError
from tests.end_to_end.commands import ROOT, TINY, environment, tensors

FLAGS = (
    f"{TINY} --train-iters 1000000 --tokenizer-type NullTokenizer --lr-decay-style constant --exit-signal-handler "
    "--diloco-ranks-per-worker 1 --diloco-sync-interval 10 --save-interval 20 --keep-last-checkpoints 3"
)


@contextlib.contextmanager
def agent(folder: Path, port: int, log: str) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun as it is started in one data centre; its whole process group is killed at the end of the block."""
    elastic = f"--nnodes=1:2 --nproc_per_node=1 --max-restarts=9 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port}"
    waits = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3 --local-addr=127.0.0.1"
    words = [sys.executable, "-m", "torch.distributed.run", *elastic.split(), *waits.split()]
    words += [str(ROOT / "pretrain_gpt.py"), *FLAGS.split(), f"--save={folder / 'run'}", f"--load={folder / 'run'}"]
    with (folder / log).open("wb") as file:
        process = subprocess.Popen(
            words,
            env=environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_workers(folder: Path, workers: int, *, after: int) -> int:
    """The iteration of the first checkpoint seen that is later than ``after``, and of so many workers."""
    found = "no checkpoint"
    for _ in range(1200):
        with contextlib.suppress(CheckpointError, OSError):
            newest = find_checkpoint(str(folder / "run"), verify=False)
            found = f"iteration {newest.iteration}"
            if newest.iteration > after and read_run_state(newest)["diloco"]["workers"] == workers:
                return newest.iteration
        time.sleep(0.1)
    logs = "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in sorted(folder.glob("*.log")))
    raise AssertionError(f"no checkpoint of {workers} workers after iteration {after}, but {found}:\n{logs}")


@pytest.mark.slow  # torchrun takes seconds for each change; workers that leave and come back are in test_diloco.py
def test_a_run_goes_on_without_a_worker_and_with_it_again(tmp_path: Path) -> None:
    """The others waited for the lost data centre for ever, or the one that came back was never taken in."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with agent(tmp_path, port, "first.log"):
        with agent(tmp_path, port, "second.log"):
            both = wait_for_workers(tmp_path, 2, after=0)
        alone = wait_for_workers(tmp_path, 1, after=both)
        assert "lost another rank" in (tmp_path / "first.log").read_text()
        with agent(tmp_path, port, "again.log"):
            wait_for_workers(tmp_path, 2, after=alone)
    kept = tensors(find_checkpoint(str(tmp_path / "run")).path)
    assert any(name.startswith("worker1.model.") for name in kept)
