"""Right and wrong answers about images, and captions beside those of people."""

from __future__ import annotations

import math
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

    0 where no four words in a row are right; None where no right caption has four words. nltk's own sum takes each
    caption under four words for one with a wrong row of four.
    """
    scores = import_module("nltk.translate.bleu_score")
    found = [normalized(each).split() for each in captions]
    wanted = [[normalized(each).split() for each in answers] for answers in right]
    if all(len(answer) < 4 for answers in wanted for answer in answers):
        return None
    matches, counts, length, closest = [0] * 4, [0] * 4, 0, 0
    for words, answers in zip(found, wanted, strict=True):
        for order in range(4):
            own, most = _grams(words, order + 1), Counter[tuple[str, ...]]()
            for answer in answers:
                most |= _grams(answer, order + 1)
            matches[order] += (own & most).total()
            counts[order] += own.total()
        length, closest = length + len(words), closest + scores.closest_ref_length(answers, len(words))
    if 0 in matches:
        return 0.0
    logarithms = [math.log(match / count) for match, count in zip(matches, counts)]
    return float(scores.brevity_penalty(closest, length)) * math.exp(sum(logarithms) / 4)


def _grams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    """How often each row of ``order`` words is in ``words``."""
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))
