"""Distillation inside the chunked vocabulary loss: cross entropy and divergence from a teacher, without all logits.

The teacher is its own hidden states and output matrix, multiplied by the same rows as the student's, or what was stored
of its distributions: the most probable ids and one bucket for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.ops.matmul import in_fastest_type
from megatron.core.parallel.collectives import all_gather, all_reduce
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel.cross_entropy import (
    GradientSums,
    LabelSoftmax,
    LogitChunk,
    VocabularyPart,
    kept_gradients,
    logit_chunks,
    softmax_,
    wide_type,
)


@dataclass(frozen=True, kw_only=True)
class Head:
    """What makes a teacher's logits: ``hidden`` [N, h], this rank's rows ``weight`` [v, h] and ``bias`` [v], and a soft
    ``cap``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class TopOfDistribution:
    """The most probable ids of each row, equal on all ranks: ``ids`` [N, k], their log-probabilities ``log_probs``
    [N, k], and the logarithm ``rest`` [N] of what all other ids have together (-inf: nothing).
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor


Target = Head | TopOfDistribution


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Factors of the two losses, and the ``temperature`` by which both models' logits are divided in the divergence.
    ``z_loss``: as of ``linear_cross_entropy``.
    """

    cross_entropy: float
    divergence: float
    temperature: float = 1.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class DistilledSums:
    """Sums over rows of weight times loss. ``total``: the mix, which has the gradient; the others only report:
    ``cross_entropy``, and the ``divergence`` KL(teacher ‖ student) in nats.
    """

    total: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def distilled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    target: Target,
    *,
    mix: Mix,
    vocabulary: VocabularyPart,
    bias: Tensor | None = None,
    cap: float | None = None,
    backward_scale: float = 1.0,
) -> DistilledSums:
    """Cross entropy of the labels and divergence from ``target``, mixed; arguments and gradients as of
    ``linear_cross_entropy``. The gradient of a row's divergence by its logits is (p_student - p_teacher) / temperature.

    The teacher has no gradient, and as many rows of its matrix here as the student has. Against the top of a
    distribution the divergence is that of k + 1 outcomes, of which one is any other id.
    """
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    scale = backward_scale if needs_grad else None
    given = (hidden, weight, bias, labels, loss_weights, target, mix, vocabulary, cap, scale)
    return DistilledSums(*_DistilledCrossEntropy.apply(*given))  # type: ignore[no-untyped-call]


@torch.no_grad()
def top_of_distribution(
    head: Head, count: int, *, vocabulary: VocabularyPart, temperature: float = 1.0
) -> TopOfDistribution:
    """The ``count`` most probable ids of each row of ``head``, at most as many as there are, the likeliest first; the
    same on every tensor-parallel rank.
    """
    found = list[TopOfDistribution]()
    for chunk in logit_chunks(head.hidden, head.weight, head.bias, vocabulary, head.cap):
        found.append(_top_of_chunk(_tempered(chunk.wide, temperature, vocabulary), count, vocabulary))
    return TopOfDistribution(
        ids=torch.cat([each.ids for each in found]),
        log_probs=torch.cat([each.log_probs for each in found]),
        rest=torch.cat([each.rest for each in found]),
    )


def _top_of_chunk(logits: Tensor, count: int, vocabulary: VocabularyPart) -> TopOfDistribution:
    """Overwrites ``logits``."""
    mesh, lowest = vocabulary.mesh, torch.finfo(logits.dtype).min
    here = min(count, logits.shape[1])
    top, columns = logits.topk(here, dim=1)
    padding = columns >= vocabulary.valid
    ids = (columns + vocabulary.start).masked_fill(padding, -1)
    top = all_gather(top.masked_fill(padding, lowest), mesh, "tp", dim=1)
    ids = all_gather(ids, mesh, "tp", dim=1)
    top, places = top.topk(min(count, top.shape[1]), dim=1)
    ids = ids.gather(1, places)
    kept = ids[0] >= 0  # padding is last in every row
    top, ids = top[:, kept], ids[:, kept]
    spread = _spread_(logits, mesh)
    columns, is_here = _columns_here(ids, vocabulary)
    _take_out_(spread.local, columns, is_here)
    rest = all_reduce(spread.local.sum(dim=1, keepdim=True) * spread.factor, mesh, "tp")
    return TopOfDistribution(ids=ids, log_probs=top - spread.log_z, rest=rest.log().squeeze(1))


@dataclass(frozen=True)
class _Spread:
    """A softmax over the columns of all ranks: ``local`` [rows, v] times ``factor`` [rows, 1]; ``log_z`` [rows, 1]."""

    local: Tensor
    factor: Tensor
    log_z: Tensor


