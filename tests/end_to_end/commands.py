"""Run the project's commands in a process of their own and read what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.checkpointing.load import load_checkpoint
from megatron.core.checkpointing.storage import CheckpointReader, tensors_in
from megatron.core.files.remote_path import AnyPath
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from tests import mock_data
from tests.harness.scripts import run_script, start_script

ROOT = Path(__file__).resolve().parents[2]
SERVER = "tools/run_text_generation_server.py"

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-2 --mock-data --vocab-size 300 --log-interval 1 --eval-iters 0 --num-workers 0"
)
"""A model that trains in milliseconds a step, dropout on."""


def environment() -> dict[str, str]:
    """The test's environment with one thread a process, and no launcher's variables."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def command(script: str, flags: str, *more: str, ranks: int = 1) -> list[str]:
    """Command line of a script of the repository on one rank, or on several under torchrun."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(ROOT / script), *flags.split(), *more]


def run(script: str, flags: str, *more: str, ranks: int = 1, expect: int = 0, documents: int = mock_data.FEW) -> str:
    """Run a script to its end and return what it printed, both streams; its exit code must be ``expect``.

    ``documents``: in mock data.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = run_script(script, [*flags.split(), *more], ranks=ranks, log=Path(folder, "log"), documents=documents)
    assert ended.code == expect, f"exit code {ended.code}, expected {expect}:\n{ended.output}"
    return ended.output


def launch(script: str, flags: str, *more: str, ranks: int = 1, expect: int = 0) -> str:
    """``run``, started as a user starts it: with Python, or with torchrun for several ranks."""
    done = subprocess.run(
        command(script, flags, *more, ranks=ranks),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == expect, f"exit code {done.returncode}, expected {expect}:\n{done.stdout}"
    return done.stdout


def words_for_python(script: str, *words: str, checkout: Path, **variables: str) -> list[str]:
    """What a bash script of the repository starts Python with, in the folder ``checkout``.

    Its Python only prints the words; a test can run them in a forked process, as ``run`` does.
    """
    python = checkout / ".venv/bin/python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        python.chmod(0o755)
        (checkout / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        ["bash", str(checkout / script), *words],
        cwd="/",  # a script finds its checkout from wherever it is started
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def quickstart(script: str, folder: Path, *, iterations: int) -> str:
    """What a script of examples/ prints that runs in ``folder``, without a home, and leaves all in ``folder/run``."""
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("the quickstart runs in .venv, and making one is tests/run.sh's first step")
    kept = {name: value for name, value in environment().items() if not name.startswith(("XDG_", "MPL", "HOME"))}
    home = folder / "home"
    home.mkdir(exist_ok=True)
    variables = {"HOME": str(home), "QUICKSTART_DIR": str(folder / "run"), "QUICKSTART_ITERATIONS": str(iterations)}
    done = subprocess.run(
        ["bash", str(ROOT / script)],
        cwd=folder,
        env=kept | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(log: str) -> dict[int, str]:
    """Loss as printed, by iteration."""
    return {int(i): loss for i, loss in re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", log)}


def tensors(checkpoint: AnyPath) -> dict[str, Tensor]:
    """Every logical tensor of a checkpoint."""
    stored = tensors_in(CheckpointReader(checkpoint).read_metadata())
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    entries = [ShardedState(name, tensor, Sharding(tuple(tensor.shape))) for name, tensor in state.items()]
    load_checkpoint(checkpoint, entries, Mesh.single())
    return state


def assert_same_tensors(first: AnyPath, second: AnyPath, *, names: Sequence[str] | None = None) -> None:
    """Two checkpoints hold the same tensors, bit for bit."""
    one, other = tensors(first), tensors(second)
    assert one.keys() == other.keys()
    for name in names or one:
        assert torch.equal(one[name], other[name]), f"{name} differs by {(one[name] - other[name]).abs().max()}"


@contextlib.contextmanager
def starting(log: Path, *flags: str, ranks: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process; it is killed when it hasn't ended by itself."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(SERVER, "--port 0 --inference-max-requests 4", *flags, ranks=ranks),
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def serving(log: Path, *flags: str) -> Iterator[str]:
    """The address of a server in a forked process, as soon as it serves."""
    process = start_script(SERVER, ["--port", "0", "--inference-max-requests", "4", *flags], log=log)
    try:
        while not (found := _address(log)):
            assert process.is_alive(), log.read_text()
            time.sleep(0.05)
        yield found
    finally:
        process.kill()
        process.join()


def _address(log: Path) -> str:
    found = re.search(r"serving \S+ at (http://\S+)", log.read_text()) if log.exists() else None
    return found[1] if found else ""


@contextlib.contextmanager
def started(log: Path, *flags: str, ranks: int = 1) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server's process, and its address as soon as it serves."""
    with starting(log, *flags, ranks=ranks) as process:
        while not (found := _address(log)):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process, found
