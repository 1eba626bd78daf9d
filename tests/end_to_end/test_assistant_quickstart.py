"""The way from text to an assistant: pretraining, instruction tuning, preferences, and the same model in llama.cpp."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.commands import quickstart

pytest.importorskip("gguf", reason="GGUF files are written with the extra gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp runs the file; it is in the extra dev-all")


@pytest.mark.slow  # each command has tests of its own
def test_quickstart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run for a few iterations in a folder with a space: each step's checkpoint answers, and llama.cpp as the last."""
    folder = tmp_path_factory.mktemp("quick start")
    said, out = quickstart("examples/assistant/quickstart.sh", folder, iterations=40), folder / "run"
    rows = dict(re.findall(r"^\| (\S+) \| (.*) \|$", said, re.MULTILINE))
    assert list(rows)[1:] == ["pretrained", "chat", "preferred", "llama.cpp"]
    assert all(re.fullmatch(r"\d+% \| \d+% \| \d+% \| (\d+%|-) \| (\d+\.\d|-)", row) for row in list(rows.values())[1:])
    for name in ("pretrained", "chat", "preferred", "answers.txt", "gguf/gguf-Q8_0.gguf"):
        assert (out / name).exists() and f"{out}/{name}" in said[said.index("== Done in") :]
