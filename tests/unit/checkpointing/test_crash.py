"""Killed at any moment, a job finds its newest complete checkpoint again, and it is the one it had called saved."""

from __future__ import annotations

import multiprocessing
import random
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint, is_unused
from megatron.core.checkpointing.load import load_checkpoint, read_run_document
from megatron.core.checkpointing.save import begin_save, save_checkpoint
from megatron.core.checkpointing.sharded_view import Staging
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import CheckpointError
from tests.harness.ranks import fork_server
from tests.harness.sentences import check_line

NUM_TENSORS, SIZE = 4, 1 << 17  # 2 MiB: long enough to be hit in the middle


def state(value: float) -> list[ShardedState]:
    sharding = Sharding((SIZE,))
    return [ShardedState(f"model.{index}", torch.full((SIZE,), value), sharding) for index in range(NUM_TENSORS)]


def save_until_killed(root: Path, background: bool, report: Connection) -> None:
    """Save iteration after iteration from where the last process left off, telling each when it is durable."""
    torch.set_num_threads(1)
    staging = Staging() if background else None
    iteration = 0 if is_unused(root) else find_checkpoint(root).iteration
    while True:
        iteration += 1
        states = state(float(iteration))
        pending = begin_save(root, iteration, states, {"iteration": iteration}, Mesh.single(), background=staging)
        if background:
            for part in states:
                part.tensor.fill_(-1.0)
        pending.finish()
        report.send(iteration)


def last_message(connection: Connection) -> int:
    """The last iteration that the killed process had called saved."""
    last = 0
    while connection.poll():
        try:
            last = connection.recv()
        except EOFError:  # everything was read; only the killed process held the other end
            break
    return last


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
def test_killed_saves_lose_nothing(background: bool, tmp_path: Path) -> None:
    """SIGKILL at random moments: what was called saved is found, and what is found is whole."""
    draw = random.Random(3)
    context = fork_server()
    for _ in range(4):
        ours, theirs = context.Pipe()
        process = context.Process(target=save_until_killed, args=(tmp_path, background, theirs), daemon=True)
        process.start()
        theirs.close()
        assert ours.poll(120), "the saving process died by itself"
        time.sleep(draw.uniform(0.0, 0.15))
        process.kill()
        process.join()
        announced = last_message(ours)
        found = find_checkpoint(tmp_path)
        assert announced <= found.iteration <= announced + 1
        states = state(0.0)
        load_checkpoint(found, states, Mesh.single())
        assert all((part.tensor == found.iteration).all() for part in states)
        assert read_run_document(found)["state"] == {"iteration": found.iteration}


def save_with_small_disk(root: Path, report: Connection) -> None:
    """A limit on file size, which the kernel reports as an OSError in the middle of a write, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        save_checkpoint(root, 20, state(2.0), {}, Mesh.single())
    except CheckpointError as error:
        report.send(str(error))


def test_a_real_write_error_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The error of the operating system comes through torch's serialization with its reason."""
    save_checkpoint(tmp_path, 10, state(1.0), {}, Mesh.single())
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=save_with_small_disk, args=(tmp_path, theirs), daemon=True)
    process.start()
    theirs.close()
    message = ours.recv()
    process.join()
    check_line(message, "__0_0.distcp")
    assert find_checkpoint(tmp_path).iteration == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "latest_checkpointed_iteration.txt"]
