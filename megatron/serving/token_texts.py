"""The text of single tokens, for log-probabilities and segments."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.inference.request import TokenLogprobs
from megatron.core.tokenizers.base import Tokenizer

LEAST_LOGPROB = -9999.0
"""What stands for the logarithm of 0, which JSON cannot spell."""


@dataclass(frozen=True)
class TokenTexts:
    """Spells tokens; ``as_ids``: as ``token_id:17``."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def spelled(self, token: int) -> str:
        """A token as a text of its own, U+FFFD for bytes that are no character."""
        return f"token_id:{token}" if self.as_ids else self.tokenizer.detokenize([token])

    def ranked(self, logprobs: TokenLogprobs, token: int, *, most: int) -> dict[str, float]:
        """Texts and log-probabilities of the ``most`` likeliest tokens and of the one that was sampled.

        Of tokens with one text, the likelier stays.
        """
        found: dict[str, float] = {}
        for each, value in (*logprobs.top[:most], (token, logprobs.logprob)):
            found.setdefault(self.spelled(each), finite(value))
        return found


def finite(logprob: float) -> float:
    """A log-probability as JSON can spell it."""
    return max(logprob, LEAST_LOGPROB)
