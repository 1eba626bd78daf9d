"""Arguments of the gated delta rule, which all its implementations share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

L2_EPS = 1e-6  # added to the sum of squares of a query or a key


@dataclass(frozen=True, eq=False)
class DeltaInputs:
    """A batch of sequences for the gated delta rule, with ``v``'s heads in groups of ``h / g`` that share a key head.

    ``q``, ``k`` [b, l, g, dk]; ``v`` [b, l, h, dv]; ``log_decay`` [b, l, h], at most 0; ``beta`` [b, l, h], the rate of
    writing. ``document_ids`` [b, l]: the state is zero at the start of each document after the first, which goes on
    with the initial state.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    document_ids: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Everything that has a gradient, in the order above."""
        return self.q, self.k, self.v, self.log_decay, self.beta

    def token(self, number: int) -> DeltaInputs:
        """One token of each sequence, of which all tensors lack their dim ``l``."""
        return DeltaInputs(*(x[:, number] for x in self.tensors))


@dataclass(frozen=True)
class DeltaOptions:
    """Constants of a layer. ``scale``: of queries. ``normalizes``: whether queries and keys are divided by their length
    first. ``chunk_size``: tokens of a chunk of the chunked form, which changes its speed only.
    """

    scale: float = 1.0
    normalizes: bool = False
    chunk_size: int = 64


def wide_type(x: Tensor) -> torch.dtype:
    """The type of decays, states and products: fp32, or fp64 for inputs in fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def unit_rows(q: Tensor, k: Tensor, options: DeltaOptions) -> tuple[Tensor, Tensor]:
    """Queries and keys in the wide type, of length 1 where the layer normalizes them, and queries scaled."""
    q, k = q.to(wide_type(q)), k.to(wide_type(k))
    if options.normalizes:
        q, k = (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
    return q * options.scale, k


def first_state(inputs: DeltaInputs, initial_state: Tensor | None) -> Tensor:
    """The state [b, h, dk, dv] before the first token, zero unless given."""
    v, wide = inputs.v, wide_type(inputs.v)
    if initial_state is not None:
        return initial_state.to(wide)
    return v.new_zeros(v.shape[0], v.shape[2], inputs.k.shape[3], v.shape[3], dtype=wide)
