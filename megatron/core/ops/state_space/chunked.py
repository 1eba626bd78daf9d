"""The scan in plain matrix products over chunks of the sequence (Dao and Gu 2024, arXiv:2405.21060, section 6).

States at the chunks' borders are kept; scores inside a chunk are computed again in the backward pass. A few chunks are
computed at a time, so that their scores stay in a processor's cache and memory grows with the length alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.ops.documents import numbered

# Scores computed at a time: those of a few chunks stay in a CPU's cache, a GPU wants many.
_SCORES = {"cpu": 1 << 19}
_SCORES_ELSEWHERE = 1 << 26


def supports(device: torch.device, dtype: torch.dtype) -> str | None:
    """None: any scan."""
    return None


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None,
    document_ids: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The result of ``state_space.scan``, by chunks of ``chunk_size`` tokens."""
    runs = None if document_ids is None else numbered(document_ids)
    return _Scan.apply(x, dt, a, B, C, initial_state, runs, chunk_size)  # type: ignore[no-untyped-call, no-any-return]


class _Scan(torch.autograd.Function):
    """In a chunk, with α = cumsum(dt·a), u = dt·x, scores M = (C·Bᵀ)∘L, L = exp(α_i - α_j) for j ≤ i, and S the state
    before it:  y = M·u + exp(α)·C·S,  S' = exp(α_Q)·S + Σ_j exp(α_Q - α_j)·u_j ⊗ B_j.

    Backward, with K = (dy·uᵀ)∘L, summed over the heads of a group to dG, and P = K∘(C·Bᵀ):
    du = Mᵀ·dy + exp(α_Q - α_j)·dS'·B;  dC = dG·B + exp(α)·dy·S;  dB = dGᵀ·C + exp(α_Q - α_j)·u·dS';
    dS = exp(α_Q)·dS' + exp(α)·dy ⊗ C;  dα = rows of P - columns of P, and what the other exponentials add to it.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        B: Tensor,
        C: Tensor,
        initial_state: Tensor | None,
        runs: Tensor | None,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        batch, length, heads, width = x.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        states = x.new_empty(batch, -(-length // chunk_size), heads, width, B.shape[3], dtype=wide)
        if initial_state is None:
            state = states.new_zeros(batch, heads, width, B.shape[3])
        else:
            state = initial_state.to(wide)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for rows, chunks in _blocks(x, chunk_size):
            block = _Block.of(rows, chunks, x, dt, a, B, C, runs)
            added = block.added()
            for chunk in range(added.shape[1]):
                states[:, chunks.start + chunk] = state
                state = torch.addcmul(added[:, chunk], block.decay[:, chunk], state)
            block.put(block.outputs(states[:, chunks]), y)
        ctx.save_for_backward(x, dt, a, B, C, runs, states)
        ctx.chunk_size, ctx.initial_type = chunk_size, None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return y, state

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, a, B, C, runs, states = ctx.saved_tensors
        grads = _Gradients(*(torch.empty(each.shape, dtype=each.dtype, device=x.device) for each in (x, dt, B, C)))
        grad_a = states.new_zeros(a.shape)
        state_gradient = torch.zeros_like(states[:, 0]) if grad_state is None else grad_state.to(states.dtype)
        upstream = torch.zeros_like(x) if grad is None else grad
        for rows, chunks in reversed(list(_blocks(x, ctx.chunk_size))):
            block = _Block.of(rows, chunks, x, dt, a, B, C, runs)
            state_gradient = block.backward(upstream, states[:, chunks], state_gradient, grads, grad_a)
        grad_initial = None if ctx.initial_type is None else state_gradient.to(ctx.initial_type)
        return grads.x, grads.dt, grad_a.to(a.dtype), grads.B, grads.C, grad_initial, None, None


@dataclass(frozen=True)
class _Gradients:
    """Gradients of the whole sequence, filled block by block."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor


