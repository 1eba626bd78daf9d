"""RACE, MNLI and QQP from small files in the forms in which they are published, and every way in which one is odd."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from tasks.fine_tuning.files import joined, name_in_scores, read_labelled
from tests.harness.sentences import check_sentence

ARTICLE: dict[str, Any] = {
    "id": "high1.txt",
    "article": "Tom has a dog.\nIt is old.",
    "questions": ["Tom has a _ .", "How old is it?"],
    "options": [["cat", "dog", "bird", "fish"], ["New", "Young", "Old", "Unborn"]],
    "answers": ["B", "C"],
}
MNLI_HEADER = ["index", "promptID", "pairID", "genre", "s1_bp", "s2_bp", "s1_p", "s2_p", "sentence1", "sentence2"]
QQP_HEADER = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def table(header: list[str], *rows: list[str]) -> str:
    return "".join("\t".join(row) + "\n" for row in (header, *rows))


def mnli_row(number: int, first: str, second: str, *labels: str) -> list[str]:
    return [
        str(number),
        "31193",
        "31193n",
        "government",
        "( x )",
        "( y )",
        "(ROOT x)",
        "(ROOT y)",
        first,
        second,
        *labels,
    ]


def message(task: str, path: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        read_labelled(task, str(path))
    return str(caught.value)


def test_race(tmp_path: Path) -> None:
    """The option goes into the blank or behind the question; files are taken in order, with one article a line."""
    folder = tmp_path / "RACE/dev/high"
    second = ARTICLE | {"article": "Another.", "questions": ["Q"], "options": [list("abcd")], "answers": ["A"]}
    write(folder / "2.txt", json.dumps(second))
    write(folder / "1.txt", json.dumps(ARTICLE) + "\n" + json.dumps(second) + "\n\n")
    write(folder / "notes.md", "not data")
    found = read_labelled("RACE", str(folder))
    assert found.name == "dev-high"
    assert [text.label for text in found.texts] == [1, 2, 0, 0]
    assert [text.origin for text in found.texts] == [
        f"{folder}/{place}" for place in ("1.txt:1", "1.txt:1", "1.txt:2", "2.txt:1")
    ]
    assert [first for first, _ in found.texts[0].pairs] == [
        f"Tom has a {each} ." for each in ("cat", "dog", "bird", "fish")
    ]
    assert [first for first, _ in found.texts[1].pairs] == [
        f"How old is it? {each}" for each in ("New", "Young", "Old", "Unborn")
    ]
    assert {article for _, article in found.texts[0].pairs} == {ARTICLE["article"]}
    assert [text.index for text in found.texts] == ["1.txt:0", "1.txt:1", "1.txt:2", "2.txt:0"]


@pytest.mark.parametrize("labels", [["neutral"], ["entailment", "neutral", "neutral", "x", "y", "neutral"]])
def test_mnli(labels: list[str], tmp_path: Path) -> None:
    """Train files have one label behind the sentences, dev files five of annotators before the one that counts."""
    header = [*MNLI_HEADER, *(f"label{n}" for n in range(len(labels) - 1)), "gold_label"]
    others = ["-"] * (len(labels) - 1)
    rows = [
        mnli_row(0, 'He said "no.', "He said no", *labels),
        mnli_row(1, " spaced ", "b", *others, "entailment"),
        mnli_row(2, "a\u2028b", "\u00e9", *others, "contradiction"),
    ]
    path = write(tmp_path / "MNLI/dev_matched.tsv", table(header, *rows).replace("\n", "\r\n"))
    found = read_labelled("MNLI", path)
    assert found.name == "dev-matched"
    assert [text.label for text in found.texts] == [2, 1, 0]
    assert [text.pairs for text in found.texts] == [
        (('He said "no.', "He said no"),),
        (("spaced", "b"),),
        (("a\u2028b", "\u00e9"),),
    ]
    assert [text.origin for text in found.texts] == [f"{path}:{line}" for line in (2, 3, 4)]


def test_qqp_leaves_out_what_its_own_files_have_cut_off(tmp_path: Path) -> None:
    """Rows that lack columns or a question are in the published file; they are left out, counted and said."""
    rows = [
        ["0", "1", "2", "How?", "Why?", "0"],
        ["7", "1", "2", "cut off"],
        ["1", "3", "4", "What is it?", "What's it?", "1"],
        ["2", "3", "4", "", "What's it?", "1"],
    ]
    path = write(tmp_path / "QQP/train.tsv", table(QQP_HEADER, *rows))
    found = read_labelled("QQP", path)
    assert [(text.pairs, text.label) for text in found.texts] == [
        ((("How?", "Why?"),), 0),
        ((("What is it?", "What's it?"),), 1),
    ]
    assert found.left_out == [f"{path}:3 with 4 columns instead of 6", f"{path}:5 with an empty question"]
    check_sentence(found.describe(), path, "2 samples", found.left_out[0])


def test_test_sets_without_labels(tmp_path: Path) -> None:
    """GLUE scores predictions by the index of their rows; the sentences are found in the columns of a test set."""
    file = write(tmp_path / "MNLI/test_matched.tsv", table(MNLI_HEADER, mnli_row(7, "a", "b"), mnli_row(3, "c", "d")))
    found = read_labelled("MNLI", file, needs_labels=False)
    assert [(text.index, text.pairs, text.label) for text in found.texts] == [
        ("7", (("a", "b"),), None),
        ("3", (("c", "d"),), None),
    ]
    assert found.describe() == f"{file}: 2 samples without labels"
    rows = [["0", "How?", "Why?"], ["1", "cut off"], ["5", "Who?", "What?"]]
    file = write(tmp_path / "QQP/test.tsv", table(["id", "question1", "question2"], *rows))
    found = read_labelled("QQP", file, needs_labels=False)
    assert [(text.index, text.pairs, text.label) for text in found.texts] == [
        ("0", (("How?", "Why?"),), None),
        ("5", (("Who?", "What?"),), None),
    ]
    assert found.left_out == [f"{file}:3 with 2 columns instead of 3"]


@pytest.mark.parametrize(
    ("task", "path", "name"),
    [
        ("RACE", "/data/RACE/test/high/", "test-high"),
        ("RACE", "/data/RACE/", "RACE"),
        ("MNLI", "data/MNLI/dev_mismatched.tsv", "dev-mismatched"),
        ("QQP", "QQP/a/dev.tsv", "a-dev"),
        ("QQP", "other/dev.tsv", "other-dev"),
    ],
)
def test_names_in_scores(task: str, path: str, name: str) -> None:
    """As Megatron-LM calls them, which scripts that collect scores look for."""
    assert name_in_scores(task, path) == name


def test_several_sets_are_one_to_train_on(tmp_path: Path) -> None:
    one = read_labelled("QQP", write(tmp_path / "a.tsv", table(QQP_HEADER, ["0", "1", "2", "a", "b", "0"])))
    two = read_labelled("QQP", write(tmp_path / "b.tsv", table(QQP_HEADER, ["1", "1", "2", "c", "d", "1"], ["2"])))
    both = joined([one, two])
    assert both.texts == one.texts + two.texts
    assert both.left_out == two.left_out
    assert len({one.digest, two.digest, both.digest, joined([two, one]).digest}) == 4


RaceChange = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"answers": None}, ":1 has no 'answers': a line of RACE holds article, questions, options and answers"),
        ({"article": 7}, ":1 has 7 as 'article'"),
        ({"answers": ["B"]}, ":1 has 2 questions, 2 lists of options and 1 answers"),
        ({"answers": ["B", "E"]}, ":1: the answer to 'How old is it?' is 'E', not one of A, B, C, D"),
        ({"answers": ["b", "C"]}, "is 'b', not one of A, B, C, D"),
        (
            {"options": [list("abc"), list("abcd")]},
            ":1: the options of 'Tom has a _ .' are ['a', 'b', 'c'], not 4 texts",
        ),
        ({"options": ["abcd", list("abcd")]}, "are 'abcd', not 4 texts"),
        ({"questions": ["Q", 3]}, "not 4 texts"),
    ],
)
def test_odd_lines_of_race(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """What is wrong is said with file and line."""
    file = write(tmp_path / "x.txt", json.dumps(ARTICLE | change))
    found = message("RACE", tmp_path)
    assert found.startswith(file) and expected in found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"article": ', "{file}:1 is not JSON: "),
        ("[1]", "{file}:1 has no 'article'"),
        ("\n \n", "{file} is empty: each line of RACE's files is JSON with an article and its questions"),
        (b"\xff\xfe", "{file}:1 is not UTF-8 (invalid start byte at byte 0 of the line)"),
    ],
)
def test_odd_files_of_race(content: str | bytes, expected: str, tmp_path: Path) -> None:
    file = write(tmp_path / "x.txt", content)
    assert message("RACE", tmp_path).startswith(expected.replace("{file}", file))


def test_race_is_of_folders(tmp_path: Path) -> None:
    """A level too high or too low is the usual mistake."""
    file = write(tmp_path / "RACE/dev/high/1.txt", json.dumps(ARTICLE))
    check_sentence(message("RACE", file), file, "RACE/dev/high")
    assert message("RACE", tmp_path / "none").startswith(f"{tmp_path}/none does not exist: RACE data is folders")
    folder = tmp_path / "RACE/dev"
    check_sentence(message("RACE", folder), folder)
    check_sentence(message("RACE", tmp_path / "RACE"), f"{tmp_path}/RACE")


MNLI_TRAIN = [*MNLI_HEADER, "label1", "gold_label"]


@pytest.mark.parametrize(
    ("task", "content", "expected"),
    [
        ("MNLI", "", " is empty: its first line names the columns"),
        ("MNLI", table(MNLI_TRAIN), " holds no samples of MNLI"),
        ("MNLI", table(MNLI_HEADER, mnli_row(0, "a", "b")), " has the columns of MNLI's test set, so it has no labels"),
        ("MNLI", table(QQP_HEADER), ":1 has 6 columns; MNLI's test files have 10, its train and dev files more"),
        ("MNLI", table(MNLI_TRAIN, mnli_row(0, "a", "b", "neutral")), ":2 has 11 columns, but the header 12"),
        ("MNLI", table(MNLI_TRAIN, mnli_row(0, "a", "", "x", "neutral")), ":2: column 10 holds no sentence"),
        (
            "MNLI",
            table(MNLI_TRAIN, mnli_row(0, "a", "b", "x", "neutral"), mnli_row(1, "a", "b", "x", "-")),
            ":3: the label '-' is not one of contradiction, entailment, neutral",
        ),
        ("MNLI", table(MNLI_TRAIN, mnli_row(0, "a", "b", "neutral", "")), ":2: the label '' is not one of"),
        (
            "MNLI",
            table(MNLI_TRAIN, ["id", *mnli_row(0, "a", "b", "x", "neutral")[1:]]),
            ":2: column 1 is 'id', but the index of a row is a number",
        ),
        ("MNLI", table(MNLI_TRAIN).encode() + b"0\tcaf\xe9\n", ":2 is not UTF-8 ("),
        (
            "QQP",
            table(["id", "question1", "question2"], ["0", "a", "b"]),
            " has the columns of QQP's test set, so it has no labels: give a train or dev file",
        ),
        ("QQP", table(MNLI_TRAIN), ":1 has 12 columns; QQP's train and dev files have 6, its test file 3"),
        ("QQP", table(QQP_HEADER, ["0", "1", "2", "a", "b", "2"]), ":2: the label '2' is not one of 0, 1"),
        ("QQP", table(QQP_HEADER, ["0", "1", "2", "a", "b", ""]), ":2: the label '' is not one of 0, 1"),
        ("QQP", table(QQP_HEADER, ["0", "1"]), " holds no samples of QQP: {file}:2 with 2 columns instead of 6"),
    ],
)
def test_odd_tables(task: str, content: str | bytes, expected: str, tmp_path: Path) -> None:
    """What is wrong is said with file and line."""
    file = write(tmp_path / "x.tsv", content)
    assert message(task, file).startswith(file + expected.replace("{file}", file))


def test_tables_are_files(tmp_path: Path) -> None:
    check_sentence(message("MNLI", tmp_path), tmp_path, "train.tsv", "dev_matched.tsv")
    assert message("QQP", tmp_path / "none.tsv").startswith(f"{tmp_path}/none.tsv does not exist")
