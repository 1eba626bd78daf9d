"""The quickstart of exports: a checkpoint as GGUF files of eight and four bits, run by llama.cpp."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.commands import quickstart

pytest.importorskip("matplotlib", reason="the quickstart's last step draws a picture")
pytest.importorskip("gguf", reason="GGUF files are written with the extra gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp runs the files; it is in the extra dev-all")


@pytest.mark.slow  # conversions are proven by tests/unit/conversion
def test_quickstart(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's perplexity of both files is about the checkpoint's, and its text with eight bits the same."""
    folder = tmp_path_factory.mktemp("quick start")
    quickstart("examples/quickstart.sh", folder, iterations=40)
    out = folder / "export"
    monkeypatch.setenv("EXPORT_DIR", str(out))
    monkeypatch.setenv("EXPORT_TOKENS", "130")
    said = quickstart("examples/export/quickstart.sh", folder, iterations=40)
    assert len(re.findall(r"^proof: llama.cpp .* reads it", said, re.MULTILINE)) == 2
    ours, eight, four = (float(each) for each in re.findall(r"^  perplexity (\S+)$", said, re.MULTILINE))
    assert eight == pytest.approx(ours, rel=0.02) and four == pytest.approx(ours, rel=0.1)
    assert len(re.findall(r"'Return a new' goes on: '.+'", said)) == 3
    assert (out / "q8_0/q8_0-Q8_0.gguf").stat().st_size > (out / "q4_0/q4_0-Q4_0.gguf").stat().st_size > 1_000_000
