"""Faults in distillation."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "recomputed_layers_without_their_distance",
        "megatron/core/objectives/hidden_states.py",
        old="                    inputs.kept[module] = compared\n",
        new="                    pass\n",
        suffers="With recomputation hidden states are compared and reported, and nothing is learned from it.",
        first=("equivalence/test_distillation.py::hidden",),
    ),
    Fault(
        "projections_of_a_part_of_the_sequence",
        "megatron/core/objectives/hidden_states.py",
        old="sharding = Sharding((teacher, student), partial_grad=partial_under_sequence_parallel(context))",
        new="sharding = Sharding((teacher, student))",
        suffers="With sequence parallelism each rank learns its own matrix between hidden sizes.",
        first=("equivalence/test_distillation.py::hidden",),
    ),
    Fault(
        "teacher_sees_a_part_of_the_vocabulary",
        "megatron/core/tensor_parallel/distillation.py",
        old='    log_z = highest + all_reduce((log_sum - highest).exp(), mesh, "tp").log()\n',
        new="    log_z = log_sum\n",
        suffers="With tensor parallelism each rank learns the teacher's distribution over its own ids.",
        first=("parallel/test_distillation_loss.py",),
    ),
    Fault(
        "teacher_of_other_data",
        "megatron/core/datasets/teacher_scores.py",
        old="if index is not None and self._scores.seen(index) != digest_of_sample(sample):",
        new="if index is None and self._scores.seen(0) != digest_of_sample(sample):",
        suffers="A run learns what a teacher said of other texts than those that it reads.",
        first=("unit/training/test_distillation.py::stored",),
    ),
    Fault(
        "teacher_of_other_documents",
        "megatron/core/datasets/teacher_scores.py",
        old="    for each in (tokens, positions, documents):\n",
        new="    for each in (tokens, positions):\n",
        suffers="A run whose attention stays within documents learns what a teacher said that saw across them.",
        first=("unit/training/test_distillation.py::read",),
    ),
    Fault(
        "rest_of_a_stored_top_has_the_top_in_it",
        "megatron/core/tensor_parallel/distillation.py",
        old="    local.scatter_add_(1, columns, -taken)\n",
        new="    local.add_(0.0)\n",
        suffers="The bucket of all other ids holds the likeliest ones, too.",
        first=("unit/tensor_parallel/test_distillation.py",),
    ),
    Fault(
        "teacher_learns_at_temperature_one",
        "megatron/core/tensor_parallel/distillation.py",
        old="    of_teacher = _spread_(_tempered(teacher, mix.temperature, vocabulary), mesh)\n",
        new="    of_teacher = _spread_(_tempered(teacher, 1.0, vocabulary), mesh)\n",
        suffers="With a temperature the student's softened distribution is compared with the teacher's sharp one.",
        first=("unit/tensor_parallel/test_distillation.py",),
    ),
)
