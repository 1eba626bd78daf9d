"""Faults in guards around a step, in the ledger of nodes, and in elastic runs."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "spike_of_a_falling_loss",
        "megatron/training/guards/spikes.py",
        old="    return (value - middle) / max(",
        new="    return abs(value - middle) / max(",
        suffers="With --spike-action steps are skipped when the loss falls fast.",
        first=("unit/training/guards/test_spikes.py::a_spike",),
    ),
    Fault(
        "spiked_batch_taken_again",
        "megatron/training/guards/guard.py",
        old="run.guards.passed_over.append([first, iteration])",
        new="run.guards.passed_over.append([first, iteration - 1])",
        suffers="A run that was rolled back trains on the batch that spoiled it, and is rolled back again.",
        first=("unit/training/guards/test_spikes.py::rolled_back",),
    ),
    Fault(
        "replay_from_a_later_state",
        "megatron/training/guards/guard.py",
        old="            kept.restore()\n",
        new="",
        suffers="With --fp8-recipe delayed every step that is computed again counts as a fault of the hardware.",
        first=("unit/training/guards/test_replays.py::statistics",),
    ),
    Fault(
        "every_node_blamed_for_a_killed_rank",
        "megatron/training/guards/ledger.py",
        old="if restarts > before.get(host, restarts)]",
        new="if restarts >= before.get(host, restarts)]",
        suffers="The ledger counts a fault for each node of a run when a rank of one was killed.",
        first=("unit/training/guards/test_ledger.py::torchrun",),
    ),
    Fault(
        "microbatch_that_does_not_divide",
        "megatron/config/run.py",
        old="for size in range(1, asked + 1) if each % size == 0)",
        new="for size in range(1, asked + 1) if global_batch_size % size == 0)",
        suffers="An elastic run that loses a node is refused, though its batch could be shared.",
        first=("parallel/test_elastic.py::microbatches",),
    ),
)
