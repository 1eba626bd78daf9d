"""The gated delta rule of a slice of a sequence whose state before it isn't known yet."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.delta_rule.backends import Backend
from megatron.core.ops.delta_rule.request import DeltaInputs, DeltaOptions, wide_type


@dataclass(frozen=True, eq=False)
class SliceMap:
    """Everything a slice computes is affine in the state S before it: after it, the state is ``transition·S + added``.

    ``outputs`` [b, l, h, dv], of a zero state; ``reads`` [b, l, h, dk], whose product with S is added to them;
    ``transition`` [b, h, dk, dk] and ``added`` [b, h, dk, dv], in fp32 or wider.
    """

    outputs: Tensor
    reads: Tensor
    transition: Tensor
    added: Tensor

    def outputs_after(self, state: Tensor) -> Tensor:
        """Results ``[b, l, h, dv]`` of the slice where the state before it is ``state`` [b, h, dk, dv]."""
        reads = self.reads.to(state.dtype).transpose(1, 2)
        return self.outputs + torch.matmul(reads, state).transpose(1, 2).to(self.outputs.dtype)


def slice_map(
    inputs: DeltaInputs, options: DeltaOptions, backend: Backend, *, continues: Tensor | None = None
) -> SliceMap:
    """What ``inputs`` makes of any state, in one pass: the identity beside a zero state, with values of zero.

    ``continues`` [b]: whether the first token is of the document before the slice; others read nothing of it.
    """
    batch, _, heads, width = inputs.v.shape
    key_width = inputs.k.shape[3]
    values = F.pad(inputs.v, (0, key_width))
    identity = torch.eye(key_width, dtype=wide_type(inputs.v), device=inputs.v.device)
    state = F.pad(identity, (width, 0)).expand(batch, heads, -1, -1)
    if continues is not None:
        state = state * continues[:, None, None, None]
    out, final = backend.apply(dataclasses.replace(inputs, v=values), options, state)
    outputs, reads = torch.split(out, [width, key_width], dim=-1)
    added, transition = torch.split(final, [width, key_width], dim=-1)
    return SliceMap(outputs, reads, transition, added)
