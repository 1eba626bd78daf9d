"""Faults in training on answers of the model itself."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "a_resumed_run_diverges_from_itself",
        "megatron/training/rollouts/reference.py",
        old="        elif saved is not None:\n",
        new="        elif saved is not None and self.state['published']:\n",
        suffers="A run that goes on measures its divergence from its own weights, and drifts away.",
        first=("unit/training/rollouts/test_rollouts.py::goes_on",),
    ),
    Fault(
        "initial_weights_stay_in_place",
        "megatron/training/rollouts/reference.py",
        old="            self._put(own)\n",
        new="            del own\n",
        suffers="Each time that answers are made, the model forgets all that it has learned.",
        first=("unit/training/rollouts/test_rollouts.py::initial_weights",),
    ),
    Fault(
        "answers_are_counted_by_each_context_rank",
        "megatron/core/objectives/grpo.py",
        old='counts_here=int(output.context.mesh.rank("cp") == 0),',
        new="counts_here=1,",
        suffers="With context parallelism the learning rate is divided by the number of ranks.",
        first=("equivalence/test_grpo.py",),
    ),
)
