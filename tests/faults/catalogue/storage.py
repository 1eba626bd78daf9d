"""Faults in saves that are tried again, and in copies on nodes."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "failed_save_not_copied",
        "megatron/training/checkpoints/waiting.py",
        old="self.jobs.append(self.copied(job))",
        new="self.jobs.append(job)",
        suffers="A save that is tried again writes weights of later steps under its own iteration.",
        first=("unit/training/checkpoints/test_saving.py::waits_for",),
    ),
    Fault(
        "copies_of_two_pasts",
        "megatron/core/checkpointing/node_copies/choosing.py",
        old="        return self.iteration, self.saved_at\n",
        new="        return self.iteration, 0.0\n",
        suffers="A node that was away brings its part of another past, and the run goes on from a mixture.",
        first=("unit/checkpointing/test_node_copies.py",),
    ),
    Fault(
        "copy_of_another_run",
        "megatron/core/checkpointing/node_copies/choosing.py",
        old="            if origin in each.origins and each.iteration > newer_than:\n",
        new="            if each.iteration > newer_than:\n",
        suffers="A new run in an old folder's place goes on from a copy that the old one left in memory.",
        first=("unit/checkpointing/test_node_copies.py",),
    ),
)
