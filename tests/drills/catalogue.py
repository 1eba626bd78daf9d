"""The drills by name, and how one is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.drills import drills, slurm, soak, storage
from tests.drills.drills import Say
from tests.drills.job import Job

Drill = Callable[[Path, Say], None]


def run_drill(name: str, folder: Path, say: Say) -> None:
    """Run a drill; whatever happens, none of its processes is left. Raises AssertionError for another end."""
    try:
        DRILLS[name](folder, say)
    finally:
        for job in Job.started:
            job.end()
        Job.started.clear()


DRILLS: dict[str, Drill] = {
    "kill-rank": drills.kill_rank,
    "kill-launcher": drills.kill_launcher,
    "stop-process": drills.stop_process,
    "flip-gradient": drills.flip_gradient,
    "flip-weight": drills.flip_weight,
    "flip-file": drills.flip_file,
    "slow-rank": drills.slow_rank,
    "clock-jumps": drills.clock_jumps,
    "disk-full": drills.disk_full,
    "cut-network": drills.cut_network,
    "elastic": drills.elastic,
    "service-away": storage.service_away,
    "disk-away": storage.disk_away,
    "lost-node": storage.lost_node,
    "memory-copies": storage.memory_copies,
    "slurm-time-limit": slurm.time_limit,
    "slurm-preempted": slurm.preempted,
    "slurm-requeued": slurm.requeued,
    "soak": soak.soak,
}
NEED_ROOT = {"disk-full", "cut-network", "disk-away"}
NEED_PROGRAMS = {
    "disk-away": "bindfs",
    **dict.fromkeys(("slurm-time-limit", "slurm-preempted", "slurm-requeued"), "slurmctld"),
}
"""Programs that a drill starts and that most machines don't have."""


def summary(drill: Drill) -> str:
    """What a drill does, in a sentence."""
    return " ".join((drill.__doc__ or "").split())
