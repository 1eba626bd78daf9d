"""The known word that a misspelt word almost certainly stands for.

Similar is not enough: ``--deepspeed`` contains ``--seed``, and ``--reglu`` is one letter from ``--geglu``. Words are
compared part by part, and a part that is itself a word of another flag is no typo. A wrong suggestion is worse than
none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

_MOST_TYPOS = 2


def did_you_mean(word: str, known: Iterable[Any], *, words: Collection[str] = ()) -> str:
    """`` (did you mean X?)`` for what ``meant_by`` finds, else nothing."""
    meant = meant_by(word, known, words=words)
    return f" (did you mean {meant}?)" if meant else ""


def meant_by(word: str, known: Iterable[Any], *, words: Collection[str] = ()) -> str | None:
    """The only known word that ``word`` is a likely typo of, if there is one.

    ``words``: further parts that are correct as they stand, besides those of ``known``.
    """
    meant: dict[tuple[str, ...], str] = {}
    for each in known:
        meant.setdefault(parts_of(str(each)), str(each))
    correct = {part for parts in meant for part in parts} | set(words)
    typed = parts_of(word)
    distances = {parts: found for parts in meant if (found := _typos(typed, parts, correct)) is not None}
    least = min(distances.values(), default=None)
    nearest = [parts for parts, distance in distances.items() if distance == least]
    return meant[nearest[0]] if len(nearest) == 1 else None


def parts_of(word: str) -> tuple[str, ...]:
    """The words a flag, a field or a value is made of, in lower case: ``--num_layers`` -> ``num``, ``layers``."""
    return tuple(re.findall(r"[^\s\-–—_.]+", word.lower()))


def _typos(typed: tuple[str, ...], meant: tuple[str, ...], correct: Collection[str]) -> int | None:
    """Number of typos between ``meant`` and ``typed``, or None if they are more likely different words."""
    if "".join(typed) == "".join(meant) or sorted(typed) == sorted(meant):  # other dashes or case; another order
        return 0
    if len(typed) != len(meant):
        return None
    counts = [_typos_of_part(one, other, correct) for one, other in zip(typed, meant, strict=True)]
    if sorted(counts, key=bool) == [*[0] * (len(counts) - 1), None]:  # the other parts leave no doubt about this one
        at = counts.index(None)
        counts[at] = _letter_of_part(typed[at], meant[at], correct) if len(counts) > 1 else None
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) and sum(known) <= _MOST_TYPOS else None


def _letter_of_part(typed: str, meant: str, correct: Collection[str]) -> int | None:
    """One wrong letter in a short part, not the first: ``sise`` for ``size``."""
    alike = len(typed) == len(meant) > 3 and typed[0] == meant[0] and typed.isalpha() and typed not in correct
    return 1 if alike and sum(one != other for one, other in zip(typed, meant, strict=True)) == 1 else None


def _typos_of_part(typed: str, meant: str, correct: Collection[str]) -> int | None:
    if typed == meant:
        return 0
    shorter, longer = sorted((typed, meant), key=len)
    if longer == shorter + "s" and len(shorter) > 2:
        return 1
    if typed in correct or re.findall(r"\d", typed) != re.findall(r"\d", meant) or len(meant) < 3:
        return None
    slip = _is_slip(typed, meant)
    if len(meant) < 6:  # short words have too many neighbours: seed and speed, relu and gelu
        return 1 if slip else None
    if typed[0] != meant[0] and not slip:
        return None
    distance = _distance(typed, meant)
    return distance if distance <= (2 if len(meant) > 7 else 1) else None


def _is_slip(typed: str, meant: str) -> bool:
    """Whether a letter was left out or typed twice, or two neighbours were swapped."""
    places = range(len(meant))
    return (
        any(typed == meant[:at] + meant[at + 1 :] for at in places)
        or any(typed == meant[:at] + meant[at] + meant[at:] for at in places)
        or any(typed == meant[:at] + meant[at : at + 2][::-1] + meant[at + 2 :] for at in places)
    )


def _distance(one: str, other: str) -> int:
    """Edit distance of two words: insertions, deletions, substitutions and swaps of neighbours."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, start=1):
        row = [i]
        for j, b in enumerate(other, start=1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
