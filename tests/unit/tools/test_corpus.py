"""tools/make_stdlib_corpus.py: English from the files of any Python, the same each time, nothing twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error
from tools import make_stdlib_corpus
from tools.make_stdlib_corpus import Document, gather, is_held_out, module_paragraphs, split_paragraphs

MODULE = b'''#!/usr/bin/env python
# coding: utf-8
"""Tools for the keeping of bees in gardens.

    >>> x = (1, 2), {3: 4}; y[5] += x[6:7] ** 8; z = {9: [0]}
"""

# The order of these two matters, because bees that
# have no queen leave the hive within a day.
x = 1  # short


class Hive:
    """A box in which bees live and make honey all summer long."""

    def open(self):
        """Open the lid with care, so that no bee is hurt by it."""
        text = """
        # this is not a comment of the file at all
        # but two lines inside of a string, sadly
        """

    def close(self):
        "shut"
'''


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_stdlib_corpus.main(["--output-dir", str(folder)])
    return folder


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow  # the first command of examples/quickstart.sh, which is tested as a whole
def test_it_is_several_megabytes(written: Path) -> None:
    """Enough to train an 8k vocabulary and a small model; evaluation text is there too."""
    sizes = {
        name: sum(len(each["text"]) for each in records(written / name)) for name in ("train.jsonl", "heldout.jsonl")
    }
    assert sizes["train.jsonl"] > 1_500_000
    assert 30_000 < sizes["heldout.jsonl"] < sizes["train.jsonl"] / 5
    assert sorted(path.name for path in written.iterdir()) == ["heldout.jsonl", "train.jsonl"]


@pytest.mark.slow
def test_no_paragraph_occurs_twice(written: Path) -> None:
    """Neither within the training text nor across: held-out text that was trained on would flatter the model."""
    documents = [each for name in ("train.jsonl", "heldout.jsonl") for each in records(written / name)]
    paragraphs = [" ".join(part.split()) for each in documents for part in each["text"].split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    assert len({each["source"] for each in documents}) == len(documents)


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    """Whatever order the file system lists them in."""
    for name in ("b.py", "a/c.py", "a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'"""{name}: ' + f"a story of bees told in {name}. " * 20 + '"""\n')
    assert [each.source for each in gather(tmp_path)] == ["a/c.py", "a.py", "b.py"]
    assert list(gather(tmp_path)) == list(gather(tmp_path))


def test_docstrings_and_comments_in_the_order_of_lines() -> None:
    assert list(module_paragraphs(MODULE)) == [
        "Tools for the keeping of bees in gardens.",
        "The order of these two matters, because bees that\nhave no queen leave the hive within a day.",
        "A box in which bees live and make honey all summer long.",
        "Open the lid with care, so that no bee is hurt by it.",
        "this is not a comment of the file at all\nbut two lines inside of a string, sadly",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "too few words",
        "===== ===== ===== ===== ===== =====",
        "x[1] = y[2]; z(3) += {4: 5} % 6 // 7 & 8 | 9",
        "   \n \t ",
    ],
)
def test_what_is_no_english_is_left_out(text: str) -> None:
    assert list(split_paragraphs(text)) == []


def test_control_characters_are_left_out() -> None:
    assert list(split_paragraphs("one two\x0cthree four\x00five")) == ["one two three four five"]


def test_held_out_depends_on_the_name_alone() -> None:
    """A document more or less in another Python moves no document from training to evaluation."""
    names = [f"module{number}.py" for number in range(1000)]
    held = {name for name in names if is_held_out(Document(name, "x"), percent=10)}
    assert 60 < len(held) < 140
    assert held == {name for name in names if is_held_out(Document(name, "y"), percent=10)}


def test_a_python_without_sources(tmp_path: Path) -> None:
    with expect_error(DataError):
        list(gather(tmp_path))


def test_nothing_is_imported(tmp_path: Path) -> None:
    """Sources are parsed, never run: some modules of the library open browsers or draw windows when imported."""
    (tmp_path / "trap.py").write_text('"""' + "A long story of bees. " * 30 + '"""\nraise SystemExit("was run")\n')
    (found,) = gather(tmp_path)
    assert found.source == "trap.py"


@pytest.mark.parametrize("percent", ["0", "100", "five"])
def test_impossible_share(tmp_path: Path, percent: str) -> None:
    with expect_error(ConfigError, "--heldout-percent", percent):
        make_stdlib_corpus.main(["--output-dir", str(tmp_path), "--heldout-percent", percent])


def test_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_stdlib_corpus, "gather", lambda root: iter([Document("a.py", "text")]))
    (tmp_path / "file").touch()
    with expect_error(DataError, "--output-dir"):
        make_stdlib_corpus.main(["--output-dir", str(tmp_path / "file" / "out")])
