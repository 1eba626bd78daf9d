"""What a text-generation engine is asked, and what it answers: no tensors, so servers and schedulers share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron.core.images.prompts import PromptImages
from megatron.core.inference.constrained import Constraint
from megatron.core.inference.sampling import Sampling

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """What ends a text before its limit.

    ``token_ids`` end it and are left out of the text, such as the end of a document. ``strings``: the text ends before
    the first that appears, after it with ``include_string``.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    include_string: bool = False


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Look for the ``width`` likeliest answers instead of sampling one.

    As many beams go on at once; one that has come to its end competes with the others by its score: the sum of its
    tokens' log-probabilities, divided by their number to the power of ``length_penalty``. The search ends when no beam
    that goes on scores more, at its present length, than the worst of ``width`` ended ones: transformers' beam search
    with ``early_stopping=False``, which is Megatron-LM's, too.
    """

    width: int
    length_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to continue.

    ``id``: unique among unfinished requests. ``prompt``: token ids, one at least. ``max_tokens``: how many are
    generated at most. ``seed`` and ``choice`` (which of several continuations of a prompt) determine the random
    numbers; neighbours in a batch don't. ``constraint``: a grammar that the answer follows. ``logprobs``: how many of
    the likeliest tokens are reported for each generated one beside itself; None: no log-probabilities.
    ``prompt_logprobs``: the same for the tokens of the prompt. ``encoder_prompt``: what an encoder-decoder model
    encodes; its ``prompt`` begins the decoder's text. ``skip_special_tokens``: whether those are left out of the text.
    ``beams``: how to search for the likeliest answers; then nothing is sampled, and the settings for it have no effect.
    ``adapter``: number of the adapter that the model has for this text, from 1 on; 0: none. ``images``: those that
    stand in the prompt.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    constraint: Constraint | None = None
    stop: StopRules = field(default_factory=StopRules)
    seed: int = 0
    choice: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    encoder_prompt: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    beams: BeamSearch | None = None
    adapter: int = 0
    images: PromptImages | None = None

    @property
    def keyed_prompt(self) -> Sequence[int]:
        """What keys of blocks are made of: the prompt, with pictures in place of ids at their places."""
        return self.prompt if self.images is None else self.images.keyed(self.prompt)

    @property
    def adapter_key(self) -> bytes:
        """What keys of the text's blocks begin with: those of another adapter are other blocks."""
        return str(self.adapter).encode() if self.adapter else b""

    @property
    def width(self) -> int:
        """Number of texts that are generated at once for this request."""
        return 1 if self.beams is None else self.beams.width

    def num_blocks(self, block_size: int) -> int:
        """How many blocks of the cache its text, or all of its beams together, may need."""
        return self.width * -(-(len(self.prompt) + self.max_tokens) // block_size)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of a token's probability, before temperature, penalties and filters, and of the likeliest
    tokens' at its place: ``top``, ids and values, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GeneratedToken:
    """A generated token; ``logprobs`` where they were asked for. ``text``: the characters that it completes, also
    those that a stop string cuts off; "" for hidden tokens, and for one in ``StopRules.token_ids``.
    """

    id: int
    logprobs: TokenLogprobs | None = None
    text: str = ""


@dataclass(frozen=True)
class Finish:
    """Why a text ended: ``reason``; ``stop``: the string or token id that did it; ``error``: what went wrong.

    ``is_refusal``: the request asks for what can't be, such as a grammar that nothing satisfies; otherwise the model
    or the server failed.
    """

    reason: FinishReason
    stop: str | int | None = None
    error: str | None = None
    is_refusal: bool = False


@dataclass(frozen=True, kw_only=True)
class Beam:
    """An answer that a search has found, with its ``score``; ``tokens`` with one that ended it."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    finish: Finish
    score: float


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a step brought one request.

    ``text``: what may be shown now; the texts of all updates together are the answer. ``tokens``: generated since the
    last update; one that ended the text is among them. ``prompt_logprobs``: those that have come since the last update;
    None for the first token. ``cached_tokens``: tokens of the prompt whose keys and values another request had left.
    ``beams``: the answers of a search, the best first, with its last update; ``text`` and ``tokens`` are those of the
    best one. ``started``: when the first step of the request began, in seconds of ``time.monotonic``; None if none has.
    """

    request_id: str
    text: str = ""
    tokens: tuple[GeneratedToken, ...] = ()
    finish: Finish | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    cached_tokens: int = 0
    beams: tuple[Beam, ...] = ()
    started: float | None = field(default=None, compare=False)

    @property
    def num_generated(self) -> int:
        """New tokens, those of all answers of a search."""
        return sum(len(beam.tokens) for beam in self.beams) or len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Result(Update):
    """All updates of a request together; ``finish`` is the last one's."""

    finish: Finish

    @classmethod
    def of(cls, updates: Sequence[Update]) -> Result:
        """All updates of a request, in order, as one."""
        last = updates[-1]
        assert last.finish is not None, "the last update of a request ends it"
        return cls(
            request_id=last.request_id,
            text="".join(update.text for update in updates),
            tokens=tuple(token for update in updates for token in update.tokens),
            finish=last.finish,
            prompt_logprobs=tuple(score for update in updates for score in update.prompt_logprobs),
            cached_tokens=last.cached_tokens,
            beams=last.beams,
            started=last.started,
        )

    @property
    def ids(self) -> list[int]:
        """Generated token ids, of the text only: without one that ended it."""
        ids = [token.id for token in self.tokens]
        return ids[:-1] if self.finish.reason == "stop" and isinstance(self.finish.stop, int) else ids

    @property
    def answers(self) -> list[Result]:
        """A result for each answer of a search, the best first; without a search the result itself."""
        found = [replace(self, text=beam.text, tokens=beam.tokens, finish=beam.finish, beams=()) for beam in self.beams]
        return found or [self]
