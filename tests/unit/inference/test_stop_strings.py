"""Stop strings must end a text at the same place however tokens cut it, and never flash up before they are removed."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from megatron.core.inference.stop_strings import StopStrings


def cut_off(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    finder = StopStrings(stops, include_string=include)
    shown = "".join(map(finder.add, pieces))
    return shown + finder.finish(), finder.matched


def plainly(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The stop string that is complete first, of several the longest; found character by character."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def splits(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    found = []
    for cuts in product((False, True), repeat=len(text) - 1):
        pieces = [text[0]]
        for cut, character in zip(cuts, text[1:]):
            pieces = [*pieces, character] if cut else [*pieces[:-1], pieces[-1] + character]
        found.append(pieces)
    return found


def test_every_split_of_every_stop_string() -> None:
    for stops in (["\n\n"], ["aab"], ["ab", "b a"], ["</s>", "<"], ["abcd", "bc"], ["aba"]):
        for stop in stops:
            for include in (False, True):
                for pieces in splits(f"aa{stop}b"):
                    text = "".join(pieces)
                    assert cut_off(pieces, stops, include=include) == plainly(text, stops, include=include)


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=8),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_shown_text_never_holds_a_stop_string(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    assert cut_off(pieces, stops, include=include) == plainly(text, stops, include=include)
    finder, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += finder.add(piece)
        assert not any(stop in shown for stop in stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["END", "\n\n"])
    assert [finder.add(piece) for piece in ("text E", "N", "o", "\n", "x\n")] == ["text ", "", "ENo", "", "\nx"]
    assert finder.finish() == "\n" and finder.matched is None


def test_a_stop_string_counts_when_it_ends_after_min_tokens() -> None:
    """One that began before was missed, and the text went on; one that ends before has no effect, even in a longer."""
    for stops in (["aab"], ["ab", "bc"], ["abcd", "bc"], ["aba"], ["a"]):
        for text in map("".join, product("abc", repeat=5)):
            for num_before in range(len(text) + 1):
                finder = StopStrings(stops)
                shown = [finder.add(each, may_stop=number >= num_before) for number, each in enumerate(text)]
                ends = [
                    (end, each)
                    for end in range(num_before + 1, len(text) + 1)
                    for each in sorted(stops, key=len, reverse=True)
                    if text[:end].endswith(each)
                ]
                end, matched = ends[0] if ends else (len(text), None)
                assert finder.matched == matched
                assert "".join(shown) + finder.finish() == text[: end - len(matched or "")]
