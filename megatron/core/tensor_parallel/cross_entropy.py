"""The vocabulary loss without a tensor of all logits: rows in chunks, whose gradients the forward pass computes.

Every rank holds some columns of the vocabulary and computes the softmax over those. The logarithms of the ranks' sums
give one factor a row that makes it the softmax over all columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.ops.compiled import Compiled
from megatron.core.ops.matmul import in_fastest_type, times_transposed, transposed_times
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.mesh import Mesh

# Bytes of logits at a time: on a CPU what fits its caches, elsewhere what keeps the device busy.
_CPU_CHUNK, DEVICE_CHUNK = 1 << 24, 1 << 27


@dataclass(frozen=True, kw_only=True)
class VocabularyPart:
    """This rank's part of the vocabulary: ``valid`` ids from ``start``; further rows of the weight are padding."""

    mesh: Mesh
    start: int
    valid: int


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    *,
    vocabulary: VocabularyPart,
    bias: Tensor | None = None,
    cap: float | None = None,
    z_loss: float = 0.0,
    backward_scale: float = 1.0,
) -> Tensor:
    """Sum over rows of ``loss_weights`` times the cross entropy of softmax(hidden·weightᵀ + bias), as a scalar.

    With a soft ``cap`` logits x are cap·tanh(x/cap), in fp32 or wider (Gemma 2, arXiv:2408.00118). Gradients are those
    of the cross entropy plus ``z_loss`` times the square of the softmax's log Z (PaLM, arXiv:2204.02311), which keeps
    it near 0; the result is the cross entropy alone.

    ``hidden`` [N, h]; ``weight`` [v, h] and ``bias`` [v], this rank's part; ``labels`` [N], ids of the
    whole vocabulary; ``loss_weights`` [N]. Rows of ``weight`` from ``valid`` on are padding: no probability, no
    gradient. The result is fp32 (fp64 for fp64 inputs) and the same on every tensor-parallel rank.

    The forward pass computes the gradients as well, when any is needed; the backward pass multiplies them by the
    incoming gradient and can run once. The gradient of ``hidden`` is this rank's part of a sum over the
    tensor-parallel ranks.

    ``backward_scale``: the gradient of the result from which the backward pass will start. Gradients are made at that
    scale, so that a loss scale keeps the small probabilities of an fp16 chunk from vanishing before they are summed.
    """
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    return _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call, no-any-return]
        hidden, weight, bias, labels, loss_weights, vocabulary, cap, z_loss, backward_scale if needs_grad else None
    )


@torch.no_grad()
def vocab_parallel_token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocabulary: VocabularyPart,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Cross entropy of each row, [N] in fp32 (fp64 for fp64 inputs), without gradient; arguments as above."""
    losses = hidden.new_empty(hidden.shape[0], dtype=wide_type(hidden))
    for chunk in logit_chunks(hidden, weight, bias, vocabulary, cap):
        losses[chunk.rows] = softmax_(chunk.wide, labels[chunk.rows], vocabulary).losses
    return losses


@torch.no_grad()
def vocab_parallel_argmax(
    hidden: Tensor,
    weight: Tensor,
    *,
    vocabulary: VocabularyPart,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """The most probable id of each row, [N]; the lowest of several that are equal."""
    best = hidden.new_empty(hidden.shape[0], dtype=torch.int64)
    for chunk in logit_chunks(hidden, weight, bias, vocabulary, cap):
        top, index = chunk.wide.max(dim=1)
        highest = all_reduce(top.clone(), vocabulary.mesh, "tp", op="max")
        candidate = torch.where(top == highest, index + vocabulary.start, torch.iinfo(torch.int64).max)
        best[chunk.rows] = all_reduce(candidate, vocabulary.mesh, "tp", op="min")
    return best


def wide_type(x: Tensor) -> torch.dtype:
    """The type in which softmaxes and sums over ``x`` are computed: fp32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True)
class LogitChunk:
    """Some rows and their ``logits`` [rows, v], in the type of the matmul and in fp32 or wider (perhaps one tensor).

    ``slope`` [rows, v]: derivatives of a soft cap, where they are asked for.
    """

    rows: slice
    logits: Tensor
    wide: Tensor
    slope: Tensor | None


