"""The gated delta rule in chunks of tokens, as products of matrices (Yang et al. 2024, arXiv:2412.06464).

Within a chunk the changes of all tokens solve a unit lower triangular system, for what the tokens write and for what
the state before the chunk contributes at once; states then pass from chunk to chunk. With G the sum of a chunk's log
decays up to a token and Γ = exp(G_i − G_j) for j ≤ i:

    (I + strictly lower(β·K·Kᵀ ∘ Γ)) [U | W] = [β·V | β·e^G·K]        P = lower(Q·Kᵀ ∘ Γ)
    D = U − W·S;   O = (e^G·Q)·S + P·D;   S ← e^{G_last}·S + (e^{G_last − G}·K)ᵀ·D
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from megatron.core.ops.delta_rule.request import (
    DeltaInputs,
    DeltaOptions,
    first_state,
    unit_rows,
    wide_type,
)
from megatron.core.ops.documents import numbered


def apply(inputs: DeltaInputs, options: DeltaOptions, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Results ``[b, l, h, dv]`` in the type of ``v``, and the state ``[b, h, dk, dv]`` after the last token.

    For the backward pass it keeps its inputs and the state before each chunk; the rest is computed again.
    """
    runs = None if inputs.document_ids is None else numbered(inputs.document_ids)
    return _Chunked.apply(*inputs.tensors, first_state(inputs, initial_state), runs, options)  # type: ignore[no-untyped-call, no-any-return]


class _Terms(NamedTuple):
    """The matrices above for each of ``n`` chunks of C tokens; ``B`` = batch times heads.

    ``u`` [n, B, C, dv]; ``w``, ``queries`` e^G·Q and ``keys`` e^{G_last − G}·K [n, B, C, dk]; ``scores`` P
    [n, B, C, C]; ``decay`` e^{G_last} [n, B, 1, 1]. Where tokens are of another document they are zero.
    """

    u: Tensor
    w: Tensor
    queries: Tensor
    scores: Tensor
    keys: Tensor
    decay: Tensor


