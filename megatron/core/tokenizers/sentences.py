"""Text cut into sentences by punkt (Kiss and Strunk 2006), as implemented in NLTK.

Its parameters (abbreviations, words that begin sentences, ...) come from NLTK's ``punkt_tab`` where NLTK_DATA holds
it; otherwise punkt, which needs no labels, learns them from the first megabytes of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any

from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import ConfigError

LEARNED_FROM_BYTES = 4 << 20


@dataclass(frozen=True)
class SentenceRules:
    """Where sentences end; small enough to be sent to workers.

    ``parameters``: punkt's, as JSON. ``origin``: where they come from, for messages. ``keep_whitespace``: whitespace
    between two sentences belongs to the first, so that a document's sentences together are its text.
    ``leading_space``: a sentence begins with a space where whitespace separates it from the one before.
    """

    parameters: str
    origin: str
    keep_whitespace: bool = False
    leading_space: bool = False

    def split(self, text: str) -> list[str]:
        """Sentences of one text, without the whitespace around them unless asked for."""
        spans = list(_splitter(self.parameters).span_tokenize(text))
        if not self.keep_whitespace:
            spaces = [self.leading_space and start > 0 and text[start - 1].isspace() for start, _ in spans]
            spaces[:1] = [False] * len(spaces[:1])
            return [" " * space + text[start:end] for space, (start, end) in zip(spaces, spans)]
        bounds = [0, *(start for start, _ in spans[1:]), len(text)]
        return [text[start:end] for start, end in pairwise(bounds)] if text else []


def needs_leading_space(tokenizer: Tokenizer) -> bool:
    """Whether sentences after the first need the space before them to get the ids that they have in the whole text.

    Byte-level BPE spells it in the first piece. Only kinds that mask tokens are asked: what others make of sentences is
    what Megatron-LM makes of them.
    """
    if not hasattr(tokenizer, "mask"):
        return False
    whole, first, bare, spaced = tokenizer.tokenize_parts(["a. b", "a.", "b", " b"])
    return whole == first + spaced and whole != first + bare


def _punkt() -> Any:
    """NLTK's module of punkt. Raises ConfigError without NLTK, and with a release that unpickles its data."""
    try:
        punkt = import_module("nltk.tokenize.punkt")
    except ModuleNotFoundError:
        found = "which is not installed"
    else:
        if hasattr(punkt, "PunktTokenizer"):
            return punkt
        found = f"and release {import_module('nltk').__version__} is installed"
    raise ConfigError(
        f"sentences are split with the nltk library, release 3.9 or newer, {found}: pip install 'nltk>=3.9', or leave "
        "--split-sentences out"
    )


def installed_rules(language: str, *, keep_whitespace: bool = False) -> SentenceRules | None:
    """NLTK's own rules of a language, or None when NLTK_DATA holds none; ConfigError for an invalid name."""
    punkt = _punkt()
    try:
        parameters = punkt.PunktTokenizer(language)._params
    except LookupError:
        return None
    except ValueError as error:
        raise ConfigError(f"--lang {language}: {error}; give a name such as english or german.") from None
    return SentenceRules(_to_json(parameters), f"NLTK's punkt_tab, {language}", keep_whitespace)


def learned_rules(texts: Iterable[str], *, language: str, keep_whitespace: bool = False) -> SentenceRules:
    """Rules that punkt learns from ``texts``, where those of ``language`` are missing; deterministic."""
    trainer, size = _punkt().PunktTrainer(), 0
    for text in texts:
        trainer.train(text, finalize=False)
        size += len(text)
    trainer.finalize_training()
    origin = f"punkt trained on the first {size / 1e6:.1f} MB of the text itself"
    origin += f", as NLTK_DATA holds no punkt_tab for {language}"
    return SentenceRules(_to_json(trainer.get_params()), origin, keep_whitespace)


def _to_json(parameters: Any) -> str:
    return json.dumps(
        [
            sorted(parameters.abbrev_types),
            sorted(parameters.collocations),
            sorted(parameters.sent_starters),
            sorted(parameters.ortho_context.items()),
        ]
    )


@lru_cache(maxsize=1)
def _splitter(parameters: str) -> Any:
    """A punkt splitter of this process."""
    punkt = _punkt()
    abbreviations, collocations, starters, orthography = json.loads(parameters)
    restored = punkt.PunktParameters()
    restored.abbrev_types = set(abbreviations)
    restored.collocations = set(map(tuple, collocations))
    restored.sent_starters = set(starters)
    restored.ortho_context.update(orthography)
    splitter = punkt.PunktSentenceTokenizer()
    splitter._params = restored
    return splitter


def split_all(texts: Sequence[str], rules: SentenceRules | None) -> tuple[list[str], list[int]]:
    """All sentences end to end, and the number of each text's; without rules each text is one."""
    if rules is None:
        return list(texts), [1] * len(texts)
    sentences = [rules.split(text) for text in texts]
    return [sentence for each in sentences for sentence in each], [len(each) for each in sentences]
