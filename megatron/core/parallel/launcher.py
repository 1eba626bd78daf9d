"""What a launcher leaves to its ranks: to tell a restart from the attempt before it, and to end when it is killed."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.core.parallel.environment import LaunchEnvironment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ATTEMPT = "attempt"


def store_of_this_attempt(store: Store, launch: LaunchEnvironment, *, timeout: timedelta) -> Store:
    """``store`` under a name that only ranks of this attempt know. A collective of all ranks.

    torchrun restarts ranks on the store of the attempt before, in which the addresses of dead ranks are still found.
    The name is not TORCHELASTIC_RESTART_COUNT: nodes whose own ranks didn't fail count otherwise. Rank 0 makes it up;
    the others take it when rank 0 repeats what they have just made up themselves, which a dead one never does.

    Raises torch's DistStoreError when ranks don't come within ``timeout``.
    """
    store.set_timeout(timeout)
    own = uuid.uuid4().hex
    if launch.rank == 0:
        store.set(_ATTEMPT, own)
        for rank in range(1, launch.world_size):
            store.set(f"{own}/seen {rank}", store.get(f"{own}/joined {rank}").decode())
        return _named(own, store)
    deadline, asked = time.monotonic() + timeout.total_seconds(), ""
    while time.monotonic() < deadline:
        name = store.get(_ATTEMPT).decode()
        if name != asked:
            store.set(f"{name}/joined {launch.rank}", own)
            asked = name
        seen = f"{name}/seen {launch.rank}"
        if store.check([seen]) and store.get(seen).decode() == own:
            return _named(name, store)
        time.sleep(0.02)
    raise dist.DistStoreError("rank 0 did not start")


def _named(name: str, store: Store) -> Store:
    named: Store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    return named


@contextmanager
def leaving_with_launcher(launch: LaunchEnvironment, *, poll: float = 1.0) -> Iterator[None]:
    """End this process within ``poll`` seconds of its launcher's death, wherever the main thread is, for a ``with``
    block. A launcher that is killed tells nobody, and ranks that wait for others would do so until their time-outs.
    """
    if launch.launcher is None:
        yield
        return
    done = threading.Event()
    threading.Thread(target=_watch_launcher, args=(launch, done, poll), name="launcher", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _watch_launcher(launch: LaunchEnvironment, done: threading.Event, poll: float) -> None:
    while os.getppid() == launch.launcher:
        if done.wait(poll):
            return
    if launch.local_rank == 0:
        sys.stderr.write(f"error: the launcher, process {launch.launcher}, was killed; ending its ranks\n")
        sys.stderr.flush()
    os._exit(1)
