"""docs/library.md: its code runs, and the names that it promises are those of the recorded list."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron
from tests.architecture.source_tree import ROOT

PAGE = ROOT / "docs" / "library.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
LIST = ROOT / "tests" / "golden" / "library.txt"


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, in one process; the conversion compares logits with those of transformers."""
    pytest.importorskip("transformers", reason="one block converts its model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "library_page"}
    for number, block in enumerate(BLOCKS, start=1):
        exec(compile(block, f"docs/library.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "iteration        2/       2" in printed
    assert "--hidden-sise" in printed
    assert (tmp_path / "saved" / "iter_0000005").is_dir()


def public() -> Iterator[str]:
    """What the page imports, and the parameters of the functions, classes and methods among that which it calls."""
    page = "".join(BLOCKS)
    for name in dir(megatron):
        if f"megatron.{name}(" in page:
            yield f"megatron.{name}{parameters(getattr(megatron, name))}"
    for method in ("forward", "generate", "save", "save_pretrained"):
        yield f"megatron.LanguageModel.{method}{parameters(getattr(megatron.LanguageModel, method))}"
    for node in ast.parse(page).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron"):
            for alias in node.names:
                found = getattr(importlib.import_module(str(node.module)), alias.name)
                yield f"{node.module}.{alias.name}{parameters(found) if f'{alias.name}(' in page else ''}"
                for method in sorted(set(re.findall(rf"\b{alias.name}\.(\w+)\(", page))):
                    yield f"{node.module}.{alias.name}.{method}{parameters(getattr(found, method))}"


def parameters(found: object) -> str:
    """Names of what a function or a class's constructor takes; ``…`` stands for a default."""
    assert callable(found)
    taken = inspect.signature(found).parameters.values()
    defaults = [each.name + ("" if each.default is each.empty else "=…") for each in taken]
    first = next((number for number, each in enumerate(taken) if each.kind is each.KEYWORD_ONLY), None)
    return f"({', '.join(defaults if first is None else [*defaults[:first], '*', *defaults[first:]])})"


def test_the_public_names_are_those_of_the_list() -> None:
    """A renamed function or parameter breaks scripts of users. To change the list: CHANGELOG.md says so, and
    ``python -m tests.unit.test_library_page`` writes it.
    """
    assert sorted(set(public())) == LIST.read_text(encoding="utf-8").splitlines()


def test_settings_need_neither_torch_nor_numpy() -> None:
    """``import megatron`` in a launcher or a notebook must take milliseconds."""
    code = "import megatron, megatron.config, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


if __name__ == "__main__":
    LIST.write_text("\n".join(sorted(set(public()))) + "\n", encoding="utf-8")
