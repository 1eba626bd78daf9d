"""A tokenizer small enough to train in every session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import train_tokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
TEXTS = [f"Document {number}: the quick brown fox jumps over lazy dog number {number * 7}.\n" for number in range(50)]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def command(tool: str, *arguments: str | Path) -> list[str]:
    """A tool as a user starts it."""
    return [sys.executable, str(REPOSITORY / "tools" / tool), *map(str, arguments)]


def environment() -> dict[str, str]:
    """The variables a tool is started with: the checkout is importable, as after an install."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def run(tool: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a tool to its end."""
    return subprocess.run(
        command(tool, *arguments), env=environment(), capture_output=True, text=True, timeout=600, **options
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty documents with a title."""
    path = tmp_path_factory.mktemp("corpus") / "in.jsonl"
    return write_lines(path, [{"text": text, "title": text[:12]} for text in TEXTS])


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """What tools/train_tokenizer.py writes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer.main(["--input", str(corpus), "--output-dir", str(folder), "--vocab-size", "300"])
    return folder
