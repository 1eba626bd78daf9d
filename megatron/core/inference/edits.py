"""A request's logits processors: what its settings change in the logits before a token is sampled.

They are tensors that are made once and serve every token of all the request's choices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.core.inference.request import Request, StopRules
from megatron.core.inference.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """Settings for logits of one size and device. Token ids are int64; ``left_out`` is bool ``[v]``."""

    left_out: Tensor | None
    never: Tensor
    ends: Tensor
    after: tuple[Tensor, ...]
    biased: Tensor
    biases: Tensor

    @classmethod
    def of(cls, sampling: Sampling, stop: StopRules, scores: Tensor) -> _Tensors:
        size = len(scores)

        def ids(tokens: Collection[int]) -> Tensor:
            return torch.tensor([each for each in tokens if each < size], device=scores.device).long()

        left_out = None
        if sampling.allowed_ids is not None:
            left_out = torch.ones(size, dtype=torch.bool, device=scores.device)
            left_out[ids(sampling.allowed_ids)] = False
        bias = [(token, value) for token, value in sampling.logit_bias if token < size]
        return cls(
            left_out=left_out,
            never=ids([word[0] for word in sampling.bad_words if len(word) == 1]),
            ends=ids(stop.token_ids if sampling.min_tokens else ()),
            after=tuple(ids(pair.tokens) for pair in sampling.forbidden_after),
            biased=ids([token for token, _ in bias]),
            biases=scores.new_tensor([value for _, value in bias]),
        )


@dataclass(eq=False)
class Edits:
    """What ``sampling`` and the end tokens of ``stop`` change in logits, up to the penalties."""

    sampling: Sampling
    stop: StopRules
    _tensors: dict[tuple[int, torch.device, torch.dtype], _Tensors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._words = _Words(self.sampling.bad_words)

    @classmethod
    def of(cls, request: Request, latest: Edits | None = None) -> Edits:
        """The edits of a request; ``latest`` if its settings are the same objects, as those of a prompt's choices."""
        if latest is None or latest.sampling is not request.sampling:
            return cls(request.sampling, request.stop)
        if latest.stop is request.stop or not request.sampling.min_tokens:  # before which no text may end
            return latest
        return cls(request.sampling, request.stop)

    @property
    def has_effect(self) -> bool:
        """Whether any logits may change."""
        sampling = self.sampling
        lists = (sampling.logit_bias, sampling.bad_words, sampling.forbidden_after, sampling.min_tokens)
        return sampling.allowed_ids is not None or any(lists)

    def apply(self, scores: Tensor, backwards: Iterable[int], *, last: int, num_generated: int) -> None:
        """Change ``scores`` ``[v]`` in place. ``backwards``: the text's tokens, the ``last`` one first."""
        key = (len(scores), scores.device, scores.dtype)
        if key not in self._tensors:
            self._tensors[key] = _Tensors.of(self.sampling, self.stop, scores)
        tensors = self._tensors[key]
        if tensors.left_out is not None:
            scores.masked_fill_(tensors.left_out, -math.inf)
        forbidden = [tensors.never]
        if completing := [each for each in self._words.completing(backwards) if each < len(scores)]:
            forbidden.append(torch.tensor(completing, device=scores.device))
        if num_generated < self.sampling.min_tokens:
            forbidden.append(tensors.ends)
        forbidden += [ids for pair, ids in zip(self.sampling.forbidden_after, tensors.after) if last in pair.previous]
        for ids in forbidden:
            if len(ids):
                scores.index_fill_(0, ids, -math.inf)
        if len(tensors.biased):
            scores.index_add_(0, tensors.biased, tensors.biases)

    @property
    def limiting(self) -> list[str]:
        """Names of the settings that may leave no token."""
        named = ("allowed_ids", "bad_words", "forbidden_after", "min_tokens")
        words = {"allowed_ids": "allowed_token_ids", "forbidden_after": "prevent_newline_after_colon"}
        return [words.get(name, name) for name in named if getattr(self.sampling, name)]


@dataclass
class _Node:
    """A node of the tree of words, read backwards. ``ends``: last tokens of words whose other tokens lead here."""

    before: dict[int, _Node] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)


class _Words:
    """Sequences of several tokens. Looking for those that a text has begun takes no longer than one of them is long."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._root = _Node()
        for word in words:
            node = self._root
            for token in reversed(word[:-1]):
                node = node.before.setdefault(token, _Node())
            if len(word) > 1:
                node.ends.add(word[-1])

    def completing(self, backwards: Iterable[int]) -> set[int]:
        """The tokens that complete a sequence after a text, whose tokens come ``backwards``."""
        node, found = self._root, set[int]()
        for token in backwards:
            if token not in node.before:
                break
            node = node.before[token]
            found |= node.ends
        return found


class Occurrences:
    """The tokens of a text, each once, and how many times the answer holds them."""

    def __init__(self, prompt: Sequence[int]) -> None:
        unique = dict.fromkeys(prompt)
        self._place = {token: place for place, token in enumerate(unique)}
        self._ids = np.array(list(unique), dtype=np.int64)
        self._counts = np.zeros(len(unique), dtype=np.int64)

    def append(self, token: int) -> None:
        """Add a token to the answer."""
        self._ids, self._counts = self.after([token])
        self._place.setdefault(token, len(self._place))

    def forked(self) -> Occurrences:
        """A copy, for another answer with the same beginning."""
        found = Occurrences(())
        found._place, found._ids, found._counts = dict(self._place), self._ids, self._counts
        return found

    def after(self, drafts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids and counts ``[unique tokens]`` of the text and ``drafts``."""
        more = Counter(drafts)
        new = [token for token in more if token not in self._place]
        ids = np.append(self._ids, np.array(new, dtype=np.int64))
        counts = np.append(self._counts, np.zeros(len(new), dtype=np.int64))
        places = dict(zip(new, range(len(self._ids), len(ids))))
        for token, times in more.items():
            counts[self._place.get(token, places.get(token))] += times
        return ids, counts
