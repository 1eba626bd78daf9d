"""Right and wrong answers about images, and captions beside those of people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from importlib import import_module

_ARTICLES = {"a", "an", "the"}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)} | {"none": "0"}
_MARKS = re.escape(';/[]"{}()=+\\_-><@`,?!')
_PEOPLE = 10


def normalized(answer: str) -> str:
    """An answer as VQA compares it: small letters, no articles, numbers as digits, no punctuation but that of numbers.

    The rules are those of https://visualqa.org/evaluation.html. Its list of contractions without an apostrophe is not
    needed: apostrophes are dropped from both sides.
    """
    text = " ".join(answer.lower().split())
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    text = re.sub(rf"(?<=\s)[{_MARKS}]+|[{_MARKS}]+(?=\s|$)|^[{_MARKS}]+", "", text)
    text = re.sub(rf"[{_MARKS}]", " ", text).replace("'", "").replace("\u2019", "")
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text)
    return " ".join(_DIGITS.get(word, word) for word in text.split() if word not in _ARTICLES)


def accuracy(answer: str, right: Sequence[str]) -> float:
    """How right an answer is, from 0 to 1.

    With the answers of ten people it is VQA's (arXiv:1505.00468): min(1, matches / 3), the mean over each nine of them.
    With any other number it must be one of them.
    """
    given, matches = normalized(answer), Counter(map(normalized, right))
    count = matches[given]
    if len(right) != _PEOPLE:
        return float(count > 0)
    # One is left out: where it is a match, one match less remains.
    return (count * min(1.0, (count - 1) / 3) + (_PEOPLE - count) * min(1.0, count / 3)) / _PEOPLE


def most_frequent(right: Sequence[Sequence[str]]) -> float:
    """Mean accuracy of the one answer that is given most often, whatever is asked."""
    counted = Counter(normalized(each) for answers in right for each in answers)
    best = counted.most_common(1)[0][0]
    return sum(accuracy(best, answers) for answers in right) / len(right)


def bleu(captions: Sequence[str], right: Sequence[Sequence[str]]) -> float | None:
    """BLEU-4 of all captions together (Papineni et al. 2002), over words as ``normalized`` leaves them.

    0 where no four words in a row are right; None where no right caption has four words.
    """
    scores = import_module("nltk.translate.bleu_score")
    found = [normalized(each).split() for each in captions]
    wanted = [[normalized(each).split() for each in answers] for answers in right]
    if all(len(answer) < 4 for answers in wanted for answer in answers):
        return None
    if not _shares_four(found, wanted):
        return 0.0
    return float(scores.corpus_bleu(wanted, found))


def _shares_four(found: Sequence[Sequence[str]], wanted: Sequence[Sequence[Sequence[str]]]) -> bool:
    """Whether any caption has four words in a row of one of its own; without, nltk warns and gives nearly 0."""
    return any(
        _fours(words) & {four for answer in answers for four in _fours(answer)}
        for words, answers in zip(found, wanted, strict=True)
    )


def _fours(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + 4]) for start in range(len(words) - 3)}
