"""The repository's own files, as the guards see them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {"__pycache__", "build", "dist", "runs"}  # built or written by commands; hidden folders are skipped as well
OURS_THOUGH_HIDDEN = {".ci", ".github"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path below the repository, its text, and the version of Python that reads it."""

    path: str
    text: str
    python: tuple[int, int] | None = None

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path, feature_version=self.python)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones too."""
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    def at(self, node: ast.AST) -> str:
        """``path:line`` of a node."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


def files(*suffixes: str) -> list[Path]:
    """Every file of ours with one of the suffixes, sorted."""
    return sorted(path for path in _walk(ROOT) if path.suffix in suffixes or path.name in suffixes)


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in OURS_THOUGH_HIDDEN
            if not hidden and path.name not in NOT_OURS and path.suffix != ".egg-info":
                yield from _walk(path)
        else:
            yield path


def relative(path: Path) -> str:
    """Path below the repository, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def sources() -> Iterator[Source]:
    """Every Python file of ours."""
    return (Source(relative(path), path.read_text(encoding="utf-8")) for path in files(".py"))


def is_library(path: str) -> bool:
    """Whether a file is part of what users run, as opposed to tests and benchmarks."""
    return not path.startswith(("tests/", "benchmarks/"))
