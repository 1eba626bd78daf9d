"""Beam search: the most probable answers of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.inference.detokenizer import token_texts
from megatron.core.inference.request import Beam, BeamSearch, Finish, GeneratedToken, Request, TokenLogprobs
from megatron.core.inference.sampler import NOT_FINITE, NOTHING_LEFT, SamplerState, token_logprobs
from megatron.core.inference.scheduler import TextState
from megatron.core.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class _Found:
    """Tokens of an answer with their log-probabilities where these are wanted. ``value``: the sum of log-probabilities
    while it goes on, its score once it has ended.
    """

    tokens: tuple[tuple[int, TokenLogprobs | None], ...]
    value: float
    has_stopped: bool = False


class Search:
    """The beams of a search and its ended answers, from log-probabilities alone; :class:`BeamSearch` has its rules.

    ``end_ids`` end an answer, as ``max_tokens`` do.
    """

    def __init__(self, beams: BeamSearch, *, end_ids: frozenset[int], max_tokens: int) -> None:
        self._beams, self._end_ids, self._max_tokens = beams, end_ids, max_tokens
        self.going_on = [_Found((), 0.0)]
        self.ended: list[_Found] = []

    def advance(self, scores: Tensor, logits: Tensor, *, top: int | None = None) -> list[tuple[int, int]]:
        """Advance by one token. ``scores`` ``[beams, v]``: log-probabilities, edited by the request's settings.

        Returns pairs of a beam's number and its next token, the best first; none when the search has ended. ``top``:
        how many of the likeliest tokens of ``logits`` ``[beams, v]`` are reported beside each.
        """
        width, length = self._beams.width, 1 + len(self.going_on[0].tokens)
        sums = scores + scores.new_tensor([each.value for each in self.going_on])[:, None]
        best = sums.flatten().topk(min(sums.numel(), width * (1 + max(1, len(self._end_ids)))))
        moves, ended, going_on = list[tuple[int, int]](), list[_Found](), list[_Found]()
        for rank, (value, place) in enumerate(zip(best.values.tolist(), best.indices.tolist())):
            number, token = divmod(place, scores.shape[1])
            is_end = token in self._end_ids
            if value == -math.inf or (rank >= width and (is_end or length == self._max_tokens)):
                continue
            each = None if top is None else token_logprobs(logits[number : number + 1], [token], top=top)[0]
            tokens = (*self.going_on[number].tokens, (token, each))
            if is_end or length == self._max_tokens:
                ended.append(_Found(tokens, value / length**self._beams.length_penalty, is_end))
            elif len(moves) < width:
                moves.append((number, token))
                going_on.append(_Found(tokens, value))
        self.ended = sorted([*self.ended, *ended], key=lambda found: -found.value)[:width]
        self.going_on = going_on
        if not going_on or (len(self.ended) == width and self._best_possible(length) <= self.ended[-1].value):
            self.going_on = []
            return []
        return moves

    def _best_possible(self, length: int) -> float:
        return self.going_on[0].value / float(length**self._beams.length_penalty)


class BeamAnswer:
    """The search of one request, and the texts of its beams in the scheduler."""

    def __init__(self, text: TextState, beams: BeamSearch) -> None:
        request = text.request
        self._request = request
        self._search = Search(beams, end_ids=request.stop.token_ids, max_tokens=request.max_tokens)
        self.texts: list[TextState] = [text]
        self._logits: dict[TextState, Tensor] = {}

    def take(self, text: TextState, logits: Tensor) -> list[tuple[int, int]] | None:
        """The logits ``[v]`` of a beam's next token: the moves of all beams (see :class:`Search`), once all have come.

        Raises ValueError for logits that are not finite, and where the request leaves no token.
        """
        self._logits[text] = logits
        if len(self._logits) < len(self.texts):
            return None
        whole = torch.stack([self._logits.pop(each) for each in self.texts])
        if not whole.amax(dim=-1).isfinite().all():
            raise ValueError(NOT_FINITE)
        scores = whole.to(torch.promote_types(whole.dtype, torch.float32)).log_softmax(dim=-1)
        for number, each in enumerate(self.texts):
            state = SamplerState(self._request)
            if state.is_edited:
                for token in each.tokens[len(self._request.prompt) :]:
                    state.append(token)
                state.edit(scores[number], ())
        moves = self._search.advance(scores, whole, top=self._request.logprobs)
        if not moves and not self._search.ended:
            raise ValueError(NOTHING_LEFT)
        return moves

    def found(self, tokenizer: Tokenizer | None) -> tuple[Beam, ...]:
        """The answers, the best first."""
        return tuple(_beam(each, self._request, tokenizer) for each in self._search.ended)


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
