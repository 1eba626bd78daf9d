"""Answers that follow a grammar, such as JSON of a schema: which tokens may come next."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# A space, or a line break and the indentation after it: a model that likes spaces would write little else.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,40}"}

_KEPT_GRAMMARS = 32


class ConstraintCompiler:
    """Compiles grammars for a tokenizer by the library llguidance.

    ``end_ids``: tokens that end texts, which requests name in their stop rules; a grammar allows them where an answer
    is complete. ``seconds``: how long a grammar may take. Compile outside of the engine's thread. The methods raise
    ConfigError for a grammar that is wrong, too complex, or has parts that the library doesn't know.
    """

    def __init__(self, tokenizer: Tokenizer, *, end_ids: Collection[int], seconds: float = 5.0) -> None:
        try:
            import llguidance
        except ImportError:
            raise ConfigError(
                "answers that follow a schema need the llguidance library: pip install llguidance, or this project's "
                "extra constrained"
            ) from None
        if not end_ids:
            raise ConfigError("answers that follow a schema need a token that ends texts, and this tokenizer has none")
        self._seconds = seconds
        self._compiled = lru_cache(maxsize=_KEPT_GRAMMARS)(self._compile)
        self._matcher = llguidance.LLMatcher
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, end_ids))
        self._vocabulary = llguidance.LLTokenizer(wrapped, eos_token=sorted(end_ids))

    def json_schema(self, schema: Mapping[str, Any]) -> Constraint:
        """JSON that validates against a schema."""
        return self.compiled(self._matcher.grammar_from_json_schema(dict(schema), defaults=_JSON_OPTIONS))

    def json_object(self) -> Constraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Constraint:
        """Text that a regular expression matches as a whole; it has no look-around and no backreferences."""
        return self.compiled(self._matcher.grammar_from_regex(pattern))

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

    def _compile(self, grammar: str) -> Constraint:
        found: list[LLMatcher] = []

        def compile_grammar() -> None:
            matcher = self._matcher(self._vocabulary, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # may find that the grammar is too complex
            found.append(matcher)

        thread = Thread(target=compile_grammar, name="compile-grammar", daemon=True)  # the library bounds its work, too
        thread.start()
        thread.join(self._seconds)
        if not found:
            raise ConfigError(f"the schema or grammar took more than {self._seconds:g} s to compile: make it simpler")
        if found[0].is_error():
            reason = " ".join(found[0].get_error().partition("<state>")[0].split())  # then the parser's insides
            if "NoExtensionBias" in reason:  # no token is allowed at the start
                reason = "no token of this vocabulary can begin a text of that form"
            raise ConfigError(f"the schema or grammar cannot be followed: {reason[:300]}")
        return Constraint(grammar, found[0])


class Constraint:
    """A compiled grammar of the library; requests share it. ``grammar``: its source in the library's own form."""

    def __init__(self, grammar: str, matcher: LLMatcher) -> None:
        self.grammar, self._matcher = grammar, matcher

    def begin(self) -> ConstraintState:
        """The state of one answer that has no tokens yet."""
        return ConstraintState(self._matcher.deep_copy())


class ConstraintState:
    """The parser state of one answer in a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, drafts: Sequence[int] = ()) -> NDArray[np.int32] | None:
        """Which tokens may follow the answer and ``drafts``: bit ``t % 32`` of word ``t // 32`` for token ``t``.

        None: the grammar doesn't allow ``drafts``. Where the answer may end, tokens that end texts are allowed.
        """
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
        return ConstraintState(self._matcher.deep_copy())

    def problem(self) -> str | None:
        """Why the answer can't go on, as a sentence; None where the grammar isn't the reason."""
        return _problem(self._matcher)


def _problem(matcher: LLMatcher) -> str | None:
    """What is wrong with a grammar, as a sentence; None where nothing is."""
    if not matcher.is_error():
        return None
    reason = " ".join(matcher.get_error().partition("<state>")[0].split())  # then the parser's insides
    if "NoExtension" in reason:  # no token is allowed
        reason = "nothing satisfies it, or no token of this vocabulary can spell what must come next"
    elif "TooComplex" in reason:
        reason = "it is too complex: make it simpler"
    return f"the schema or grammar cannot be followed: {reason[:300]}"


class _Vocabulary:
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        special = tokenizer.special_ids.union(end_ids)
        self.special_token_ids = sorted(special)
        self.eos_token_id = min(end_ids)
        self.bos_token_id = tokenizer.bos
        self._tokenizer = tokenizer
        self._ids = {token: number for number, token in enumerate(self.tokens) if number not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Token ids whose bytes are exactly ``text``: the tokenizer's, unless it adds a space. Empty if none are."""
        whole = text.encode()
        try:
            ids = self._tokenizer.tokenize_parts([text])[0]
        except DataError:  # this vocabulary cannot spell it
            return []
        if b"".join(self.tokens[token] for token in ids) == whole:
            return ids
        ids, start = [], 0
        while start < len(whole):
            ends = range(min(start + self._longest, len(whole)), start, -1)
            end = next((end for end in ends if whole[start:end] in self._ids), None)
            if end is None:
                return []
            ids.append(self._ids[whole[start:end]])
            start = end
        return ids