def _spread_(logits: Tensor, mesh: Mesh) -> _Spread:
    """Overwrites wide ``logits`` [rows, v]; reduces [rows, 1] twice over the ranks."""
    largest = logits.amax(dim=1, keepdim=True)
    local = torch.softmax(logits, dim=1, out=logits)
    log_sum = largest - local.amax(dim=1, keepdim=True).log()
    highest = all_reduce(log_sum.clone(), mesh, "tp", op="max")
    log_z = highest + all_reduce((log_sum - highest).exp(), mesh, "tp").log()
    return _Spread(local, (log_sum - log_z).exp(), log_z)


def _tempered(logits: Tensor, temperature: float, vocabulary: VocabularyPart) -> Tensor:
    """A copy of the logits over the temperature; padding stays finite, as a rank may hold nothing else."""
    found = logits / temperature
    found[:, vocabulary.valid :] = torch.finfo(logits.dtype).min
    return found


def _columns_here(ids: Tensor, vocabulary: VocabularyPart) -> tuple[Tensor, Tensor]:
    """The columns of ids on this rank, 0 where they are on another, and which are here."""
    columns = ids.long() - vocabulary.start
    is_here = (columns >= 0) & (columns < vocabulary.valid)
    return columns.masked_fill(~is_here, 0), is_here


def _take_out_(local: Tensor, columns: Tensor, is_here: Tensor) -> Tensor:
    """Set what ``local`` has at the columns to zero, exactly; returns what was there, 0 for those elsewhere."""
    taken = local.gather(1, columns).masked_fill(~is_here, 0.0)
    local.scatter_add_(1, columns, -taken)
    return taken


@dataclass(frozen=True)
class _Divergence:
    """What a chunk's divergence needs for its gradient. ``losses`` [rows].

    The gradient is ``student`` times its factor, minus ``minus`` [rows, v] times ``of_minus`` [rows, 1], plus
    ``added`` [rows, k] at ``columns``; ``student`` is None where it is the softmax of the cross entropy, from which the
    columns were ``taken`` [rows, k]. ``share`` [rows, 1]: factor of the student's part.
    """

    losses: Tensor
    student: _Spread | None
    minus: Tensor | None = None
    of_minus: Tensor | None = None
    columns: Tensor | None = None
    added: Tensor | None = None
    taken: Tensor | None = None
    share: Tensor | None = None


def _from_head(
    teacher: Tensor, student: Tensor, mix: Mix, labels: Tensor, vocabulary: VocabularyPart
) -> tuple[LabelSoftmax, _Divergence]:
    """Overwrites both chunks of wide logits."""
    mesh = vocabulary.mesh
    of_teacher = _spread_(_tempered(teacher, mix.temperature, vocabulary), mesh)
    expected = teacher.sub_(student).mul_(of_teacher.local).sum(dim=1, keepdim=True)  # of the difference of logits
    expected = all_reduce(expected * of_teacher.factor, mesh, "tp") / mix.temperature
    spread = None if mix.temperature == 1.0 else _spread_(_tempered(student, mix.temperature, vocabulary), mesh)
    softmax = softmax_(student, labels, vocabulary)
    log_z = softmax.log_z if spread is None else spread.log_z
    losses = (expected - of_teacher.log_z + log_z).squeeze(1)
    return softmax, _Divergence(losses, spread, minus=of_teacher.local, of_minus=of_teacher.factor)


def _from_top(
    top: TopOfDistribution, student: Tensor, mix: Mix, labels: Tensor, vocabulary: VocabularyPart
) -> tuple[LabelSoftmax, _Divergence]:
    """Overwrites the chunk of wide logits. Stored probabilities were rounded, and are made to add up to 1 again."""
    mesh = vocabulary.mesh
    logs = torch.cat((top.log_probs, top.rest.unsqueeze(1)), dim=1).to(student.dtype).log_softmax(dim=1)
    shares = logs.exp()
    columns, is_here = _columns_here(top.ids, vocabulary)
    logits = (student.gather(1, columns) / mix.temperature).masked_fill(~is_here, 0.0)
    spread = None if mix.temperature == 1.0 else _spread_(_tempered(student, mix.temperature, vocabulary), mesh)
    softmax = softmax_(student, labels, vocabulary)
    own = spread or _Spread(softmax.local, softmax.factor, softmax.log_z)
    taken = _take_out_(own.local, columns, is_here) * own.factor
    others = own.local.sum(dim=1, keepdim=True) * own.factor
    sums = all_reduce(torch.cat((logits, others), dim=1), mesh, "tp")
    logits, others = sums[:, :-1], sums[:, -1:].clamp(min=torch.finfo(student.dtype).tiny)
    student_logs = torch.cat((logits - own.log_z, others.log()), dim=1)
    losses = torch.where(shares > 0, shares * (logs - student_logs), 0.0).sum(dim=1)
    added = (taken - shares[:, :-1]).masked_fill(~is_here, 0.0)
    share = 1.0 - shares[:, -1:] / others
    return softmax, _Divergence(losses, spread, columns=columns, added=added, taken=taken, share=share)


