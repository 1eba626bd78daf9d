"""Write questions that a small model can learn to answer, as chats and as pairs of a better and a worse answer.

Three kinds: the module of the standard library that has a function, two words to repeat, and which of two words came
first or last. No pair of words and no wording for a function in heldout.jsonl is in the other files. In chats.jsonl
half of the answers begin with words that say nothing; in preferences.jsonl the answer without them is the better one.
chats.jsonl also has pieces of text, so that a model doesn't forget how to write it. The same Python gives the same
bytes.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILLERS = ("That is a good question.", "Let me think about it for a moment.", "I am glad that you ask.")
MODULES = (
    "Which module has {}?",
    "Where is the function {}?",
    "I need {}. What do I import?",
    "Tell me the module of {}.",
)
REPEATED = ("Say {} and {}.", "Please repeat {} and {}.")
ORDERED = (("Which is first, {} or {}?", 0), ("Which is last, {} or {}?", 1))
NAMES = (
    "ast base64 bisect calendar colorsys copy csv difflib dis fnmatch functools glob gzip heapq html inspect io json"
)
MORE_NAMES = "keyword locale operator os pickle platform pprint random shlex shutil statistics string textwrap tokenize"
EVERY = 8  # one question of so many is held out
PIECES, LENGTH = 2, 400  # of each document, in characters


@dataclass(frozen=True)
class Question:
    """A question, the sentence that answers it, and its kind: module, repeat or order."""

    kind: str
    text: str
    answer: str


def main(argv: Sequence[str]) -> int:
    """Write chats.jsonl, preferences.jsonl and heldout.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True, type=Path, help="documents whose words are said, as JSON lines")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder of the three files")
    given = parser.parse_args(argv)
    random_numbers = random.Random(0)
    train, heldout = divided(questions(given.corpus))
    for some in (train, heldout):
        random_numbers.shuffle(some)
    given.output_dir.mkdir(parents=True, exist_ok=True)
    turns = [chat(each, random_numbers.choice(FILLERS) if number % 2 else "") for number, each in enumerate(train)]
    write(given.output_dir / "chats.jsonl", [*conversations(turns), *pieces(given.corpus)])
    write(given.output_dir / "preferences.jsonl", (pair(each, random_numbers.choice(FILLERS)) for each in train))
    write(given.output_dir / "heldout.jsonl", ({**chat(each), "kind": each.kind} for each in heldout))
    return 0


def questions(corpus: Path) -> Iterator[tuple[int, Question]]:
    """Every question, with the number that decides whether it is held out."""
    for at, (module, function) in enumerate(functions()):
        for number, wording in enumerate(MODULES):
            yield at + number * 2, Question("module", wording.format(function), f"{function} is in {module}.")
    for at, pair in enumerate(pairs(words(corpus))):
        wording, answer = ORDERED[at % 2]
        yield at // 2, Question("repeat", REPEATED[at % 2].format(*pair), "{} and {}.".format(*pair))
        yield at // 2 + 1, Question("order", wording.format(*pair), f"It is {pair[answer]}.")


def functions() -> list[tuple[str, str]]:
    """Public functions with a docstring that only one of the modules has, as (module, function)."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), list[tuple[str, str]]()
    for module in (NAMES + " " + MORE_NAMES).split():
        file = root / f"{module}.py" if (root / f"{module}.py").exists() else root / module / "__init__.py"
        tree = ast.parse(file.read_text(encoding="utf-8"))
        of_module = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
        found += [(module, each.name) for each in of_module if ast.get_docstring(each)][:6]
    times = Counter(function for _, function in found)
    return [(module, function) for module, function in found if times[function] == 1]


def words(corpus: Path) -> list[str]:
    """The most frequent words of six letters and more."""
    texts = (json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines())
    times = Counter(
        word for text in texts for word in text.split() if len(word) > 5 and word.isalpha() and word.islower()
    )
    return [word for word, _ in sorted(times.items(), key=lambda each: (-each[1], each[0]))[:200]]


def pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Each word beside eight others."""
    steps = range(1, 9)
    return [(word, words[(at * 7 + step * 31) % len(words)]) for step in steps for at, word in enumerate(words)]


def pieces(corpus: Path) -> Iterator[dict[str, str]]:
    """The beginnings of documents: the words that a piece begins with, and those that follow."""
    for line in corpus.read_text(encoding="utf-8").splitlines():
        paragraphs = json.loads(line)["text"].split("\n\n")
        for paragraph in paragraphs[:PIECES]:
            start, _, rest = paragraph.partition(" ")
            if len(rest) > 100:
                yield {"prompt": start, "completion": f" {rest[:LENGTH]}"}


def divided(questions: Iterable[tuple[int, Question]]) -> tuple[list[Question], list[Question]]:
    """Questions to train on, and those that are held out."""
    found: tuple[list[Question], list[Question]] = ([], [])
    for number, question in questions:
        found[number % EVERY == 0].append(question)
    return found


def conversations(chats: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Conversations of one question and of three, in turn."""
    for start in range(0, len(chats), 4):
        for some in (chats[start : start + 1], chats[start + 1 : start + 4]):
            if some:
                yield {"messages": [message for each in some for message in each["messages"]]}


def chat(question: Question, filler: str = "") -> dict[str, Any]:
    """A conversation; the answer begins with ``filler``."""
    return {"messages": [message("user", question.text), message("assistant", f"{filler} {question.answer}".strip())]}


def pair(question: Question, filler: str) -> dict[str, Any]:
    """A better and a worse answer."""
    return {
        "prompt": [message("user", question.text)],
        "chosen": [message("assistant", question.answer)],
        "rejected": [message("assistant", f"{filler} {question.answer}")],
    }


def message(role: str, content: str) -> dict[str, str]:
    """One turn."""
    return {"role": role, "content": content}


def write(file: Path, lines: Iterable[object]) -> None:
    """Write JSON lines, and say how many."""
    texts = [json.dumps(line) for line in lines]
    file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    print(f"{file}: {len(texts):,} lines")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
