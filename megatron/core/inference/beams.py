"""Beam search: the most probable answers of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.inference.detokenizer import token_texts
from megatron.core.inference.request import Beam, BeamSearch, Finish, GeneratedToken, Request, TokenLogprobs
from megatron.core.inference.sampler import NOT_FINITE, SamplerState, token_logprobs
from megatron.core.inference.scheduled_text import ScheduledText
from megatron.core.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class _Found:
    """Tokens of an answer with their log-probabilities where these are wanted. ``value``: the sum of log-probabilities
    while it goes on, its score once it has ended.
    """

    tokens: tuple[tuple[int, TokenLogprobs | None], ...]
    value: float
    has_stopped: bool = False


class _Place(NamedTuple):
    """A token that may follow a beam, and the sum of log-probabilities with it."""

    beam: int
    token: int
    value: float


class NotFiniteError(ValueError):
    """Logits that are not finite."""


class Search:
    """The beams of a search and its ended answers, from log-probabilities alone; :class:`BeamSearch` has its rules.

    ``end_ids`` end an answer, as ``max_tokens`` do.
    """

    def __init__(self, beams: BeamSearch, *, end_ids: frozenset[int], max_tokens: int) -> None:
        self._beams, self._end_ids, self._max_tokens = beams, end_ids, max_tokens
        self.going_on = [_Found((), 0.0)]
        self.ended: list[_Found] = []
        self._ends: Tensor | None = None

    def advance(self, scores: Tensor, logits: Tensor, *, top: int | None = None) -> list[tuple[int, int]]:
        """Advance by one token. ``scores`` ``[beams, v]``: log-probabilities, edited by the request's settings.

        Returns pairs of a beam's number and its next token, the best first; none when the search has ended. ``top``:
        how many of the likeliest tokens of ``logits`` ``[beams, v]`` are reported beside each.
        """
        width, length = self._beams.width, 1 + len(self.going_on[0].tokens)
        sums = scores + scores.new_tensor([each.value for each in self.going_on])[:, None]
        best = [place for place in _best(sums, width) if length == self._max_tokens or place.token in self._end_ids]
        ended = [
            _Found(
                self._tokens(place, each),
                place.value / length**self._beams.length_penalty,
                place.token in self._end_ids,
            )
            for place, each in zip(best, _logprobs_of(best, logits, top))
        ]
        moves, going_on = list[tuple[int, int]](), list[_Found]()
        if length < self._max_tokens:
            sums[:, self._ends_below(scores.shape[1], sums.device)] = -math.inf
            following = _best(sums, width)
            for place, each in zip(following, _logprobs_of(following, logits, top)):
                moves.append((place.beam, place.token))
                going_on.append(_Found(self._tokens(place, each), place.value))
        self.ended = sorted([*self.ended, *ended], key=lambda found: -found.value)[:width]
        self.going_on = going_on
        if not going_on or (len(self.ended) == width and self._best_possible(length) <= self.ended[-1].value):
            self.going_on = []
            return []
        return moves

    def _tokens(self, place: _Place, logprobs: TokenLogprobs | None) -> tuple[tuple[int, TokenLogprobs | None], ...]:
        return (*self.going_on[place.beam].tokens, (place.token, logprobs))

    def _ends_below(self, size: int, device: torch.device) -> Tensor:
        """The ids that end an answer as a tensor, which is made once: there may be as many as the vocabulary has."""
        if self._ends is None:
            self._ends = torch.tensor([each for each in self._end_ids if each < size], device=device).long()
        return self._ends

    def _best_possible(self, length: int) -> float:
        return self.going_on[0].value / float(length**self._beams.length_penalty)


class BeamAnswer:
    """The search of one request, and the texts of its beams in the scheduler."""

    def __init__(self, text: ScheduledText, beams: BeamSearch, state: SamplerState) -> None:
        request = text.request
        self._request = request
        self._search = Search(beams, end_ids=request.stop.token_ids, max_tokens=request.max_tokens)
        self.texts: list[ScheduledText] = [text]
        self._states = [state]  # of the texts
        self._logits: dict[ScheduledText, Tensor] = {}

    def take(self, text: ScheduledText, logits: Tensor) -> list[tuple[int, int]] | None:
        """The logits ``[v]`` of a beam's next token: the moves of all beams (see :class:`Search`), once all have come.

        Raises ValueError for logits that are not finite, and where the request leaves no token.
        """
        self._logits[text] = logits
        if len(self._logits) < len(self.texts):
            return None
        whole = torch.stack([self._logits.pop(each) for each in self.texts])
        if not whole.amax(dim=-1).isfinite().all():
            raise NotFiniteError(NOT_FINITE)
        scores = whole.to(torch.promote_types(whole.dtype, torch.float32)).log_softmax(dim=-1)
        is_edited = self._states[0].is_edited
        if is_edited:
            for number, state in enumerate(self._states):
                state.edit(scores[number], ())
        moves = self._search.advance(scores, whole, top=self._request.logprobs)
        if not moves and not self._search.ended:
            raise ValueError(self._states[0].nothing_left())
        if is_edited:
            before = self._states
            self._states = [before[number].forked() for number, _ in moves]
            for state, (_, token) in zip(self._states, moves):
                state.append(token)
        return moves

    def found(self, tokenizer: Tokenizer | None) -> tuple[Beam, ...]:
        """The answers, the best first."""
        return tuple(_beam(each, self._request, tokenizer) for each in self._search.ended)


def _best(sums: Tensor, count: int) -> list[_Place]:
    """The ``count`` largest of ``sums`` ``[beams, v]`` that are possible, the largest first."""
    best = sums.flatten().topk(min(sums.numel(), count))
    pairs = zip(best.values.tolist(), best.indices.tolist())
    return [_Place(place // sums.shape[1], place % sums.shape[1], value) for value, place in pairs if value > -math.inf]


def _logprobs_of(places: Sequence[_Place], logits: Tensor, top: int | None) -> Sequence[TokenLogprobs | None]:
    """Log-probabilities of the tokens at ``places``, with the ``top`` likeliest beside each; None: not wanted."""
    if top is None or not places:
        return [None] * len(places)
    rows = logits[[place.beam for place in places]]
    return token_logprobs(rows, [place.token for place in places], top=top)


def _beam(found: _Found, request: Request, tokenizer: Tokenizer | None) -> Beam:
    ids = [token for token, _ in found.tokens]
    shown = ids[:-1] if found.has_stopped else ids
    texts = _texts(shown, request, tokenizer) + [""] * found.has_stopped
    tokens = [GeneratedToken(token, each, text) for (token, each), text in zip(found.tokens, texts, strict=True)]
    finish = Finish("stop", stop=ids[-1]) if found.has_stopped else Finish("length")
    return Beam(text="".join(texts), tokens=tuple(tokens), finish=finish, score=found.value)


def _texts(ids: Sequence[int], request: Request, tokenizer: Tokenizer | None) -> list[str]:
    if tokenizer is None:
        return [""] * len(ids)
    hidden = tokenizer.special_ids if request.skip_special_tokens else frozenset[int]()
    return token_texts(tokenizer, ids, prompt=() if request.encoder_prompt else request.prompt, hidden=hidden)
