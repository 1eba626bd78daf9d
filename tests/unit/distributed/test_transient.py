"""Tensors that have memory only for a while."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.distributed.transient import TransientTensor


def test_what_a_module_keeps_is_readable_after_two_releases_in_a_row() -> None:
    """A unit that was gathered and released without being used left ``weight.data`` unreadable for good."""
    flat = torch.arange(4.0)
    weight = nn.Parameter(flat.view(2, 2))
    memory, kept = TransientTensor(flat, owner="a layer", parameters={"weight": weight}), weight.data
    memory.free()
    for _ in range(2):
        memory.allocate()
        memory.free()
    memory.allocate()
    flat.copy_(torch.ones(4))
    memory.open()
    assert type(kept) is torch.Tensor and kept.sum() == 4 == weight.sum()