def _sum_of_products_(
    local: Tensor, of_local: Tensor, plus: Tensor | None, of_plus: Tensor, minus: Tensor | None, of_minus: Tensor
) -> None:
    """``local`` [rows, v] becomes local·of_local + plus·of_plus - minus·of_minus; factors are [rows, 1]. Each product
    is rounded before it is subtracted, so that equal ones leave exactly zero.
    """
    local.mul_(of_local)
    if plus is None:
        plus = local
    else:
        plus.mul_(of_plus)
    if minus is not None:
        plus.sub_(minus.mul_(of_minus))
    if plus is not local:
        local.add_(plus)


def _logit_gradients_(softmax: LabelSoftmax, divergence: _Divergence, weights: Tensor, mix: Mix) -> Tensor:
    """Gradients of the mix by the chunk's logits, in place of its softmax; ``weights`` [rows, 1]."""
    hard, soft = weights * mix.cross_entropy, weights * (mix.divergence / mix.temperature)
    own = hard + weights * (2.0 * mix.z_loss) * softmax.log_z if mix.z_loss else hard
    share = soft if divergence.share is None else soft * divergence.share
    student, plus = divergence.student, None
    of_local, of_plus = softmax.factor * own, softmax.factor * share
    if student is None:
        of_local = softmax.factor * (own + share)
    else:
        plus, of_plus = student.local, student.factor * share
    of_minus = of_local if divergence.of_minus is None else divergence.of_minus * soft
    _sum_of_products_(softmax.local, of_local, plus, of_plus, divergence.minus, of_minus)
    if divergence.columns is not None and divergence.added is not None and divergence.taken is not None:
        added = divergence.added * soft
        if student is None:  # the cross entropy's part of what was taken out
            added = added + divergence.taken * own
        softmax.local.scatter_add_(1, divergence.columns, added)
    return softmax.local.scatter_add_(1, softmax.columns, -hard.masked_fill(~softmax.here, 0.0))


def _targets(target: Target, vocabulary: VocabularyPart) -> Iterator[LogitChunk] | None:
    if isinstance(target, TopOfDistribution):
        return None
    hidden, weight = in_fastest_type(target.hidden), in_fastest_type(target.weight)
    bias = None if target.bias is None else in_fastest_type(target.bias)
    return logit_chunks(hidden, weight, bias, vocabulary, target.cap)


def _measured(
    chunk: LogitChunk,
    target: Target,
    teacher: Iterator[LogitChunk] | None,
    labels: Tensor,
    mix: Mix,
    vocabulary: VocabularyPart,
) -> tuple[LabelSoftmax, _Divergence]:
    """Both losses of a chunk, whose logits are overwritten."""
    if isinstance(target, TopOfDistribution):
        rows = chunk.rows
        top = TopOfDistribution(ids=target.ids[rows], log_probs=target.log_probs[rows], rest=target.rest[rows])
        return _from_top(top, chunk.wide, mix, labels[rows], vocabulary)
    assert teacher is not None
    other = next(teacher)
    assert other.rows == chunk.rows, "teacher and student have equally many columns of one type"
    return _from_head(other.wide, chunk.wide, mix, labels[chunk.rows], vocabulary)


class _DistilledCrossEntropy(torch.autograd.Function):
    """dlogits = weight·scale·(ce·(softmax - onehot) + kl·(softmax_T - teacher_T) / T), a chunk at a time; see
    ``linear_cross_entropy``.
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
        target: Target,
        mix: Mix,
        vocabulary: VocabularyPart,
        cap: float | None,
        backward_scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given, hidden, weight = hidden.dtype, in_fastest_type(hidden), in_fastest_type(weight)
        bias = None if bias is None else in_fastest_type(bias)
        hard, soft = (hidden.new_zeros((), dtype=wide_type(hidden)) for _ in range(2))
        loss_weights = loss_weights.to(hard.dtype)
        needed = [backward_scale is not None and each for each in ctx.needs_input_grad[:3]]
        gradients = GradientSums(hidden, weight, bias, needed=needed, given=given)
        teacher = _targets(target, vocabulary)
        for chunk in logit_chunks(hidden, weight, bias, vocabulary, cap, slopes=backward_scale is not None):
            weights = loss_weights[chunk.rows]
            softmax, divergence = _measured(chunk, target, teacher, labels, mix, vocabulary)
            hard += (softmax.losses * weights).sum()
            soft += (divergence.losses * weights).sum()
            if backward_scale is None:
                continue
            wide = _logit_gradients_(softmax, divergence, (weights * backward_scale).unsqueeze(1), mix)
            if chunk.slope is not None:
                wide.mul_(chunk.slope)
            grad_logits = wide if wide.dtype == chunk.logits.dtype else chunk.logits.copy_(wide)
            gradients.add(chunk.rows, grad_logits, wide)
        ctx.gradients, ctx.backward_scale = gradients.sums(), backward_scale
        ctx.mark_non_differentiable(hard, soft)
        return mix.cross_entropy * hard + mix.divergence * soft, hard, soft

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grad), *(None,) * 7
