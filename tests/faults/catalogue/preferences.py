"""Faults in training on pairs of answers, and on rated ones."""

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
        "a_baseline_is_of_a_rank",
        "megatron/training/evaluation/evaluate.py",
        old='return _sums(run, each, axes=("pp", "dp", "cp"))',
        new='return _sums(run, each, axes=("pp", "cp"))',
        suffers="With KTO data-parallel ranks have baselines of their own, so the layout changes what is learned.",
        first=("equivalence/test_preferences.py",),
    ),
    Fault(
        "other_answers_are_the_own_ones",
        "megatron/core/datasets/rated.py",
        old="found[order] = np.roll(order, 1)",
        new="found[order] = order",
        suffers="KTO's baseline is the mean reward, so nothing is learned of how good answers are.",
        first=("unit/objectives/test_rated.py::another_sample",),
    ),
    Fault(
        "a_baseline_is_below_0",
        "megatron/core/objectives/rated.py",
        old="count.clamp(min=1)).clamp(min=0)",
        new="count.clamp(min=1))",
        suffers="KTO's loss is another one than published.",
        first=("unit/objectives/test_rated.py::whole_logits",),
    ),
    Fault(
        "a_resumed_run_is_its_own_reference",
        "megatron/core/objectives/compared.py",
        old="        if saved := first.state.get(_STATE):\n",
        new="        if (saved := first.state.get(_STATE)) and stored is not None:\n",
        suffers="A run that goes on without its file is held to its own weights, and starts again from rewards of 0.",
        first=("unit/objectives/test_preference.py::goes_on",),
    ),
)
