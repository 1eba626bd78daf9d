"""The ledger of a run: starts, ends and faults of every node, in ``ledger.jsonl`` beside the checkpoints.

Nodes that fail often (lemons) are named at each start, and a run that only starts and fails is stopped.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from megatron.config.run import RunConfig
from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.files.remote_path import AnyPath, RemotePath, path_of
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError, MegatronError
from megatron.small_files import check_regular

logger = logging.getLogger(__name__)

LEDGER = "ledger.jsonl"
_MOST_WORDS = 300  # characters of an error that the ledger keeps
_LOST = "lost another rank"  # what a rank says whose error follows from another's end
_LEMON = 2  # faults of a node from which on each start names it

Entry = Mapping[str, Any]


class Ledger:
    """Appends to the ledger of a folder; a folder that can't be written costs a warning, not the run.

    ``run``: names this start. ``host``: of this rank.
    """

    def __init__(self, folder: AnyPath, *, run: str, host: str) -> None:
        self._path, self.run, self.host = folder / LEDGER, run, host

    def add(self, event: str, **facts: object) -> None:
        """Add a line with the time and this start."""
        entry = {"time": f"{datetime.now():%Y-%m-%d %H:%M:%S}", "run": self.run, "event": event, **facts}
        line = json.dumps(entry) + "\n"
        try:
            if isinstance(self._path, RemotePath):  # object stores can't append
                before = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
                self._path.write_text(before + line, encoding="utf-8")
            else:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line)
        except OSError as error:
            logger.warning("%s could not be written: %s", self._path, error.strerror)

    def fault(self, places: Sequence[str], what: str) -> None:
        """Note a fault of the nodes that ``places`` (host and device) are on."""
        for place in dict.fromkeys(places):
            self.add("fault", host=place.split()[0], place=place, what=what)


def read_ledger(folder: AnyPath) -> list[Entry]:
    """The lines of a folder's ledger. A line that a crash left unfinished, or with fields of other types, is left out.

    Raises CheckpointError for a pipe or a device.
    """
    path, found = folder / LEDGER, list[Entry]()
    check_regular(path, where=str(path), error=CheckpointError)
    if not path.exists():
        return found
    with path.open("rb") as file:
        content: bytes = file.read()
    for line in content.decode(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_entry(entry):
            found.append(entry)
    return found


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not {"event", "run"} <= entry.keys():
        return False
    hosts = entry.get("hosts") or {}
    return (
        all(isinstance(entry.get(name, ""), str) for name in ("event", "run", "host", "launch", "how", "what"))
        and isinstance(hosts, dict)
        and all(isinstance(restarts, int) for restarts in hosts.values())
    )


def lost_hosts(entries: Sequence[Entry], hosts: Mapping[str, int], launch: str) -> list[str]:
    """The nodes on which a rank of the start before has ended without a word, as far as that can be told.

    ``hosts``: nodes of this start, with how often their launcher has started ranks again. torchrun counts only on the
    node whose rank failed. A node that isn't there any more, under the same launch, is lost.
    """
    starts = [entry for entry in entries if entry["event"] == "start"]
    if not starts:
        return []
    last = starts[-1]
    own = [entry for entry in entries if entry["run"] == last["run"] and entry["event"] in ("end", "fault")]
    told = [entry for entry in own if entry.get("what") != _LOST]  # by that rank, in time before it was ended, too
    if told or last.get("launch") != launch or not launch:
        return []
    before: Mapping[str, int] = last.get("hosts") or {}
    again = [host for host, restarts in hosts.items() if restarts > before.get(host, restarts)]
    return again or [host for host in before if host not in hosts]


def faults_of(entries: Sequence[Entry]) -> Counter[str]:
    """How many starts each node has ended, or spoiled a step of: a node counts once in a start."""
    pairs = {(entry["run"], entry.get("host")) for entry in entries if entry["event"] == "fault"}
    return Counter(str(host) for _, host in pairs if host)


def lemon_lines(entries: Sequence[Entry], hosts: Sequence[str]) -> list[str]:
    """A line about each node of this start that has failed in several starts."""
    starts, faults = sum(entry["event"] == "start" for entry in entries), faults_of(entries)
    return [
        f"ledger: node {host} had faults in {faults[host]} of the last {starts} starts; leave it out (Slurm: "
        f"--exclude={host})"
        for host in sorted(set(hosts))
        if faults[host] >= _LEMON
    ]


def starts_without_progress(entries: Sequence[Entry], iteration: int) -> list[Entry]:
    """The last starts in a row that began at ``iteration``, where this one begins as well, and failed."""
    ended = {entry["run"]: entry for entry in entries if entry["event"] == "end"}
    found = list[Entry]()
    for entry in reversed([entry for entry in entries if entry["event"] == "start"]):
        how = ended.get(entry["run"], {}).get("how", "failed")
        if entry.get("iteration") != iteration or how != "failed":
            break
        found.append({**entry, "what": ended.get(entry["run"], {}).get("what", "ended without a message")})
    return found


def check_progress(entries: Sequence[Entry], iteration: int, *, most: int, folder: AnyPath) -> None:
    """Raise ConfigError when ``most`` starts in a row have failed without a new checkpoint; 0: any number."""
    failed = starts_without_progress(entries, iteration)
    if not most or len(failed) < most:
        return
    said = list(dict.fromkeys(str(entry["what"]) for entry in failed))
    why = f"always with: {said[0]}" if len(said) == 1 else f"at last with: {said[0]}"
    raise ConfigError(
        f"the last {len(failed)} starts in {folder} ended at iteration {iteration} without a new checkpoint, {why}: "
        "look at that first; for a loss that is not finite, or a damaged checkpoint, go on from an older one with "
        f"--ckpt-step, and to start regardless leave out --max-starts-without-progress {most} or delete "
        f"{folder / LEDGER}"
    )


@contextmanager
def ledger(
    config: RunConfig, context: ParallelContext, *, iteration: int, say: Callable[[str], None]
) -> Iterator[Ledger | None]:
    """Keep the ledger of ``--save`` during the block. A collective at its start.

    Raises ConfigError where ``--max-starts-without-progress`` ends the run. Yields None without ``--node-ledger``.
    """
    save = config.checkpoint.save
    if save is None or not config.guards.node_ledger:
        yield None
        return
    folder, mesh, host = path_of(save), context.mesh, socket.gethostname()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
    everyone = gather_objects((host, restarts), mesh)
    hosts = dict(everyone)

    def begin() -> tuple[str, list[str]]:
        book, entries = Ledger(folder, run=uuid.uuid4().hex[:12], host=host), read_ledger(folder)
        for lost in lost_hosts(entries, hosts, launch):
            earlier = str([entry for entry in entries if entry["event"] == "start"][-1]["run"])
            Ledger(folder, run=earlier, host=host).fault([lost], "a rank ended without a message")
        entries = read_ledger(folder)
        check_progress(entries, iteration, most=config.guards.max_starts_without_progress, folder=folder)
        book.add("start", iteration=iteration, ranks=mesh.world_size, hosts=hosts, launch=launch)
        return book.run, lemon_lines(read_ledger(folder), [*hosts])

    run, lines = run_on_first(begin, mesh)
    for line in lines:
        say(line)
    book = Ledger(folder, run=run, host=host)
    try:
        yield book
    except KeyboardInterrupt:
        _end(book, context, how="interrupted", what="interrupted")
        raise
    except Exception as error:
        _end(book, context, how="failed", what=f"{type(error).__name__}: {error}"[:_MOST_WORDS], error=error)
        raise
    _end(book, context, how="finished", what="")


def _end(book: Ledger, context: ParallelContext, *, how: str, what: str, error: Exception | None = None) -> None:
    """Note how a start has ended: rank 0 writes, and a rank whose own error it is, not one that follows from it."""
    mesh, activity = context.mesh, context.mesh.activity
    # A kernel's error comes up where the host waits for the device; others come there because a rank is gone.
    follows = bool(activity.collective) and not isinstance(error, MegatronError) and "CUDA error" not in str(error)
    is_own = error is not None and not isinstance(error, MegatronError) and not follows
    if is_own:
        book.fault([book.host], f"rank {mesh.world_rank}: {what}")
    if mesh.world_rank == 0 or is_own:
        place = f"{activity.place}, {activity.collective}" if activity.collective else activity.place
        book.add("end", how=how, what=_LOST if follows else what, place=place, rank=mesh.world_rank)
