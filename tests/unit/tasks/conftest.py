"""One small model for all tests of tasks."""

from __future__ import annotations

import pytest

from tests.harness.evaluation import SmallGPT2, small_gpt2


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> SmallGPT2:
    """See small_gpt2."""
    pytest.importorskip("transformers", reason="compares with transformers")
    return small_gpt2(tmp_path_factory.mktemp("gpt2"))
