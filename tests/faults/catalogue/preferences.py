"""Faults in training on pairs of answers."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "answers_end_at_a_ranks_slice",
        "megatron/core/objectives/preference.py",
        old='sides.sum(2).to(each.dtype))), mesh, "cp")',
        new='sides.sum(2).to(each.dtype))), mesh, "tp")',
        suffers="With context parallelism the loss is of a part of each answer.",
        first=("equivalence/test_preferences.py",),
    ),
    Fault(
        "rejected_answers_are_learned",
        "megatron/core/objectives/preference.py",
        old="rejected * (self.answer == REJECTED)",
        new="-rejected * (self.answer == REJECTED)",
        suffers="The model learns to write the rejected answers, too.",
        first=("unit/objectives/test_preference.py::whole_logits",),
    ),
    Fault(
        "a_resumed_run_is_its_own_reference",
        "megatron/core/objectives/preference.py",
        old="        if saved := first.state.get(_STATE):\n",
        new="        if (saved := first.state.get(_STATE)) and stored is not None:\n",
        suffers="A run that goes on without its file is held to its own weights, and starts again from rewards of 0.",
        first=("unit/objectives/test_preference.py::goes_on",),
    ),
)
