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
from megatron.core.ops.state_space.request import ScanInputs

# Bytes of scores computed at a time: those of a few chunks stay in a CPU's cache, a GPU wants many.
_SCORES = {"cpu": 1 << 19}
_SCORES_ELSEWHERE = 1 << 27


def supports(device: torch.device, dtype: torch.dtype) -> str | None:
    """Always None: it computes any scan."""
    return None


def scan(inputs: ScanInputs, initial_state: Tensor | None, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The result of ``state_space.scan``, by chunks of ``chunk_size`` tokens."""
    runs = None if inputs.document_ids is None else numbered(inputs.document_ids)
    return _Scan.apply(*inputs.tensors, initial_state, runs, chunk_size)  # type: ignore[no-untyped-call, no-any-return]


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
        inputs, y = ScanInputs(x, dt, a, B, C, runs), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for rows, chunks in _blocks(x, chunk_size):
            block = _Block.of(rows, chunks, inputs)
            added = block.added()
            for chunk in range(added.shape[1]):
                states[:, chunks.start + chunk] = state
                state = torch.addcmul(added[:, chunk], block.decay[:, chunk], state)
            block.write_outputs(states[:, chunks], y)
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
        inputs, upstream = ScanInputs(x, dt, a, B, C, runs), torch.zeros_like(x) if grad is None else grad
        for rows, chunks in reversed(list(_blocks(x, ctx.chunk_size))):
            block = _Block.of(rows, chunks, inputs)
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
    size = _chunks_at_once(x.device, batch * heads * chunk_size**2 * x.itemsize)
    for first in range(0, whole, size):
        last = min(first + size, whole)
        yield slice(first * chunk_size, last * chunk_size), slice(first, last)
    if length % chunk_size:
        yield slice(whole * chunk_size, length), slice(whole, whole + 1)


def _chunks_at_once(device: torch.device, scores: int) -> int:
    """Chunks of a block. ``scores``: bytes of those of one chunk."""
    return max(_SCORES.get(device.type, _SCORES_ELSEWHERE) // scores, 1)


def working_bytes(
    device: torch.device, shape: tuple[int, int, int, int], *, groups: int, states: int, chunk_size: int, itemsize: int
) -> int:
    """What the backward pass needs at most for one block, beside what it is given and gives. ``shape`` [b, l, h, p] of
    x, whose elements have ``itemsize`` bytes; ``groups`` and ``states``: g and n of B and C.
    """
    batch, length, heads, width = shape
    wide = max(itemsize, 4)
    narrow = itemsize if itemsize < wide else 0  # copies in the type of the products
    chunks = min(_chunks_at_once(device, batch * heads * chunk_size**2 * itemsize), max(length // chunk_size, 1))
    size = min(chunk_size, length)
    of_token = heads * (width * (5 * itemsize + 3 * wide) + size * (2 * wide + narrow) + 5 * wide)
    of_token += groups * (4 * states * itemsize + size * (wide + itemsize))
    of_chunk = heads * width * (states * 2 * (wide + narrow) + max(size, states) * wide)
    return batch * (chunks * (size * of_token + of_chunk) + 2 * heads * width * states * wide)


def _chunks(x: Tensor, count: int) -> Tensor:
    """[b, c·q, ...] -> [b, c, q, ...], a view."""
    return x.view(x.shape[0], count, -1, *x.shape[2:])


@dataclass(frozen=True)
class _Block:
    """A few chunks of ``q`` tokens. Products of each head have its tokens as rows, [b, c, h, q, p]; products that the
    ``r`` heads of a group share have them side by side, [b, c, g, q, r, p].

    ``x`` and ``u`` = dt·x [b, c, h, q, p]; ``dt`` [b, c, h, q]; ``B`` and ``C`` [b, c, g, q, n]; ``alpha``: sums of
    dt·a in the chunk [b, c, h, q]; ``seen`` [q, q] or [b, c, 1, q, q]: whether token i may see token j. ``entering``,
    ``leaving`` [b, c, h, q]: what is left of the state before the chunk at each token, and of each token at the chunk's
    end.
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
    def of(cls, rows: slice, chunks: slice, inputs: ScanInputs) -> _Block:
        """The ``rows`` of a sequence, which are its ``chunks``. Documents are numbered by their runs."""
        x, dt, a, B, C = inputs.tensors
        runs = inputs.document_ids
        count, wide = chunks.stop - chunks.start, torch.promote_types(x.dtype, torch.float32)
        by_head = _chunks(x[:, rows], count).transpose(2, 3).contiguous()
        steps = _chunks(dt[:, rows], count).transpose(2, 3).to(wide).contiguous()
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
            x=by_head,
            u=(by_head * steps.unsqueeze(4)).to(x.dtype),
            dt=steps,
            B=_chunks(B[:, rows], count).transpose(2, 3).contiguous(),
            C=_chunks(C[:, rows], count).transpose(2, 3).contiguous(),
            alpha=alpha,
            seen=seen,
            entering=entering,
            leaving=leaving,
        )

    @property
    def decay(self) -> Tensor:
        """What is left of the state before each chunk at its end, [b, c, h, 1, 1]."""
        return self.entering[..., -1:, None]

    def added(self) -> Tensor:
        """What each chunk adds to the state, [b, c, h, p, n], in fp32 or wider."""
        return self._transposed_times(self._side_by_side(self.u, self.leaving), self.B)

    def write_outputs(self, states: Tensor, y: Tensor) -> None:
        """Write y of these tokens to that of the whole sequence. ``states`` [b, c, h, p, n]: before each chunk."""
        products, decays = self._scores()
        scores = self._by_group(decays).mul_(products).view(decays.shape).to(self.x.dtype)
        self._add(torch.matmul(scores, self.u), self._times_states(self.C, states), self.entering, y)

    def backward(self, grad: Tensor, states: Tensor, after: Tensor, grads: _Gradients, grad_a: Tensor) -> Tensor:
        """Write the gradients of these tokens, and return that of the state before them.

        ``grad``: of y of the whole sequence; ``after`` [b, h, p, n]: of the state after the last of these chunks;
        ``grad_a``: it is added to.
        """
        narrow, count = self.x.dtype, states.shape[1]
        upstream = _chunks(grad[:, self.rows], count).transpose(2, 3).contiguous()
        entered, left = self._side_by_side(upstream, self.entering), self._side_by_side(self.u, self.leaving)
        before, later = self._transposed_times(entered, self.C), torch.empty_like(states)
        for chunk in reversed(range(count)):
            later[:, chunk] = after
            after = torch.addcmul(before[:, chunk], self.decay[:, chunk], after)
        received, sent = self._times_states(self.C, states), self._times_states(self.B, later)

        products, decays = self._scores()
        grad_scores = torch.matmul(upstream, self.u.mT).to(decays.dtype).mul_(decays)
        scores = self._by_group(decays).mul_(products).view(decays.shape).to(narrow)
        grad_u = torch.matmul(scores.mT, upstream).to(decays.dtype)
        self._by_group(grad_u).add_(sent.transpose(3, 4) * self._by_group(self.leaving).unsqueeze(5))
        by_group = self._by_group(grad_scores)
        grad_products = by_group.sum(3).masked_fill_(~self.seen, 0.0).to(narrow)
        ratios = by_group.mul_(products).view(decays.shape)  # the gradients of the logarithms of the decays

        past, future = self._states(states), self._states(later)
        grad_C = torch.matmul(grad_products, self.B).add_(torch.matmul(entered.flatten(4), past))
        grad_B = torch.matmul(grad_products.mT, self.C).add_(torch.matmul(left.flatten(4), future))

        # A decay over no token at all is 1 whatever the steps are: as a part of sums it would only leave its rounding.
        ratios.diagonal(dim1=-2, dim2=-1).zero_()
        grad_alpha = ratios.sum(-1).sub_(ratios.sum(-2))
        self._by_group(grad_alpha).add_((received * entered).sum(5).transpose(3, 4))
        grad_alpha[..., -1] += (later * states).sum((3, 4)) * self.decay[..., 0, 0]
        grad_steps = grad_alpha.flip(-1).cumsum(-1).flip(-1)  # of dt·a: all sums that it is a part of
        self._by_group(grad_steps)[..., 1:] += (sent * left).sum(5).transpose(3, 4).cumsum(-1)[..., :-1]
        grad_a.add_((grad_steps * self.dt).sum((0, 1, 3)))
        grad_dt = (grad_u * self.x).sum(4).addcmul_(grad_steps, self.a[:, None])
        grad_x = grad_u.mul_(self.dt.unsqueeze(4))
        for found, whole in ((grad_x, grads.x), (grad_dt, grads.dt), (grad_B, grads.B), (grad_C, grads.C)):
            _chunks(whole[:, self.rows], count).copy_(found.transpose(2, 3))
        return after

    def _scores(self) -> tuple[Tensor, Tensor]:
        """C·Bᵀ where it is seen, [b, c, g, 1, q, q], and exp(α_i - α_j) there, [b, c, h, q, q]."""
        products = torch.matmul(self.C, self.B.mT).to(self.alpha.dtype).masked_fill_(~self.seen, 0.0)
        # Above the diagonal the difference is positive: unmasked, its exponential may be infinite, and inf · 0 is NaN.
        decays = torch.sub(self.alpha.unsqueeze(-1), self.alpha.unsqueeze(-2)).clamp_(max=0.0).exp_()
        return products.unsqueeze(3), decays

    def _by_group(self, x: Tensor) -> Tensor:
        """[b, c, h, ...] -> [b, c, g, r, ...], a view."""
        return x.view(*x.shape[:2], self.B.shape[2], -1, *x.shape[3:])

    def _side_by_side(self, x: Tensor, factor: Tensor) -> Tensor:
        """``x`` [b, c, h, q, p] times ``factor`` [b, c, h, q] for products of its groups: [b, c, g, q, r, p]."""
        given, factors = self._by_group(x).transpose(3, 4), self._by_group(factor).transpose(3, 4).unsqueeze(5)
        return torch.mul(given, factors, out=x.new_empty(given.shape))

    def _transposed_times(self, x: Tensor, given: Tensor) -> Tensor:
        """``x`` [b, c, g, q, r, p], transposed, times B or C of its group: states [b, c, h, p, n]."""
        found = torch.matmul(x.flatten(4).mT, given).to(self.alpha.dtype)
        return found.view(*self.x.shape[:3], self.x.shape[4], -1)

    def _times_states(self, given: Tensor, states: Tensor) -> Tensor:
        """B or C of each group times ``states`` [b, c, h, p, n] of its heads: [b, c, g, q, r, p]."""
        found = torch.matmul(given, self._states(states).mT).to(self.alpha.dtype)
        return found.view(*found.shape[:4], -1, states.shape[3])

    def _states(self, states: Tensor) -> Tensor:
        """[b, c, h, p, n] -> [b, c, g, r·p, n], in the type of the products."""
        return states.to(self.x.dtype).reshape(*states.shape[:2], self.B.shape[2], -1, states.shape[4])

    def _add(self, inside: Tensor, past: Tensor, factor: Tensor, whole: Tensor) -> None:
        """Write ``inside`` [b, c, h, q, p] + ``past`` [b, c, g, q, r, p] · ``factor`` [b, c, h, q] to these tokens."""
        target = _chunks(whole[:, self.rows], inside.shape[1])  # [b, c, q, h, p]
        target = target.view(*target.shape[:3], past.shape[2], -1, target.shape[4]).transpose(2, 3)
        factors = self._by_group(factor).transpose(3, 4).unsqueeze(5)
        given = self._by_group(inside).transpose(3, 4).to(past.dtype)
        if target.dtype == past.dtype:
            torch.addcmul(given, past, factors, out=target)
        else:
            target.copy_(torch.addcmul(given, past, factors))
