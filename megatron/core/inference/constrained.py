"""Answers that follow a grammar, such as JSON of a schema: which tokens may come next."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.inference.ecma_regex import rust_pattern
from megatron.core.inference.json_schema import followable
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# A space, or a line break and the indentation after it: a model that likes spaces would write little else.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,40}"}

_KEPT_GRAMMARS = 32
_SECONDS_OF_A_MASK, _SECONDS_BESIDE = 0.005, 0.25
"""What a mask of a grammar may take on average, and all of them besides that: others wait while masks are made."""


class ConstraintCompiler:
    """Compiles grammars for a vocabulary by the library llguidance.

    The library may take very long, and ends the process where a grammar is nested too deeply: compile a stranger's in a
    process that has limits first. The methods raise ConfigError for a grammar that is wrong, too complex, or has parts
    that the library doesn't know.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            import llguidance
        except ImportError:
            raise ConfigError(
                "answers that follow a schema need the llguidance library: pip install llguidance, or this project's "
                "extra constrained"
            ) from None
        self._compiled = lru_cache(maxsize=_KEPT_GRAMMARS)(self._compile)
        self._matcher = llguidance.LLMatcher
        wrapped = llguidance.TokenizerWrapper(_Spelling(vocabulary))
        self._vocabulary = llguidance.LLTokenizer(wrapped, eos_token=list(vocabulary.end_ids))

    def json_schema(self, schema: Mapping[str, Any], *, strict: bool = False) -> Constraint:
        """JSON that validates against a schema.

        A grammar can't compare parts of a text. So ``oneOf`` is exact where no value fits two of its schemas, else it
        is taken as ``anyOf``, and ``uniqueItems`` is left out; ``Constraint.relaxed`` names them. ``strict`` refuses
        them instead.
        """
        found, is_relaxed = followable(schema, strict=strict)
        relaxed = ("uniqueItems",) * is_relaxed
        try:
            return self._relaxed(self._json_grammar(found), relaxed)
        except _OverlapError:
            if strict:
                raise ConfigError(
                    "the schema cannot be followed: a value may fit several schemas of a oneOf, of which strict: true "
                    "allows one; make them differ, use anyOf, or leave out strict"
                ) from None
        return self._relaxed(self._json_grammar(found, coerce_one_of=True), ("oneOf", *relaxed))

    def json_object(self) -> Constraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Constraint:
        """Text that a regular expression of ECMA-262 matches as a whole, without look-around and backreferences."""
        return self.compiled(self._matcher.grammar_from_regex(rust_pattern(pattern)))

    def choice(self, texts: Sequence[str]) -> Constraint:
        """One of several texts."""
        if not texts:
            raise ConfigError("the list of texts to choose from is empty: name one at least")
        return self.grammar("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    def grammar(self, lark: str) -> Constraint:
        """Text of a context-free grammar, which is written as llguidance's variant of Lark."""
        return self.compiled(self._matcher.grammar_from_lark(lark))

    def compiled(self, grammar: str) -> Constraint:
        """A grammar in the library's own form, such as ``Constraint.grammar``; the latest ones are kept."""
        return self._compiled(grammar)

    def _json_grammar(self, schema: dict[str, Any], **options: Any) -> str:
        try:
            defaults: Any = {**_JSON_OPTIONS, **options}
            return str(self._matcher.grammar_from_json_schema(schema, defaults))
        except ValueError as error:
            raise ConfigError(f"the schema cannot be followed: {error}") from None

    def _relaxed(self, grammar: str, relaxed: tuple[str, ...]) -> Constraint:
        found = self.compiled(grammar)
        return replace(found, relaxed=relaxed) if relaxed else found

    def _compile(self, grammar: str) -> Constraint:
        matcher = self._matcher(self._vocabulary, grammar, log_level=0)
        cost = MaskCost()
        if not matcher.is_error():
            with cost.measured():
                matcher.compute_bitmask()  # may find that the grammar is too complex
        if matcher.is_error() and "coerce_one_of" in matcher.get_error():
            raise _OverlapError
        if problem := _problem(matcher) or cost.problem():
            raise ConfigError(problem)
        return Constraint(grammar, matcher, cost)


class _OverlapError(ConfigError):
    """A ``oneOf`` of which the library can't tell that a value fits one schema alone."""


@dataclass
class MaskCost:
    """What the masks of a grammar have taken, for all its answers: ``seconds`` of the processor for ``masks`` of them.

    The library bounds the parts of a grammar, and not what they cost together: 40 patterns that may go on side by side
    take 50 ms for each token of each answer.
    """

    seconds: float = 0.0
    masks: int = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the block, which makes a mask."""
        start = time.thread_time()
        yield
        self.seconds += time.thread_time() - start
        self.masks += 1

    def problem(self) -> str | None:
        """What is wrong with a grammar whose masks take too long, as a sentence."""
        if self.seconds <= _SECONDS_BESIDE + _SECONDS_OF_A_MASK * self.masks:
            return None
        milliseconds = 1000 * self.seconds / self.masks
        return (
            f"the schema or grammar cannot be followed: it is too complex (each token takes {milliseconds:.0f} ms, and "
            f"may take {1000 * _SECONDS_OF_A_MASK:.0f}): make it simpler"
        )


@dataclass(frozen=True, eq=False)
class Constraint:
    """A compiled grammar of the library; requests share it.

    ``grammar``: its source in the library's own form. ``cost``: of its masks so far. ``relaxed``: keywords of a schema
    that it doesn't keep exactly.
    """

    grammar: str
    matcher: LLMatcher
    cost: MaskCost
    relaxed: tuple[str, ...] = ()

    def begin(self) -> ConstraintState:
        """The state of one answer that has no tokens yet."""
        return ConstraintState(self.matcher.deep_copy(), self.cost)


class ConstraintState:
    """The parser state of one answer in a grammar."""

    def __init__(self, matcher: LLMatcher, cost: MaskCost) -> None:
        self._matcher, self._cost = matcher, cost

    def allowed(self, drafts: Sequence[int] = ()) -> NDArray[np.int32] | None:
        """Which tokens may follow the answer and ``drafts``: bit ``t % 32`` of word ``t // 32`` for token ``t``.

        None: the grammar doesn't allow ``drafts``. Where the answer may end, tokens that end texts are allowed. None
        are where the grammar has a ``problem``.
        """
        if self._cost.problem() is not None:
            return np.zeros(1, dtype=np.int32)  # padded with zeros by its reader
        with self._cost.measured():
            count = self._matcher.try_consume_tokens(list(drafts))
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32) if count == len(drafts) else None
            if count:
                self._matcher.rollback(count)
        if bits is not None and self._matcher.is_error():  # too complex; its mask would allow the end
            return np.zeros_like(bits)
        return bits

    def append(self, token: int) -> None:
        """Add an allowed token to the answer."""
        self._matcher.consume_token(token)

    def forked(self) -> ConstraintState:
        """A copy, for another answer with the same beginning."""
        return ConstraintState(self._matcher.deep_copy(), self._cost)

    def problem(self) -> str | None:
        """Why the answer can't go on, as a sentence; None where the grammar isn't the reason."""
        return _problem(self._matcher) or self._cost.problem()


def _problem(matcher: LLMatcher) -> str | None:
    """What is wrong with a grammar, as a sentence; None where nothing is."""
    if not matcher.is_error():
        return None
    reason = " ".join(matcher.get_error().partition("<state>")[0].split())  # then the parser's insides
    if "NoExtension" in reason:  # no token is allowed
        reason = "nothing satisfies it, or no token of this vocabulary can spell what must come next"
    elif re.search("TooComplex|too many|max is", reason, re.IGNORECASE):
        reason = f"it is too complex ({reason[:200]}): make it simpler"
    return f"the schema or grammar cannot be followed: {reason[:300]}"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a grammar has to know of a tokenizer, without the tokenizer.

    ``tokens``: the bytes of each. ``end_ids``: those that end texts, which requests name in their stop rules; a grammar
    allows them where an answer is complete. ``special_ids``: those that no text holds.
    """

    tokens: Sequence[bytes]
    end_ids: Sequence[int]
    special_ids: Sequence[int]
    bos: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, end_ids: Collection[int]) -> Vocabulary:
        """The vocabulary of a tokenizer; raises ConfigError without a token that ends texts."""
        if not end_ids:
            raise ConfigError("answers that follow a schema need a token that ends texts, and this tokenizer has none")
        return cls(
            tokens=[tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
            end_ids=sorted(end_ids),
            special_ids=sorted(tokenizer.special_ids.union(end_ids)),
            bos=tokenizer.bos,
        )


class _Spelling:
    """What the library asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special_ids
        self.eos_token_id, self.bos_token_id = vocabulary.end_ids[0], vocabulary.bos
        special = set(vocabulary.special_ids)
        self._ids = {token: number for number, token in enumerate(self.tokens) if number not in special and token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """Token ids whose bytes are exactly ``text``, the longest that fit; empty if none are."""
        whole, ids, start = text.encode(), list[int](), 0
        while start < len(whole):
            ends = range(min(start + self._longest, len(whole)), start, -1)
            end = next((end for end in ends if whole[start:end] in self._ids), None)
            if end is None:
                return []
            ids.append(self._ids[whole[start:end]])
            start = end
        return ids
