"""Faults in launch files and in what supervisors see of a run."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "mount_that_is_read_only",
        "megatron/planning/launch/disagreements.py",
        old="    elif writes and mount.read_only:\n",
        new="    elif False:\n",
        suffers="A run on a cluster trains until its first save, which fails.",
        first=("unit/planning/test_launch_files.py::what_disagrees",),
    ),
    Fault(
        "health_of_every_rank",
        "megatron/training/reporting/health.py",
        old="    if path is None or launch.local_rank:\n",
        new="    if path is None:\n",
        suffers="The ranks of a node overwrite each other's health file, so that a dead first rank seems alive.",
        first=("unit/training/reporting/test_health.py::only_the_first_rank",),
    ),
)
