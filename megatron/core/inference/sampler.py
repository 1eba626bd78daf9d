"""The sampler: next tokens from logits by each request's settings, with random numbers of that request alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from megatron.config.flags import plural_s
from megatron.core.inference.edits import Edits, Occurrences
from megatron.core.inference.request import Request, TokenLogprobs
from megatron.core.inference.sampling import Sampling
from megatron.core.parallel.rng import derive_seed

_BLOCK = 128  # columns that are summed first: a cumulative sum of all columns takes many times as long

NOT_FINITE = "the model's logits are not finite (NaN or infinite): its weights or this prompt are broken"
NOTHING_LEFT = "the request's settings leave no token to sample"


class SamplerState:
    """What the sampler knows of a request: settings, tokens so far, and the state of its constraint.

    ``edits``: those of the request, which its choices share.
    """

    def __init__(self, request: Request, edits: Edits | None = None) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.constraint = None if request.constraint is None else request.constraint.begin()
        self.edits = edits or Edits.of(request)
        sampling = request.sampling
        penalties = (sampling.repetition_penalty - 1.0, sampling.frequency_penalty, sampling.presence_penalty)
        self._occurrences = Occurrences(request.prompt) if any(penalties) else None
        self.is_edited = self.constraint is not None or self._occurrences is not None or self.edits.has_effect

    @property
    def num_generated(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - len(self.request.prompt)

    def append(self, token: int) -> None:
        """Add a token to the answer."""
        self.tokens.append(token)
        if self._occurrences is not None:
            self._occurrences.append(token)
        if self.constraint is not None:
            self.constraint.append(token)

    def forked(self) -> SamplerState:
        """A copy, for another answer with the same beginning."""
        found = copy(self)
        found.tokens = list(self.tokens)
        found.constraint = None if self.constraint is None else self.constraint.forked()
        found._occurrences = None if self._occurrences is None else self._occurrences.forked()
        return found

    def edit(self, scores: Tensor, drafts: Sequence[int]) -> None:
        """Change the logits ``scores`` ``[v]`` of the token after ``drafts`` up to the penalties, in place."""
        if self.constraint is not None:
            _keep(scores, _unpacked(self.constraint.allowed(drafts), len(scores)))
        if self.edits.has_effect:
            backwards = chain(reversed(drafts), reversed(self.tokens))
            last = drafts[-1] if drafts else self.tokens[-1]
            self.edits.apply(scores, backwards, last=last, num_generated=self.num_generated + len(drafts))
        if self._occurrences is not None:
            ids, counts = self._occurrences.after(drafts)
            where = torch.from_numpy(ids).to(scores.device)
            scores[where] = _penalized(scores[where], torch.from_numpy(counts).to(scores), self.request.sampling)

    def nothing_left(self) -> str:
        """Why no token is left to sample, as a sentence about the request's settings."""
        limiting = self.edits.limiting
        if self.constraint is None:
            named = f" ({', '.join(limiting)})" if limiting else ""
            return f"{NOTHING_LEFT}{named}: allow more tokens"
        if problem := self.constraint.problem():
            return problem
        after = f"after {self.num_generated} token{plural_s(self.num_generated)} of the text"
        if not limiting:
            return f"nothing can follow the schema or grammar {after}: allow more in it"
        return (
            f"{NOTHING_LEFT}: {after} none that the schema or grammar allows is left by {', '.join(limiting)}; leave "
            "one of them out"
        )


@dataclass(frozen=True)
class SampleRow:
    """The token to sample from a row of logits: the one after ``state``'s tokens and ``drafts``."""

    state: SamplerState
    drafts: tuple[int, ...] = ()

    @property
    def index(self) -> int:
        """The token's number in the answer."""
        return self.state.num_generated + len(self.drafts)


