"""Faults in low-rank adapters and in checkpoints that refer to a base."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "stored_zero_points_forgotten",
        "megatron/core/quantization/stored.py",
        old="        if self.zeros is not None:\n            found.sub_(",
        new="        if False:\n            found.sub_(",
        suffers="Adapters learn beside another base than the one that their quantized checkpoint holds.",
        first=("parallel/test_quantized_base.py::same_beside_codes",),
    ),
    Fault(
        "prefix_of_another_adapter",
        "megatron/core/inference/request.py",
        old='return str(self.adapter).encode() if self.adapter else b""',
        new='return b""',
        suffers="A text goes on from keys and values that another adapter has computed for an equal prompt.",
        first=("parallel/test_several_adapters.py::own_adapter",),
    ),
    Fault(
        "adapter_of_the_first_text",
        "megatron/core/inference/runner.py",
        old="                places.setdefault(row.adapter, []).extend(range(first, first + len(row.tokens)))\n",
        new="                places.setdefault(row.adapter, []).extend(range(len(row.tokens)))\n",
        suffers="In a batch, what an adapter adds goes to the tokens of the first text.",
        first=("parallel/test_several_adapters.py::own_adapter",),
    ),
    Fault(
        "peft_ranks_on_top_of_each_other",
        "megatron/core/conversion/peft/writing.py",
        old="        first += rank\n",
        new="        first += 0\n",
        suffers="In an exported PEFT folder, keys of a fused matrix have the adapter of queries.",
        first=("unit/conversion/test_peft.py::peft_computes",),
    ),
    Fault(
        "peft_alpha_pattern_skipped",
        "megatron/core/conversion/peft/reading.py",
        old="b * (settings.scale_of(module) / settings.scale)",
        new="b * 1.0",
        suffers="Modules of a PEFT folder whose alpha or rank differs add another amount than in peft.",
        first=("unit/conversion/test_peft.py::mean_the_same",),
    ),
    Fault(
        "adapter_sees_a_part_of_the_sequence",
        "megatron/core/tensor_parallel/low_rank.py",
        old="            narrow = enter(narrow, context)\n",
        new="            narrow = narrow + 0\n",
        suffers="With tensor parallelism an adapter of a column-split layer has a part of its gradient.",
        first=("equivalence/test_lora.py",),
    ),
    Fault(
        "keys_in_the_place_of_queries",
        "megatron/core/tensor_parallel/low_rank.py",
        old="else by_matrix.argsort()",
        new="else by_matrix",
        suffers="Adapters of queries, keys and values add to each other's rows where heads are grouped.",
        first=("unit/training/checkpoints/test_adapters.py::merged",),
    ),
    Fault(
        "merged_without_the_scale",
        "megatron/core/conversion/adapters.py",
        old="delta = scale * (b.make()",
        new="delta = (b.make()",
        suffers="An exported model has learned another amount than the adapter.",
        first=("unit/training/checkpoints/test_adapters.py::merged",),
    ),
    Fault(
        "experts_adapter_reads_unweighted_rows",
        "megatron/core/moe/experts.py",
        old="second.lora.add(self._activation(inner) * scales, groups)",
        new="second.lora.add(self._activation(inner), groups)",
        suffers="What an adapter of an expert adds has no routing weight.",
        first=("unit/training/checkpoints/test_adapters.py::merged",),
    ),
    Fault(
        "another_base_is_taken",
        "megatron/core/checkpointing/base.py",
        old="    if found != base.fingerprint:\n",
        new="    if not found:\n",
        suffers="An adapter is loaded on other weights than those beside which it was trained.",
        first=("unit/training/checkpoints/test_adapters.py::base",),
    ),
    Fault(
        "replaced_base_is_referred_to",
        "megatron/training/checkpoints/loading.py",
        old=" or (save is not None and path_of(save) == base.parent)",
        new="",
        suffers="Newer checkpoints in its folder replace the base that all of them refer to.",
        first=("unit/training/checkpoints/test_adapters.py::refer",),
    ),
    Fault(
        "frozen_head_beside_adapters",
        "megatron/planning/adapters.py",
        old="if name not in run.optimizer.trained})",
        new="if not name})",
        suffers="A new head of random weights is never trained beside adapters.",
        first=("unit/tasks/test_fine_tuning.py",),
    ),
)