class _Chunked(torch.autograd.Function):
    """Only changes and states are computed chunk by chunk, everything else for all chunks at once.

    Backward, with dS the gradient of the state after a chunk: dD = Pᵀ·dO + keys·dS, and the state before it has the
    gradient queriesᵀ·dO − Wᵀ·dD + e^{G_last}·dS. Gradients of the terms are products of these with changes and states;
    those of the inputs follow from computing the terms again.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        runs: Tensor | None,
        options: DeltaOptions,
    ) -> tuple[Tensor, Tensor]:
        terms = _terms(DeltaInputs(q, k, v, log_decay, beta), runs, options)
        before, changes, final = [], [], state.flatten(0, 1)
        for u, w, keys, decay in zip(terms.u, terms.w, terms.keys, terms.decay):
            before.append(final)
            changes.append(torch.baddbmm(u, w, final, alpha=-1))
            final = torch.baddbmm(decay * final, keys.mT, changes[-1])
        states = torch.stack(before)
        out = torch.matmul(terms.scores, torch.stack(changes)).add_(torch.matmul(terms.queries, states))
        ctx.save_for_backward(q, k, v, log_decay, beta, states, runs)
        ctx.options = options
        return _by_token(out, v).to(v.dtype), final.view(state.shape)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        *given, states, runs = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in given]
        with torch.enable_grad():
            differentiable = _terms(DeltaInputs(*leaves), runs, ctx.options)
        terms = _Terms(*(x.detach() for x in differentiable))
        size = terms.u.shape[2]
        grad = _by_chunk(grad.to(states.dtype), size).flatten(1, 2)
        grad_changes, grad_states = torch.matmul(terms.scores.mT, grad), torch.matmul(terms.queries.mT, grad)
        after = torch.empty_like(states)
        grad_before = grad_state.flatten(0, 1)
        for n in reversed(range(len(states))):
            after[n] = grad_before
            grad_changes[n].baddbmm_(terms.keys[n], grad_before)
            passed = torch.baddbmm(grad_states[n], terms.w[n].mT, grad_changes[n], alpha=-1)
            grad_before = passed.addcmul_(terms.decay[n], grad_before)
        changes = terms.u - torch.matmul(terms.w, states)
        of_terms = _Terms(
            u=grad_changes,
            w=torch.matmul(grad_changes, states.mT).neg_(),
            queries=torch.matmul(grad, states.mT),
            scores=torch.matmul(grad, changes.mT),
            keys=torch.matmul(changes, after.mT),
            decay=(states * after).sum((-2, -1), keepdim=True),
        )
        found = torch.autograd.grad(differentiable, leaves, of_terms)
        return *found, grad_before.view_as(grad_state), None, None


def _terms(inputs: DeltaInputs, runs: Tensor | None, options: DeltaOptions) -> _Terms:
    v = inputs.v
    size, wide, heads_of_key = min(options.chunk_size, v.shape[1]), wide_type(v), v.shape[2] // inputs.k.shape[2]
    queries, keys = (
        _by_chunk(x, size).unsqueeze(3) for x in unit_rows(inputs.q, inputs.k, options)
    )  # [n, b, g, 1, C, dk]
    values, steps, rates = (
        _by_chunk(x.to(wide), size).unflatten(2, (-1, heads_of_key))  # type: ignore[no-untyped-call]
        for x in (v, inputs.log_decay.unsqueeze(-1), inputs.beta.unsqueeze(-1))
    )  # [n, b, g, r, C, dv or 1]
    total = steps.cumsum(-2)
    last = total[..., -1:, :]
    is_earlier = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    from_state, to_state, decay = total.exp(), (last - total).exp(), last.exp()
    if runs is not None:
        of_tokens, before = _runs_by_chunk(runs, size)
        is_earlier = is_earlier & (of_tokens == of_tokens.mT)
        from_state = from_state.masked_fill(of_tokens != before, 0.0)
        to_state = to_state.masked_fill(of_tokens != of_tokens[..., -1:, :], 0.0)
        decay = decay.masked_fill(of_tokens[..., -1:, :] != before, 0.0)
    between = (total - total.mT).masked_fill(~is_earlier, -torch.inf).exp()  # masked first: others could overflow
    mixed = (torch.matmul(keys, keys.mT) * between * rates).tril(-1)
    right = torch.cat((rates * values, rates * from_state * keys), -1)
    solved = torch.linalg.solve_triangular(mixed, right, upper=False, unitriangular=True)
    u, w = torch.split(solved, [values.shape[-1], keys.shape[-1]], dim=-1)
    scores = torch.matmul(queries, keys.mT) * between
    return _Terms(*(x.flatten(1, 3) for x in (u, w, from_state * queries, scores, to_state * keys, decay)))


def _runs_by_chunk(runs: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Documents of the tokens of each chunk, [n, b, 1, 1, C, 1], padding being of the last, and that of the token
    before the chunk, [n, b, 1, 1, 1, 1].
    """
    runs = torch.cat((runs, runs[:, -1:].expand(-1, -runs.shape[1] % size)), 1)
    of_tokens = _by_chunk(runs[:, :, None, None], size).unsqueeze(3)
    ends = of_tokens[..., -1:, :]
    return of_tokens, torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))


def _by_chunk(x: Tensor, size: int) -> Tensor:
    """``[b, l, heads, d]`` to ``[n, b, heads, size, d]``, with zeros in place of tokens that are missing."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).permute(1, 0, 3, 2, 4)


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """The inverse, ``[n, b·heads, size, d]`` to the shape of ``like``."""
    x = x.view(x.shape[0], like.shape[0], -1, *x.shape[2:]).permute(1, 0, 3, 2, 4)
    return x.flatten(1, 2)[:, : like.shape[1]]
