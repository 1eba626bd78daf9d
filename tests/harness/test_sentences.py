"""The snapshot of sentences: wording changes in one file, and no entry outlives its test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.errors import CheckpointError, ConfigError
from tests.golden.regenerate_sentences import checking, main, merged
from tests.harness import sentences
from tests.harness.sentences import (
    COLLECTED,
    ROOT,
    SNAPSHOT,
    check_line,
    check_sentence,
    expect_error,
    has_fact,
    outdated,
    read_snapshot,
    write_snapshot,
)

RECORDED = {"t.py::test_a[--x 1]": ["--x 1 is odd", "two\n\n lines\\n"], "t.py::test_b": ["\\ begins"]}


def test_every_entry_has_its_test(request: pytest.FixtureRequest) -> None:
    """An entry that no test checks any more would be read as if it held."""
    recorded = read_snapshot(SNAPSHOT.read_text(encoding="utf-8"))
    assert write_snapshot(recorded) == SNAPSHOT.read_text(encoding="utf-8")
    assert outdated(recorded, request.config.stash[COLLECTED]) == []


def test_the_file_keeps_sentences_as_they_are() -> None:
    """Lines that are empty, begin with spaces or with what marks them come back."""
    assert read_snapshot(write_snapshot(RECORDED)) == RECORDED


def test_entries_of_tests_that_are_gone() -> None:
    """A parameter that changed its name, a function and a file that were deleted."""
    here = Path(__file__).relative_to(ROOT).as_posix()
    known, other = f"{here}::test_x[a]", f"{here}::test_x[b]"
    assert outdated([known, other], {f"{here}::test_x": {known}}) == [other]
    there = f"{here}::test_entries_of_tests_that_are_gone"
    assert outdated([f"{here}::test_nothing", "tests/gone.py::test_a", there], {}) == [
        f"{here}::test_nothing",
        "tests/gone.py::test_a",
    ]


def test_facts_are_whole() -> None:
    """``--size 6`` was found in ``--size 64`` by a search for text."""
    text = "--size 64 of (x.bin) holds 5,000 or 1.5 or 3-4; rank 2."
    assert all(has_fact(text, fact) for fact in ("--size 64", "x.bin", "5,000", "1.5", "rank 2", "(x.bin)"))
    assert not any(has_fact(text, fact) for fact in ("--size 6", "--siz", "x", "5", "1", "000", "size", "3"))
    assert not has_fact("[2026-11-27 09:30:12] iteration 4, time left: 0:00:05", "12"), "a time of day had the fact"


def test_tests_that_come_to_a_check_are_found() -> None:
    """Also those that check by a function of their file."""
    text = (
        "def said():\n    check_line('')\ndef helper():\n    said()\ndef test_a():\n    helper()\n"
        "def test_b():\n    pass\ndef test_c():\n    with expect_error(E):\n        pass\n"
    )
    assert checking(text) == ["test_a", "test_c"]


def test_a_run_replaces_what_its_tests_say(tmp_path: Path) -> None:
    """Entries of tests that did not run stay, those of tests that say nothing or are gone do not."""
    here = f"{Path(__file__).relative_to(ROOT).as_posix()}::test_facts_are_whole"
    (tmp_path / "1.jsonl").write_text(f'["{here}[a]", ["new"]]\n["{here}[b]", []]\n')
    (tmp_path / "1.collected").write_text(f'{{"{here}": ["{here}[a]", "{here}[b]", "{here}[c]"]}}')
    before = {f"{here}[{each}]": [each] for each in "abcd"} | {"tests/gone.py::test_x": ["x"]}
    assert merged(before, tmp_path) == {f"{here}[a]": ["new"], f"{here}[c]": ["c"]}


SAID = ["--x 1 is odd: give an even number", "--y 2 is even"]


@contextmanager
def another_test() -> Iterator[None]:
    """Another test is running, whose sentences are ``SAID``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "_SNAPSHOT", sentences._Snapshot(recorded={"t::t": SAID}, test="t::t"))
        yield


def test_another_word_another_fact_and_another_exit_code_are_seen() -> None:
    """Each alone ends the test."""

    with another_test():
        with expect_error(ConfigError, "--x 1"):
            raise ConfigError(SAID[0])
        for text, code in (("--y 22 is even", 2), ("--y 2 is even", 1)):
            with pytest.raises(AssertionError), expect_error(ConfigError, "--y 2"):
                raise ConfigError(text, exit_code=code)
        with pytest.raises(ConfigError), expect_error(CheckpointError):
            raise ConfigError(SAID[1])
        with pytest.raises(AssertionError, match="another sentence than the recorded one"):
            check_sentence("--y 2 is not odd", "--y 2")


def test_a_sentence_that_is_no_longer_said_is_seen() -> None:
    """Its entry would stay in the snapshot for ever."""
    with another_test():
        check_line(f"progress\n{SAID[0]}\nmore", "--x 1")
        check_sentence(SAID[0])
        with pytest.raises(AssertionError, match="the test no longer checks"):
            sentences._SNAPSHOT.finish()
        check_line(f"{SAID[1]}\n{SAID[0]}", "--y 2")
        sentences._SNAPSHOT.finish()


def test_a_line_is_found_wherever_it_is() -> None:
    """None, or two that differ, is no answer."""
    for output in ("nothing", "--x 1 is a\n--x 1 is b"):
        with pytest.raises(AssertionError, match="lines with"):
            check_line(output, "--x 1")


def test_a_number_alone_names_no_line() -> None:
    """``12`` was found in a time of day: the test was red for one second of each minute."""
    with another_test(), pytest.raises(AssertionError, match="numbers alone"):
        check_line(SAID[1], 2)


@pytest.mark.slow  # starts pytest
def test_the_command_records_what_another_process_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One test, through pytest, where the test had another sentence before."""
    test = "tests/harness/test_sentences.py::test_a_sentence_of_this_file"
    snapshot = tmp_path / "snapshot.txt"
    snapshot.write_text(write_snapshot({test: ["another"], "tests/gone.py::test_x": ["x"]}), encoding="utf-8")
    assert main([test], snapshot) == 0
    assert capsys.readouterr().out.endswith("snapshot.txt: sentences of 1 tests, 2 of them changed\n")
    assert read_snapshot(snapshot.read_text(encoding="utf-8")) == {test: ["2 is a number, of 2 numbers"]}


def test_a_sentence_of_this_file() -> None:
    """The entry that the test above records anew."""
    check_sentence("2 is a number, of 2 numbers", 2)