def _blocks(x: Tensor, chunk_size: int) -> Iterator[tuple[slice, slice]]:
    """Tokens, and chunks, that are computed at a time. The last block is a chunk of the tokens that are left."""
    batch, length, heads, _ = x.shape
    whole = length // chunk_size
    scores = batch * heads * chunk_size**2
    size = max(_SCORES.get(x.device.type, _SCORES_ELSEWHERE) // scores, 1)
    for first in range(0, whole, size):
        last = min(first + size, whole)
        yield slice(first * chunk_size, last * chunk_size), slice(first, last)
    if length % chunk_size:
        yield slice(whole * chunk_size, length), slice(whole, whole + 1)


def _chunks(x: Tensor, count: int) -> Tensor:
    """[b, c·q, ...] -> [b, c, q, ...], a view."""
    return x.view(x.shape[0], count, -1, *x.shape[2:])


@dataclass(frozen=True)
class _Block:
    """A few chunks of ``q`` tokens, heads first and tokens last, so that products need no copies.

    ``x`` and ``u`` = dt·x [b, c, h, p, q]; ``dt`` [b, c, h, 1, q]; ``B`` and ``C`` [b, c, g, q, n]; ``alpha``: sums of
    dt·a in the chunk [b, c, h, q]; ``seen`` [q, q] or [b, c, 1, q, q]: whether token i may see token j.
    ``entering``, ``leaving`` [b, c, h, 1, q]: what is left of the state before the chunk at each token, and of each
    token at the chunk's end; ``decay`` [b, c, h, 1, 1]: of the whole chunk.
    """

    rows: slice
    a: Tensor
    x: Tensor
    u: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    alpha: Tensor
    seen: Tensor
    entering: Tensor
    leaving: Tensor

    @classmethod
    def of(
        cls,
        rows: slice,
        chunks: slice,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        B: Tensor,
        C: Tensor,
        runs: Tensor | None,
    ) -> _Block:
        """The ``rows`` of a sequence, which are its ``chunks``. ``runs`` [b, l]: documents numbered from 0."""
        count, narrow = chunks.stop - chunks.start, x.dtype
        wide = torch.promote_types(narrow, torch.float32)
        heads_first = _chunks(x[:, rows], count).permute(0, 1, 3, 4, 2).contiguous()
        steps = _chunks(dt[:, rows], count).transpose(2, 3).to(wide, memory_format=torch.contiguous_format)
        alpha = (steps * a.to(wide)[:, None]).cumsum(dim=-1)
        seen = torch.ones(alpha.shape[-1], alpha.shape[-1], dtype=torch.bool, device=x.device).tril_()
        entering, leaving = alpha.exp(), (alpha[..., -1:] - alpha).exp_()
        if runs is not None:
            own = _chunks(runs[:, rows], count)  # [b, c, q]
            before = _chunks(torch.cat((runs[:, :1], runs[:, :-1]), dim=1)[:, rows], count)[..., :1]
            entering = entering.masked_fill_((own != before).unsqueeze(2), 0.0)
            leaving = leaving.masked_fill_((own != own[..., -1:]).unsqueeze(2), 0.0)
            seen = (seen & (own.unsqueeze(-1) == own.unsqueeze(-2))).unsqueeze(2)
        return cls(
            rows=rows,
            a=a.to(wide),
            x=heads_first,
            u=(heads_first * steps.unsqueeze(3)).to(narrow),
            dt=steps.unsqueeze(3),
            B=_chunks(B[:, rows], count).transpose(2, 3).contiguous(),
            C=_chunks(C[:, rows], count).transpose(2, 3).contiguous(),
            alpha=alpha,
            seen=seen,
            entering=entering.unsqueeze(3),
            leaving=leaving.unsqueeze(3),
        )

    @property
    def decay(self) -> Tensor:
        """What is left of the state before each chunk at its end, [b, c, h, 1, 1]."""
        return self.entering[..., -1:]

    def added(self) -> Tensor:
        """What each chunk adds to the state, [b, c, h, p, n], in fp32 or wider."""
        found = torch.matmul(self._grouped((self.u * self.leaving).to(self.x.dtype)), self.B)
        return found.to(self.alpha.dtype).view(*self.x.shape[:4], -1)

    def outputs(self, states: Tensor) -> Tensor:
        """y of the chunks with ``states`` [b, c, h, p, n] before them, [b, c, h, p, q]."""
        from_past = self._times_group(states, self.C) * self.entering
        products, decays = self._scores()
        scores = self._grouped_scores(decays).mul_(products).to(self.x.dtype).view(decays.shape)
        return from_past.add_(torch.matmul(self.u, scores.mT))

    def backward(self, grad: Tensor, states: Tensor, after: Tensor, grads: _Gradients, grad_a: Tensor) -> Tensor:
        """Write the gradients of these tokens, and return that of the state before them.

        ``grad``: of y of the whole sequence; ``after`` [b, h, p, n]: of the state after the last of these chunks;
        ``grad_a``: it is added to.
        """
        narrow, count = self.x.dtype, states.shape[1]
        upstream = _chunks(grad[:, self.rows], count).permute(0, 1, 3, 4, 2).contiguous()
        entered = (upstream * self.entering).to(narrow)
        before = torch.matmul(self._grouped(entered), self.C).to(states.dtype).view(states.shape)
        later = torch.empty_like(states)
        for chunk in reversed(range(count)):
            later[:, chunk] = after
            after = torch.addcmul(before[:, chunk], self.decay[:, chunk], after)
        from_later = self._times_group(later, self.B) * self.leaving  # [b, c, h, p, q]

        products, decays = self._scores()
        grad_scores = torch.matmul(upstream.mT, self.u).to(decays.dtype).mul_(decays)
        scores = self._grouped_scores(decays).mul_(products).view(decays.shape)
        grad_u = from_later + torch.matmul(upstream, scores.to(narrow))
        by_group = self._grouped_scores(grad_scores)
        grad_products = by_group.sum(3).masked_fill_(~self.seen, 0.0).to(narrow)
        ratios = by_group.mul_(products).view(decays.shape)  # the gradients of the logarithms of the decays

        left, given = self._grouped(entered), self._grouped((self.u * self.leaving).to(narrow))
        past, future = self._states(states), self._states(later)
        grad_C = torch.matmul(grad_products, self.B).add_(torch.matmul(left.mT, past))
        grad_B = torch.matmul(grad_products.mT, self.C).add_(torch.matmul(given.mT, future))

        grad_alpha = ratios.sum(-1).sub_(ratios.sum(-2))
        grad_alpha.add_((self._times_group(states, self.C) * entered).sum(3))
        sent = (from_later * self.u).sum(3)
        grad_alpha.sub_(sent)
        grad_alpha[..., -1] += sent.sum(-1) + (later * states).sum((3, 4)) * self.decay[..., 0, 0]
        grad_steps = grad_alpha.flip(-1).cumsum(-1).flip(-1)  # of dt·a
        grad_a.add_((grad_steps * self.dt.squeeze(3)).sum((0, 1, 3)))
        grad_dt = (grad_u * self.x).sum(3).addcmul_(grad_steps, self.a[:, None])
        self.put(grad_u * self.dt, grads.x)
        for found, whole in ((grad_dt.transpose(2, 3), grads.dt), (grad_B.transpose(2, 3), grads.B)):
            _chunks(whole[:, self.rows], count).copy_(found)
        _chunks(grads.C[:, self.rows], count).copy_(grad_C.transpose(2, 3))
        return after

    def put(self, found: Tensor, whole: Tensor) -> None:
        """Write ``found`` [b, c, h, p, q] to these tokens of ``whole`` [b, l, h, p]."""
        _chunks(whole[:, self.rows], found.shape[1]).copy_(found.permute(0, 1, 4, 2, 3))

    def _scores(self) -> tuple[Tensor, Tensor]:
        """C·Bᵀ where it is seen, [b, c, g, 1, q, q], and exp(α_i - α_j) there, [b, c, h, q, q]."""
        wide = self.alpha.dtype
        products = torch.matmul(self.C, self.B.mT).to(wide).masked_fill_(~self.seen, 0.0)
        # Above the diagonal the difference is positive: unmasked, its exponential may be infinite, and inf · 0 is NaN.
        decays = torch.sub(self.alpha.unsqueeze(-1), self.alpha.unsqueeze(-2)).clamp_(max=0.0).exp_()
        return products.unsqueeze(3), decays

    def _grouped_scores(self, scores: Tensor) -> Tensor:
        """[b, c, h, q, q] -> [b, c, g, r, q, q]."""
        return scores.view(*scores.shape[:2], self.B.shape[2], -1, *scores.shape[3:])

    def _grouped(self, x: Tensor) -> Tensor:
        """[b, c, h, p, q] -> [b, c, g, r·p, q]: the heads of a group are rows of one matrix."""
        return x.view(*x.shape[:2], self.B.shape[2], -1, x.shape[4])

    def _states(self, states: Tensor) -> Tensor:
        """[b, c, h, p, n] -> [b, c, g, r·p, n], in the type of the products."""
        return states.to(self.x.dtype).reshape(*states.shape[:2], self.B.shape[2], -1, states.shape[4])

    def _times_group(self, states: Tensor, given: Tensor) -> Tensor:
        """``states`` [b, c, h, p, n] times B or C of their group: [b, c, h, p, q], in fp32 or wider."""
        found = torch.matmul(self._states(states), given.mT)
        return found.to(self.alpha.dtype).view(self.x.shape)
