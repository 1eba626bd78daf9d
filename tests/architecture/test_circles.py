"""No two modules of the library need each other, so that any file can be read after those below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.source_tree import Source, sources

Imports = Mapping[str, set[str]]


def imports_of(library: Mapping[str, Source]) -> Imports:
    """The modules of ``library`` that each of them imports: at its top, inside a function, or for types alone.

    ``from package import name`` imports the module ``package.name`` where there is one, else ``package``. That Python
    also runs the packages above a module isn't counted.
    """
    return {name: {*_imported(source, library)} - {name} for name, source in library.items()}


def _imported(source: Source, library: Mapping[str, Source]) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in library)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{each.name}" for each in node.names)
            yield from (found for name in names if (found := name if name in library else str(node.module)) in library)


def circles(imports: Imports) -> list[list[str]]:
    """The largest sets of modules each of which imports every other one, directly or through others."""
    with suppress(CycleError):
        TopologicalSorter(imports).prepare()
        return []
    reached = {name: _reachable(name, imports) for name in imports}
    found = {frozenset(each for each in reached[name] if name in reached[each]) for name in imports}
    return sorted(sorted(each) for each in found if each)


def _reachable(name: str, imports: Imports) -> set[str]:
    found, ahead = set[str](), [name]
    while ahead:
        new = imports[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def library() -> dict[str, Source]:
    """Every module of the library, by its name."""
    paths = {source.path.removesuffix(".py").removesuffix("/__init__"): source for source in sources()}
    return {path.replace("/", "."): source for path, source in paths.items() if path.startswith("megatron")}


def test_modules_import_in_one_direction() -> None:
    """Nothing in the settings could be read first: 21 of their files needed each other."""
    modules = library()
    assert len(modules) > 400
    assert circles(imports_of(modules)) == []


@pytest.mark.parametrize(
    "back",
    [
        "import megatron.a",
        "from megatron import a",
        "from megatron.a import x",
        "def f() -> None:\n    from megatron.a import x",
        "if TYPE_CHECKING:\n    from megatron.a import x",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    """However a module imports another one, it needs it to be understood."""
    texts = {"megatron": "", "megatron.a": "import megatron.b", "megatron.b": "import megatron.c", "megatron.c": back}
    found = imports_of({name: Source(f"{name}.py", text) for name, text in texts.items()})
    assert circles(found) == [["megatron.a", "megatron.b", "megatron.c"]]
