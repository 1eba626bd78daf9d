"""The quickstart of experts shows what such a model is: text, a loss that falls, and how evenly experts are used."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.commands import quickstart

pytest.importorskip("matplotlib", reason="the quickstart's last step draws pictures")


@pytest.mark.slow  # the commands are those of examples/quickstart.sh with flags of experts
def test_quickstart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run for a few iterations in a folder with a space: losses, balance, text, pictures and the paths of all."""
    folder = tmp_path_factory.mktemp("quick start")
    said, out = quickstart("examples/experts/quickstart.sh", folder, iterations=20), folder / "run"
    end = said[said.index("== Done in") :]
    found = re.search(r"The loss fell: training lm loss from (\S+) \(iteration 1\) to (\S+) \(20\)", end)
    assert found is not None and float(found[2]) < float(found[1]) < 9.0
    shown = re.findall(r"^(At first|In the end): experts \| max violation: (\d\.\d+) ", end, re.MULTILINE)
    assert [when for when, _ in shown] == ["At first", "In the end"]
    curve = re.search(r"training moe/max_violation from (\S+) \(iteration 1\)", (out / "balance.txt").read_text())
    assert curve is not None and curve[1] == shown[0][1]
    for prompt in ("Return a new", "The following example", "Raises an exception if"):
        assert re.search(rf"^{prompt}\W*\w", (out / "sample.txt").read_text(), re.MULTILINE)
    for name in ("checkpoints", "tensorboard", "loss.png", "balance.png", "sample.txt"):
        assert f"{out}/{name}" in end and (out / name).exists()
