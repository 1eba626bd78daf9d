"""A restart on the store of a dead attempt, and the death of the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from megatron.core.parallel.environment import LaunchEnvironment
from megatron.core.parallel.launch import store_of_this_attempt
from tests.harness.sentences import expect_error

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.2)


def join(store: Store, ranks: Sequence[int], *, timeout: timedelta = LONG) -> list[Store]:
    """What ranks of a world of three get that start in this order, a moment apart."""
    world = LaunchEnvironment(world_size=3)

    def start(place: int) -> Store:
        time.sleep(0.05 * place)
        return store_of_this_attempt(store, replace(world, rank=ranks[place]), timeout=timeout)

    with ThreadPoolExecutor() as threads:
        return list(threads.map(start, range(len(ranks))))


def test_restarted_ranks_find_nothing_of_dead_ones() -> None:
    """torchrun --max-restarts seldom restarted: ranks connected to addresses that dead ranks had left in the store.

    Whoever comes first, and after a whole attempt as after one that died while it started.
    """
    store = HashStore()
    names = set()
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        of_this = join(store, order)
        of_this[0].set("address", str(order))
        assert [each.get("address").decode() for each in of_this] == [str(order)] * 3
        names.add(store.get("attempt"))
    assert len(names) == 3

    with pytest.raises(dist.DistStoreError):
        join(store, [0, 1], timeout=SHORT)
    with expect_error(dist.DistStoreError, "0"):
        join(store, [1, 2], timeout=SHORT)
    of_this = join(store, [2, 0, 1])
    of_this[0].set("address", "last")
    assert [each.get("address").decode() for each in of_this] == ["last"] * 3


WAITING = """
import os, subprocess, sys
code = '''
import os, sys, time
from torch._C._distributed_c10d import HashStore, Store

from megatron.core.parallel.environment import launch_environment
launch = launch_environment()
if sys.argv[1] == "early":
    print(launch.launcher, flush=True)
    while os.getppid() == launch.launcher:
        time.sleep(0.01)
from megatron.core.parallel.launch import leaving_with_launcher
with leaving_with_launcher(launch, poll=0.1):
    if sys.argv[1] == "late":
        print(launch.launcher, flush=True)
    time.sleep(1000)
'''
for told in ("early", "late"):
    subprocess.Popen([sys.executable, "-c", code, told])
sys.stdin.read()
"""


def test_ranks_end_with_their_launcher() -> None:
    """Ranks of a killed torchrun waited for each other for 14 minutes, on GPUs that others wanted.

    Of these two, one still loads torch when that happens.
    """
    variables = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    launcher = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout is not None and launcher.stdin is not None
    with launcher.stdout, launcher.stdin:
        for _ in ("early", "late"):
            assert launcher.stdout.readline() == f"{launcher.pid}\n"
        launcher.kill()
        launcher.wait()
        rest = launcher.stdout.read()  # ends with the last of them
        assert rest.count(f"the launcher, process {launcher.pid}, was killed") == 2, rest
