"""docs/attention.md: its table is what the backends say. ``python -m tests.unit.ops.test_attention_page`` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.ops.attention.registry import BACKENDS, KERNELS
from megatron.core.ops.attention.request import AttentionRequest
from tests.architecture.source_tree import ROOT

PAGE = ROOT / "docs" / "attention.md"
ASKED: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.1},
    "sliding windows": {"window": (4095, 0)},
    "windows, not causal": {"window": (511, 511), "causal": False},
    "soft caps": {"soft_cap": True},
    "ALiBi": {"slopes": True},
    "attention sinks": {"sinks": True},
    "packed documents": {"document_ids": True},
    "padding masks": {"attention_mask": True, "causal": False},
    "biases": {"bias": True},
    "cached keys": {"query_length": 1024},
    "parts of the keys": {"partial": True},
    "parts, windows": {"partial": True, "window": (4095, 0)},
    "parts, dropout": {"partial": True, "dropout": 0.1},
    "parts, ALiBi": {"partial": True, "slopes": True},
    "sinks, ALiBi": {"sinks": True, "slopes": True},
    "soft caps, dropout": {"soft_cap": True, "dropout": 0.1},
    "determinism": {"deterministic": True},
    "fp32": {"dtype": torch.float32},
    "heads of 192": {"head_width": 192},
    "heads of 256": {"head_width": 256},
    "heads of 100": {"head_width": 100},
}


def rows() -> Iterator[str]:
    """The table in Markdown."""
    yield f"| | {' | '.join(f'`{name}`' for name in BACKENDS)} |"
    yield f"|---|{'---|' * len(BACKENDS)}"
    devices = [KERNELS[name].capabilities.devices if name in KERNELS else "any device" for name in BACKENDS]
    yield f"| runs on | {' | '.join(devices)} |"
    for feature, changes in ASKED.items():
        answers = ["yes" if serves(name, changes) else "–" for name in BACKENDS]
        yield f"| {feature} | {' | '.join(answers)} |"


def serves(name: str, changes: dict[str, Any]) -> bool:
    """Whether a backend accepts a call on a Hopper GPU."""
    lengths = {"query_length": 8192, "key_length": 8192, "head_width": 128, "capability": (9, 0)}
    facts: dict[str, Any] = {"device": torch.device("meta"), "dtype": torch.bfloat16, "causal": True}
    return BACKENDS[name].supports(AttentionRequest(**(facts | lengths | changes))) is None


def with_table(page: str) -> str:
    """The page with the table of today."""
    table = "\n".join(rows())
    return re.sub(r"(<!-- table: .* -->\n).*(<!-- end -->)", rf"\1\n{table}\n\n\2", page, flags=re.DOTALL)


def test_the_table_is_what_the_backends_say() -> None:
    """A user chooses a backend by it."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "python -m tests.unit.ops.test_attention_page writes it"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
