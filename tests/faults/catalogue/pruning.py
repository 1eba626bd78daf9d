"""Faults in pruning."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "gates_of_other_neurons",
        "megatron/core/models/gpt/pruning/units.py",
        old="return torch.cat([kept + part * count for part in range(parts)])",
        new="return torch.cat([kept + part * len(kept) for part in range(parts)])",
        suffers="The gates of a smaller model belong to other neurons, and its loss is that of a model never trained.",
        first=("unit/conversion/test_pruning.py::zero",),
    ),
    Fault(
        "keys_of_other_heads",
        "megatron/core/models/gpt/pruning/units.py",
        old="group * size + per_group * query + torch.arange(2 * width)]",
        new="group * size + torch.arange(2 * width)]",
        suffers="The heads of a smaller model read rows of queries as keys and values.",
        first=("unit/conversion/test_pruning.py::zero",),
    ),
    Fault(
        "importance_of_a_rank_s_texts",
        "megatron/core/models/gpt/pruning/importance.py",
        old="for table in (self.influence, *self._of_channels, *self._of_units.values()):",
        new="for table in (self.influence, *self._of_channels):",
        suffers="On two ranks a model loses other neurons than on one, chosen by half of the texts.",
        first=("unit/conversion/test_pruning.py::layout",),
    ),
)
