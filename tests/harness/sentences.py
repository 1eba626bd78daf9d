"""Sentences that users read: a test names flags, files and values, and the snapshot keeps the whole sentence.

``tests/golden/sentences.txt`` has an entry for each sentence that a test expects, under the test's id. Another wording
changes that file alone; ``python -m tests.golden.regenerate_sentences`` writes it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from megatron.errors import MegatronError

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = ROOT / "tests" / "golden" / "sentences.txt"
RECORD = "--record-sentences"
COLLECTED = pytest.StashKey[dict[str, set[str]]]()
"""Ids of all tests, of both tiers, of each function that this run collected with all its parameters."""

_ORIGIN = re.compile(r"^(DEBUG|INFO|WARNING|ERROR) +[\w.]+:\w+\.py:\d+ ", re.MULTILINE)
"""Where a line of ``caplog.text`` comes from."""
_OF_ONE_RUN = {
    r"\bprocess \d+ on \S+, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d": "process * on *, since *",
    r"\b127\.0\.0\.1:\d{4,5}\b": "127.0.0.1:PORT",
    r"(?<=iter_\d{7}-)[0-9a-f]{8}\b": "*",
    r"(?<=\.(?:partial|removed)-)[0-9a-f]{8}\b": "*",
    r"largest difference \S+ between logits of up to [^\s,]+": "largest difference * between logits of up to *",
    r"largest difference of logits \S+, of logits up to [^\s,]+": "largest difference of logits *, of logits up to *",
    r"\bcpu has \d+\.\d+ GB\b": "cpu has * GB",
    r"differ by \S+, where rounding explains \S+;": "differ by *, where rounding explains *;",
}
"""What names one process, one attempt or one machine, and rounding, which differs among processors."""
_CLOCK = re.compile(r"\b\d+:\d\d:\d\d\b")
"""A time of day, or a duration: ``09:30:12`` has no fact of a test, though each of its numbers is one at some time."""

E = TypeVar("E", bound=BaseException)


def read_snapshot(text: str) -> dict[str, list[str]]:
    """Sentences of each test, by its id."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("    "):
            sentences = next(reversed(found.values()))
            sentences[-1] += ("\n" if sentences[-1] else "") + line[4:].removeprefix("\\")
        elif line and not line.startswith("# "):
            found.setdefault(re.sub(r" \(\d+\)$", "", line), []).append("")
    return found


def write_snapshot(sentences: dict[str, list[str]]) -> str:
    """The text of the snapshot, sorted by test."""
    lines = ["# Whole sentences that users read, under the tests that expect them.", ""]
    for test in sorted(sentences):
        for number, sentence in enumerate(sentences[test], start=1):
            lines.append(test if number == 1 else f"{test} ({number})")
            lines += [f"    {each}" if each and each[0] != "\\" else f"    \\{each}" for each in sentence.split("\n")]
            lines.append("")
    return "\n".join(lines)


@dataclass
class _Snapshot:
    """The recorded sentences, and those of the test that is running."""

    recorded: dict[str, list[str]] = field(default_factory=dict)
    folder: Path | None = None  # sentences are recorded there, and compared with nothing
    temporary: str = ""  # the folder of all tests' temporary folders
    test: str | None = None
    said: list[str] = field(default_factory=list)

    def take(self, sentence: str) -> None:
        """Compare a sentence of the running test with the recorded one, or record it; twice the same counts once."""
        assert self.test is not None, "sentences are checked in the process of the test, not in that of a rank"
        if sentence in self.said:
            return
        wanted, number = self.recorded.get(self.test, []), len(self.said)
        self.said.append(sentence)
        if self.folder is None:
            before = wanted[number] if number < len(wanted) else ""
            assert sentence == before, f"{_difference(before, sentence)}\n{_advice(self.test)}"

    def finish(self) -> None:
        """Write down what a test that passed has said, or see that it said all that is recorded."""
        assert self.test is not None
        if self.folder is not None:
            with (self.folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps([self.test, self.said]) + "\n")
        else:
            missing = self.recorded.get(self.test, [])[len(self.said) :]
            assert not missing, f"the test no longer checks {missing}\n{_advice(self.test)}"


_SNAPSHOT = _Snapshot()


def _difference(before: str, now: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "recorded", "now", n=1, lineterm="")
    return "another sentence than the recorded one:\n" + "\n".join(lines)


def _advice(test: str) -> str:
    return f"if this is right: python -m tests.golden.regenerate_sentences '{test}'"


