"""The oldest versions that the README promises: said alike everywhere, and as far as names tell, kept.

``python -m tests.releases.try_versions`` runs them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megatron.core.torch_release import OLDEST_TORCH, require_torch
from megatron.errors import ConfigError
from tests.architecture.source_tree import ROOT, Source, is_library, sources
from tests.end_to_end.commands import TINY
from tests.harness.sentences import expect_error
from tests.releases.flow import StepError, agree
from tests.releases.try_versions import PROMISED

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


@dataclass
class Used:
    """Newer things of the standard library by file, and names of torch that programs use."""

    newer: dict[str, list[str]] = field(default_factory=dict)
    torch: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def used() -> Used:
    """What all files use; the oldest Python reads each of them once."""
    found = Used()
    for source in sources():
        read = replace(source, python=OLDEST_PYTHON)
        if newer := too_new(read):
            found.newer[source.path] = newer
        if is_library(source.path):
            names = (name for name in names_of(read) if name.startswith("torch."))
            found.torch |= {name for name in names if not name.startswith("torch._C")}
    return found


def test_the_oldest_python_reads_every_file(used: Used) -> None:
    """Everything runs on 3.11 here; on 3.10 a newer form of syntax or a newer name would end every command."""
    assert used.newer == {}


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


def test_every_name_of_torch_is_known_to_be_in_the_oldest(used: Used) -> None:
    """Everything runs with torch 2.13 here; a name that came after 2.9 would fail where nobody looks.

    Every name in the file was looked up in torch 2.9.1, on Python 3.10. Methods of tensors and keyword arguments are
    not checked. Look a new name up there before it goes into the file.
    """
    known = set(TORCH_NAMES.read_text(encoding="utf-8").split())
    assert sorted(known) == TORCH_NAMES.read_text(encoding="utf-8").split(), f"sort {TORCH_NAMES.name}"
    assert sorted(used.torch - known) == [], f"is it in torch 2.9? then add it to {TORCH_NAMES.name}"


def test_the_promised_versions_are_those_that_a_release_tries() -> None:
    """README promised torch 2.6, on which two ranks never started and attention read beyond its tensors."""
    setup, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("setup.py", "README.md"))
    oldest, tested, newest = PROMISED
    assert oldest.python == ".".join(map(str, OLDEST_PYTHON))
    assert oldest.torch.rpartition(".")[0] == ".".join(map(str, OLDEST_TORCH))
    assert f'"torch>={oldest.torch.rpartition(".")[0]},<3"' in setup and f'python_requires=">={oldest.python}"' in setup
    others = (each.rpartition(".")[0].replace("==", ">=") for each in oldest.others)
    assert all(f'"{each}"' in setup for each in others)
    assert f"torch=={tested.torch}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for promise in (
        f"Python {oldest.python} or newer on torch {oldest.torch.rpartition('.')[0]} or newer",
        f"Python {oldest.python} and torch {oldest.torch}, and with Python {newest.python} and torch {newest.torch}",
        f"tested with Python {tested.python} and torch {tested.torch.rpartition('.')[0]}",
        f"pip install torch=={tested.torch} ",
    ):
        assert promise in " ".join(readme.split()), promise


@pytest.mark.parametrize("found", ["2.6.0+cu124", "2.8.0", "1.13.1"])
def test_older_releases_of_torch_are_refused(found: str) -> None:
    """By number: as text, 2.10 comes before 2.9."""
    with expect_error(ConfigError, f"torch {found}", "torch 2.9"):
        require_torch(found)


def test_an_older_torch_ends_a_command_with_one_sentence() -> None:
    """Two ranks ended in a traceback about PrefixStore; grouped queries gave wrong numbers or a crash."""
    started = "import runpy, sys, torch; torch.__version__ = '2.8.0'; del sys.argv[0]; "
    started += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", started, "pretrain_gpt.py", *TINY.split(), "--train-iters", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: torch 2.8.0 is installed, and torch 2.9 or newer is needed: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("found", ["2.9.0", "2.10.0a0+gitb31f58d", "2.13.0+cpu", "3.0.0", "custom"])
def test_newer_releases_of_torch_are_taken(found: str) -> None:
    """2.10 is newer than 2.9, and what builds call themselves is not ours to judge."""
    refused = ""
    try:
        require_torch(found)
    except ConfigError as error:
        refused = str(error)
    assert not refused


def test_losses_of_a_layout_that_differ_fail_a_release() -> None:
    """A kernel that reads beyond its tensors ends no command: it trains another model."""
    agree("context", [6.9, 5.0001], [6.9, 5.0], 1e-4)
    with pytest.raises(StepError, match="context: losses"):
        agree("context", [6.9, 5.01], [6.9, 5.0], 1e-4)
    with pytest.raises(StepError, match="context: losses"):
        agree("context", [6.9], [6.9, 5.0], 1e-4)
