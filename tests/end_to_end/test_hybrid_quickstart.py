"""The quickstart of hybrids: trained over tensor-parallel ranks, resumed over a pipeline, evaluated and sampled."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.commands import quickstart

pytest.importorskip("matplotlib", reason="the quickstart's last step draws pictures")


@pytest.mark.slow  # the commands are those of examples/quickstart.sh with flags of hybrids
def test_quickstart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run for a few iterations in a folder with a space: losses, the cut, perplexity, text and a picture."""
    folder = tmp_path_factory.mktemp("quick start")
    said, out = quickstart("examples/hybrid/quickstart.sh", folder, iterations=20), folder / "run"
    end = said[said.index("== Done in") :]
    found = re.search(r"The loss fell: training lm loss from (\S+) \(iteration 1\) to (\S+) \(20\)", end)
    assert found is not None and float(found[2]) < float(found[1]) < 9.0
    assert "3 Mamba-2, 1 attention, 3 MLP layers" in said and "2 stages of" in said
    assert re.search(r"iteration +11/ +20", said)  # where the second half goes on
    for prompt in ("Return a new", "The following example", "Raises an exception if"):
        assert re.search(rf"^{prompt}\W*\w", (out / "sample.txt").read_text(), re.MULTILINE)
    for name in ("checkpoints", "tensorboard", "loss.png", "heldout.txt", "sample.txt"):
        assert f"{out}/{name}" in end and (out / name).exists()
