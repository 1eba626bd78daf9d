"""Conversations and prompt–completion pairs as tokens, which of them a model is trained on, and what ends its answers.

A model learns to end its answers only from a token that is trained on. That is the last one of an answer that isn't
space, if it is a special token or what the format ends turns with. Where a template leaves the end to the next turn, it
is that turn's mark, or the end of the document.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.base import Tokenizer, encoded_texts
from megatron.core.tokenizers.conversations import ChatFormat, Span, Writer, Written
from megatron.core.tokenizers.records import Conversation, Pair
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError

_MARK = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]>|</?s>|<(?:bos|eos|sop)>|<(?:start|end)_of_turn>|\[gMASK\]"
)
"""Words that vocabularies have as one token, where they have them."""


@dataclass(frozen=True)
class Located:
    """Ids of a text, and the characters ``[starts[i], stops[i])`` that each stands for, wholly or in part.

    Both are int64 [tokens] and don't fall.
    """

    ids: list[int]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def within(self, span: Span) -> tuple[int, int]:
        """The first token with a character of the span, and the one after the last."""
        start = int(np.searchsorted(self.stops, span.start, side="right"))
        return start, max(start, int(np.searchsorted(self.starts, span.stop, side="left")))


@dataclass
class Endings:
    """What ends the answers of many conversations.

    ``last``: how many answers each token ends. ``within``: how often these occur in an answer before its end.
    ``next_marks``: answers that are ended by the first token of the next turn, ``documents``: by the end of the
    document. ``unmarked``: answers whose end the template leaves outside of what it marks as generated; ``none``:
    other answers that nothing ends.
    """

    last: Counter[int] = field(default_factory=Counter)
    within: Counter[int] = field(default_factory=Counter)
    next_marks: int = 0
    documents: int = 0
    unmarked: int = 0
    none: int = 0

    @property
    def answers(self) -> int:
        """Number of answers that are trained on."""
        return self.last.total() + self.unmarked + self.none


@dataclass(frozen=True)
class Sample:
    """Ids of a conversation, and for each whether it is trained on."""

    ids: list[int]
    learned: list[bool]


class SampleEncoder:
    """Encodes conversations, and counts what ends their answers.

    ``writer``: their format. ``marker``: a word of texts that stands for other ids, which ``encode`` is given; None:
    there is none. ``endings``: counts so far. Raises ConfigError for a template with a tokenizer that can't tell which
    characters a token stands for.
    """

    def __init__(self, tokenizer: Tokenizer, writer: Writer, *, marker: str | None = None) -> None:
        if not isinstance(writer, ChatFormat) and not isinstance(tokenizer, RustTokenizer):
            raise ConfigError(
                f"--chat-template needs a tokenizer that reports positions in the text, which {tokenizer.name} does not"
            )
        self.endings = Endings()
        self._tokenizer, self._writer, self._marker = tokenizer, writer, marker
        self._cut = dict[str, int]()
        self._leading = leading_ids(tokenizer)
        end = writer.turn_end if isinstance(writer, ChatFormat) else ""
        self._turn_end = self._single(end.strip()) if end.strip() else self._single(end)

    @property
    def source(self) -> str:
        """The format as a Jinja template."""
        return self._writer.source

    def encode(self, sample: Conversation | Pair, inserted: Sequence[Sequence[int]] = ()) -> Sample:
        """Ids of a sample. Raises DataError for one that can't be expressed, or in which nothing is learned.

        ``inserted``: ids in place of each ``marker``; those below 0 are never trained on.
        """
        if isinstance(sample, Pair):
            return self._pair(sample, inserted)
        written = self._writer.write(sample)
        cut = isinstance(self._writer, ChatFormat)
        tokens = self._with_inserted(written, inserted, cut=cut)
        self._note_marks(sample, written.text)
        return self._with_targets(tokens, written)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids that end answers, in ascending order.

        An ordinary token, such as a line end, is none if an answer holds it; a special one may be in a few answers,
        whose authors wrote about it.
        """
        most = {
            token: count if token in self._tokenizer.special_ids else 0 for token, count in self.endings.last.items()
        }
        return tuple(sorted(token for token in most if self.endings.within[token] <= most[token]))

    @property
    def cut_marks(self) -> dict[str, int]:
        """Marks of turns that are no single token, and how many they are."""
        return {mark: count for mark, count in self._cut.items() if count > 1}

    def _with_inserted(self, written: Written, inserted: Sequence[Sequence[int]], *, cut: bool) -> Located:
        """Tokens of a conversation, between whose markers each text is encoded alone."""
        if self._marker is None:
            return tokens_of(written.text, written.answers, self._tokenizer, cut=cut)
        parts, start = list[Located](), 0
        spans = [Span(*found.span()) for found in re.finditer(re.escape(self._marker), written.text)]
        _check_inserted(len(spans), inserted)
        for span, ids in zip((*spans, Span(len(written.text), len(written.text))), (*inserted, ())):
            inside = [
                Span(max(each.start, start) - start, min(each.stop, span.start) - start)
                for each in written.answers
                if each.start < span.start and each.stop > start
            ]
            text = tokens_of(written.text[start : span.start], inside, self._tokenizer, cut=cut)
            parts.append(Located(text.ids, text.starts + start, text.stops + start))
            parts.append(Located(list(ids), *(np.full(len(ids), place, np.int64) for place in span)))
            start = span.stop
        starts, stops = (np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "stops"))
        return Located([number for part in parts for number in part.ids], starts, stops)

    def _ids_of(self, text: str, inserted: Sequence[Sequence[int]]) -> list[int]:
        """Ids of a text without those around it."""
        if self._marker is None:
            return self._tokenizer.tokenize_parts([text])[0]
        texts = text.split(self._marker)
        _check_inserted(len(texts) - 1, inserted)
        between = zip(self._tokenizer.tokenize_parts(texts), (*inserted, ()))
        return [number for ids, more in between for number in (*ids, *more)]

    def _pair(self, pair: Pair, inserted: Sequence[Sequence[int]]) -> Sample:
        """A prompt has the tokens that it is asked with, and a completion those that it has behind the prompt."""
        if not pair.completion:
            raise DataError("nothing to learn: the completion is empty")
        asked = 0 if self._marker is None else pair.prompt.count(self._marker)
        prompt, completion = (
            self._ids_of(pair.prompt, inserted[:asked]),
            self._ids_of(pair.completion, inserted[asked:]),
        )
        whole = self._ids_of(pair.prompt + pair.completion, inserted)
        answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else completion
        eod = self._tokenizer.eod
        answer += [] if answer and answer[-1] == eod else [eod]
        read = [*self._leading, *prompt]
        taught = [number >= 0 for number in answer]
        self.endings.last[eod] += 1
        self.endings.within.update(token for token in answer[:-1] if token == eod)
        return Sample([*read, *answer], [False] * len(read) + taught)

    def _with_targets(self, tokens: Located, written: Written) -> Sample:
        ids, learned, eod = list(tokens.ids), [False] * len(tokens.ids), self._tokenizer.eod
        # The document ends where a format has no end of a conversation.
        ends_document = isinstance(self._writer, ChatFormat) and self._turn_end != eod
        for span in written.answers:
            start, stop = tokens.within(span)
            learned[start:stop] = [number >= 0 for number in ids[start:stop]]
            if start < stop:
                ends_document |= self._count_end(ids, learned, start, stop, written)
        if not any(learned[1:]):
            raise DataError("nothing to learn: the first token is never predicted, and the others are no answer")
        if ends_document:
            ids.append(eod)
            learned.append(learned[-1])
        return Sample(ids, learned)

    def _count_end(self, ids: list[int], learned: list[bool], start: int, stop: int, written: Written) -> bool:
        """Count what ends the answer of these tokens; whether it is the end of the document."""
        last = next((n for n in reversed(range(start, stop)) if not self._is_space(ids[n])), stop - 1)
        ends, count = self._tokenizer.special_ids | {self._turn_end}, self.endings
        if ids[last] not in ends and ids[stop - 1] in ends:  # turns that end with a line end
            last = stop - 1
        count.within.update(token for token in ids[start:last] if token in ends)
        if ids[last] in ends:
            count.last[ids[last]] += 1
        elif written.is_marked:
            count.unmarked += 1
        elif stop == len(ids):
            count.last[self._tokenizer.eod] += 1
            count.documents += 1
            return True
        elif ids[stop] in self._tokenizer.special_ids:
            learned[stop] = True
            count.last[ids[stop]] += 1
            count.next_marks += 1
        else:
            count.none += 1
        return False

    def _note_marks(self, conversation: Conversation, text: str) -> None:
        """Count the tokens of each mark that the format wrote, and no message."""
        contents = [message["content"] or "" for message in conversation.messages]
        for mark in dict.fromkeys(_MARK.findall(text)):
            if mark not in self._cut and not any(mark in content for content in contents):
                self._cut[mark] = len(self._tokenizer.tokenize_parts([mark])[0])

    def _single(self, text: str) -> int | None:
        """The id of a text that is one token."""
        if not text:
            return None
        try:
            [ids] = self._tokenizer.tokenize_parts([text])
        except DataError:  # a tokenizer that can't express every text
            return None
        return ids[0] if len(ids) == 1 else None

    def _is_space(self, token: int) -> bool:
        if token not in self._spaces:
            self._spaces[token] = self._tokenizer.detokenize([token]).isspace()
        return self._spaces[token]

    @cached_property
    def _spaces(self) -> dict[int, bool]:
        return {}