def logit_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    vocabulary: VocabularyPart,
    cap: float | None,
    *,
    slopes: bool = False,
) -> Iterator[LogitChunk]:
    """Logits of some rows at a time, the lowest finite value for padding; each chunk overwrites the one before.

    Ranges of rows are the same on every rank, since padded parts of the vocabulary are equally large.
    """
    total, columns = hidden.shape[0], weight.shape[0]
    size = max(1, (_CPU_CHUNK if hidden.device.type == "cpu" else DEVICE_CHUNK) // (columns * hidden.element_size()))
    if size > 64:
        size -= size % 64  # whole vectors, and the same kernels for all chunks but the last
    buffer = hidden.new_empty(min(size, total), columns)
    is_wide = buffer.dtype == wide_type(buffer)
    wide_buffer = buffer if is_wide else torch.empty_like(buffer, dtype=wide_type(buffer))
    slope_buffer = torch.empty_like(wide_buffer) if slopes and cap is not None else None
    for start in range(0, total, size):
        rows = slice(start, min(start + size, total))
        logits = times_transposed(hidden[rows], weight, bias, buffer=buffer)
        height = logits.shape[0]
        wide = logits if is_wide else wide_buffer[:height].copy_(logits)
        slope = None if slope_buffer is None else slope_buffer[:height]
        if cap is not None:  # cap·tanh(x/cap), and its derivative 1 - tanh²(x/cap), both in place
            wide.div_(cap).tanh_()
            if slope is not None:
                torch.mul(wide, wide, out=slope).neg_().add_(1.0)
            wide.mul_(cap)
        wide[:, vocabulary.valid :] = torch.finfo(logits.dtype).min  # not -inf: a rank may hold only padding
        yield LogitChunk(rows, logits, wide, slope)


@dataclass(frozen=True)
class LabelSoftmax:
    """A chunk's softmax over this rank's columns, and its losses.

    ``local`` [rows, v]; times ``factor`` [rows, 1] it is the softmax over the whole vocabulary. ``losses`` [rows],
    ``log_z`` [rows, 1]: the logarithm of what the softmax divides by.
    ``columns`` [rows, 1]: each label's column here, and ``here`` [rows, 1]: whether there is one.
    """

    local: Tensor
    factor: Tensor
    losses: Tensor
    log_z: Tensor
    columns: Tensor
    here: Tensor


def softmax_(logits: Tensor, labels: Tensor, vocabulary: VocabularyPart) -> LabelSoftmax:
    """Overwrites wide ``logits`` [rows, v]; reduces [rows, 1] and [2, rows, 1] over the ranks.

    Torch's fused softmax takes half the time of its parts; the sum it divided by is read off its largest value.
    """
    columns = labels.unsqueeze(1) - vocabulary.start
    here = (columns >= 0) & (columns < vocabulary.valid)
    columns = columns.masked_fill(~here, 0)
    of_label = logits.gather(1, columns).masked_fill(~here, 0.0)
    largest = logits.amax(dim=1, keepdim=True)
    local = torch.softmax(logits, dim=1, out=logits)
    log_sum = largest - local.amax(dim=1, keepdim=True).log()
    highest = all_reduce(log_sum.clone(), vocabulary.mesh, "tp", op="max")
    total, of_label = all_reduce(torch.stack(((log_sum - highest).exp(), of_label)), vocabulary.mesh, "tp")
    log_total = highest + total.log()
    return LabelSoftmax(local, (log_sum - log_total).exp(), (log_total - of_label).squeeze(1), log_total, columns, here)


@Compiled
def _logit_gradients_(
    local: Tensor, factors: Tensor, columns: Tensor, shares: Tensor, slope: Tensor | None, rounded: Tensor | None
) -> None:
    """``local`` [rows, v] becomes (local·factors - shares at columns)·slope, and ``rounded`` the same in its type.

    ``factors``, ``columns``, ``shares`` [rows, 1].
    """
    if torch.compiler.is_compiling():  # one pass over memory, which a scatter would split
        ids = torch.arange(local.shape[1], device=local.device)
        gradients = local * factors - torch.where(ids == columns, shares, 0.0)
        local.copy_(gradients if slope is None else gradients * slope)
    else:
        local.mul_(factors).scatter_add_(1, columns, -shares)
        if slope is not None:
            local.mul_(slope)
    if rounded is not None:
        rounded.copy_(local)


class GradientSums:
    """Gradients of a vocabulary loss, summed while its chunks are computed: those of ``hidden`` [N, h], ``weight``
    [v, h] and ``bias`` [v] that ``needed`` asks for, in the type ``given``, of the bias in fp32 or wider.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, needed: Sequence[bool], given: torch.dtype
    ) -> None:
        self._hidden, self._weight, self._given = hidden, weight, given
        needs_hidden, self._needs_weight, needs_bias = needed
        self._of_hidden = torch.empty_like(hidden, dtype=given) if needs_hidden else None
        self._of_weight: Tensor | None = None
        self._of_bias = torch.zeros_like(bias, dtype=wide_type(bias)) if bias is not None and needs_bias else None

    def add(self, rows: slice, of_logits: Tensor, wide: Tensor) -> None:
        """Add a chunk of ``rows``, whose gradient of logits [rows, v] is given in the type of the matmul and wide."""
        if self._of_hidden is not None:
            place = self._of_hidden[rows]
            buffer = place if place.dtype == of_logits.dtype else None
            place.copy_(times_transposed(of_logits, self._weight.t(), buffer=buffer))
        if self._needs_weight:
            self._of_weight = transposed_times(of_logits, self._hidden[rows], add_to=self._of_weight)
        if self._of_bias is not None:
            self._of_bias += wide.sum(dim=0)

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of all chunks."""
        of_weight = None if self._of_weight is None else self._of_weight.to(self._given)
        return self._of_hidden, of_weight, self._of_bias


def kept_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """What the forward pass of a vocabulary loss kept in ``ctx.gradients``, made at ``ctx.backward_scale``, times the
    gradient of the loss. Once: they are overwritten.
    """
    gradients: tuple[Tensor | None, ...] | None = ctx.gradients
    assert gradients is not None, "the backward pass of a vocabulary loss can run once"
    ctx.gradients = None
    factor = grad / ctx.backward_scale
    return tuple(part if part is None else part.mul_(factor) for part in gradients)


class _LinearCrossEntropy(torch.autograd.Function):
    """dlogits = (softmax - onehot)·weight·scale, a chunk at a time;  dhidden = dlogits·W,  dW = dlogitsᵀ·hidden.

    A soft cap multiplies dlogits by its slope; the z-loss, whose gradient is a multiple of the softmax, the softmax by
    1 + 2·z_loss·log Z.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_weights: Tensor,
        vocabulary: VocabularyPart,
        cap: float | None,
        z_loss: float,
        backward_scale: float | None,
    ) -> Tensor:
        # One copy for all chunks, whose logits then aren't rounded.
        given, hidden, weight = hidden.dtype, in_fastest_type(hidden), in_fastest_type(weight)
        bias = None if bias is None else in_fastest_type(bias)
        total = hidden.new_zeros((), dtype=wide_type(hidden))
        loss_weights = loss_weights.to(total.dtype)
        needed = [backward_scale is not None and each for each in ctx.needs_input_grad[:3]]
        gradients = GradientSums(hidden, weight, bias, needed=needed, given=given)
        for chunk in logit_chunks(hidden, weight, bias, vocabulary, cap, slopes=backward_scale is not None):
            weights = loss_weights[chunk.rows]
            softmax = softmax_(chunk.wide, labels[chunk.rows], vocabulary)
            total += (softmax.losses * weights).sum()
            if backward_scale is None:
                continue
            weights = (weights * backward_scale).unsqueeze(1)
            wide, narrow = softmax.local, chunk.logits
            grad_logits = wide if wide.dtype == narrow.dtype else narrow
            shares = weights.masked_fill(~softmax.here, 0.0)
            rounded = None if grad_logits is wide else narrow
            factors = weights * softmax.factor
            if z_loss:
                factors *= 1.0 + 2.0 * z_loss * softmax.log_z
            _logit_gradients_(wide, factors, softmax.columns, shares, chunk.slope, rounded)
            gradients.add(chunk.rows, grad_logits, wide)
        ctx.gradients, ctx.backward_scale = gradients.sums(), backward_scale
        return total

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grad), *(None,) * 6