@dataclass(frozen=True)
class SampledToken:
    """A sampled token; ``logprobs`` where the request wants them. With an ``error`` there is none, ``token``
    is -1, and only this request fails; ``is_refusal``: it asks for what can't be.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    is_refusal: bool = False


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """A token for each row of ``logits`` ``[rows, v]``, which isn't changed. No state is changed either: append those
    tokens that are accepted to their request's state.
    """
    logits = _precise(logits)
    is_finite = logits.amax(dim=-1).isfinite().tolist()
    scores = edited(logits, rows)
    can_sample = is_finite
    if scores is not logits:
        can_sample = [raw and left for raw, left in zip(is_finite, scores.amax(dim=-1).isfinite().tolist())]
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    greedy, random = list[int](), list[int]()
    for number, row in enumerate(rows):
        if can_sample[number]:
            (greedy if row.state.request.sampling.is_greedy else random).append(number)
    if greedy:
        tokens[greedy] = _likeliest(_rows_of(scores, greedy))
    if random:
        requests = [rows[number].state.request for number in random]
        indices = [rows[number].index for number in random]
        weights = filtered(_rows_of(scores, random), [request.sampling for request in requests], indices)
        uniforms = [uniform(request.seed, request.choice, index) for request, index in zip(requests, indices)]
        tokens[random] = picked(weights, torch.tensor(uniforms, dtype=torch.float64))
    reported = _reported(logits, tokens, rows)
    return [
        SampledToken(token, logprobs) if can_sample[number] else _failed(rows[number], is_finite=is_finite[number])
        for number, (token, logprobs) in enumerate(zip(tokens.tolist(), reported))
    ]


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Sequence[int], *, top: int) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens`` and of the ``top`` likeliest ones under ``logits`` ``[tokens, v]``."""
    values = _precise(logits).log_softmax(dim=-1)
    own = values.gather(1, torch.tensor(tokens, device=values.device)[:, None])[:, 0].tolist()
    likeliest = values.topk(min(top, values.shape[-1]), dim=-1)
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist())
    return [TokenLogprobs(value, tuple(zip(*best))) for value, best in zip(own, pairs)]


