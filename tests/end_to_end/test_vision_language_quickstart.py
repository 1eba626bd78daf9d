"""From scanned digits to a model that reads them: pictures, two stages, and answers about held-out ones."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.end_to_end.commands import quickstart

pytest.importorskip("PIL", reason="pictures are read with the extra images")
if find_spec("sklearn") is None:
    pytest.skip("the digits are scikit-learn's", allow_module_level=True)


@pytest.mark.slow  # each command has tests of its own
def test_quickstart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run for a few iterations in a folder with a space: every step's checkpoint answers, and pictures are drawn."""
    folder = tmp_path_factory.mktemp("quick start")
    said, out = quickstart("examples/vision_language/quickstart.sh", folder, iterations=16), folder / "run"
    for name in ("texts", "projector", "trained"):
        rows = re.findall(
            r"^ > heldout_(\w+).jsonl \| accuracy: \S+ \| questions: 300", (out / f"{name}.txt").read_text(), re.M
        )
        assert rows == ["captions", "left", "right", "larger"]
    assert "results on CAPTION | loss: " in (out / "captions.txt").read_text()
    assert "images         6,000 checked" in said
    for name in ("texts", "projector", "trained", "answers/trained/heldout_left.jsonl", "sample.png", "answers.png"):
        assert (out / name).exists() and f"{out}/{name}" in said[said.index("== Done in") :]
