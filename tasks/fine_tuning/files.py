"""Labelled texts from the published files of RACE, MNLI and QQP.

A line without what its file must hold is an error that names it. Only QQP's files have truncated rows; they are left
out and counted. GLUE's test sets have no labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.text_files import parse_line
from megatron.errors import DataError
from megatron.small_files import check_regular, has_file

MNLI_LABELS = {"contradiction": 0, "entailment": 1, "neutral": 2}
RACE_CHOICES = 4
_MNLI_TEST, _QQP_TEST, _QQP = 10, 3, 6  # columns
_QQP_LABELS = {"0": 0, "1": 1}
ANSWERS = {"RACE": ("A", "B", "C", "D"), "MNLI": tuple(MNLI_LABELS), "QQP": tuple(_QQP_LABELS)}
"""Labels in the files, by number."""


@dataclass(frozen=True)
class LabelledText:
    """A pair of texts, or one pair for each choice, and the right class or choice; from ``line`` of ``path``.

    ``label``: None in a test set without labels. ``index``: of its prediction.
    """

    pairs: tuple[tuple[str, str], ...]
    label: int | None
    path: Path
    line: int
    index: str = ""

    @property
    def origin(self) -> str:
        """File and line."""
        return f"{self.path}:{self.line}"


@dataclass
class LabelledTexts:
    """The texts of a path. ``name``: in scores. ``left_out``: truncated rows. ``digest``: of the bytes of all files."""

    name: str
    source: str
    texts: list[LabelledText] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    digest: str = ""

    @property
    def has_labels(self) -> bool:
        """Whether the texts have labels, which all or none of a file's have."""
        return self.texts[0].label is not None

    def describe(self) -> str:
        """Source, number of samples, and rows left out, in a line."""
        line = f"{self.source}: {len(self.texts):,} samples{'' if self.has_labels else ' without labels'}"
        if self.left_out:
            line += f"; rows left out: {len(self.left_out):,}, the first {self.left_out[0]}"
        return line


def read_labelled(task: str, path: str, *, needs_labels: bool = True) -> LabelledTexts:
    """The texts of a folder of RACE, or of a file of MNLI or QQP.

    Raises DataError that names file and line for bad data, and, if labels are needed, for a test set without.
    """
    read = _READERS[task]
    found = LabelledTexts(name_in_scores(task, path), path)
    digest = hashlib.blake2b(digest_size=16)
    read(found, Path(path), digest.update)
    if not found.texts:
        raise DataError(f"{path} holds no samples of {task}" + (f": {found.left_out[0]}" if found.left_out else ""))
    if needs_labels and not found.has_labels:
        raise DataError(
            f"{path} has the columns of {task}'s test set, so it has no labels: give a train or dev file, or "
            "--epochs 0 --predictions-dir FOLDER to write predictions"
        )
    found.digest = digest.hexdigest()
    return found


def name_in_scores(task: str, path: str) -> str:
    """The name of a set in scores, as in Megatron-LM: the part of its path after the task's name."""
    behind = path.split(task)[-1].removesuffix(".tsv").strip("/")
    name = behind.replace("/", "-")
    return (name if task == "RACE" else name.replace("_", "-")) or Path(path).stem


def _read_race(found: LabelledTexts, folder: Path, note: Callable[[bytes], None]) -> None:
    """Every ``*.txt`` of a folder: JSON lines of an article and questions about it."""
    if not folder.is_dir():
        is_file = folder.exists()
        raise DataError(
            f"{folder} {'is a file' if is_file else 'does not exist'}: RACE data is folders of .txt files, such as "
            "RACE/dev/high"
        )
    files = sorted(folder.glob("*.txt"))
    if not files:
        below = sorted(each.name for each in folder.iterdir() if each.is_dir() and any(each.glob("*.txt")))
        advice = f"; its folders {' and '.join(below)} do: give each" if below else ""
        raise DataError(f"{folder} holds no .txt files{advice}")
    for file in files:
        of_file: list[LabelledText] = []
        for number, line in _lines(file, note):
            if line.strip():
                of_file += _questions(line, file, number)
        found.texts += [replace(each, index=f"{file.name}:{place}") for place, each in enumerate(of_file)]
        if not of_file:
            raise DataError(f"{file} is empty: each line of RACE's files is JSON with an article and its questions")