def edited(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """``logits`` ``[rows, v]`` after constraints, forbidden tokens, biases and penalties; itself where none apply."""
    numbers = [number for number, row in enumerate(rows) if row.state.is_edited]
    if not numbers:
        return logits
    scores = logits.clone()
    for number in numbers:
        rows[number].state.edit(scores[number], rows[number].drafts)
    return scores


def filtered(scores: Tensor, samplings: Sequence[Sampling], indices: Sequence[int]) -> Tensor:
    """Weights ``[rows, columns]`` in proportion to which tokens number ``indices`` of answers are sampled: 1 for the
    likeliest, 0 for those that min-p, top-k and top-p leave out. ``columns``: v and zeros up to a multiple of a block.
    """
    vocabulary = scores.shape[-1]
    weights = F.pad(scores, (0, -vocabulary % _BLOCK), value=-math.inf)
    if any(each.temperature != 1.0 for each in samplings):
        weights /= weights.new_tensor([each.temperature for each in samplings])[:, None]
    counts = {number: each.top_k for number, each in enumerate(samplings) if 0 < each.top_k < vocabulary}
    limits = {number: _largest(weights[number], count)[-1] for number, count in counts.items()}
    is_kept = _at_least(weights, limits, otherwise=-math.inf)
    weights -= weights.amax(dim=-1, keepdim=True)
    weights.exp_()
    if is_kept is not None:
        weights *= is_kept
    min_p = {number: weights.new_tensor(each.min_p) for number, each in enumerate(samplings) if each.min_p}
    if (is_kept := _at_least(weights, min_p)) is not None:
        weights *= is_kept
    shares = [each.top_p_at(index) for each, index in zip(samplings, indices)]
    numbers = [number for number, share in enumerate(shares) if share < 1.0]
    if numbers:
        wanted = torch.tensor([shares[number] for number in numbers], dtype=torch.float64)
        found = _last_kept(_rows_of(weights, numbers), wanted)
        if (is_kept := _at_least(weights, dict(zip(numbers, found)))) is not None:
            weights *= is_kept
    return weights


def uniform(seed: int, choice: int, index: int) -> float:
    """The random number in [0, 1) of an answer's token ``index``, a function of its arguments alone."""
    return (derive_seed(seed, "generation", choice, index) >> 10) * 2.0**-53


def _failed(row: SampleRow, *, is_finite: bool) -> SampledToken:
    if not is_finite:
        return SampledToken(-1, error=NOT_FINITE)
    return SampledToken(-1, error=row.state.nothing_left(), is_refusal=True)


def _precise(logits: Tensor) -> Tensor:
    """``logits`` in fp32, or as they are in fp64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _rows_of(scores: Tensor, numbers: Sequence[int]) -> Tensor:
    """The rows of ``scores`` with these numbers; the tensor itself if they are all."""
    return scores if len(numbers) == len(scores) else scores[numbers]


def _likeliest(scores: Tensor) -> Tensor:
    """The likeliest token of each row, the first of several."""
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    return torch.from_numpy(scores.numpy().argmax(axis=-1))  # a twentieth of the time of torch's


def _reported(logits: Tensor, tokens: Tensor, rows: Sequence[SampleRow]) -> list[TokenLogprobs | None]:
    """Log-probabilities of the sampled ``tokens`` for those rows whose requests want them."""
    wanted = {number: row.state.request.logprobs for number, row in enumerate(rows)}
    found: list[TokenLogprobs | None] = [None] * len(rows)
    for top in {top for top in wanted.values() if top is not None}:
        numbers = [number for number, each in wanted.items() if each == top]
        for number, each in zip(numbers, token_logprobs(logits[numbers], tokens[numbers].tolist(), top=top)):
            found[number] = each
    return found


def picked(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token ``[rows]`` at which the cumulative sum of ``weights`` exceeds the row's share ``uniforms`` ``[rows]``
    of the total.
    """
    blocks = weights.view(len(weights), -1, _BLOCK)
    sums = blocks.sum(dim=-1).double().cumsum(dim=-1)
    target = _below(uniforms.to(sums.device)[:, None] * sums[:, -1:], sums)
    block = torch.searchsorted(sums, target, right=True)
    inner = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    rest = _below(target - F.pad(sums, (1, 0)).gather(1, block), inner)
    return (block * _BLOCK + torch.searchsorted(inner, rest, right=True))[:, 0]


def _below(target: Tensor, sums: Tensor) -> Tensor:
    """``target``, less than the last of the cumulative ``sums``, so that no token of weight 0 is found."""
    return target.clamp(min=0.0).minimum(torch.nextafter(sums[..., -1:], sums.new_zeros(())).view_as(target))


def _at_least(values: Tensor, limits: Mapping[int, Tensor], *, otherwise: float = 0.0) -> Tensor | None:
    """1 where ``values`` ``[rows, columns]`` reach the limit of their row, else 0; None without limits."""
    if not limits:
        return None
    each = values.new_full((len(values), 1), otherwise)
    for number, limit in limits.items():
        each[number, 0] = limit
    # Not bools, and no masked_fill: several times slower on a CPU.
    return torch.ge(values, each, out=torch.empty_like(values))


def _largest(values: Tensor, count: int) -> Tensor:
    """The ``count`` largest of ``values`` ``[n]``, the largest first."""
    if values.device.type != "cpu":
        return values.topk(count).values
    # NumPy's are vectorized, and take a fifth of the time of torch's.
    array = values.numpy()
    if count < len(array):
        array = np.partition(array, len(array) - count)[len(array) - count :]
    return torch.from_numpy(np.sort(array)).flip(0)


def _last_kept(weights: Tensor, shares: Tensor) -> Tensor:
    """The smallest weight ``[rows]`` that top-p keeps: larger ones together don't exceed the row's share of the sum."""
    if weights.device.type == "cpu":
        ordered = torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)  # vectorized, unlike torch's
    else:
        ordered = weights.sort(dim=-1, descending=True).values
    return ordered.gather(1, picked(ordered, shares)[:, None])[:, 0]


def _penalized(scores: Tensor, counts: Tensor, sampling: Sampling) -> Tensor:
    """``scores`` of tokens that a text holds, ``counts`` times of them in its answer, after penalties."""
    scores = torch.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
    scores = scores - sampling.frequency_penalty * counts
    return scores - sampling.presence_penalty * (counts > 0)


def _keep(scores: Tensor, allowed: Tensor) -> None:
    """Leave out all tokens but the ``allowed`` ones (bool, ``[v]``), in place."""
    scores.masked_fill_(~allowed.to(scores.device), -math.inf)


def _unpacked(bits: NDArray[np.int32] | None, size: int) -> Tensor:
    """The first ``size`` of the bits in int32 words, as bools; all are set where there are no bits."""
    if bits is None:
        return torch.ones(size, dtype=torch.bool)
    return torch.from_numpy(np.unpackbits(bits.view(np.uint8), count=size, bitorder="little")).bool()
