"""Attention over some of the keys, to be merged with attention over the others: what context parallelism is made of.

Results are merged by ``OnlineSoftmax``. The gradient needs of the other parts only the merged result (Dao et al. 2022,
arXiv:2205.14135), so parts can be computed wherever their keys are.
"""

from __future__ import annotations

from torch import Tensor

from megatron.core.ops.attention.registry import LayerBackend, choice_for
from megatron.core.ops.attention.request import AttentionOptions, Gradients, PartialResult


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, backend: str | LayerBackend = "auto"
) -> PartialResult:
    """softmax(q·kᵀ·scale)·v over just these keys, without autograd; shapes as in ``attention``.

    Causal calls have as many queries as keys. The caller splits documents: ``options.document_ids`` is None.
    """
    return choice_for(q, k, options, backend, partial=True).backend.attend_partly(q, k, v, options)


def partial_attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: PartialResult,
    options: AttentionOptions,
    *,
    backend: str | LayerBackend = "auto",
) -> Gradients:
    """What these keys contribute to the gradients, for ``grad`` [sq, b, n, d] of the result over *all* keys, ``whole``.

    ``options.generator`` must have the state that it had at the call of ``partial_attention`` that is differentiated.
    """
    chosen = choice_for(q, k, options, backend, partial=True)
    return chosen.backend.gradients_of_part(grad, q, k, v, whole, options)
