"""Estimates are of accelerators, so a CPU computes as they do."""

from __future__ import annotations

import pytest

from megatron.core.ops import matmul


@pytest.fixture(autouse=True)
def computes_bf16_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in fp32, and attention that suits them, are of some CPUs only."""
    monkeypatch.setattr(matmul, "_is_slow_in_bf16", lambda: False)
