"""Sampling settings of a request; sampler.py applies them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cached_property

from megatron.errors import ConfigError

GREEDY_BELOW = 1e-5  # a temperature below it takes the likeliest token; dividing by it would overflow

_BOUNDS: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, sys.float_info.max, "it must be 0 (always the most probable token) or above"),
    "top_k": (0, math.inf, "it must be 0 (all tokens) or the number of tokens to keep"),
    "top_p": (0.0, 1.0, "it is a probability from 0 (all tokens) to 1"),
    "min_p": (0.0, 1.0, "it is a share of the largest probability from 0 (off) to 1"),
    "top_p_decay": (0.0, 1.0, "it is a factor from 0 (off) to 1"),
    "top_p_bound": (0.0, 1.0, "it is a probability from 0 (no bound) to top-p"),
    "repetition_penalty": (math.ulp(0.0), sys.float_info.max, "it must be above 0, and 1 is off"),
    "presence_penalty": (-2.0, 2.0, "it must be from -2 to 2, and 0 is off"),
    "frequency_penalty": (-2.0, 2.0, "it must be from -2 to 2, and 0 is off"),
    "min_tokens": (0, math.inf, "it must be 0 or the least number of tokens"),
}
"""The least and the most that each setting may be, and the rule as messages state it."""


@dataclass(frozen=True, kw_only=True)
class ForbiddenAfter:
    """Right after a token of ``previous`` none of ``tokens`` is sampled, such as no newline after a colon."""

    previous: frozenset[int]
    tokens: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled. The defaults sample from the model's own distribution.

    Applied in this order, each to what the ones before have left:

    - ``allowed_ids``: only these tokens (None: all). ``bad_words``: sequences of tokens that the text never holds.
      ``forbidden_after``: pairs of tokens that never follow each other.
    - ``min_tokens``: before that many tokens nothing ends the text.
    - ``logit_bias``: pairs of a token and what is added to its logit.
    - ``repetition_penalty``: logits of tokens that prompt or answer hold are divided by it, negative ones multiplied
      (1: off). ``frequency_penalty``: subtracted for each time that the answer holds a token; ``presence_penalty``:
      once for a token that the answer holds (0: off).
    - ``temperature`` divides the logits (0: always the likeliest token, whatever follows here).
    - ``min_p`` keeps tokens at least this times as likely as the likeliest (0: all).
    - ``top_k`` keeps the k likeliest tokens and those as likely as the k-th (0: all; 1: always the likeliest).
    - ``top_p`` keeps the likeliest tokens until their probabilities exceed p, and those as likely as the last of them
      (0 and 1: all). After each token p is multiplied by ``top_p_decay`` (0: it stays), down to ``top_p_bound``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    allowed_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    forbidden_after: tuple[ForbiddenAfter, ...] = ()

    def __post_init__(self) -> None:
        for name, (least, most, rule) in _BOUNDS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name.replace('_', '-')} is {value}; {rule}")
        if (self.top_p_decay or self.top_p_bound) and not self.top_p:
            raise ConfigError("top-p-decay and top-p-bound change top-p, which is off: give top-p, too")
        if self.top_p_bound > self.top_p:
            raise ConfigError(f"top-p-bound is {self.top_p_bound}, more than top-p {self.top_p}; give less")
        for token, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise ConfigError(f"logit-bias of token {token} is {bias}; it must be from -100 to 100")
        if self.allowed_ids is not None and not self.allowed_ids:
            raise ConfigError("allowed token ids are an empty list, which leaves no token to sample: name one at least")
        if not all(self.bad_words):
            raise ConfigError("bad words hold one without tokens: name one token at least")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.top_k == 1 or self.temperature < GREEDY_BELOW

    def top_p_at(self, index: int) -> float:
        """Top-p of the answer's token ``index``; 1 where it keeps all tokens."""
        if self.top_p in (0.0, 1.0) and self.top_p_decay in (0.0, 1.0):
            return 1.0
        decay = self.top_p_decay or 1.0
        return max(self.top_p * decay**index, self.top_p_bound, 1e-300)  # at 0 it would keep all tokens

    def check_vocabulary(self, size: int) -> None:
        """Raise ConfigError for a token id that a vocabulary of ``size`` ids doesn't have."""
        for name, ends in self._named_ids.items():
            for token in ends:
                if not 0 <= token < size:
                    raise ConfigError(f"{name} holds token id {token}; this vocabulary has ids 0 to {size - 1}")

    @cached_property
    def _named_ids(self) -> dict[str, tuple[int, int]]:
        """The least and the largest token id of each setting; found once for all requests that share the settings."""
        named = {
            "logit-bias": [token for token, _ in self.logit_bias],
            "allowed token ids": self.allowed_ids or (),
            "bad words": [token for word in self.bad_words for token in word],
        }
        return {name: (min(tokens), max(tokens)) for name, tokens in named.items() if tokens}