def _check_inserted(markers: int, inserted: Sequence[Sequence[int]]) -> None:
    if markers != len(inserted):
        raise DataError(
            f"the chat template writes {markers} images, and the sample has {len(inserted)}: give a template that "
            "writes each once"
        )


def leading_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that the tokenizer puts before a whole text, such as a beginning of text."""
    text = "1"  # also a text of NullTokenizer, whose words are ids
    [whole], [bare] = tokenizer.tokenize_batch([text]), tokenizer.tokenize_parts([text])
    places = range(len(whole) - len(bare) + 1)
    return whole[: next((place for place in places if whole[place : place + len(bare)] == bare), 0)]


def leading_text(tokenizer: Tokenizer) -> str:
    """The spelling of ``leading_ids``, or nothing if the tokenizer doesn't recognize it in a text."""
    ids = leading_ids(tokenizer)
    text = tokenizer.detokenize(ids) if ids else ""
    return text if ids and tokenizer.tokenize_parts([text])[0] == ids else ""


def tokens_of(text: str, answers: Sequence[Span], tokenizer: Tokenizer, *, cut: bool) -> Located:
    """Tokens of a text, in which special tokens are spelled out, with their characters.

    With ``cut`` no token holds the end of a prompt and the beginning of its answer, since the prompt would have other
    tokens when it is asked. A tokenizer that doesn't tell the characters encodes the text in parts, divided where
    ``answers`` begin and end. Raises DataError for lone surrogates.
    """
    encoded_texts([text])  # refuses lone surrogates
    if not isinstance(tokenizer, RustTokenizer):
        parts = _divided(text, {border for span in answers for border in span})
        found = tokenizer.tokenize_parts([text[start:stop] for start, stop in parts])
        each = np.repeat(np.array(parts, np.int64).reshape(-1, 2), [len(ids) for ids in found], axis=0)
        return Located([number for ids in found for number in ids], each[:, 0], each[:, 1])
    tokens = _located(text, tokenizer)
    starts = np.array([span.start for span in answers])
    if cut and not np.isin(starts, tokens.starts).all():
        parts = _divided(text, set(starts.tolist()))
        pieces = [_located(text[start:stop], tokenizer, start) for start, stop in parts]
        return Located(
            [number for piece in pieces for number in piece.ids],
            np.concatenate([piece.starts for piece in pieces]),
            np.concatenate([piece.stops for piece in pieces]),
        )
    return tokens


def _located(text: str, tokenizer: RustTokenizer, offset: int = 0) -> Located:
    """Tokens of a text that begins ``offset`` characters behind another."""
    encoding = tokenizer.pipeline.encode(text, add_special_tokens=False)
    starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    stops = np.maximum.accumulate(stops)
    # Some vocabularies' offsets leave out the space at the beginning of a token, or all of a space.
    starts = np.minimum(starts, np.concatenate([[0], stops[:-1]]))
    return Located(encoding.ids, starts + offset, stops + offset)


def _divided(text: str, borders: set[int]) -> list[Span]:
    """The parts of a text between the borders."""
    places = sorted(borders | {0, len(text)})
    return [Span(start, stop) for start, stop in pairwise(places)]
