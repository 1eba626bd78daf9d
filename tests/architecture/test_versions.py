"""The oldest versions that the README promises, as far as they can be checked without running them: by names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source_tree import Source, is_library, sources

OLDEST_PYTHON = (3, 10)
TORCH_NAMES = Path(__file__).parents[1] / "golden" / "torch_names.txt"
# What the standard library has since 3.11, 3.12, 3.13 or 3.14, of what a project like this one may want.
NEWER = {
    "asyncio": {"Runner", "TaskGroup", "timeout"},
    "contextlib": {"chdir"},
    "copy": {"replace"},
    "datetime": {"UTC"},
    "enum": {"EnumType", "ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "inspect": {"getasyncgenstate", "getmembers_static"},
    "itertools": {"batched"},
    "math": {"cbrt", "exp2", "fma", "sumprod"},
    "operator": {"call", "is_none"},
    "os": {"process_cpu_count", "unshare"},
    "pathlib": {"UnsupportedOperation"},
    "random": {"binomialvariate"},
    "re": {"NOFLAG"},
    "sys": {"exception", "monitoring"},
    "typing": {
        "LiteralString",
        "Never",
        "NotRequired",
        "ReadOnly",
        "Required",
        "Self",
        "TypeAliasType",
        "TypeIs",
        "TypeVarTuple",
        "Unpack",
        "assert_never",
        "assert_type",
        "dataclass_transform",
        "override",
        "reveal_type",
    },
    "warnings": {"deprecated"},
}
NEWER_MODULES = {"annotationlib", "compression", "string.templatelib", "tomllib", "wsgiref.types"}
NEWER_BUILTINS = {"BaseExceptionGroup", "ExceptionGroup", "EncodingWarning", "PythonFinalizationError"}


def names_of(source: Source, top: str | None = None) -> Iterator[str]:
    """Dotted names that a file takes from modules, of those below ``top`` alone if it is given."""
    known: dict[str, str] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in source.nodes:
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in known:
            yield ".".join([known[inner.id], *reversed(parts)])


def too_new(source: Source) -> list[str]:
    """What a file uses of the standard library that the oldest Python lacks."""
    newer = NEWER_MODULES | {f"{module}.{name}" for module, names in NEWER.items() for name in names}
    builtins = {node.id for node in source.nodes if isinstance(node, ast.Name)} & NEWER_BUILTINS
    return sorted({name for name in names_of(source) if name in newer} | builtins)


def test_the_oldest_python_reads_every_file() -> None:
    """Everything runs on 3.11 here; on 3.10 a newer form of syntax or a newer name would end every command."""
    for source in sources():
        ast.parse(source.text, source.path, feature_version=OLDEST_PYTHON)
        assert not too_new(source), source.path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from typing import Self", ["typing.Self"]),
        ("import datetime as d\nx = d.UTC", ["datetime.UTC"]),
        ("import tomllib", ["tomllib"]),
        ("raise ExceptionGroup('x', [])", ["ExceptionGroup"]),
        ("import itertools\nitertools.pairwise([])", []),
    ],
)
def test_newer_names_are_seen(text: str, found: list[str]) -> None:
    """Imported, renamed, as an attribute, and built in."""
    assert too_new(Source("x.py", text)) == found


def test_newer_syntax_is_seen() -> None:
    """except* is of 3.11."""
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    x = 1\nexcept* ValueError:\n    x = 2\n", feature_version=OLDEST_PYTHON)


def test_every_name_of_torch_is_known_to_be_in_the_oldest() -> None:
    """Everything runs with torch 2.13 here; a name that came after 2.6 would fail where nobody looks.

    Every name in the file was looked up in the wheel of torch 2.6.0: its Python sources, its stubs of compiled modules
    and its list of operators. Methods of tensors and keyword arguments are not checked.
    Look a new name up there before it goes into the file.
    """
    known = set(TORCH_NAMES.read_text(encoding="utf-8").split())
    used = {
        name
        for source in sources()
        if is_library(source.path)
        for name in names_of(source)
        if name.startswith("torch.") and not name.startswith("torch._C")
    }
    assert sorted(known) == TORCH_NAMES.read_text(encoding="utf-8").split(), f"sort {TORCH_NAMES.name}"
    assert sorted(used - known) == [], f"is it in torch 2.6? then add it to {TORCH_NAMES.name}"