@contextmanager
def expect_error(
    error: type[E], *facts: object, hide: Collection[str] = (), exit_code: int | None = None
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of that class, its exit code (that of the class, where no other is given), and its sentence."""
    with pytest.raises(error) as caught:
        yield caught
    if isinstance(caught.value, MegatronError):
        wanted = getattr(error, "exit_code", None) if exit_code is None else exit_code
        assert caught.value.exit_code == wanted
    check_sentence(str(caught.value), *facts, hide=hide)


def check_sentence(sentence: str | None, *facts: object, hide: Collection[str] = ()) -> None:
    """A sentence has these facts (flags with their values, names of files, numbers) and is the recorded one.

    ``hide``: patterns of what differs from run to run or from machine to machine. Temporary folders are hidden always.
    """
    assert sentence is not None, f"nothing was said of {facts}"
    absent = [fact for fact in map(str, facts) if not has_fact(sentence, fact)]
    assert not absent, f"{absent} not in: {sentence}"
    for pattern in hide:
        sentence = re.sub(pattern, "*", sentence)
    for pattern, replacement in _OF_ONE_RUN.items():
        sentence = re.sub(pattern, replacement, sentence)
    if _SNAPSHOT.temporary:
        sentence = re.sub(rf"{re.escape(_SNAPSHOT.temporary)}(/[\w-]+)?", "TMP", sentence)
    sentence = _ORIGIN.sub("", sentence).replace(str(ROOT), "ROOT")
    _SNAPSHOT.take("\n".join(line.rstrip() for line in sentence.split("\n")))


def refusal(context: object, function: Callable[..., object], *arguments: object) -> str:
    """The error with which ``function`` ends on a rank, as ``Class: sentence``; to be run by ``run_ranks``."""
    with pytest.raises(MegatronError) as caught:
        function(context, *arguments)
    return f"{type(caught.value).__name__}: {caught.value}"


def check_refusals(sentences: list[str], *facts: object, hide: Collection[str] = ()) -> None:
    """All ranks end with the same sentence, which has these facts and is the recorded one."""
    assert len({*sentences}) == 1, sentences
    check_sentence(sentences[0], *facts, hide=hide)


def check_line(output: str, *facts: object, hide: Collection[str] = ()) -> None:
    """One line of an output, whichever came first, has all these facts, and is the recorded one.

    A number alone names no line: times, ports and sizes of other lines may have it on some day.
    """
    assert any(re.search(r"[^\W\d]", str(fact)) for fact in facts) or not facts, f"{facts} are numbers alone"
    lines = [line for line in dict.fromkeys(output.splitlines()) if all(has_fact(line, str(fact)) for fact in facts)]
    assert len(lines) == 1, f"{len(lines)} lines with {facts} in:\n{output}"
    check_sentence(lines[0], hide=hide)


def has_fact(text: str, fact: str) -> bool:
    """Whether a text has a fact as a whole: ``--size 6`` isn't in ``--size 64``, nor is 5 in 5.5 or at 09:30:05."""
    before = r"(?<![\w-])(?<!\d[.,])" if re.match(r"[\w-]", fact) else ""
    after = r"(?!\w|[-.,]\w)" if re.search(r"\w$", fact) else ""
    return re.search(before + re.escape(fact) + after, _CLOCK.sub("", text)) is not None


def outdated(snapshot: Collection[str], collected: dict[str, set[str]]) -> list[str]:
    """Recorded tests that no longer exist: by their ids where all of a function's were collected, else by its name."""
    gone = []
    for test in snapshot:
        function = function_of(test)
        if function in collected:
            gone += [test] if test not in collected[function] else []
            continue
        path, _, name = function.rpartition("::")
        file = ROOT / path.partition("::")[0]
        if not file.is_file() or f"def {name}(" not in file.read_text(encoding="utf-8"):
            gone.append(test)
    return gone


def function_of(test: str) -> str:
    """A test's id without its parameters."""
    return test.partition("[")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--record-sentences FOLDER``, for ``tests.golden.regenerate_sentences``."""
    parser.addoption(RECORD, type=Path, metavar="FOLDER", help="write what tests expect users to read there")


def pytest_configure(config: pytest.Config) -> None:
    """Read the snapshot."""
    _SNAPSHOT.folder = config.getoption(RECORD)
    if SNAPSHOT.exists():
        _SNAPSHOT.recorded = read_snapshot(SNAPSHOT.read_text(encoding="utf-8"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember which tests there are, before any are left out."""
    whole: dict[str, set[str]] = {}
    if not any("[" in word for word in config.args) and not config.getoption("lf", False):
        for item in items:
            whole.setdefault(function_of(item.nodeid), set()).add(item.nodeid)
    config.stash[COLLECTED] = whole
    if _SNAPSHOT.folder is not None:
        text = json.dumps({path: [*ids] for path, ids in whole.items()})
        (_SNAPSHOT.folder / f"{os.getpid()}.collected").write_text(text, encoding="utf-8")


@pytest.fixture(autouse=True, scope="session")
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its name is in no recorded sentence."""
    _SNAPSHOT.temporary = str(tmp_path_factory.getbasetemp())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Compare or record what this test says."""
    _SNAPSHOT.test, _SNAPSHOT.said = item.nodeid, []
    try:
        yield
        _SNAPSHOT.finish()
    finally:
        _SNAPSHOT.test = None
