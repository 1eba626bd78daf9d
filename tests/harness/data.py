"""Real corpora and vocabularies for tests that want more than made-up input; they are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def shared_data(*parts: str) -> Path:
    """A path below ``MEGATRON_TEST_DATA`` (or ``../shared`` beside the repository); skips where it is absent."""
    folder = Path(os.environ.get("MEGATRON_TEST_DATA", REPOSITORY.parent / "shared"))
    path = folder.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {path}: set MEGATRON_TEST_DATA to a folder that holds {'/'.join(parts)}")
    return path