def _questions(line: str, file: Path, number: int) -> Iterator[LabelledText]:
    """The samples of one line: each question with its four options."""
    where = f"{file}:{number}"
    try:
        content = parse_line(line)
    except DataError as error:
        raise DataError(f"{where} is {error}; each line of RACE's files is JSON that holds an article") from None
    article = _member(content, "article", str, where)
    questions, options, answers = (_member(content, key, list, where) for key in ("questions", "options", "answers"))
    if not len(questions) == len(options) == len(answers):
        raise DataError(
            f"{where} has {len(questions)} questions, {len(options)} lists of options and {len(answers)} answers; "
            "there must be one of each"
        )
    letters = ANSWERS["RACE"]
    for question, choices, answer in zip(questions, options, answers):
        texts = [question, *choices] if isinstance(choices, list) else [None]
        if len(texts) != 1 + RACE_CHOICES or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}: the options of {question!r} are {choices!r}, not {RACE_CHOICES} texts")
        if answer not in letters:
            raise DataError(f"{where}: the answer to {question!r} is {answer!r}, not one of {', '.join(letters)}")
        filled = [question.replace("_", each) if "_" in question else f"{question} {each}" for each in choices]
        yield LabelledText(tuple((each, article) for each in filled), letters.index(answer), file, number)


def _member(content: Any, key: str, kind: type, where: str) -> Any:
    value = content.get(key) if isinstance(content, dict) else None
    if not isinstance(value, kind):
        lacks = f"has no {key!r}" if value is None else f"has {value!r} as {key!r}"
        raise DataError(f"{where} {lacks}: a line of RACE holds article, questions, options and answers")
    return value


def _read_mnli(found: LabelledTexts, file: Path, note: Callable[[bytes], None]) -> None:
    """Columns 1 (index), 9 and 10 (the sentences), and the last (the label); a test set has ten, and no label."""
    columns, rows = _table(file, note)
    if columns < _MNLI_TEST:
        raise DataError(
            f"{file}:1 has {columns} columns; MNLI's test files have {_MNLI_TEST}, its train and dev files more"
        )
    for number, row in rows:
        where = f"{file}:{number}"
        if len(row) != columns:
            raise DataError(f"{where} has {len(row)} columns, but the header {columns}")
        _check_number(row[0], where)
        for column in (8, 9):
            if not row[column].strip():
                raise DataError(f"{where}: column {column + 1} holds no sentence")
        label = None if columns == _MNLI_TEST else _label(row[-1], MNLI_LABELS, where)
        found.texts.append(LabelledText(((row[8].strip(), row[9].strip()),), label, file, number, row[0].strip()))


def _read_qqp(found: LabelledTexts, file: Path, note: Callable[[bytes], None]) -> None:
    """Columns 1 (index), 4 and 5 (the questions), and 6 (1: duplicates); a test set has index and questions alone."""
    columns, rows = _table(file, note)
    if columns not in (_QQP, _QQP_TEST):
        raise DataError(
            f"{file}:1 has {columns} columns; QQP's train and dev files have {_QQP}, its test file {_QQP_TEST}"
        )
    for number, row in rows:
        where = f"{file}:{number}"
        if len(row) != columns:
            found.left_out.append(f"{where} with {len(row)} columns instead of {columns}")
            continue
        first, second = (text.strip() for text in (row[3:5] if columns == _QQP else row[1:3]))
        if not (first and second):
            found.left_out.append(f"{where} with an empty question")
            continue
        _check_number(row[0], where)
        label = _label(row[5], _QQP_LABELS, where) if columns == _QQP else None
        found.texts.append(LabelledText(((first, second),), label, file, number, row[0].strip()))


def _table(file: Path, note: Callable[[bytes], None]) -> tuple[int, Iterator[tuple[int, list[str]]]]:
    """Columns of the header, and the numbered rows below it."""
    if not has_file(file, error=DataError):
        what = "is a folder" if file.is_dir() else "does not exist"
        raise DataError(f"{file} {what}: give a .tsv file, such as train.tsv or dev_matched.tsv")
    lines = _lines(file, note)
    header = next(lines, None)
    if header is None:
        raise DataError(f"{file} is empty: its first line names the columns")
    return len(header[1].split("\t")), ((number, line.split("\t")) for number, line in lines if line)


def _lines(file: Path, note: Callable[[bytes], None]) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends. Only a line feed ends one: texts hold other separators."""
    check_regular(file, where=str(file), error=DataError)
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                note(line)
                yield number, line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}:{number} is not UTF-8 ({error.reason} at byte {error.start} of the line)") from None


def _check_number(text: str, where: str) -> None:
    if not text.strip().isdecimal():
        raise DataError(f"{where}: column 1 is {text!r}, but the index of a row is a number")


def _label(text: str, labels: dict[str, int], where: str) -> int:
    label = labels.get(text.strip())
    if label is None:
        raise DataError(f"{where}: the label {text!r} is not one of {', '.join(labels)}")
    return label


_READERS: dict[str, Callable[[LabelledTexts, Path, Callable[[bytes], None]], None]] = {
    "RACE": _read_race,
    "MNLI": _read_mnli,
    "QQP": _read_qqp,
}


def joined(parts: Sequence[LabelledTexts]) -> LabelledTexts:
    """Several sets as one, in order: training data of more than one file."""
    return LabelledTexts(
        name="",
        source=" ".join(part.source for part in parts),
        texts=[text for part in parts for text in part.texts],
        left_out=[each for part in parts for each in part.left_out],
        digest=" ".join(part.digest for part in parts),
    )
