"""Gather several MB of English text from Python itself: its language reference, docstrings and comments.

Nothing is imported or downloaded: the files of the standard library are parsed. The same Python gives the same bytes.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import ast
import hashlib
import inspect
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.flags import Settings, flag
from megatron.config.parse import parse_groups
from megatron.core.files.durable import replaced_file, write_errors
from megatron.errors import DataError, run_command

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"}
TOPICS = "pydoc_data/topics.py"
COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#(?!!).*\n){2,}", re.MULTILINE)
COMMENT_MARK = re.compile(r"^[ \t]*#+ ?", re.MULTILINE)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
SIGN = re.compile(r"[^\w\s]|[\d_]")
MIN_WORDS = 5  # of a paragraph: shorter ones are captions and signatures
MAX_SIGNS = 0.4  # share of a paragraph that is neither letter nor space; more is a table, a ruler or code
MIN_DOCUMENT = 300  # characters


class CorpusConfig(Settings):
    """Output folder and split of the corpus."""

    output_dir: str = flag("Folder of train.jsonl and heldout.jsonl.")
    heldout_percent: int = flag("Share of the documents kept for evaluation.", default=5, at_least=1, at_most=99)


@dataclass(frozen=True)
class Document:
    """A text and the file or topic it comes from."""

    source: str
    text: str


@dataclass(frozen=True)
class Piece:
    """A docstring or a block of comments, and its lines."""

    first_line: int
    last_line: int
    text: str


def main(argv: Sequence[str]) -> int:
    """Write train.jsonl and heldout.jsonl."""
    (config,) = parse_groups(argv, CorpusConfig, prog="make_stdlib_corpus.py", about=__doc__ or "")
    documents = list(gather(Path(sysconfig.get_paths()["stdlib"])))
    held_out = [is_held_out(document, percent=config.heldout_percent) for document in documents]
    folder = Path(config.output_dir)
    for name, wanted in (("train", False), ("heldout", True)):
        chosen = [document for document, held in zip(documents, held_out) if held == wanted]
        size = write(folder / f"{name}.jsonl", chosen)
        print(f"{folder / f'{name}.jsonl'}: {len(chosen):,} documents, {size / 1e6:.2f} MB")
    return 0


def gather(root: Path) -> Iterator[Document]:
    """Documents of a standard library, in the order of their names, no paragraph twice.

    Raises DataError when there are none: some systems ship Python without its sources.
    """
    seen: set[bytes] = set()
    found = False
    for source, paragraphs in (*topics(root), *modules(root)):
        fresh = [paragraph for paragraph in paragraphs if _is_new(paragraph, seen)]
        text = "\n\n".join(fresh)
        if len(text) >= MIN_DOCUMENT:
            found = True
            yield Document(source, text)
    if not found:
        raise DataError(f"{root} holds no Python sources; use a Python that was installed with its standard library.")


def topics(root: Path) -> Iterator[tuple[str, list[str]]]:
    """The language reference behind ``help("topic")``, paragraph by paragraph."""
    path = root / TOPICS
    if not path.is_file():
        return
    assignments = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.Assign)]
    for name, text in sorted(ast.literal_eval(assignments[-1].value).items()):
        yield f"topic {name}", list(split_paragraphs(text))


def modules(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Docstrings and comments of each module in the order of its lines."""
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if LEFT_OUT.isdisjoint(inside.parts):
            yield inside.as_posix(), list(module_paragraphs(path.read_bytes()))


def module_paragraphs(code: bytes) -> Iterator[str]:
    """Paragraphs of one source file: docstrings, and comments of at least two lines."""
    pieces = list(docstrings(ast.parse(code)))
    quoted = {line for piece in pieces for line in range(piece.first_line, piece.last_line + 1)}
    text = code.decode("utf-8", errors="ignore").replace("\r\n", "\n")
    for block in COMMENT_BLOCK.finditer(text):
        first = text.count("\n", 0, block.start()) + 1
        if first not in quoted:
            pieces.append(Piece(first, first, COMMENT_MARK.sub("", block.group())))
    for piece in sorted(pieces, key=lambda piece: piece.first_line):
        yield from split_paragraphs(piece.text)


def docstrings(node: ast.AST) -> Iterator[Piece]:
    """Every docstring of a module and of the classes and functions in it."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield Piece(first.lineno, first.end_lineno or first.lineno, inspect.cleandoc(first.value.value))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler)):  # expressions, which are most nodes, hold no docstring
            yield from docstrings(child)


def split_paragraphs(text: str) -> Iterator[str]:
    """Cleaned paragraphs that read like English."""
    for paragraph in re.split(r"\n\s*\n", CONTROL.sub(" ", text.expandtabs())):
        lines = [line.rstrip() for line in paragraph.splitlines()]
        cleaned = "\n".join(line for line in lines if line)
        if len(cleaned.split()) >= MIN_WORDS and len(SIGN.findall(cleaned)) <= MAX_SIGNS * len(cleaned):
            yield cleaned


def is_held_out(document: Document, *, percent: int) -> bool:
    """Whether a document is for evaluation; this depends on its name alone, so a new document changes no other."""
    digest = hashlib.sha256(document.source.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def write(path: Path, documents: Iterable[Document]) -> int:
    """Write JSON lines, the file whole or not at all; returns its size in bytes."""
    lines = "".join(json.dumps({"text": each.text, "source": each.source}) + "\n" for each in documents)
    with write_errors(path, remedy="give --output-dir a folder that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as aside:
            aside.write_text(lines, encoding="utf-8")
    return len(lines)


def _is_new(paragraph: str, seen: set[bytes]) -> bool:
    """Whether the paragraph occurs for the first time, however it is wrapped."""
    digest = hashlib.sha256(" ".join(paragraph.split()).encode("utf-8", "surrogatepass")).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
